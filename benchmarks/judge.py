"""
What it is worth to a search to judge placements by what they should take on this machine.

``python -m benchmarks.judge BOOK`` takes the folder of a finished ``placewright bench fidelity``.
For each of its models it searches by simulated times, by expected ones, and by expected ones with
the folder's calibration, and measures the three plans beside all single devices, their steps taking
turns. What the calibration predicts of each is told beside.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import placewright as pw
from placewright.bench.fidelity import runnable
from placewright.bench.fidelity_book import FidelityBook
from placewright.bench.fidelity_tables import read_fidelity
from placewright.execute.calibration import predict
from placewright.execute.expecting import ExpectedEvaluator
from placewright.execute.measuring import Effort
from placewright.units import format_time


def main() -> None:
    """Search and measure, model by model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("book", type=Path)
    parser.add_argument("--budget", default="5s")
    parser.add_argument("--models", default="", help="with commas between; all by default")
    options = parser.parse_args()
    book = FidelityBook(options.book)
    found = read_fidelity(book)
    wanted = options.models.split(",") if options.models else [r.model for r in found.results]
    for model in wanted:
        problem = book.load_problem(model)
        plans = {}
        for d, name in enumerate(problem.cluster.device_names):
            timeline = pw.simulate(problem, np.full(problem.num_ops, d, dtype=np.int64))
            plans[f"all on {name}"] = pw.Plan.of(timeline, name, lower_bound_s=0.0, placer="none")
        judges = {
            "simulated": None,
            "expected": ExpectedEvaluator(problem),
            "calibrated": ExpectedEvaluator(problem, found.calibration),
        }
        for name, judge in judges.items():
            plans[name] = pw.place(problem, budget=options.budget, evaluator=judge).plan
        effort = Effort(target=0.01, max_steps=200, limit_s=5.0)
        for each in pw.measure(runnable(model), plans, cluster=problem.cluster, effort=effort):
            words = f"failed ({each.failure})"
            if each.failure is None:
                low, high = (format_time(x) for x in (each.interval.low_s, each.interval.high_s))
                words = f"{format_time(each.median_s)} ({low} to {high})"
            candidate = plans[each.name].candidate(problem)
            said = format_time(predict(problem, candidate, found.calibration))
            print(f"{model}, {each.name}: {words}, predicted {said}", flush=True)


if __name__ == "__main__":
    main()
