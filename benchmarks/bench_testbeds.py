"""
The papers' Table 1 beside ours: CPU only, one GPU and the human expert, simulated on k40 presets.

``python -m benchmarks.bench_testbeds`` prints the tables of docs/testbeds.md.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.figures import Figure
from placewright.bench.published import TABLE_1, Table1Row
from placewright.load import load_model, load_problem
from placewright.placers.experts import BASELINES
from placewright.simulator import simulate
from placewright.timeline import Timeline

# The paper gives no batch size; only 32 can be what was run, and 128 is shown beside it.
ROWS = tuple(
    variant
    for row in TABLE_1
    for variant in (
        [row, replace(row, model="resnet-152")] if row.model == "resnet-152-b32" else [row]
    )
)

K80_IMAGES = (("resnet-50", 128, 49.5), ("inception-v3", 32, 29.3))
"""Images a second that TensorFlow's benchmark of 2017 trained on one K80 die, at batch 32."""


def run() -> list[Figure]:
    """Simulate every row: our time over the published one."""
    figures = []
    for row in ROWS:
        lines = _simulate(row)
        for name, published in (
            ("cpu-only", row.cpu_s),
            ("one-gpu", row.gpu_s),
            ("expert-paper", row.expert_s),
        ):
            if published is not None:
                ratio = lines[name].makespan_s / published
                figures.append(Figure(f"{row.model} {name}: simulated over published", ratio, "x"))
        fits = float(lines["one-gpu"].is_feasible)
        figures.append(Figure(f"{row.model}: fits one GPU (1) or not (0)", fits, ""))
    return figures


def _simulate(row: Table1Row) -> dict[str, Timeline]:
    problem = load_problem(load_model(row.model), row.cluster)
    return {name: simulate(problem, place(problem)) for name, place in BASELINES.items()}


def main() -> None:
    """Print the tables, in Markdown."""
    print("| model | testbed | | published s | simulated s | ratio |")
    print("|---|---|---|---|---|---|")
    memory, arithmetic = [], []
    for row in ROWS:
        lines = _simulate(row)
        published = {
            "cpu-only": _seconds(row.cpu_s, "-"),
            "one-gpu": _seconds(row.gpu_s, "OOM"),
            "expert-paper": _seconds(row.expert_s, "-"),
            "expert-strong": "",
        }
        for name, line in lines.items():
            told = published[name]
            ratio = ""
            if told.replace(".", "").isdigit():
                ratio = f"{line.makespan_s / float(told):.2f}"
            ours = f"{line.makespan_s:.3f}" + ("" if line.is_feasible else " (does not fit)")
            print(f"| {row.model} | {row.cluster} | {name} | {told} | {ours} | {ratio} |")
        graph = lines["one-gpu"].problem.graph
        peak = lines["one-gpu"].peak_bytes[1] / 2**30
        fits = "fits" if lines["one-gpu"].is_feasible else "does not fit"
        wanted = "OOM" if row.gpu_s is None else "fits"
        verdict = "matched" if (wanted == "fits") == (fits == "fits") else "not matched"
        memory.append(f"| {row.model} | {peak:.2f} | {fits} | {wanted} | {verdict} |")
        flops, moved = graph.op_flops.sum(), graph.op_bytes.sum()
        arithmetic.append(
            f"| {row.model} | {graph.num_ops:,} | {flops / 1e12:.3f} | {moved / 1e9:.1f}"
            f" | {flops / 4.29e12:.3f} | {moved / 288e9:.3f} | {flops / 1.32e12:.2f} |"
        )
    print("\n| model | peak GiB on one GPU | simulated | published | |\n|---|---|---|---|---|")
    print("\n".join(memory))
    print(
        "\n| model | ops | Tflop | GB moved | s at K40's peak flops | s at K40's peak bandwidth"
        " | s at the CPU's peak flops |\n|---|---|---|---|---|---|---|"
    )
    print("\n".join(arithmetic))
    print("\n| model | published images/s | simulated | ratio |\n|---|---|---|---|")
    for model, batch, images in K80_IMAGES:
        problem = load_problem(load_model(model), "k80x2")
        ours = batch / simulate(problem, BASELINES["one-gpu"](problem)).makespan_s
        print(f"| {model} | {images} | {ours:.1f} | {ours / images:.2f} |")


def _seconds(value: float | None, missing: str) -> str:
    return missing if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
