"""
Tables and pictures of `placewright bench fidelity`.

This module owns what is told of each model: how far simulated times and peaks are from measured
ones on plans that nothing was fitted to, before and after calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from placewright.bench.fidelity_book import FidelityBook, Record, to_placement
from placewright.bench.fidelity_fit import (
    Agreement,
    Sample,
    agreement,
    calibrate,
    covered,
    peak_error,
    reachable_spearman,
)
from placewright.bench.fidelity_plans import NEAR
from placewright.bench.tables import Table
from placewright.errors import InputError
from placewright.execute.calibration import (
    COVERAGE,
    Calibration,
    calibrated_devices,
    conformal_ends,
)
from placewright.execute.replay import Replay
from placewright.execute.replayed_peaks import replayed_peaks
from placewright.problem import Candidate
from placewright.report.scatter import Panel
from placewright.simulator import simulate
from placewright.units import format_time

NONE = "–"
OPS_BEFORE = "ops before"


@dataclass(frozen=True, eq=False, repr=False)
class ModelResult:
    """The plans of a model that ran, by what they were for."""

    model: str
    records: tuple[Record, ...]
    samples: tuple[Sample, ...]
    replayed_bytes: tuple[dict[str, int], ...]  # peaks, by device

    def part(self, name: str) -> list[tuple[Record, Sample]]:
        """List the plans that were for this, in the order in which they were measured."""
        pairs = zip(self.records, self.samples, strict=True)
        return [pair for pair in pairs if pair[0].part == name]

    def noise_sd(self) -> float | None:
        """
        Tell by how much times of one plan's processes vary, in logarithms; None if it is not known.

        What all plans were slower or faster by together at one time does not count.
        """
        count = max((len(record.processes_s) for record in self.records), default=0)
        times_s = [r.processes_s for r in self.records if len(r.processes_s) == count]
        if count < 2 or len(times_s) < 2:
            return None
        logs = np.log(times_s)
        logs = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
        return float(np.sqrt((logs**2).sum() / (len(times_s) - 1) / (count - 1)))


@dataclass(frozen=True, eq=False)
class Fidelity:
    """All that was measured, and the calibration made of it."""

    results: tuple[ModelResult, ...]
    failed: tuple[Record, ...]
    calibration: Calibration


def read_fidelity(book: FidelityBook, models: Sequence[str] | None = None) -> Fidelity:
    """
    Read what was measured, and calibrate.

    Raises
    ------
    InputError
        There is too little of it, or it cannot be read.
    """
    records = [each for each in book.read().values() if models is None or each.model in models]
    ran = [each for each in records if each.measured_s is not None]
    results = []
    for model in dict.fromkeys(each.model for each in ran):
        of_model = tuple(each for each in ran if each.model == model)
        results.append(_replay(book, model, of_model))
    fitting = [sample for result in results for _, sample in result.part("fit")]
    if len(fitting) < 2 or not any(result.part("test") for result in results):
        raise InputError(
            f"`{book.path}` has {len(fitting)} plans to fit and"
            f" {len(ran) - len(fitting)} to test; run the bench with the same models first."
        )
    devices = calibrated_devices(book.load_problem(results[0].model).cluster)
    failed = tuple(each for each in records if each.measured_s is None)
    return Fidelity(tuple(results), failed, calibrate(fitting, devices))


def _replay(book: FidelityBook, model: str, records: tuple[Record, ...]) -> ModelResult:
    problem, again = book.load_problem(model), book.load_again(model)
    names = problem.cluster.device_names
    samples, peaks = [], []
    for record in records:
        timeline = simulate(problem, Candidate(to_placement(record.placement)))
        replay, measured_s = Replay.of(timeline, again), record.measured_s or math.nan
        before = None if again is None else Replay.of(timeline)
        samples.append(Sample(model, replay, measured_s, before))
        peaks.append(dict(zip(names, replayed_peaks(timeline).tolist(), strict=True)))
    return ModelResult(model, records, tuple(samples), tuple(peaks))


def make_tables(found: Fidelity) -> list[Table]:
    """Make the tables: step times, peaks (shares of a GPU have none), and the constants."""
    tables = [_times(found), _peaks(found), _constants(found.calibration)]
    return [table for table in tables if table.rows]


def _times(found: Fidelity) -> Table:
    rows: list[tuple[str, ...]] = []
    inside = total = 0
    constants = found.calibration.constants
    for result in found.results:
        pairs = result.part("test")
        if not pairs:
            continue
        measured = [sample.measured_s for _, sample in pairs]
        foreseen = [sample.foreseen.time_s(constants) for _, sample in pairs]
        hits = covered(foreseen, measured, found.calibration)
        inside, total = inside + hits, total + len(pairs)
        raw = agreement([record.simulated_s for record, _ in pairs], measured)
        span = f"{format_time(min(measured))} – {format_time(max(measured))}"
        counts = f"{len(result.records) - len(pairs)} + {len(pairs)}"
        rows.append((result.model, counts, span, "raw", *_words(raw), ""))
        kinds = {"calibrated": [sample.replay.time_s(constants) for _, sample in pairs]}
        if any(sample.before for _, sample in pairs):
            kinds[OPS_BEFORE] = foreseen
        rows += [("", "", "", k, *_words(agreement(p, measured)), "") for k, p in kinds.items()]
        rows[-1] = (*rows[-1][:-1], f"{hits} of {len(pairs)}")
    return Table(
        title="Step times, simulated against measured",
        columns=(
            *("model", "plans", "measured", "simulated", "median error", "worst error"),
            *("Spearman", "Kendall near", "in interval"),
        ),
        num_text=4,
        rows=tuple(rows),
        notes=(
            "Plans: those fitted to, and test plans. All figures are of the latter.",
            f"Kendall near: among those within {NEAR:g} times of the best, with their number.",
            *_drift(found),
            f"The {COVERAGE:.0%} interval covers {inside} of {total} test plans"
            f" ({inside / total:.0%}).",
            *_provenance(found),
        ),
    )


def _drift(found: Fidelity) -> list[str]:
    """Say how op times before plans ran differ from those meanwhile."""
    ratios = []
    for result in found.results:
        of_model = [
            sample.before.total_work[:, 0].sum() / sample.replay.total_work[:, 0].sum()
            for sample in result.samples
            if sample.before is not None
        ]
        ratios += [abs(float(np.median(of_model)) - 1)] if of_model else []
    if not ratios:
        return []
    return [
        "Calibrated: with ops timed again between the plans' turns. Ops before: with their times"
        " from before any plan ran, which is all that a prediction has. Those differed by"
        f" {np.median(ratios):.1%} (median model) to {max(ratios):.1%} (worst)."
    ]


def _words(found: Agreement) -> tuple[str, ...]:
    near = NONE if found.kendall is None else f"{found.kendall:.2f}"
    return (
        f"{found.median_error:.1%}",
        f"{found.worst_error:.1%}",
        NONE if found.spearman is None else f"{found.spearman:.3f}",
        f"{near} ({found.num_near})",
    )


def _provenance(found: Fidelity) -> list[str]:
    """Say where plans were measured, how sure their times are, and what failed."""
    records = [record for result in found.results for record in result.records]
    machines = dict.fromkeys(f"{r.machine}, torch {r.torch}" for r in records)
    notes = [f"Measured on {' and '.join(machines)}."]
    noises = [sd for result in found.results if (sd := result.noise_sd()) is not None]
    if noises:
        notes.append(
            f"Each plan ran in {len(records[0].processes_s)} processes. Apart from what all were"
            " slower or faster by at one time, times of one plan vary among them by"
            f" {np.median(noises):.1%} (sd; median model) to {max(noises):.1%} (worst)."
        )
        notes += _reachable(found)
    notes += [f"Failed: {r.model}, {r.plan}: {r.reason}" for r in found.failed]
    return notes


def _reachable(found: Fidelity) -> list[str]:
    """Say how well an order can be predicted of times that vary so much."""
    words = []
    for result in found.results:
        pairs, noise_sd = result.part("test"), result.noise_sd()
        if noise_sd is not None and pairs:
            measured = [sample.measured_s for _, sample in pairs]
            count = max(len(record.processes_s) for record, _ in pairs)
            reached = reachable_spearman(measured, noise_sd / math.sqrt(count))
            words += [] if reached is None else [f"{reached:.3f} on {result.model}"]
    if not words:
        return []
    return [f"Spearman of a prediction without error, with that noise: {', '.join(words)}."]


def _peaks(found: Fidelity) -> Table:
    rows = []
    for result in found.results:
        pairs = [*zip(result.records, result.replayed_bytes, strict=True)]
        raw = _known([peak_error(r.simulated_bytes, r.measured_bytes) for r, _ in pairs])
        replayed = _known([peak_error(peaks, r.measured_bytes) for r, peaks in pairs])
        if raw:
            figures = (f"{figure:.1%}" for figure in (*_worst(raw), *_worst(replayed)))
            rows.append((result.model, str(len(raw)), *figures))
    return Table(
        title="Peak memory, simulated against measured",
        columns=(
            *("model", "plans", "raw median error", "raw worst error"),
            *("replayed median error", "replayed worst error"),
        ),
        num_text=2,
        rows=tuple(rows),
        notes=("Of all plans, on the device that holds most. Nothing is fitted.",),
    )


def _known(errors: Iterable[float | None]) -> list[float]:
    return [error for error in errors if error is not None]


def _worst(errors: Sequence[float]) -> tuple[float, float]:
    return float(np.median(errors)), max(errors)


def _constants(calibration: Calibration) -> Table:
    constants = calibration.constants
    rows = []
    for kind, each in constants.kinds.items():
        rows.append((f"op times on {kind}, times", f"{each.op_factor:.3f}"))
        rows.append((f"an op on {kind}, more", format_time(each.op_overhead_s)))
    rows.append(("a transfer, more", format_time(constants.transfer_overhead_s)))
    rows.append(("a weight that is fetched, more", format_time(constants.weights_overhead_s)))
    rows.append(("a transfer's bytes by bandwidth, times", f"{constants.copy_factor:.3f}"))
    rows.append(("a weight's bytes by bandwidth, times", f"{constants.weights_factor:.3f}"))
    rows.append(("latency where it counts, times", f"{constants.wake_factor:.3f}"))
    if {"cpu", "cuda"} <= constants.kinds.keys():
        words = "a thread, for a tensor between a CPU and a GPU"
        rows.append((words, format_time(constants.hand_over_s)))
        words = "a CPU's time to send to a GPU, of the transfer's"
        rows.append((words, f"{constants.staging_factor:.3f}"))
    rows.append(("a step, more", format_time(constants.step_overhead_s)))
    rows.append(("what ops gain while other cores idle, times", f"{constants.idle_factor:.3f}"))
    low, high = (math.exp(end) - 1 for end in conformal_ends(calibration.residuals))
    rows.append((f"{COVERAGE:.0%} interval", f"{low:+.1%} to {high:+.1%}"))
    rows.append(("error among plans of a model (sd)", f"{calibration.within_sd:.1%}"))
    rows.append(("error between models (sd)", f"{calibration.between_sd:.1%}"))
    return Table(
        title="Calibration",
        columns=("constant", "fitted"),
        num_text=1,
        rows=tuple(rows),
        notes=(
            f"Fitted to {len(calibration.residuals)} plans of {calibration.num_models} models.",
        ),
    )


def make_panels(found: Fidelity, is_calibrated: bool = True) -> list[Panel]:
    """Make a panel of each model: predicted against measured, and the interval."""
    low, high = conformal_ends(found.calibration.residuals)
    panels = []
    for result in found.results:
        pairs = [*zip(result.records, result.samples, strict=True)]
        constants = found.calibration.constants
        panels.append(
            Panel(
                title=result.model,
                predicted_s=tuple(
                    sample.replay.time_s(constants) if is_calibrated else record.simulated_s
                    for record, sample in pairs
                ),
                measured_s=tuple(sample.measured_s for _, sample in pairs),
                is_tested=tuple(record.part == "test" for record, _ in pairs),
                band=(math.exp(low), math.exp(high)) if is_calibrated else None,
            )
        )
    return panels
