"""
What placewright does today, in under two minutes: a real model, captured and placed.

Run it with ``make demo``. It captures a translation model of the papers from PyTorch, places it as
people do, as a policy that learns from scratch does, and as `auto` does, on the papers' machine and
on one with too little memory for one GPU. It writes a plan and a timeline of each placement, and a
picture of `auto`'s, to ``demo/``. Then it times the ops of an Inception on a core of this machine,
places it on two of them, and runs it that way.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before PyTorch is loaded

import numpy as np
from rich.console import Console

import placewright as pw
from placewright.execute._cores import own_cores
from placewright.execute.devices import find_devices
from placewright.execute.measuring import Effort
from placewright.execute.op_times import measured_costs, processor_model
from placewright.execute.profiling import profile
from placewright.load import load_capture
from placewright.placers.experts import BASELINES
from placewright.report.drawing import draw_placement
from placewright.report.facts import describe_graph
from placewright.report.terminal import table
from placewright.units import format_bytes, format_count, format_time

MODEL, CLUSTER, BUDGET = "nmt-4", "k40x4", "8s"
REAL_MODEL = "examples/inception.py:build"
TWO_CORES = """name = "two-cores"
[[device]]
names = ["cpu:0", "cpu:1"]
kind = "cpu"
model = "{model}"
memory = "1GiB"
flops = {{ float32 = 5e10 }}
memory_bandwidth = "10GB/s"
launch = "3us"
[link]
latency = "70us"
bandwidth = "7GB/s"
"""


def placements(problem: pw.Problem) -> dict[str, np.ndarray]:
    """Make the placements that a person might try."""
    graph, cluster = problem.graph, problem.cluster
    gpu, cpu = cluster.device_index("cuda:0"), cluster.device_index("cpu")
    random = np.random.default_rng(0).integers(0, problem.num_devices, graph.num_ops)
    scattered = random.copy()
    scattered[problem.colocation_members] = random[problem.colocation_leaders]
    stored_on_cpu = graph.op_is_resident | (np.array(graph.op_phases) == "update")
    return {
        "random": scattered,
        **{name: place(problem) for name, place in BASELINES.items()},
        "GPU, weights on CPU": np.where(stored_on_cpu, cpu, gpu),
    }


def main(folder: Path = Path("demo")) -> None:
    """Capture, place, simulate; print tables; write plans and timelines."""
    console = Console(highlight=False, soft_wrap=True)
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    graph = pw.load_model(MODEL)
    spent = time.perf_counter() - began
    facts = describe_graph(graph)
    console.print(
        f"{MODEL}, one training step, captured from PyTorch without computing anything (or read"
        f" from the cache) in {format_time(spent)}:\n{facts.num_ops:,} ops,"
        f" {format_count(facts.flops)} flops, {format_bytes(facts.parameter_bytes)} of parameters,"
        f" {format_bytes(facts.activation_bytes)} of activations."
    )
    problem = pw.load_problem(graph, CLUSTER)
    console.print(
        f"On {CLUSTER}: {problem.cluster.description}. All times are simulated.\n"
        "The first time on a machine, simulator and placers are compiled, which takes a while."
    )
    small = pw.load_problem(pw.load_model("tiny-nmt"), CLUSTER)
    pw.place(small, "auto", budget="64 samples")  # so that compiling takes nothing of its budget
    show(console, problem, "Placements", folder)
    console.print()
    tight = pw.load_problem(graph, f"{CLUSTER}-tight")
    memory = format_bytes(tight.cluster.memory_bytes[-1])
    show(console, tight, f"The same with {memory} a GPU, so that one cannot hold the model")
    rows = np.repeat(np.stack([*placements(problem).values()]), 20, axis=0)
    began = time.perf_counter()
    pw.simulate_many(problem, rows)
    spent = time.perf_counter() - began
    console.print(
        f"Simulating {len(rows):,} placements took {format_time(spent)}:"
        f" {len(rows) / spent:,.0f} placements a second on this machine.\n"
    )
    run_for_real(console, folder)
    console.print(
        "\nWhat to look at:\n"
        f"  placewright simulate {MODEL} --cluster {CLUSTER}"
        f" --plan {folder}/auto.plan.json\n"
        "      says which ops and transfers make that step as long as it is;\n"
        f"  {folder}/auto.placement.png\n"
        "      is a picture of it: layers by depth, a colour for each GPU, white for the CPU;\n"
        f"  {folder}/auto.trace.json\n"
        "      opens at https://ui.perfetto.dev and shows every op and transfer on its device;\n"
        f"  placewright measure {REAL_MODEL} --plan {folder}/two-cores.plan.json\n"
        "      runs that plan on two cores again; docs/run-a-plan.md runs a model of yours;\n"
        "  placewright place file.py:function --cluster laptop\n"
        "      places a PyTorch model of yours; see docs/models.md and docs/placers.md."
    )


def run_for_real(console: Console, folder: Path) -> None:
    """Place a model on two cores of this machine, with measured op times, and run it."""
    if len(own_cores()) < 2:
        console.print("Nothing is run for real here: that needs two cores.")
        return
    began = time.perf_counter()
    (folder / "two-cores.toml").write_text(TWO_CORES.format(model=processor_model()))
    captured, cluster = load_capture(REAL_MODEL), pw.Cluster.load(folder / "two-cores.toml")
    profile(captured, find_devices(cluster.device_names), say=lambda _: None)
    problem = pw.Problem(captured.graph, cluster, measured_costs(captured.graph, cluster).costs)
    plans = {"one core": _alone(problem)}
    plans["two cores"] = pw.place(problem, "auto", budget="4s").plan
    plans["two cores"].save(folder / "two-cores.plan.json")
    effort = Effort(max_steps=60, limit_s=6.0)
    shown = table("Inception-V3, narrow, on cores of this machine", "placement", "simulated", "run")
    for each in pw.measure(REAL_MODEL, plans, effort=effort):
        ran = each.reason if each.failure else f"{format_time(each.median_s)} (median)"
        plan = plans.get(each.name)  # plain PyTorch, on all cores, has none
        shown.add_row(each.name, format_time(plan.predicted.makespan_s) if plan else "", ran)
    console.print(shown)
    console.print(
        "This one was run: each plan in a process of its own, their steps taking turns, with op"
        f" times measured before ({format_time(time.perf_counter() - began)} for all of it)."
    )


def _alone(problem: pw.Problem) -> pw.Plan:
    timeline = pw.simulate(problem, np.zeros(problem.num_ops, dtype=np.int64))
    return pw.Plan.of(timeline, "one core", lower_bound_s=0.0, placer="demo")


def show(console: Console, problem: pw.Problem, title: str, folder: Path | None = None) -> None:
    """Simulate every placement and show them in a table; write them to `folder`."""
    bound_s = pw.lower_bounds(problem).best_s
    shown = table(title, "placement", "step time", "over bound", "moved", "peak", "fits")
    ways = placements(problem)
    learned = pw.place(problem, "hierarchical-plus", budget=BUDGET)
    found = pw.place(problem, "auto", budget=BUDGET)
    ways |= {"hierarchical-plus": learned.placement, "auto": found.placement}
    for name, placement in ways.items():
        timeline = pw.simulate(problem, placement)
        if folder is not None:
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
    if folder is not None:
        names, kinds = problem.cluster.device_names, problem.cluster.device_kinds
        title = f"{MODEL} on {CLUSTER} by auto: simulated step {format_time(found.makespan_s)}"
        path = folder / "auto.placement.png"
        draw_placement(problem.graph, names, kinds, found.placement, path, title)
    console.print(
        f"hierarchical-plus learned from scratch for {BUDGET}: {learned.samples:,} simulated"
        f" placements.\nauto had {BUDGET} too: {found.samples:,}. {found.reason}\n"
        f"No placement takes less than {format_time(bound_s)} (proven lower bound)."
    )


if __name__ == "__main__":
    main()
