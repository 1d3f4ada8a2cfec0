"""
What simulated plans would take if they were run on this machine: `expect`, `ExpectedEvaluator`.

This module owns when that can be told: where most of the model's op times are measured (`profile`
measures them). How sure it is can be told where the cluster's devices have a calibration, too
(`bench fidelity` makes one). Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from placewright.arguments import expect_type, expect_word
from placewright.errors import InputError
from placewright.evaluate import OBJECTIVES, Basis, Evaluations, Objective, check_candidates
from placewright.execute.calibration import (
    COVERAGE,
    Calibration,
    Prediction,
    interval,
    read_calibration,
)
from placewright.execute.op_times import measured_costs
from placewright.execute.replay import Constants, Replay
from placewright.execute.replayed_peaks import replayed_peaks
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate
from placewright.timeline import Timeline
from placewright.units import format_bytes, format_time

MOST = 0.9
"""The share of the op times' sum that has to be measured."""


@dataclass(frozen=True)
class Expectation:
    """A plan's step time and peaks on this machine."""

    step: Prediction
    num_plans: int  # that the calibration is made of
    peak_bytes: dict[str, int]  # by device

    def describe(self) -> dict[str, Any]:
        """Tell it in plain values."""
        times = {name: getattr(self.step, name) for name in ("time_s", "low_s", "high_s")}
        return times | {"peak_bytes": self.peak_bytes, "num_plans": self.num_plans}

    def words(self) -> str:
        """Tell it in two sentences."""
        time_s, low_s, high_s = self.step.time_s, self.step.low_s, self.step.high_s
        peaks = ", ".join(f"{format_bytes(size)} on {d}" for d, size in self.peak_bytes.items())
        return (
            f"Run on this machine, it should take {format_time(time_s)}: {COVERAGE:.0%} of plans"
            f" would lie within {format_time(low_s)} and {format_time(high_s)} (calibrated with"
            f" {self.num_plans} plans). It should hold {peaks}."
        )


def expect(timeline: Timeline) -> Expectation | None:
    """
    Tell what a simulated plan would take on this machine; None if that is not known.

    Raises
    ------
    InputError
        The calibration file is wrong.
    """
    problem = timeline.problem
    calibration = read_calibration(problem.cluster)
    if calibration is None or not _is_measured(problem):
        return None
    time_s = Replay.of(timeline).time_s(calibration.constants)
    names, peaks = problem.cluster.device_names, replayed_peaks(timeline).tolist()
    return Expectation(
        interval(time_s, calibration),
        len(calibration.residuals),
        {name: peak for name, peak in zip(names, peaks, strict=True) if peak},
    )


def _is_measured(problem: Problem) -> bool:
    return measured_costs(problem.graph, problem.cluster).share_of_time >= MOST


@dataclass(eq=False)
class ExpectedEvaluator:
    """
    Evaluates by what a step should take on this machine: plans are replayed as they would be run.

    Peaks are the simulated ones. It takes six to ten times as long for a candidate as simulating
    many at once does, which on a machine with a GPU is well spent: to the simulator, which takes
    ops in any order and has threads' time for free, plans are quick that are not.

    Parameters
    ----------
    problem
        What is placed, with measured op times.
    calibration
        The machine's, whose constants are used; without one, op times and links are all that
        counts.
    """

    problem: Problem
    calibration: Calibration | None = None
    objective: Objective = "latency"
    overlap: bool = True
    num_samples: int = 0
    basis: ClassVar[Basis] = "expected"

    def __post_init__(self) -> None:
        expect_type(self.problem, Problem, "problem", "a `Problem`")
        expect_word(self.objective, OBJECTIVES, "objective")
        if self.objective != "latency":
            raise InputError("Only `latency` is known of real devices, one step after the other.")

    @classmethod
    def find(cls, problem: Problem) -> ExpectedEvaluator | None:
        """
        Make one for a problem whose op times are measured on this machine; None if they are not.

        Raises
        ------
        InputError
            The calibration file is wrong.
        """
        return cls(problem, read_calibration(problem.cluster)) if _is_measured(problem) else None

    def evaluate(self, candidates: Sequence[Candidate]) -> Evaluations:
        """Simulate candidates for their order, and replay them."""
        check_candidates(self.problem, candidates)
        self.num_samples += len(candidates)
        lines = [simulate(self.problem, candidate) for candidate in candidates]
        constants = Constants() if self.calibration is None else self.calibration.constants
        times_s = np.array([Replay.of(line).time_s(constants) for line in lines])
        over = np.array([line.overflow_bytes for line in lines], dtype=np.int64)
        return Evaluations(times_s, over, np.stack([line.peak_bytes for line in lines]))
