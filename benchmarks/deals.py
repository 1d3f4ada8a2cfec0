"""
How much of a fidelity bench's figures is the deal: which plans were fitted to, and which judged.

``python -m benchmarks.deals BOOK`` takes the folder of a finished ``placewright bench fidelity``,
deals its plans into fitting and test plans anew (of each two with neighbouring times of a model,
one at random), calibrates, and tells the mean and the range of every figure over all deals.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from placewright.bench.fidelity_book import FidelityBook
from placewright.bench.fidelity_fit import Sample, agreement, calibrate, covered
from placewright.bench.fidelity_tables import Fidelity, read_fidelity

FIGURES = {"median error": ".1%", "Spearman": ".3f", "Kendall near": ".3f", "plans near": ".0f"}
"""What is told of each model, and how it is written."""


def main() -> None:
    """Deal, calibrate, and tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("book", type=Path)
    parser.add_argument("--deals", type=int, default=10)
    options = parser.parse_args()
    found = read_fidelity(FidelityBook(options.book))
    random = np.random.default_rng(0)
    figures: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    shares = []
    for _ in range(options.deals):
        fitting, tested = deal(found, random)
        calibration = calibrate(fitting, ["any"])
        times_s = [each.foreseen.time_s(calibration.constants) for each in tested]
        measured_s = [each.measured_s for each in tested]
        shares.append(covered(times_s, measured_s, calibration) / len(tested))
        for result in found.results:
            mine = [each for each in tested if each.model == result.model]
            told = agreement(
                [each.replay.time_s(calibration.constants) for each in mine],
                [each.measured_s for each in mine],
            )
            kendall = np.nan if told.kendall is None else told.kendall
            spearman = np.nan if told.spearman is None else told.spearman
            figures[result.model].append(
                (told.median_error, spearman, kendall, float(told.num_near))
            )
    table = Table(title=f"Calibrated, {options.deals} deals: mean (lowest to highest)")
    for name in ("model", *FIGURES):
        table.add_column(name)
    for model, rows in figures.items():
        table.add_row(model, *map(in_words, np.array(rows).T, FIGURES.values()))
    console = Console(width=120)
    console.print(table)
    console.print(f"In the 90 % interval: {in_words(np.array(shares), '.1%')}")


def deal(found: Fidelity, random: np.random.Generator) -> tuple[list[Sample], list[Sample]]:
    """Deal the plans into those to fit to and those to test with."""
    fitting, tested = [], []
    for result in found.results:
        samples = sorted(result.samples, key=lambda each: each.measured_s)
        for pair in zip(samples[::2], samples[1::2], strict=False):
            first = int(random.integers(2))
            fitting.append(pair[first])
            tested.append(pair[1 - first])
    return fitting, tested


def in_words(values: np.ndarray, form: str) -> str:
    """Write a figure's mean and range; those that could not be told do not count."""
    known = values[np.isfinite(values)]
    if not len(known):
        return "–"
    return f"{known.mean():{form}} ({known.min():{form}} to {known.max():{form}})"


if __name__ == "__main__":
    main()
