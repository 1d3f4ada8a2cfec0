"""
Plans dealt into halves, one to fit constants to and one to test them on, again and again.

This module owns the deals. With some ten plans a half, how well an order is found depends on which
ones they are; so figures are means over several deals. Every plan is tested in half of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from placewright.bench.fidelity_fit import Sample, calibrate
from placewright.errors import InputError
from placewright.execute.calibration import Calibration

NUM_PAIRS = 5
"""Of deals: in the second of two, halves have changed places."""


@dataclass(frozen=True, eq=False)
class Deal:
    """The calibration with one half, and where the other half's plans are among their model's."""

    calibration: Calibration
    tested: Mapping[str, Sequence[int]]  # by model


def make_deals(
    samples: Mapping[str, Sequence[Sample]], devices: Sequence[str], seed: int = 0
) -> list[Deal]:
    """
    Deal the plans of each model, and calibrate with each half.

    Of each two that are next to each other in measured time one, at random, is in each half.

    Raises
    ------
    InputError
        There are too few plans.
    """
    random, deals = np.random.default_rng(seed), []
    for _ in range(NUM_PAIRS):
        halves: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
        for model, mine in samples.items():
            order = np.argsort([sample.measured_s for sample in mine])
            flips = random.integers(2, size=-(-len(order) // 2))
            half = (np.arange(len(order)) + flips[np.arange(len(order)) // 2]) % 2
            for k in range(2):
                halves[k][model] = sorted(order[half == k].tolist())
        for fitted, tested in (halves, halves[::-1]):
            fitting = [samples[model][at] for model, every in fitted.items() for at in every]
            if len(fitting) < 2 or not any(tested.values()):
                count = sum(map(len, samples.values()))
                raise InputError(f"{count} plans are too few to fit and test; expected 4 or more.")
            deals.append(Deal(calibrate(fitting, devices), tested))
    return deals
