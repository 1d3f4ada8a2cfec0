"""
What can be said of measured step times: when they have settled, how sure their median is, which of
two is less.

Nothing here assumes how times are distributed: intervals of a median are order statistics, those of
a ratio are resampled. Steps of one process are taken to be independent of each other; what drifts
is what interleaving is for.

Letters: ``S`` steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

LEAST_WARM_UP = 2
WINDOW = 5
AGREEMENT = 0.05
"""Steps have settled once the medians of two windows of so many differ by so little."""

CONFIDENCE = 0.95
FEWEST = 6
"""Of fewer steps there is no interval of that confidence, however wide."""

_RESAMPLED = 2000


@dataclass(frozen=True)
class Interval:
    """A median, and between what it lies with a confidence of 95 %; infinite if unknown."""

    median_s: float
    low_s: float
    high_s: float

    @property
    def half_width(self) -> float:
        """Give half the interval, as a share of the median."""
        return (self.high_s - self.low_s) / 2 / self.median_s


@dataclass(frozen=True)
class Ratio:
    """How two compare: the ratio of medians, its 95 % interval, how sure it is less than one."""

    ratio: float
    low: float
    high: float
    sureness: float


def count_warm_up(times_s: Sequence[float] | FloatArray) -> int | None:
    """
    Count the steps before times have settled; None if they have not.

    That is the first step, after the first two, from which on two windows have medians within a
    few percent of each other.
    """
    for begin in range(LEAST_WARM_UP, len(times_s) - 2 * WINDOW + 1):
        middle = begin + WINDOW
        now_s, then_s = np.median(times_s[begin:middle]), np.median(times_s[middle:][:WINDOW])
        if abs(now_s - then_s) <= AGREEMENT * min(now_s, then_s):
            return begin
    return None


def median_interval(times_s: FloatArray) -> Interval:
    """Give the median of times ([S]) and its confidence interval, by order statistics."""
    ordered, rank = np.sort(times_s), _rank(len(times_s))
    median_s = float(np.median(ordered))
    if rank == 0:
        return Interval(median_s, -math.inf, math.inf)
    return Interval(median_s, float(ordered[rank - 1]), float(ordered[-rank]))


@cache
def _rank(count: int) -> int:
    """
    Find which of so many ordered values, from below, bounds their median; 0: none does.

    The median is below the k-th lowest of n values only if fewer than k are below it: a binomial
    chance. Its bound at both ends is half of what confidence leaves.
    """
    total, chance, rank = 0, 1, 0  # in units of 2 ** -count
    most = round((1 - CONFIDENCE) / 2 * 10**6) * 2**count
    while (total + chance) * 10**6 <= most:
        total += chance
        chance = chance * (count - rank) // (rank + 1)
        rank += 1
    return rank


def compare_medians(
    left: Sequence[FloatArray], right: Sequence[FloatArray], seed: int = 0
) -> Ratio:
    """
    Compare the medians of two that took turns: ``left`` by ``right``.

    Each is a list of rounds, of which those that both took count. The ratio is that of a round's
    two medians, and of these the median: what disturbed a round disturbed both. For its interval
    rounds are drawn anew, and steps within each.
    """
    num_rounds = min(len(left), len(right))
    random = np.random.default_rng(seed)
    drawn = np.empty((num_rounds, _RESAMPLED))
    found = np.empty(num_rounds)
    for k, (mine, theirs) in enumerate(zip(left[:num_rounds], right[:num_rounds], strict=True)):
        found[k] = np.median(mine) / np.median(theirs)
        drawn[k] = _resampled_medians(mine, random) / _resampled_medians(theirs, random)
    rounds = random.integers(num_rounds, size=(num_rounds, _RESAMPLED))
    ratios = np.median(np.take_along_axis(drawn, rounds, axis=0), axis=0)
    low, high = np.quantile(ratios, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    less = float((ratios < 1).mean() + (ratios == 1).mean() / 2)
    return Ratio(float(np.median(found)), float(low), float(high), less)


def _resampled_medians(times_s: FloatArray, random: np.random.Generator) -> FloatArray:
    drawn = random.integers(len(times_s), size=(_RESAMPLED, len(times_s)))
    return np.asarray(np.median(times_s[drawn], axis=1))
