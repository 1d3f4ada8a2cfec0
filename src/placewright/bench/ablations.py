"""
Ablations: one option of a learned placer at a time, over seeds, at equal samples.

This module owns which options are changed on which testbeds. Options about memory are changed where
memory is tight, since elsewhere no placement fails and they do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from placewright.bench.cells import Cell, Effort, Option, Outcome
from placewright.bench.summary import Summary, failures, verdict
from placewright.bench.tables import Table
from placewright.bench.testbeds import Testbed
from placewright.placers.run import Budget
from placewright.placing import find_placer

TESTBEDS = (
    Testbed("nmt-2", "k40x2"),
    Testbed("nmt-4", "k40x4"),
    Testbed("inception-v3-b1", "k40x2"),
    Testbed("nmt-2", "k40x2-tight"),
    Testbed("nmt-4", "k40x4-tight"),
)

FULL = Effort("600s, 2000 samples", 5)
QUICK = Effort("120s, 200 samples", 2, models=("nmt-2",))


@dataclass(frozen=True)
class Change:
    """Options of a placer that are changed together."""

    placer: str
    options: dict[str, Option]
    is_about_memory: bool = False

    @property
    def name(self) -> str:
        """Write the options for a table."""
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


def _each(placer: str, option: str, *values: Option, is_about_memory: bool = False) -> list[Change]:
    return [Change(placer, {option: value}, is_about_memory) for value in values]


_BASE, _PLUS = "hierarchical", "hierarchical-plus"
_CYCLE = "cycle_samples"
PLACERS = (_BASE, _PLUS)
_PLUS_OPTIONS = (
    "any_edges",
    "device_features",
    "equal_devices",
    "tied_layers",
    "path_features",
    "aligned",
    "follows",
)
_PLUS_TRAINING: dict[str, Option] = {
    "baseline": "moving-average",
    "entropy": 0.0,
    "epochs": 1,
    "scaled_advantages": False,
}

CHANGES = (
    *_each(_BASE, "reward", "sqrt", "identity", "log1p", "improvement"),
    *_each(_BASE, "baseline", "moving-average", "leave-one-out", "none"),
    *_each(_BASE, "num_groups", 32, 64, 128, 256),
    *(
        Change(_BASE, {"num_groupings": m, "num_placements": k})
        for m, k in ((1, 4), (1, 16), (4, 4), (1, 1))
    ),
    *(
        Change(_BASE, {"temperature": temperature, "tanh_constant": constant})
        for temperature, constant in ((10.0, 5.0), (1.0, 5.0), (1.0, 0.0), (5.0, 2.0))
    ),
    *_each(_BASE, "learning_rate", 0.1, 0.01, 0.001),
    *(change for name in _PLUS_OPTIONS for change in _each(_BASE, name, True)),
    *_each(_BASE, "failure", "constant", "penalty", is_about_memory=True),
    *_each(_BASE, "failures_ignored_after", 0, 100, is_about_memory=True),
    *_each(_BASE, "fit", "none", "mask", is_about_memory=True),
    *(change for name in _PLUS_OPTIONS for change in _each(_PLUS, name, False)),
    *(Change(_PLUS, {name: value}) for name, value in _PLUS_TRAINING.items()),
    *_each(_PLUS, "fit", "none", is_about_memory=True),
)
"""One change each; those that change nothing are the base itself."""

_NOTES = (
    "`hierarchical-plus` learns in one cycle over all its samples.",
    "Step time: the median of seeds (lowest–highest). Over base: the ratio of medians.",
    "Seed noise: a two-sided permutation test of ranks over the seeds finds a difference this large"
    " in 5 % of cases or more when there is none. Of many changes without effect, one in twenty"
    " would still be called faster or slower.",
)


def plan(testbeds: Sequence[Testbed], effort: Effort) -> list[Cell]:
    """List the cells, the first seed of everything first, each once."""
    cells = {}
    for bed in testbeds:
        for placer in PLACERS:
            for options in ({}, *(_changed(change) for change in _changes(placer, bed))):
                for seed in range(effort.num_seeds):
                    cell = Cell(
                        bench="ablations",
                        model=bed.model,
                        cluster=bed.cluster,
                        placer=placer,
                        options=options | _one_cycle(placer, effort),
                        seed=seed,
                        budget=effort.budget,
                    )
                    cells[cell.key] = cell
    return sorted(cells.values(), key=lambda cell: cell.seed)


def _one_cycle(placer: str, effort: Effort) -> dict[str, Option]:
    """Let a placer that learns in cycles have one, over all its samples: not end in the middle."""
    samples = Budget.parse(effort.budget).samples
    return {_CYCLE: samples} if placer == _PLUS and samples is not None else {}


def _changes(placer: str, bed: Testbed) -> list[Change]:
    return [
        change
        for change in CHANGES
        if change.placer == placer and change.is_about_memory == bed.is_tight
    ]


def _changed(change: Change) -> dict[str, Option]:
    """Give a change's options: none if the placer has them anyway."""
    same = find_placer(change.placer, change.options) == find_placer(change.placer)
    return {} if same else change.options


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Make a table for each testbed and base."""
    made = []
    for bed in TESTBEDS:
        for placer in PLACERS:
            here = [
                outcome
                for outcome in outcomes
                if (outcome.cell.model, outcome.cell.cluster, outcome.cell.placer)
                == (bed.model, bed.cluster, placer)
            ]
            if here:
                made.append(_table(bed, placer, here))
    return made


def _table(bed: Testbed, placer: str, outcomes: Sequence[Outcome]) -> Table:
    base = _pick(outcomes, {})
    rows = [("none (the base)", base.step, "", "")]
    for change in _changes(placer, bed):
        options = _changed(change)
        ours = _pick(outcomes, options)
        if not options:
            rows.append((change.name, "the base", "", ""))
        elif ours.outcomes:
            rows.append((change.name, ours.step, ours.over(base), verdict(ours, base)))
    return Table(
        title=f"Ablations of {placer}: {bed.model} on {bed.cluster}, simulated",
        columns=("change", "step time s", "over base", "against the base"),
        num_text=1,
        rows=tuple(rows),
        notes=(*_NOTES, *failures([Summary(tuple(outcomes))])),
    )


def _pick(outcomes: Sequence[Outcome], options: dict[str, Option]) -> Summary:
    def is_it(cell: Cell) -> bool:
        return {k: v for k, v in cell.options.items() if k != _CYCLE} == options

    return Summary(tuple(outcome for outcome in outcomes if is_it(outcome.cell)))
