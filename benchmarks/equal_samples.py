"""
Learning against searching at equal samples: the table of docs/learned.md.

``python -m benchmarks.equal_samples`` runs `hierarchical-plus`, annealing and cross-entropy for
4,000 samples on the rows of Table 1, three seeds each (about half an hour), and prints step times
over `expert-strong`'s after 1,000 and 4,000 samples, and the samples it took to equal it; medians.
"""

from __future__ import annotations

import os
import statistics

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from placewright.bench.testbeds import K40
from placewright.load import load_model, load_problem
from placewright.placing import Result, place

PLACERS = ("hierarchical-plus", "annealing", "cross-entropy")
COUNTS = (1000, 4000)
SEEDS = 3


def best_after(result: Result, count: int) -> float:
    """Give the best time that fits after so many samples."""
    times = [e.objective_s for e in result.history if e.samples <= count and not e.overflow_bytes]
    return min(times, default=float("inf"))


def samples_to(result: Result, goal_s: float) -> float:
    """Count the samples until a placement that fits is as fast as `goal_s`."""
    fast = (e.samples for e in result.history if e.objective_s <= goal_s and not e.overflow_bytes)
    return next(fast, float("inf"))


def main() -> None:
    """Run all and print rows."""
    print("| model | testbed |", *[f" {p}, {n} |" for n in COUNTS for p in PLACERS])
    for bed in K40:
        problem = load_problem(load_model(bed.model), bed.cluster)
        goal_s = place(problem, "expert-strong").objective_s
        runs = {
            name: [
                place(problem, name, budget=f"{COUNTS[-1]} samples", seed=s) for s in range(SEEDS)
            ]
            for name in PLACERS
        }
        ratios = [
            f"{statistics.median(best_after(run, count) for run in runs[name]) / goal_s:.3f}"
            for count in COUNTS
            for name in PLACERS
        ]
        needed = [f"{statistics.median(samples_to(r, goal_s) for r in runs[n]):g}" for n in PLACERS]
        print(f"| {bed.model} | {bed.cluster} | {' | '.join([*ratios, *needed])} |", flush=True)


if __name__ == "__main__":
    main()
