"""
The papers' setting on this machine: `hierarchical` learns from measured step times alone.

``python -m benchmarks.learn_measured --devices cpu:0,cpu:1 --out DIR`` trains two branches of a
perceptron on two cores; with ``--devices cpu:0,cuda:0 --model wide --memory cuda:0=256MiB`` a wide
perceptron runs on a GPU that is too small for it and a core. A sample's reward is its measured step
time; the simulator gives only the order of its ops.
The plan that comes of it is measured again, its steps taking turns with those of every single
device and of the placers by rule. DIR has the figures, the plan and the history, of which
``placewright curves DIR`` draws the curve. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import placewright as pw
from placewright.bench.fidelity import runnable
from placewright.execute.devices import find_devices
from placewright.execute.measured import MeasuredEvaluator
from placewright.execute.measuring import Effort
from placewright.execute.op_times import measured_costs
from placewright.execute.profiling import profile
from placewright.load import load_capture
from placewright.placing import Result
from placewright.policies.checkpoint import WEIGHTS
from placewright.units import format_time, parse_bytes

HEADROOM = 48 * 2**20
RULES = ("m-etf", "heft", "contiguous", "auto")


def wide() -> dict[str, Any]:
    """Run a perceptron of 24 layers whose weights take 384 MiB."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048) for _ in range(24)]
    module = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.ReLU())))
    return {"module": module.eval(), "inputs": (torch.randn(16, 2048),), "train": False}


def main() -> None:
    """Probe, learn, and measure again."""
    options = _options()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    names = options.devices.split(",")
    model = f"{Path(__file__)}:wide" if options.model == "wide" else runnable(options.model)
    probed = pw.Cluster.load(options.cluster) if options.cluster else pw.probe(names)
    box = _capped(probed, options.memory)
    box.save(out / "cluster.toml")
    captured = load_capture(model)
    profile(captured, find_devices(box.device_names))
    problem = pw.Problem(captured.graph, box, measured_costs(captured.graph, box).costs)
    begin_s = time.perf_counter()
    with MeasuredEvaluator(problem, model) as evaluator:
        found = pw.place(
            problem,
            options.placer,
            budget=options.budget,
            seed=options.seed,
            options=json.loads(options.set),
            evaluator=evaluator,
            folder=out,
            resume=(out / WEIGHTS).exists(),
        )
        counts = evaluator.num_samples, len(evaluator.outcomes), len(evaluator.failures)
    took_s = time.perf_counter() - begin_s
    print(
        f"{counts[0]} placements sampled, {counts[1]} different ones measured, {counts[2]} of them"
        f" failed, in {format_time(took_s)}."
    )
    found.save(out)
    _measure_again(problem, model, found, out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--cluster", default="", help="what `probe` wrote of these devices")
    parser.add_argument("--model", default="branches_training")
    parser.add_argument("--memory", default="", help="cuda:0=256MiB")
    parser.add_argument("--placer", default="hierarchical")
    parser.add_argument("--budget", default="500 samples")
    parser.add_argument("--set", default="{}", help="options of the placer, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="bench-measured")
    return parser.parse_args()


def _capped(box: pw.Cluster, words: str) -> pw.Cluster:
    if not words:
        return box
    name, _, size = words.partition("=")
    memory = box.memory_bytes.copy()
    memory[box.device_index(name)] = parse_bytes(size, "`--memory`")
    return dataclasses.replace(box, memory_bytes=memory)


def _with_headroom(problem: pw.Problem) -> pw.Problem:
    """Leave room on GPUs for what libraries need beside tensors, as `probe` does."""
    box = problem.cluster
    is_gpu = np.array([kind == "cuda" for kind in box.device_kinds])
    memory = box.memory_bytes - np.where(is_gpu, HEADROOM, 0)
    return pw.Problem(problem.graph, dataclasses.replace(box, memory_bytes=memory), problem.costs)


def _measure_again(problem: pw.Problem, model: str, found: Result, out: Path) -> None:
    plans = {found.placer: found.plan}
    for d, name in enumerate(problem.cluster.device_names):
        timeline = pw.simulate(problem, np.full(problem.num_ops, d, dtype=np.int64))
        plans[f"all on {name}"] = pw.Plan.of(timeline, name, lower_bound_s=0.0, placer="none")
    for placer in RULES:
        plans[placer] = pw.place(_with_headroom(problem), placer, budget="5s").plan
    effort = Effort(target=0.01, max_steps=100, limit_s=3.0)
    lines = []
    for each in pw.measure(model, plans, cluster=problem.cluster, effort=effort):
        predicted_s = plans[each.name].predicted.makespan_s
        words = f"failed ({each.failure}): {each.reason}"
        if each.failure is None:
            low, high = (format_time(x) for x in (each.interval.low_s, each.interval.high_s))
            words = f"{format_time(each.median_s)} ({low} to {high}, {each.num_steps} steps)"
        lines.append(f"{each.name}: {words}; simulated {format_time(predicted_s)}")
        print(lines[-1], flush=True)
    (out / "figures.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
