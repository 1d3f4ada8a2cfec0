"""
Outcomes over seeds, in figures: medians and ranges, ratios, and what is no more than noise.

This module owns how seeds are put together. A seed whose answer does not fit memory, or that
failed, counts as slower than any that fits.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.bench.cells import Answer, Outcome
from placewright.units import format_bytes

Ranks = NDArray[np.float64]

NOT_RUN = "–"
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Summary:
    """What a placer came to over its seeds."""

    outcomes: tuple[Outcome, ...]

    @property
    def answers(self) -> list[Answer]:
        """List the answers of those that did not fail."""
        return [outcome.answer for outcome in self.outcomes if outcome.answer is not None]

    @property
    def times_s(self) -> list[float]:
        """List the step times of answers that fit, the best first."""
        return sorted(answer.objective_s for answer in self.answers if answer.is_feasible)

    @property
    def median_s(self) -> float | None:
        """Give the median step time; None if that is of one that does not fit or failed."""
        if not self.outcomes:
            return None
        missing = len(self.outcomes) - len(self.times_s)
        median = statistics.median([*self.times_s, *[math.inf] * missing])
        return median if math.isfinite(median) else None

    @property
    def planned(self) -> str:
        """Give the median planning time in seconds, for a table."""
        walls = [answer.wall_s for answer in self.answers]
        if not walls:
            return NOT_RUN
        wall_s = statistics.median(walls)
        return f"{wall_s:.{0 if wall_s >= 10 else 2}f}" if wall_s >= 0.01 else "<0.01"

    @property
    def step(self) -> str:
        """Give the step time in seconds, for a table: median, range, and what does not fit."""
        if not self.outcomes:
            return NOT_RUN
        total, fit = len(self.outcomes), len(self.times_s)
        over = [a.overflow_bytes for a in self.answers if not a.is_feasible]
        failed = total - fit - len(over)
        if self.median_s is not None:
            words = [seconds(self.median_s) + self._range()]
            words += [f"{len(over)} of {total} do not fit"] * bool(over)
            words += [f"{failed} of {total} failed"] * bool(failed)
            return ", ".join(words)
        some = f", {fit} of {total} fit" if fit else ""
        if over:
            return f"does not fit ({format_bytes(statistics.median(over))} over){some}"
        return f"failed{some}"

    def _range(self) -> str:
        low, high = seconds(self.times_s[0]), seconds(self.times_s[-1])
        return "" if low == high else f" ({low}–{high})"

    def over(self, other: Summary, decimals: int = 2) -> str:
        """Give the ratio of medians, for a table; nothing where one of them does not fit."""
        if self.median_s is None or other.median_s is None:
            return ""
        return f"{self.median_s / other.median_s:.{decimals}f}"


def seconds(time_s: float) -> str:
    """Write a step time for a table."""
    return f"{time_s:.4f}"


def chance(ours: Summary, base: Summary) -> float:
    """
    Give the chance that seeds alone would set two placers as far apart as they are.

    A two-sided permutation test of the mean rank (all splits of the seeds, or 9,999 drawn ones).
    """
    from scipy.stats import permutation_test, rankdata

    keys = [_key(outcome) for outcome in (*ours.outcomes, *base.outcomes)]
    order = {key: k for k, key in enumerate(sorted({*keys}))}
    ranks = rankdata([order[key] for key in keys])
    parts = (ranks[: len(ours.outcomes)], ranks[len(ours.outcomes) :])
    found = permutation_test(
        parts, _mean_gap, vectorized=True, permutation_type="independent", random_state=0
    )
    return min(float(found.pvalue), 1.0)


def _mean_gap(x: Ranks, y: Ranks, axis: int = -1) -> Ranks:
    return np.asarray(np.mean(x, axis=axis) - np.mean(y, axis=axis))


def _key(outcome: Outcome) -> tuple[bool, int, float]:
    answer = outcome.answer
    return (True, 0, 0.0) if answer is None else (False, answer.overflow_bytes, answer.objective_s)


def verdict(ours: Summary, base: Summary) -> str:
    """Say whether two placers differ by more than their seeds do."""
    n, m = len(ours.outcomes), len(base.outcomes)
    if not n or not m:
        return ""
    if 2 / math.comb(n + m, n) > SIGNIFICANT:
        return "too few seeds to tell"
    p = chance(ours, base)
    if p >= SIGNIFICANT:
        return f"seed noise (p {p:.2f})"
    is_better = _lean(ours, base) < 0
    return f"{'faster' if is_better else 'slower'} (p {p:.3f})"


def _lean(ours: Summary, base: Summary) -> float:
    """Count how much more often ours is worse than better, over all pairs of seeds."""
    pairs = [(_key(a), _key(b)) for a in ours.outcomes for b in base.outcomes]
    return sum((a > b) - (a < b) for a, b in pairs) / len(pairs)


def group(outcomes: Sequence[Outcome], *names: str) -> dict[tuple[str, ...], Summary]:
    """Put outcomes together whose cells agree in the named fields."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        key = tuple(str(getattr(outcome.cell, name)) for name in names)
        groups.setdefault(key, []).append(outcome)
    return {key: Summary(tuple(members)) for key, members in groups.items()}


def failures(summaries: Iterable[Summary]) -> list[str]:
    """List why cells failed: a sentence for each placer and reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for summary in summaries:
        for outcome in summary.outcomes:
            if outcome.failure:
                counts[outcome.cell.placer, outcome.short_reason] += 1
    return [
        f"Failed: {placer}, {count} cell{'s' * (count > 1)}: {reason}."
        for (placer, reason), count in counts.items()
    ]


def ran_on(outcomes: Iterable[Outcome]) -> list[str]:
    """
    Say in a sentence on which processor, with how many threads, cells ran.

    If it was not the same for all of them, the sentence names the placers that ran on each; one
    that ran on several has its cells counted.
    """
    counts: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    for outcome in outcomes:
        machine, placer = outcome.machine, outcome.cell.placer
        where = f"{machine.cpu}, {machine.threads} thread{'s' * (machine.threads != 1)} a cell"
        counts.setdefault(where, Counter())[placer] += 1
        totals[placer] += 1
    if len(counts) <= 1:
        return [f"Ran on {where}." for where in counts]
    parts = []
    for where, placers in counts.items():
        names = (
            name if count == totals[name] else f"{name} ({count} of {totals[name]} cells)"
            for name, count in placers.items()
        )
        parts.append(f"on {where}: {', '.join(names)}")
    return [f"Ran {'; '.join(parts)}."]
