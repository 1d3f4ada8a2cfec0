"""How many ops a second are simulated: memory tracked, `fifo`, four devices, one core."""

from __future__ import annotations

import resource

import numpy as np
from tests.reference import simulate as reference

from benchmarks.figures import Figure, median_s
from benchmarks.worlds import contiguous, layered_problem, scattered
from placewright import Problem, simulate, simulate_many

TARGETS = {
    (100_000, "contiguous"): 12.0,
    (100_000, "random"): 3.0,
    (1_000_000, "contiguous"): 6.0,
    (1_000_000, "random"): 1.5,
}
PLACEMENTS = {"contiguous": contiguous, "random": scattered}


def run() -> list[Figure]:
    """Measure speed by size and placement, against the reference, and on several cores."""
    small = layered_problem(100_000)
    return [
        *_speed(small, repeats=41),
        *_speed(layered_problem(1_000_000), repeats=9),
        *_other_disciplines(small),
        *_device_counts(),
        *_against_reference(),
        *_many(),
        *_timeline(small),
    ]


def _rate(problem: Problem, placement: np.ndarray, repeats: int, **options: object) -> float:
    row = placement.astype(np.int32)[np.newaxis]
    run = lambda: simulate_many(problem, row, num_threads=1, **options)  # noqa: E731
    run()
    return problem.num_ops / median_s(run, repeats) / 1e6


def _speed(problem: Problem, repeats: int) -> list[Figure]:
    return [
        Figure(
            f"{problem.num_ops:,} ops, {name}",
            _rate(problem, place(problem), repeats),
            "million ops/s",
            TARGETS[problem.num_ops, name],
        )
        for name, place in PLACEMENTS.items()
    ]


def _other_disciplines(problem: Problem) -> list[Figure]:
    priorities = np.random.default_rng(2).random(problem.num_ops)
    return [
        Figure(
            f"{problem.num_ops:,} ops, {name}, {discipline}",
            _rate(problem, place(problem), 9, discipline=discipline, priorities=given),
            "million ops/s",
        )
        for discipline, given in (("program", None), ("priority", priorities))
        for name, place in PLACEMENTS.items()
    ]


def _device_counts() -> list[Figure]:
    problems = [layered_problem(100_000, count) for count in (1, 8, 16)]
    return [
        Figure(
            f"100,000 ops, random, {p.num_devices} devices",
            _rate(p, scattered(p), 9),
            "million ops/s",
        )
        for p in problems
    ]


def _against_reference() -> list[Figure]:
    problem = layered_problem(20_000)
    figures = []
    for name, place in PLACEMENTS.items():
        placement = place(problem)
        slow = median_s(lambda: reference(problem, placement), 1)  # noqa: B023
        fast = problem.num_ops / _rate(problem, placement, 101) / 1e6
        figures.append(
            Figure(f"20,000 ops, {name}: kernel over reference", slow / fast, "times", 100)
        )
    return figures


def _many() -> list[Figure]:
    problem = layered_problem(10_000)
    rows = np.stack([scattered(problem, seed) for seed in range(256)]).astype(np.int32)
    ratios = []
    for _ in range(9):
        one = median_s(lambda: simulate_many(problem, rows, num_threads=1), 1)
        two = median_s(lambda: simulate_many(problem, rows, num_threads=2), 1)
        ratios.append(one / two)
    return [
        Figure(
            "256 placements of 10,000 ops: two cores over one",
            float(np.median(ratios)),
            "times",
            1.7,
        )
    ]


def _timeline(problem: Problem) -> list[Figure]:
    placement = scattered(problem)
    recorded = median_s(lambda: simulate(problem, placement), 5)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return [
        Figure(
            "100,000 ops, random: with a full timeline",
            problem.num_ops / recorded / 1e6,
            "million ops/s",
        ),
        Figure("peak memory of this benchmark, 1,000,000 ops included", peak, "MiB"),
    ]
