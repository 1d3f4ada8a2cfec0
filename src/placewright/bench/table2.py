"""
Table 2: a learned grouping against random ones, and against none, at equal samples.

This module owns which cells that is, and in which way a placer without groups fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from placewright.bench.cells import Cell, Effort, Option, Outcome
from placewright.bench.published import TABLE_2
from placewright.bench.summary import NOT_RUN, Summary, failures, seconds
from placewright.bench.tables import Table
from placewright.bench.testbeds import K40, Testbed
from placewright.placers.run import Budget

TESTBEDS = K40
PLACERS = ("hierarchical-plus", "hierarchical")

FULL = Effort("600s, 5000 samples", 3, 20)
QUICK = Effort("120s, 200 samples", 1, 3, models=("inception-v3-b1", "nmt-2"))

_NOTES = (
    "Every cell of a row has the same number of samples; `samples` is the fewest that one of them"
    " made of those it was given. Random groupings have 256 groups; a Grouper that is tied to"
    " layers has at most 8 for each pass of a layer: from 64 to 240 of the 256.",
    "Layers: `hierarchical-plus` with each pass of a layer as one group, which is given by rule"
    " and not learned.",
    "Learned: the median of seeds (lowest–highest). Improvement: by which share the learned"
    " grouping's median is faster than the best random grouping.",
    "Published: Table 2 of Mirhoseini et al. (2018), measured on K40s.",
)

_ARMS: dict[str, dict[str, Option]] = {
    "learned": {"grouping": "learned", "num_groups": 256},
    "layers": {"grouping": "learned", "num_groups": 1},
    "random": {"grouping": "random", "num_groups": 256},
    "none": {"grouping": "none"},
}
"""What is compared, and the options that make it so."""

_Rows = Sequence[tuple[Testbed, str, dict[str, Summary]]]  # a summary for each arm


def plan(testbeds: Sequence[Testbed], effort: Effort) -> list[Cell]:
    """List the cells, the first seed of everything first."""
    seeds = effort.num_seeds
    counts = {"learned": seeds, "layers": seeds, "random": effort.num_groupings, "none": 1}
    cells = [
        Cell(
            bench="table2",
            model=bed.model,
            cluster=bed.cluster,
            placer=placer,
            options=_ARMS[arm],
            seed=seed,
            budget=effort.budget,
        )
        for bed in testbeds
        for placer in PLACERS
        for arm, count in counts.items()
        if (arm, placer) != ("layers", "hierarchical")  # it knows of no layers
        for seed in range(count)
    ]
    return sorted(cells, key=lambda cell: cell.seed)


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Make the table of groupings, and the one of no grouping."""
    rows = []
    for bed in TESTBEDS:
        for placer in PLACERS:
            by = {arm: _pick(outcomes, bed, placer, arm) for arm in _ARMS}
            if any(summary.outcomes for summary in by.values()):
                rows.append((bed, placer, by))
    return [_groupings(rows), _no_grouping(rows)]


def _pick(outcomes: Sequence[Outcome], bed: Testbed, placer: str, arm: str) -> Summary:
    def is_it(cell: Cell) -> bool:
        where = (cell.model, cell.cluster) == (bed.model, bed.cluster)
        return where and cell.placer == placer and cell.options == _ARMS[arm]

    return Summary(tuple(outcome for outcome in outcomes if is_it(outcome.cell)))


def _groupings(rows: _Rows) -> Table:
    return Table(
        title="Table 2: learned against random groupings, simulated",
        columns=(
            "model",
            "testbed",
            "placer",
            "samples",
            "learned s",
            "layers s",
            "best random s",
            "median random s",
            "worst random s",
            "improvement",
            "published best / median / worst s",
            "published improvement",
        ),
        num_text=3,
        rows=tuple(_groupings_row(*row) for row in rows),
        notes=(
            *_NOTES,
            *failures(by[arm] for _, _, by in rows for arm in ("learned", "layers", "random")),
        ),
    )


def _groupings_row(bed: Testbed, placer: str, by: dict[str, Summary]) -> tuple[str, ...]:
    learned, drawn = by["learned"], by["random"]
    improvement = ""
    if learned.median_s is not None and drawn.times_s:
        improvement = f"{1 - learned.median_s / drawn.times_s[0]:.1%}"
    return (
        bed.model,
        bed.cluster,
        placer,
        _samples((*learned.outcomes, *drawn.outcomes)),
        learned.step,
        by["layers"].step if by["layers"].outcomes else "",
        *_spread(drawn),
        improvement,
        *_published(bed),
    )


def _spread(drawn: Summary) -> tuple[str, str, str]:
    """Give best, median and worst of the random groupings."""
    if not drawn.outcomes:
        return NOT_RUN, NOT_RUN, NOT_RUN
    if not drawn.times_s:
        return drawn.step, "", ""
    missing = len(drawn.outcomes) - len(drawn.times_s)
    median = "does not fit or failed" if drawn.median_s is None else seconds(drawn.median_s)
    worst = f"{missing} do not fit or failed" if missing else seconds(drawn.times_s[-1])
    return seconds(drawn.times_s[0]), median, worst


def _samples(outcomes: Sequence[Outcome]) -> str:
    """Give the fewest samples made, and how many were given where that differs."""
    made = [outcome.answer.samples for outcome in outcomes if outcome.answer is not None]
    if not made:
        return NOT_RUN
    given = Budget.parse(outcomes[0].cell.budget).samples
    is_short = given is not None and min(made) < given
    return f"{min(made):,} of {given:,}" if is_short else f"{min(made):,}"


def _published(bed: Testbed) -> tuple[str, str]:
    for row in TABLE_2:
        if (row.model, row.cluster) == (bed.model, bed.cluster):
            times = f"{row.best_s:.2f} / {row.median_s:.2f} / {row.worst_s:.2f}"
            return times, f"{row.improvement:.1%}"
    return "", ""


def _no_grouping(rows: _Rows) -> Table:
    return Table(
        title="No grouping: each op placed by itself, simulated",
        columns=("model", "testbed", "placer", "what became of it", "step time s", "samples"),
        num_text=4,
        rows=tuple(
            (
                bed.model,
                bed.cluster,
                placer,
                _how(by["none"], by["learned"]),
                by["none"].step,
                _samples(by["none"].outcomes),
            )
            for bed, placer, by in rows
            if by["none"].outcomes
        ),
        notes=("One seed, with the same budget as the learned grouping.",),
    )


def _how(none: Summary, learned: Summary) -> str:
    """Say in which way a placer without groups fails, if it does."""
    (outcome,) = none.outcomes
    answer = outcome.answer
    if answer is None:
        return f"{outcome.failure}: {outcome.short_reason}"
    ratio = none.over(learned)
    words = f"{ratio} times the learned grouping's step time" if ratio else "nothing to compare"
    if not answer.is_feasible:
        words = "found nothing that fits"
    given = Budget.parse(outcome.cell.budget).samples
    if given is not None and answer.samples < given:
        return f"time: {answer.samples:,} of {given:,} samples in {answer.wall_s:.0f} s; {words}"
    is_worse = not answer.is_feasible or (ratio and float(ratio) > 1)
    return f"{'quality' if is_worse else 'no failure'}: {words}"
