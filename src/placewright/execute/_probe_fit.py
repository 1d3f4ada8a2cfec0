"""
From timed ops and copies to the figures of a cluster: a roofline for each device, a line a link.

This module owns the fits. What is timed is in `placewright.execute._probe_cases` and
`placewright.execute._probe_links`.

Letters: ``S`` samples, ``P`` points of an efficiency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.cluster import Efficiency
from placewright.costs import family_of
from placewright.units import parse_rate, parse_time

COMPUTING = ("matmul", "convolution", "attention")

SURE = 2.0
"""An op counts for a peak if it takes so many times the launch overhead: less is mostly that."""

LEAST_SHARE = 1e-6

NOISE = 0.1
"""Errors beyond this (of a logarithm: 10 %) count linearly: no op bends a curve by itself."""

SMOOTH = 0.03
"""What a step from one point to the next counts, beside errors: it decides where times do not."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """An op that was timed."""

    kind: str
    dtype: str
    flops: float
    bytes: float
    time_s: float

    @property
    def family(self) -> str:
        """Give the family whose efficiency it has."""
        return family_of(self.kind)


@dataclass(frozen=True)
class Figures:
    """What a device's entry in a cluster file says of its speed."""

    flops: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float
    efficiency: Mapping[str, Efficiency]


Points = tuple[tuple[float, float], ...]


def fit_device(samples: Sequence[Sample]) -> Figures:
    """
    Fit a device's figures, so that `placewright.costs.Costs.estimate` gives back the times.

    The launch overhead is what the smallest simple ops take. Peak rate and memory bandwidth are the
    most that ops reach beyond it (the second highest: one may be chance). What those of a family
    reach of that is fitted, for about every power of four of their size. Another dtype's rate is
    that at which large products take as long as they do, with float32's efficiencies.
    """
    launch_s = round_time(_launch_s(samples))
    families: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.dtype == "float32":
            families[sample.family].append(sample)
    computing = [s for family in COMPUTING for s in families[family]]
    moving = [s for family, ours in families.items() if family not in COMPUTING for s in ours]
    rate = _round(_peak([(s.flops, s.time_s) for s in computing], launch_s))
    speed = round_rate(_peak([(s.bytes, s.time_s) for s in moving], launch_s))

    points: dict[str, Points] = {}
    for family in sorted(families, key=lambda family: (family in COMPUTING, family)):
        ours = families[family]
        flops, num_bytes, time_s = np.array([[s.flops, s.bytes, s.time_s] for s in ours]).T
        if family in COMPUTING:
            moving_s = num_bytes / (speed * _reached(points["movement"], num_bytes))
            points[family] = _fit_points(flops, flops / rate, moving_s, time_s, launch_s)
        else:
            least_s = np.maximum(flops / rate, num_bytes / speed)
            points[family] = _fit_points(num_bytes, least_s, 0 * least_s, time_s, launch_s)
    rates = {"float32": rate}
    for dtype in dict.fromkeys(s.dtype for s in samples if s.dtype != "float32"):
        large = sorted((s for s in samples if s.dtype == dtype), key=lambda s: s.flops)[-3:]
        reached = [s.flops / s.time_s / _reached(points[s.family], s.flops) for s in large]
        rates[dtype] = _round(float(np.median(reached)))
    return Figures(rates, speed, launch_s, dict(sorted(points.items())))


def _launch_s(samples: Sequence[Sample]) -> float:
    """Find the time of ops that do next to nothing: the two smallest of each simple kind."""
    tiny: dict[str, list[float]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.bytes):
        if sample.family in ("elementwise", "movement") and sample.dtype == "float32":
            tiny[sample.kind].append(sample.time_s)
    return float(np.median([time_s for times in tiny.values() for time_s in times[:2]]))


def _peak(done: Sequence[tuple[float, float]], launch_s: float) -> float:
    """Find the second highest rate, of (work, time) pairs that take long enough to tell."""
    rates = [work / (time_s - launch_s) for work, time_s in done if time_s > SURE * launch_s]
    return sorted(rates or [work / time_s for work, time_s in done])[-2:][0]


def _fit_points(
    sizes: FloatArray,  # [S]
    least_s: FloatArray,  # [S] at all of the peak
    floor_s: FloatArray,  # [S] what it takes at any rate
    time_s: FloatArray,  # [S] measured
    launch_s: float,
) -> Points:
    """Fit shares so that ``launch_s + max(least_s / share, floor_s)`` are the times measured."""
    from scipy.optimize import least_squares

    bins = np.floor(np.log(sizes) / np.log(4) + 1e-9)
    known = np.array([np.log(sizes[bins == k]).mean() for k in np.unique(bins)])  # [P]
    ratio = np.clip(least_s / np.maximum(time_s - launch_s, 1e-12), LEAST_SHARE, 1.0)
    start = np.array([np.median(np.log(ratio[bins == k])) for k in np.unique(bins)])  # [P]

    def errors(shares: FloatArray) -> FloatArray:  # [P] -> [S + P - 1]
        reached = np.interp(np.log(sizes), known, np.exp(shares))
        predicted = launch_s + np.maximum(least_s / reached, floor_s)
        return np.concatenate([np.log(predicted / time_s), SMOOTH * np.diff(shares)])

    low, high = np.log(LEAST_SHARE) - 1e-6, 1e-6
    best = least_squares(errors, start, bounds=(low, high), loss="soft_l1", f_scale=NOISE).x
    shares = np.clip(np.exp(best), LEAST_SHARE, 1.0)
    return tuple(
        (_round(np.exp(size)), _round(share)) for size, share in zip(known, shares, strict=True)
    )


def _reached(points: Points, size: FloatArray | float) -> FloatArray:
    sizes, shares = np.array(points).T
    found: FloatArray = np.interp(np.log(size), np.log(sizes), shares)
    return found


def fit_link(copies: Mapping[int, float]) -> tuple[float, float]:
    """
    Fit latency and bandwidth to the times of copies by their bytes.

    Least squares of the relative errors, neither latency nor time per byte negative.
    """
    from scipy.optimize import nnls

    sizes, times = np.array([*copies]), np.array([*copies.values()])
    both = np.stack([np.ones(len(sizes)), sizes / 1e9], axis=1)  # columns of a like size
    (latency_s, s_per_gb), _ = nnls(both / times[:, None], np.ones(len(sizes)))
    return round_time(latency_s), round_rate(1e9 / max(s_per_gb, 1e-6))


def round_time(seconds: float) -> float:
    """Round to three digits, to a time that a file spells in microseconds."""
    return parse_time(f"{seconds * 1e6:.3g}us", "a time")


def round_rate(bytes_per_s: float) -> float:
    """Round to three digits, to a rate that a file spells in GB/s."""
    return parse_rate(f"{bytes_per_s / 1e9:.3g}GB/s", "a rate")


def _round(value: float) -> float:
    return float(f"{value:.3g}")
