"""
Placers side by side on one problem: their times, what they cut, how they balance.

This module owns the figures by which placers are compared, those of partitioners' own goals
included.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from placewright.arguments import expect_type, expect_word, read_whole
from placewright.errors import InputError
from placewright.evaluate import OBJECTIVES, Objective
from placewright.execute.calibration import Calibration, probability_faster
from placewright.execute.expecting import ExpectedEvaluator
from placewright.placers.run import Budget
from placewright.placing import PLACERS, Result, place
from placewright.policies.learned import POLICIES
from placewright.problem import Problem
from placewright.units import format_time

SEEDED = frozenset(
    [
        *"auto random hill-climbing annealing cross-entropy scotch mincut metis kahypar".split(),
        *POLICIES,
    ]
)
"""Those whose answer depends on the seed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One placer on one problem, over its seeds."""

    placer: str
    objective_s: float | None  # median over seeds; None if it could not run
    best_s: float | None
    worst_s: float | None
    is_feasible: bool  # on every seed
    planning_s: float | None  # median
    balance: float | None  # largest device load over the mean of those used, median seed
    cut_bytes: int | None  # moved between devices, median seed
    num_devices: int | None
    samples: int | None
    problem: str  # why it could not run
    best_is_faster: float | None = None  # how likely the first of all is, on this machine


def compare_placers(
    problem: Problem,
    names: Sequence[str] | None = None,
    budget: str = "10s",
    objective: Objective = "latency",
    num_seeds: int = 1,
    say: Callable[[str], None] = lambda _: None,
    judge: ExpectedEvaluator | None = None,
) -> list[Comparison]:
    """
    Run placers, several seeds each where that matters, and compare them, the best first.

    With `judge` placements are judged by what they should take on this machine; if it is calibrated
    also tell how likely the first is faster than the others.

    Raises
    ------
    InputError
        A name, the budget, the objective or the number of seeds is wrong.
    """
    if names is not None:
        expect_type(names, (tuple, list), "names", "a list of placers' names")
    chosen = [*PLACERS] if names is None else [*names]
    for name in chosen:
        expect_type(name, str, "names", "a list of placers' names")
        if name not in PLACERS:
            raise InputError(f"There is no placer `{name}`. There are: {', '.join(PLACERS)}.")
    expect_type(problem, Problem, "problem", "a `Problem`")
    expect_word(objective, OBJECTIVES, "objective")
    read_whole(num_seeds, "num_seeds", 1)
    Budget.parse(budget)  # once, not in every row
    rows = []
    for name in chosen:
        say(f"{name}...")
        seeds = range(num_seeds if name in SEEDED else 1)
        try:
            results = [
                place(
                    problem,
                    name,
                    budget=budget,
                    objective=objective,
                    seed=seed,
                    evaluator=None if judge is None else dataclasses.replace(judge, num_samples=0),
                )
                for seed in seeds
            ]
        except InputError as error:
            rows.append(_failed(name, str(error)))
            continue
        rows.append(_compare(name, results))
    rows.sort(key=_rank)
    calibration = None if judge is None else judge.calibration
    return rows if calibration is None else [_doubt(rows[0], row, calibration) for row in rows]


def _doubt(best: Comparison, row: Comparison, calibration: Calibration) -> Comparison:
    if row is best or best.objective_s is None or row.objective_s is None:
        return row
    likely = probability_faster(best.objective_s, row.objective_s, calibration)
    return dataclasses.replace(row, best_is_faster=likely)


def describe_chances(rows: Sequence[Comparison]) -> list[str]:
    """Say how likely the first is faster than each other one, where that is known."""
    return [
        f"On this machine, {rows[0].placer} ({format_time(rows[0].objective_s or 0.0)}) is faster"
        f" than {row.placer} ({format_time(row.objective_s or 0.0)}) with a probability of"
        f" {row.best_is_faster:.0%}."
        for row in rows
        if row.best_is_faster is not None
    ]


def _rank(row: Comparison) -> tuple[bool, bool, float]:
    return row.objective_s is None, not row.is_feasible, row.objective_s or 0.0


def _failed(name: str, why: str) -> Comparison:
    return Comparison(
        placer=name,
        objective_s=None,
        best_s=None,
        worst_s=None,
        is_feasible=False,
        planning_s=None,
        balance=None,
        cut_bytes=None,
        num_devices=None,
        samples=None,
        problem=why,
    )


def _compare(name: str, results: list[Result]) -> Comparison:
    times = [result.objective_s for result in results]
    middle = results[int(np.argsort(times)[len(times) // 2])]
    busy = middle.timeline.device_utilisation
    used = busy[busy > 0]
    return Comparison(
        placer=name,
        objective_s=statistics.median(times),
        best_s=min(times),
        worst_s=max(times),
        is_feasible=all(result.is_feasible for result in results),
        planning_s=statistics.median([result.wall_s for result in results]),
        balance=float(used.max() / used.mean()) if used.size else 1.0,
        cut_bytes=int(middle.timeline.moved_bytes),
        num_devices=int(used.size),
        samples=middle.samples,
        problem="",
    )
