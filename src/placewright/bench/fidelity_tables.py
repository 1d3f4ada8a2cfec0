"""
Tables and pictures of `placewright bench fidelity`.

This module owns what is told of each model: how far simulated times and peaks are from measured
ones, before and after calibration with other plans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from placewright.bench.fidelity_book import FidelityBook, Record, to_placement
from placewright.bench.fidelity_deals import Deal, make_deals
from placewright.bench.fidelity_fit import (
    Agreement,
    Sample,
    agreement,
    calibrate,
    covered,
    peak_error,
    process_noise_sd,
    reachable_order,
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
    """The plans of a model that ran, in the order in which they were measured."""

    model: str
    records: tuple[Record, ...]
    samples: tuple[Sample, ...]
    replayed_bytes: tuple[dict[str, int], ...]  # peaks, by device

    def noise_sd(self) -> float | None:
        """Tell by how much times of one plan's processes vary, in logarithms."""
        return process_noise_sd(self.processes_s)

    @property
    def processes_s(self) -> list[tuple[float, ...]]:
        """Give the times of each plan's processes."""
        return [record.processes_s for record in self.records]


@dataclass(frozen=True, eq=False)
class Fidelity:
    """All that was measured, the calibration made of it, and those made of halves of it."""

    results: tuple[ModelResult, ...]
    failed: tuple[Record, ...]
    calibration: Calibration
    deals: tuple[Deal, ...]


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
    if not results:
        raise InputError(f"`{book.path}` has no plan that ran; run the bench with these models.")
    devices = calibrated_devices(book.load_problem(results[0].model).cluster)
    samples = {result.model: result.samples for result in results}
    deals = make_deals(samples, devices)
    every = [sample for mine in samples.values() for sample in mine]
    failed = tuple(each for each in records if each.measured_s is None)
    return Fidelity(tuple(results), failed, calibrate(every, devices), tuple(deals))


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
    for result in found.results:
        measured = [sample.measured_s for sample in result.samples]
        span = f"{format_time(min(measured))} – {format_time(max(measured))}"
        kinds = ["raw", "calibrated"]
        kinds += [OPS_BEFORE] if any(sample.before for sample in result.samples) else []
        for kind in kinds:
            heads = (result.model, str(len(measured)), span) if kind == "raw" else ("", "", "")
            figures = [_judge(result, deal, kind) for deal in found.deals]
            known = [each for each in figures if each is not None]
            share = "" if kind != kinds[-1] else f"{np.mean(_shares(found, [result])):.0%}"
            rows.append((*heads, kind, *_words(known), share))
    shares = _shares(found, found.results)
    return Table(
        title="Step times, simulated against measured",
        columns=(
            *("model", "plans", "measured", "simulated", "median error", "worst error"),
            *("Spearman", "Kendall near", "in interval"),
        ),
        num_text=4,
        rows=tuple(rows),
        notes=(
            f"Half of a model's plans are fitted to, and the others tested, {len(found.deals)}"
            " times, each time other ones. Figures are of the latter: means, and in brackets those"
            " of the worst time.",
            f"Kendall near: among those within {NEAR:g} times of the best.",
            *_drift(found),
            f"The {COVERAGE:.0%} interval covers {np.mean(shares):.0%} of the plans tested"
            f" ({min(shares):.0%} to {max(shares):.0%}).",
            *_provenance(found),
        ),
    )


def _judge(result: ModelResult, deal: Deal, kind: str) -> Agreement | None:
    """Tell how predictions agree with measured times, in a deal; None if no plan was tested."""
    tested = deal.tested[result.model]
    if not tested:
        return None
    measured_s = [result.samples[at].measured_s for at in tested]
    return agreement([_predict(result, at, kind, deal.calibration) for at in tested], measured_s)


def _predict(result: ModelResult, at: int, kind: str, calibration: Calibration) -> float:
    if kind == "raw":
        return result.records[at].simulated_s
    sample = result.samples[at]
    replay = sample.foreseen if kind == OPS_BEFORE else sample.replay
    return replay.time_s(calibration.constants)


def _shares(found: Fidelity, results: Sequence[ModelResult]) -> list[float]:
    """Tell what share of the plans tested is in its interval, in each deal."""
    shares = []
    for deal in found.deals:
        tested = [(result, at) for result in results for at in deal.tested[result.model]]
        if tested:
            times_s = [_predict(result, at, OPS_BEFORE, deal.calibration) for result, at in tested]
            measured_s = [result.samples[at].measured_s for result, at in tested]
            shares.append(covered(times_s, measured_s, deal.calibration) / len(tested))
    return shares


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


def _words(found: Sequence[Agreement]) -> tuple[str, ...]:
    """Write figures of all deals: their mean and the worst."""
    errors = [each.median_error for each in found]
    spearmans = [each.spearman for each in found if each.spearman is not None]
    kendalls = [each.kendall for each in found if each.kendall is not None]
    return (
        f"{np.mean(errors):.1%} ({max(errors):.1%})",
        f"{max(each.worst_error for each in found):.1%}",
        f"{np.mean(spearmans):.3f} ({min(spearmans):.3f})" if spearmans else NONE,
        f"{np.mean(kendalls):.2f} ({min(kendalls):.2f})" if kendalls else NONE,
    )


def _provenance(found: Fidelity) -> list[str]:
    """Say where plans were measured, how sure their times are, and what failed."""
    records = [record for result in found.results for record in result.records]
    machines = dict.fromkeys(f"{r.machine}, torch {r.torch}" for r in records)
    notes = [f"Measured on {' and '.join(machines)}."]
    noises = [sd for result in found.results if (sd := result.noise_sd()) is not None]
    if noises:
        counts = sorted({len(record.processes_s) for record in records})
        words = " to ".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        notes.append(
            f"Each plan ran in {words} processes. Apart from what all were slower or faster by at"
            " one time, times of one plan vary among them by"
            f" {np.median(noises):.1%} (sd; median model) to {max(noises):.1%} (worst)."
        )
        notes += _reachable(found)
    notes += [f"Failed: {r.model}, {r.plan}: {r.reason}" for r in found.failed]
    return notes


def _reachable(found: Fidelity) -> list[str]:
    """Say how well an order can be predicted of times that vary so much."""
    words = []
    for result in found.results:
        reached = reachable_order(result.processes_s)
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
    if "cuda" not in constants.kinds:
        words = "a fetched weight's reader, less, of its bytes by bandwidth"
        rows.append((words, f"{constants.cached_factor:.3f}"))
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
    """
    Make a panel of each model: predicted against measured, and the interval.

    A plan is predicted with what was fitted to others: the mean over the deals that test it.
    """
    low, high = conformal_ends(found.calibration.residuals)
    kind = "calibrated" if is_calibrated else "raw"
    panels = []
    for result in found.results:
        predicted_s = []
        for at in range(len(result.samples)):
            deals = [deal for deal in found.deals if at in deal.tested[result.model]]
            times_s = [_predict(result, at, kind, deal.calibration) for deal in deals]
            predicted_s.append(float(np.exp(np.mean(np.log(times_s)))))
        panels.append(
            Panel(
                title=result.model,
                predicted_s=tuple(predicted_s),
                measured_s=tuple(sample.measured_s for sample in result.samples),
                band=(math.exp(low), math.exp(high)) if is_calibrated else None,
            )
        )
    return panels
