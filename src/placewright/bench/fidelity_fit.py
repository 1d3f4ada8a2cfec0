"""
Simulated against measured: constants fitted to some plans, and how well others agree.

This module owns the fit, the residuals that intervals are made of, and the figures by which
agreement is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from placewright.bench.fidelity_plans import NEAR
from placewright.errors import InputError
from placewright.execute.calibration import (
    Calibration,
    interval,
)
from placewright.execute.op_times import torch_version
from placewright.execute.replay import Constants, KindConstants, Replay

FloatArray = NDArray[np.float64]

NUM_FOLDS = 10
NUM_DRAWS = 200
"""Of noise, to tell what it does to an order."""

SOFT = 0.1
"""Errors beyond this count less and less than their squares."""

ENOUGH = 1e-4
"""A fit ends where a step makes it better by less, of what there is."""

OP_UNIT_S = 1e-6
"""What the fit of an overhead for each op steps in."""

OP_STARTS = (0.5, 2.0)
"""Overheads to begin with: a factor and an overhead can stand for each other, so one may get
stuck."""


@dataclass(frozen=True)
class Global:
    """A constant that all devices share, and how it is fitted, in its unit."""

    name: str  # in `Constants`
    nothing: float  # what it is if there is nothing to say
    start: float
    most: float
    unit: float = 1.0
    least: float = 0.0


GLOBALS = (
    Global("transfer_overhead_s", 0.0, 0.5, 100.0, unit=1e-5),
    Global("weights_overhead_s", 0.0, 0.2, 100.0, unit=1e-5),
    Global("copy_factor", 1.0, 1.1, 20.0, least=1.0),  # or a search would move much
    Global("weights_factor", 1.0, 1.05, 20.0, least=1.0),
    Global("step_overhead_s", 0.0, 0.5, 100.0, unit=1e-4),
    Global("wake_factor", 1.0, 1.0, 20.0),
    Global("hand_over_s", 0.0, 1.0, 100.0, unit=1e-5),
    Global("staging_factor", 0.0, 0.5, 50.0),
    Global("idle_factor", 1.0, 0.8, 1.0),
    Global("cached_factor", 0.0, 0.5, 20.0),
)

PRIOR = 0.001
"""What a step in a constant costs, as an error: decides where a few plans do not."""

MODEL_PRIOR = 1.0
"""The same for what all plans of a model are off by together."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A plan that was measured."""

    model: str
    replay: Replay
    measured_s: float
    before: Replay | None = None  # with op times from before it ran, where those differ

    @property
    def foreseen(self) -> Replay:
        """Give what could be known of it before it ran."""
        return self.replay if self.before is None else self.before


def fit_constants(samples: Sequence[Sample]) -> Constants:
    """
    Fit the constants to plans of all models together.

    Robust least squares (soft L1) on the logarithm of predicted by measured times, every constant
    within bounds that make sense: no overhead is negative. The best of several beginnings. What
    a model's op times are off by, its plans have in common; no constant should make up for that, so
    each model has an error of its own in the fit, which predictions then leave out.

    Raises
    ------
    InputError
        There is no plan.
    """
    from scipy.optimize import least_squares

    if not samples:
        raise InputError("There is no plan to fit constants to.")
    kinds = tuple(dict.fromkeys(kind for sample in samples for kind in sample.replay.kinds))
    measured = np.log([sample.measured_s for sample in samples])
    models = list(dict.fromkeys(sample.model for sample in samples))
    model_at = [models.index(sample.model) for sample in samples]
    own = [0.0] * len(models)

    def errors(x: FloatArray) -> FloatArray:
        x, theirs = x[: -len(own)], x[-len(own) :]
        constants = _constants(x, kinds)
        found = np.log([sample.replay.time_s(constants) for sample in samples]) - measured
        return np.concatenate(
            [found + theirs[model_at], PRIOR * (x - nothing), MODEL_PRIOR * theirs]
        )

    nothing = np.array([1.0, 0.0] * len(kinds) + [each.nothing for each in GLOBALS])
    others = [each.start for each in GLOBALS] + own
    starts = [np.array([1.0, overhead] * len(kinds) + others) for overhead in OP_STARTS]
    low = np.array([0.2, 0.0] * len(kinds) + [g.least for g in GLOBALS] + [-1.0 for _ in own])
    high = np.array([5.0, 200.0] * len(kinds) + [g.most for g in GLOBALS] + [1.0 for _ in own])
    solve = partial(
        least_squares, errors, bounds=(low, high), loss="soft_l1", f_scale=SOFT, ftol=ENOUGH
    )
    best = min((solve(start) for start in starts), key=lambda found: float(found.cost))
    return _constants(best.x[: -len(own)], kinds)


def _constants(x: FloatArray, kinds: Sequence[str]) -> Constants:
    count = len(GLOBALS)
    each = [
        KindConstants(float(factor), float(overhead) * OP_UNIT_S)
        for factor, overhead in x[:-count].reshape(-1, 2)
    ]
    others = {g.name: float(value) * g.unit for g, value in zip(GLOBALS, x[-count:], strict=True)}
    return Constants(kinds=dict(zip(kinds, each, strict=True)), **others)


def calibrate(samples: Sequence[Sample], devices: Sequence[str], seed: int = 0) -> Calibration:
    """
    Fit constants, and find how far predictions with them are off.

    Residuals are those of plans that the constants were not fitted to: plans are dealt into
    `NUM_FOLDS` parts, and each is predicted with constants fitted to the others, and with op times
    from before it ran, as whoever predicts a plan has them.

    Raises
    ------
    InputError
        There are fewer than two plans.
    """
    if len(samples) < 2:
        raise InputError(f"{len(samples)} plan is too few to calibrate with; expected 2 or more.")
    fold = np.random.default_rng(seed).permutation(len(samples)) % min(NUM_FOLDS, len(samples))
    residuals = np.empty(len(samples))
    for k in range(int(fold.max()) + 1):
        fitted = fit_constants([s for s, f in zip(samples, fold, strict=True) if f != k])
        for at in np.flatnonzero(fold == k).tolist():
            sample = samples[at]
            residuals[at] = np.log(sample.measured_s / sample.foreseen.time_s(fitted))
    within, between = _spread(residuals, [sample.model for sample in samples])
    return Calibration(
        devices=tuple(devices),
        torch=torch_version() or "",
        constants=fit_constants(samples),
        residuals=tuple(sorted(residuals.tolist())),
        within_sd=within,
        between_sd=between,
        num_models=len({sample.model for sample in samples}),
    )


def _spread(residuals: FloatArray, models: Sequence[str]) -> tuple[float, float]:
    """Tell how much residuals vary among plans of a model, and their means among models."""
    groups = [residuals[[other == model for other in models]] for model in dict.fromkeys(models)]
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    within = np.sqrt(squares / max(len(residuals) - len(groups), 1))
    means = [group.mean() for group in groups]
    noise = np.mean([within**2 / len(group) for group in groups])
    between = np.sqrt(max(float(np.var(means, ddof=1)) - noise, 0.0)) if len(means) > 1 else 0.0
    return float(within), float(between)


@dataclass(frozen=True)
class Agreement:
    """How predicted and measured values agree; None where there are too few to tell."""

    num_plans: int
    median_error: float  # relative, as are the others
    worst_error: float
    spearman: float | None
    kendall: float | None  # among those within `NEAR` of the best
    num_near: int


def agreement(predicted_s: Sequence[float], measured_s: Sequence[float]) -> Agreement:
    """
    Compare predicted with measured times.

    Raises
    ------
    InputError
        There are none.
    """
    predicted, measured = np.asarray(predicted_s, float), np.asarray(measured_s, float)
    if not len(measured):
        raise InputError("There is no plan to compare.")
    errors = np.abs(predicted / measured - 1)
    near = measured <= NEAR * measured.min()
    return Agreement(
        num_plans=len(measured),
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
        spearman=_correlation("spearmanr", predicted, measured),
        kendall=_correlation("kendalltau", predicted[near], measured[near]),
        num_near=int(near.sum()),
    )


def _correlation(name: str, x: FloatArray, y: FloatArray) -> float | None:
    """Correlate ranks; None for fewer than three, or where all are equal."""
    from scipy import stats

    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(getattr(stats, name)(x, y).statistic)


def process_noise_sd(times_s: Sequence[Sequence[float]]) -> float | None:
    """
    Tell by how much times of one plan's processes vary, in logarithms; None if it is not known.

    What all plans were slower or faster by together at one time does not count.

    Parameters
    ----------
    times_s
        The times of each plan's processes, in the order in which they ran; of plans that ran in
        fewer than others nothing is made.
    """
    count = max(map(len, times_s), default=0)
    complete = [times for times in times_s if len(times) == count]
    if count < 2 or len(complete) < 2:
        return None
    logs = np.log(complete)
    logs = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    return float(np.sqrt((logs**2).sum() / (len(complete) - 1) / (count - 1)))


def reachable_order(times_s: Sequence[Sequence[float]]) -> float | None:
    """Give the Spearman that a prediction without error would have of plans' mean times."""
    noise_sd = process_noise_sd(times_s)
    if noise_sd is None:
        return None
    count = max(map(len, times_s))
    return reachable_spearman([fmean(times) for times in times_s], noise_sd / np.sqrt(count))


def reachable_spearman(measured_s: Sequence[float], noise_sd: float, seed: int = 0) -> float | None:
    """
    Give the Spearman that a prediction without error would have, on average over noise.

    Parameters
    ----------
    measured_s
        Step times, taken for the true ones.
    noise_sd
        By how much a time varies when it is measured again, in logarithms.
    seed
        Of the noise.
    """
    random, measured = np.random.default_rng(seed), np.asarray(measured_s, float)
    noisy = measured * np.exp(random.normal(0.0, noise_sd, (NUM_DRAWS, len(measured))))
    found = [_correlation("spearmanr", measured, times) for times in noisy]
    known = [each for each in found if each is not None]
    return float(np.mean(known)) if known else None


def peak_error(simulated: Mapping[str, int], measured: Mapping[str, int | None]) -> float | None:
    """Compare peaks of the device that holds most; None if nothing is known of it."""
    known = {name: peak for name, peak in measured.items() if peak}
    if not known:
        return None
    name = max(known, key=lambda name: known[name])
    return abs(simulated[name] / known[name] - 1)


def covered(
    predicted_s: Sequence[float], measured_s: Sequence[float], calibration: Calibration
) -> int:
    """Count the measured times that lie in the predictions' intervals."""
    found = [interval(time_s, calibration) for time_s in predicted_s]
    return sum(
        each.low_s <= time_s <= each.high_s for each, time_s in zip(found, measured_s, strict=True)
    )
