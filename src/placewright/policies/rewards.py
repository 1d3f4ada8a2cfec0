"""
What a sample costs a policy, and what it is compared with: rewards and baselines, for all policies.

A policy makes costs small. A sample's cost is a shape of its step time; one that failed (that does
not fit, or whose time is no number) has the failing signal's instead, or its own time with a
penalty. The baseline is taken off: what is left, the advantage, says whether to do it again.

Letters: ``M`` groupings, ``K`` placements for each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from placewright.evaluate import Evaluations

Reward = Literal["sqrt", "identity", "log1p", "improvement"]
Failure = Literal["constant", "penalty"]
Baseline = Literal["moving-average", "leave-one-out", "none"]
FloatArray = NDArray[np.float64]

SHAPES: dict[Reward, Callable[[FloatArray, float], FloatArray]] = {
    "sqrt": lambda time_s, _: np.sqrt(time_s),
    "identity": lambda time_s, _: time_s,
    "log1p": lambda time_s, _: np.log1p(time_s),
    "improvement": lambda time_s, best_s: time_s / max(best_s, 1e-12) - 1.0,
}
"""A time's cost, by the reward's name; `improvement` is how far it is from the best before it."""


@dataclass(frozen=True)
class Costs:
    """What samples cost."""

    cost: FloatArray  # [M, K]
    has_failed: NDArray[np.bool_]  # [M, K]


@dataclass(frozen=True)
class Pricing:
    """How step times become costs."""

    reward: Reward = "sqrt"
    failure: Failure = "constant"
    failure_s: float = 100.0  # the failing signal

    def cost(
        self,
        found: Evaluations,
        num_groupings: int,
        memory_bytes: float,
        best_s: float,
        fits_s: float = 0.0,
    ) -> Costs:
        """
        Give the costs of samples, a row for each grouping.

        A penalised failure costs its own time, or that of the best placement so far that fits
        (`fits_s`) if that is more, half as much again, and twice as much more for every device's
        memory (the smallest one's) that it lacks. So what fits best is cheaper than what fails,
        and of two that fail in equal time the one that lacks less. A time that is no number fails
        with the failing signal in any case.
        """
        time_s = np.where(np.isfinite(found.objective_s), found.objective_s, self.failure_s)
        has_failed = (found.overflow_bytes > 0) | ~np.isfinite(found.objective_s)
        share = found.overflow_bytes / max(memory_bytes, 1.0)
        failed_s = np.full_like(time_s, self.failure_s)
        if self.failure == "penalty":
            is_known = np.isfinite(found.objective_s)
            failed_s = np.where(is_known, np.maximum(time_s, fits_s) * (1.5 + 2 * share), failed_s)
        time_s = np.where(has_failed, failed_s, time_s)
        cost = SHAPES[self.reward](time_s, best_s)
        return Costs(cost.reshape(num_groupings, -1), has_failed.reshape(num_groupings, -1))


@dataclass(frozen=True)
class Advantages:
    """How much worse samples are than their baseline: less than nothing is to be done again."""

    device: FloatArray  # [M, K] for the choice of devices
    group: FloatArray  # [M] for the choice of groups


@dataclass
class MovingAverage:
    """A baseline: the mean of past costs, the recent ones counting more."""

    mean: float | None = None  # None: the first batch's
    decay: float = 0.9

    def advantages(self, costs: Costs, keeps: NDArray[np.bool_]) -> Advantages:
        """Compare with the past, then take the samples that are kept into it."""
        if not keeps.any():
            return Advantages(np.zeros_like(costs.cost), np.zeros(len(costs.cost)))
        now = float(costs.cost[keeps].mean())
        before = now if self.mean is None else self.mean
        found = np.where(keeps, costs.cost - before, 0.0)
        self.mean = self.decay * before + (1 - self.decay) * now
        return Advantages(found, found.mean(axis=1))


@dataclass
class LeaveOneOut:
    """
    A baseline: the mean of the other samples of the batch.

    Placements are compared with the others of their grouping, groupings by the mean of their
    placements with the other groupings, or where there is but one with the past.
    """

    past: float | None = None
    decay: float = 0.9

    def advantages(self, costs: Costs, keeps: NDArray[np.bool_]) -> Advantages:
        """Compare each sample with the others that are kept."""
        weight = keeps.astype(np.float64)
        device = _without_own(costs.cost, weight, axis=1)
        if costs.cost.shape[1] == 1:  # one placement a grouping: those of the other groupings
            device = _without_own(costs.cost, weight, axis=0)
        count = weight.sum(axis=1)
        mean = (costs.cost * weight).sum(axis=1) / np.maximum(count, 1)
        is_known = (count > 0).astype(np.float64)
        if len(mean) > 1:
            return Advantages(device, _without_own(mean, is_known, axis=0))
        before = mean[0] if self.past is None else self.past
        if is_known[0]:
            self.past = self.decay * before + (1 - self.decay) * float(mean[0])
        return Advantages(device, (mean - before) * is_known)


def _without_own(values: FloatArray, weight: FloatArray, axis: int) -> FloatArray:
    """Take off each value the mean of the others along an axis; nothing where there are none."""
    others = weight.sum(axis=axis, keepdims=True) - weight
    total = (values * weight).sum(axis=axis, keepdims=True) - values * weight
    is_compared = (others > 0) & (weight > 0)
    return np.where(is_compared, values - total / np.maximum(others, 1), 0.0)


@dataclass
class NoBaseline:
    """No baseline: every sample is discouraged, the worse ones more."""

    def advantages(self, costs: Costs, keeps: NDArray[np.bool_]) -> Advantages:
        """Give the costs as they are."""
        found = np.where(keeps, costs.cost, 0.0)
        return Advantages(found, found.mean(axis=1))


AnyBaseline = MovingAverage | LeaveOneOut | NoBaseline


def make_baseline(
    name: Baseline, pricing: Pricing, decay: float, begins_failing: bool
) -> AnyBaseline:
    """Make a baseline; a moving average may begin at the failing signal's cost."""
    if name == "moving-average":
        first = SHAPES[pricing.reward](np.array([pricing.failure_s]), pricing.failure_s)
        return MovingAverage(float(first[0]) if begins_failing else None, decay)
    return LeaveOneOut(decay=decay) if name == "leave-one-out" else NoBaseline()
