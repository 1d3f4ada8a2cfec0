"""
What a simulated plan would take if it were run on this machine: `expect`.

This module owns when that can be told: where the cluster's devices have a calibration (`bench
fidelity` makes one) and most of the model's op times are measured (`profile` measures them), since
that is what constants were fitted with. Nothing here needs PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from placewright.execute.calibration import COVERAGE, Prediction, interval, read_calibration
from placewright.execute.op_times import measured_costs
from placewright.execute.replay import Replay
from placewright.execute.replayed_peaks import replayed_peaks
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
    if calibration is None:
        return None
    if measured_costs(problem.graph, problem.cluster).share_of_time < MOST:
        return None
    time_s = Replay.of(timeline).time_s(calibration.constants)
    names, peaks = problem.cluster.device_names, replayed_peaks(timeline).tolist()
    return Expectation(
        interval(time_s, calibration),
        len(calibration.residuals),
        {name: peak for name, peak in zip(names, peaks, strict=True) if peak},
    )
