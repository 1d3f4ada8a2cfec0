"""
What placewright does today, in under two minutes: simulate a few placements of a real model.

Run it with ``make demo``. It writes a plan and a timeline of each placement to ``demo/``.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
from rich.console import Console

import placewright as pw
from placewright.report.terminal import table
from placewright.units import format_bytes, format_time

MODEL, CLUSTER = "gpt2-small", "k40x4"


def layer_of(graph: pw.Graph) -> np.ndarray:
    """Number the stages of the model by module: embedding, 12 layers, output."""
    stages = []
    for module in graph.op_modules:
        layer = re.match(r"transformer\.h\.(\d+)", module)
        is_embedding = module.startswith("transformer.w")
        stages.append(int(layer[1]) + 1 if layer else 0 if is_embedding else 13)
    return np.array(stages)


def placements(problem: pw.Problem) -> dict[str, np.ndarray]:
    """Make a few placements that a person might try."""
    graph, cluster = problem.graph, problem.cluster
    gpu = [cluster.device_index(f"cuda:{k}") for k in range(4)]
    cpu = cluster.device_index("cpu")
    stage = layer_of(graph)
    # The output layer shares its weights with the embedding, and is worth several layers.
    quarters = np.array([0, *[0] * 2, *[1] * 4, *[2] * 4, *[3] * 2, 0])[stage]
    random = np.random.default_rng(0).integers(0, problem.num_devices, graph.num_ops)
    leaders = random.copy()
    leaders[problem.colocation_members] = random[problem.colocation_leaders]
    stored_on_cpu = graph.op_is_resident | (np.array(graph.op_phases) == "update")
    return {
        "CPU only": np.full(graph.num_ops, cpu),
        "one GPU": np.full(graph.num_ops, gpu[0]),
        "two GPUs by layer": np.array(gpu)[quarters // 2],
        "four GPUs by layer": np.array(gpu)[quarters],
        "GPU, weights on CPU": np.where(stored_on_cpu, cpu, gpu[0]),
        "random": leaders,
    }


def main(folder: Path = Path("demo")) -> None:
    """Simulate the placements, print a table, write plans and timelines."""
    console = Console(highlight=False, soft_wrap=True)
    folder.mkdir(exist_ok=True)
    problem = pw.Problem(pw.load_model(MODEL), pw.load_cluster(CLUSTER))
    console.print(
        f"One training step of {MODEL} ({problem.num_ops} ops) on {CLUSTER}"
        f" ({problem.cluster.description}). All times are simulated.\n"
        "The first simulation on a machine compiles the simulator, which takes some seconds."
    )
    bound_s = pw.lower_bounds(problem).best_s
    shown = table("Placements", "placement", "step time", "over bound", "moved", "peak", "fits")
    for name, placement in placements(problem).items():
        timeline = pw.simulate(problem, placement)
        stem = re.sub(r"\W+", "-", name.lower())
        plan = pw.Plan.of(timeline, name, lower_bound_s=bound_s, placer="demo")
        plan.save(folder / f"{stem}.plan.json")
        pw.save_trace(timeline, folder / f"{stem}.trace.json")
        shown.add_row(
            name,
            format_time(timeline.makespan_s),
            f"{timeline.makespan_s / bound_s - 1:.0%}",
            format_bytes(timeline.moved_bytes),
            format_bytes(timeline.peak_bytes.max()),
            "yes" if timeline.is_feasible else "no",
        )
    console.print(shown)
    console.print(f"No placement takes less than {format_time(bound_s)} (proven lower bound).")
    rows = np.repeat(np.stack([*placements(problem).values()]), 200, axis=0)
    began = time.perf_counter()
    pw.simulate_many(problem, rows)
    spent = time.perf_counter() - began
    console.print(
        f"Simulating {len(rows):,} placements took {format_time(spent)}:"
        f" {len(rows) / spent:,.0f} placements a second on this machine.\n\n"
        "What to look at:\n"
        f"  placewright simulate {MODEL} --cluster {CLUSTER}"
        f" --plan {folder}/four-gpus-by-layer.plan.json\n"
        "      says which ops and transfers make that step as long as it is;\n"
        f"  {folder}/four-gpus-by-layer.trace.json\n"
        "      opens at https://ui.perfetto.dev and shows every op and transfer on its device."
    )


if __name__ == "__main__":
    main()
