"""How long the list schedulers take: 100,000 ops, eight devices, compiled code at hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.figures import Figure, median_s
from benchmarks.worlds import layered_problem, scattered
from placewright.placers.list_scheduling import heft, m_etf, m_sct, m_topo, peft
from placewright.placing import place
from placewright.problem import Problem
from placewright.simulator import simulate_many

TARGETS_S: dict[Callable[[Problem], np.ndarray], float | None] = {
    m_topo: None,
    m_etf: 3.0,
    m_sct: 60.0,
    heft: 3.0,
    peft: None,
}


def run() -> list[Figure]:
    """Measure each scheduler's time, and its step's time as a share of a random placement's."""
    small = layered_problem(1_000, num_devices=8)
    large = layered_problem(100_000, num_devices=8)
    at_random = _step_s(large, scattered(large))
    figures = []
    for placer, target in TARGETS_S.items():
        placer(small)  # compiles
        name = placer.__name__.replace("_", "-")
        figures += [
            Figure(
                f"100,000 ops, 8 devices: {name}{', without its LP' * (placer is m_sct)}",
                median_s(lambda: placer(large), 3),  # noqa: B023
                "s",
                target,
                at_most=True,
            ),
            Figure(
                f"100,000 ops, 8 devices: step of {name} over a random one's",
                _step_s(large, placer(large)) / at_random,
                "times",
            ),
        ]
    solved = layered_problem(5_000, num_devices=8)  # just below `MAX_LP_EDGES`
    figures.append(
        Figure(
            "5,000 ops, 8 devices: m-sct, with its linear program",
            median_s(lambda: m_sct(solved), 3),
            "s",
        )
    )
    place(small, budget_s=0.5)  # compiles
    first_s = place(large, budget_s=0.0).history[0].wall_s
    figures.append(Figure("100,000 ops, 8 devices: auto's first answer", first_s, "s", 1.0, True))
    return figures


def _step_s(problem: Problem, placement: np.ndarray) -> float:
    return float(simulate_many(problem, placement[np.newaxis], num_threads=1).makespan_s[0])
