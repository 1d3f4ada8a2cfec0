"""
Table 1: every placer on the testbeds of both papers, plain and with tight memory.

This module owns which cells that is, and how our ratios stand beside the published ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from placewright.bench.cells import Cell, Effort, Outcome
from placewright.bench.published import TABLE_1
from placewright.bench.summary import NOT_RUN, Summary, failures, group, ran_on, seconds
from placewright.bench.tables import Table
from placewright.bench.testbeds import K40, K80, Testbed
from placewright.placers.experts import BASELINES

TESTBEDS = (*K40, *K80, *(bed.tight for bed in (*K40, *K80)))

PLACERS = tuple(
    "cpu-only one-gpu expert-paper expert-strong scotch mincut colocrl hierarchical"
    " hierarchical-plus annealing auto".split()
)

FULL = Effort("600s", 3)
QUICK = Effort("5s", 1, models=("inception-v3-b1", "rnnlm", "nmt-2"))

DECIMALS = 3
"""Of a ratio to an expert: placers that come near one differ by thousandths."""

_SEEDS = "Median of seeds (lowest–highest). No ratio where one of the two does not fit."
_PUBLISHED = (
    "Published: Table 1 of Mirhoseini et al. (2018), measured on K40s, over its own expert. Batch"
    " sizes and vocabularies are ours (docs/testbeds.md)."
)
_NMT = "`nmt-2` stands for ColocRL's NMT."
_TIGHT = "Each GPU has 60 % of the memory that the model needs on one alone."
_FAMILIES = {
    "k40": ("Table 1 of the Hierarchical Planner (K40s), simulated", (_SEEDS, _PUBLISHED)),
    "k80": ("ColocRL's testbeds (K80s), simulated", (_SEEDS, _NMT)),
    "k40-tight": ("Table 1 with tight memory, simulated", (_SEEDS, _TIGHT)),
    "k80-tight": ("ColocRL's testbeds with tight memory, simulated", (_SEEDS, _TIGHT, _NMT)),
}
"""Title and notes of each family's table."""

_Found = dict[tuple[str, ...], Summary]  # by model, cluster, placer


def plan(testbeds: Sequence[Testbed], effort: Effort) -> list[Cell]:
    """List the cells, the first seed of everything first."""
    cells = [
        Cell(
            bench="table1",
            model=bed.model,
            cluster=bed.cluster,
            placer=placer,
            seed=seed,
            budget=effort.budget,
        )
        for bed in testbeds
        for placer in PLACERS
        for seed in range(1 if placer in BASELINES else effort.num_seeds)
    ]
    return sorted(cells, key=lambda cell: cell.seed)


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Make an overview, and a table for each family of clusters."""
    found = group(outcomes, "model", "cluster", "placer")
    beds = [bed for bed in TESTBEDS if any(key[:2] == (bed.model, bed.cluster) for key in found)]
    made = [_overview(beds, found)]
    for family in _FAMILIES:
        part = [bed for bed in beds if bed.family == family]
        if part:
            made.append(_family(family, part, found))
    return made


def _overview(beds: Sequence[Testbed], found: _Found) -> Table:
    others = tuple(name for name in PLACERS if name != "expert-strong")
    rows = []
    for bed in beds:
        by = {name: _get(found, bed, name) for name in PLACERS}
        ratios = (_against(by[name], by["expert-strong"]) for name in others)
        rows.append((bed.model, bed.cluster, *ratios))
    return Table(
        title="Step time over expert-strong's, simulated",
        columns=("model", "testbed", *others),
        num_text=2,
        rows=tuple(rows),
        notes=("Medians of seeds. `fits`: it does, and expert-strong does not.",),
    )


def _against(ours: Summary, expert: Summary) -> str:
    """Give a ratio, or the word that says why there is none."""
    if not ours.outcomes or not expert.outcomes:
        return NOT_RUN
    if ours.median_s is None:
        return "no fit" if ours.answers else "failed"
    return ours.over(expert, DECIMALS) or "fits"


def _family(family: str, beds: Sequence[Testbed], found: _Found) -> Table:
    title, notes = _FAMILIES[family]
    columns = ["model", "testbed", "placer", "lower bound s", "step time s", "planned in s"]
    columns += ["over expert-paper", "over expert-strong"]
    columns += ["published over expert"] * (family == "k40")
    parts = [_get(found, bed, name) for bed in beds for name in PLACERS]
    return Table(
        title=title,
        columns=tuple(columns),
        num_text=3,
        rows=tuple(row[: len(columns)] for bed in beds for row in _rows(bed, found)),
        notes=(
            *notes,
            *ran_on(outcome for part in parts for outcome in part.outcomes),
            *failures(parts),
        ),
    )


def _rows(bed: Testbed, found: _Found) -> list[tuple[str, ...]]:
    by = {name: _get(found, bed, name) for name in PLACERS}
    bounds = [answer.lower_bound_s for summary in by.values() for answer in summary.answers]
    bound = seconds(max(bounds)) if bounds else NOT_RUN
    return [
        (
            bed.model,
            bed.cluster,
            name,
            bound,
            summary.step,
            summary.planned,
            summary.over(by["expert-paper"], DECIMALS),
            summary.over(by["expert-strong"], DECIMALS),
            _published(bed, name),
        )
        for name, summary in by.items()
        if summary.outcomes
    ]


def _published(bed: Testbed, placer: str) -> str:
    """Give the published ratio to the published expert."""
    for row in TABLE_1:
        if (row.model, row.cluster) == (bed.model, bed.cluster):
            time_s = row.seconds(placer)
            if time_s is not None:
                return f"{time_s / row.expert_s:.2f}"
            return "out of memory" if placer == "one-gpu" else ""
    return ""


def _get(found: _Found, bed: Testbed, placer: str) -> Summary:
    return found.get((bed.model, bed.cluster, placer), Summary(()))
