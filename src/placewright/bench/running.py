"""
A bench from its name to its tables: what is asked for, what is left to run, what is told of it.

This module owns the list of benches, how choices narrow them, and the estimate of the time left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from placewright.bench import ablations, table1, table2
from placewright.bench.cells import Book, Cell, Effort, Outcome
from placewright.bench.pool import run_cells
from placewright.bench.summary import ran_on
from placewright.bench.tables import Table
from placewright.bench.testbeds import Testbed, choose
from placewright.errors import InputError
from placewright.placers.experts import BASELINES
from placewright.placers.run import Budget
from placewright.units import format_bytes

START_S = 4.0
"""What a cell takes beside its planning: starting Python, loading, compiled code."""


@dataclass(frozen=True)
class Bench:
    """A set of cells, and the tables made of them."""

    testbeds: tuple[Testbed, ...]
    placers: tuple[str, ...]
    full: Effort
    quick: Effort
    plan: Callable[[Sequence[Testbed], Effort], list[Cell]]
    tables: Callable[[Sequence[Outcome]], list[Table]]


BENCHES = {
    name: Bench(part.TESTBEDS, part.PLACERS, part.FULL, part.QUICK, part.plan, part.tables)
    for name, part in (("table1", table1), ("table2", table2), ("ablations", ablations))
}
"""Every bench by its name."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What of a bench is wanted; None is what the bench has by itself."""

    is_quick: bool = False
    budget: str | None = None
    num_seeds: int | None = None
    models: Sequence[str] | None = None
    clusters: Sequence[str] | None = None
    placers: Sequence[str] | None = None  # run, but tables show all that is there


def plan_cells(bench: Bench, choice: Choice) -> list[Cell]:
    """
    List the cells of a bench on the testbeds that are wanted, whatever the placer.

    Raises
    ------
    InputError
        A name is unknown, or the budget cannot be read.
    """
    effort = bench.quick if choice.is_quick else bench.full
    if choice.budget is not None:
        effort = dataclasses.replace(effort, budget=_capped(choice.budget, effort.budget))
    if choice.num_seeds is not None:
        effort = dataclasses.replace(effort, num_seeds=choice.num_seeds)
    models = effort.models if choice.models is None else choice.models
    return bench.plan(choose(bench.testbeds, models, choice.clusters), effort)


def _capped(text: str, standard: str) -> str:
    """Write a budget in one way, with the bench's own seconds if it names none."""
    budget = Budget.parse(text)
    if budget.seconds is None:
        budget = dataclasses.replace(budget, seconds=Budget.parse(standard).seconds)
    return str(budget)


def cells_to_run(
    bench: Bench, choice: Choice, done: dict[str, Outcome], is_retry: bool = False
) -> list[Cell]:
    """
    List the cells of the placers that are wanted and that are not done; or failed, to retry.

    Raises
    ------
    InputError
        A placer is not one of the bench's.
    """
    for name in choice.placers or ():
        if name not in bench.placers:
            there = ", ".join(bench.placers)
            raise InputError(f"This bench has no placer `{name}`. It has: {there}.")
    return [
        cell
        for cell in plan_cells(bench, choice)
        if cell.placer in (choice.placers or bench.placers)
        and (cell.key not in done or (is_retry and done[cell.key].failure))
    ]


def run_bench(
    cells: Sequence[Cell], book: Book, jobs: int, threads: int, say: Callable[[str], None]
) -> None:
    """
    Run cells, write each into the book as it ends, and say how it went and how long the rest takes.

    Raises
    ------
    InputError
        There are not enough cores, or the book cannot be written.
    """
    walls = _Walls()
    for outcome in book.read().values():
        walls.add(outcome)
    waiting = {cell.key: cell for cell in cells}
    with contextlib.closing(run_cells(cells, jobs, threads)) as outcomes:
        for number, outcome in enumerate(outcomes, start=1):
            book.append(outcome)
            walls.add(outcome)
            del waiting[outcome.cell.key]
            left_s = sum(map(walls.expected_s, waiting.values())) / jobs
            left = f"about {_duration(left_s)} left" if waiting else "done"
            say(f"[{number}/{len(cells)}] {outcome.cell}: {_came_to(outcome)}; {left}")


class _Walls:
    """How long cells took to plan, to guess what others will take."""

    def __init__(self) -> None:
        self._walls: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)

    def add(self, outcome: Outcome) -> None:
        """Take note of a cell."""
        if outcome.answer is not None:
            for kind in _kinds(outcome.cell):
                self._walls[kind].append(outcome.answer.wall_s)

    def expected_s(self, cell: Cell) -> float:
        """Guess by the same placer on this model, or on others, or else by the budget."""
        for kind in _kinds(cell):
            if self._walls[kind]:
                return START_S + sum(self._walls[kind]) / len(self._walls[kind])
        seconds = Budget.parse(cell.budget).seconds or 0.0
        return START_S + (0.0 if cell.placer in BASELINES else seconds)


def _kinds(cell: Cell) -> tuple[tuple[str, ...], tuple[str, ...]]:
    kind = (cell.placer, repr(cell.options), cell.budget)
    return (*kind, cell.model), kind


def _came_to(outcome: Outcome) -> str:
    answer = outcome.answer
    if answer is None:
        return f"failed ({outcome.failure}): {outcome.short_reason}"
    fits = "" if answer.is_feasible else f" ({format_bytes(answer.overflow_bytes)} over)"
    samples = f"{answer.samples:,} sample{'s' * (answer.samples != 1)}"
    return f"{answer.objective_s:.4f} s{fits} after {samples}, {answer.wall_s:.1f} s"


def _duration(time_s: float) -> str:
    """Write how long people have to wait: ``3 h 20 min``."""
    minutes = math.ceil(time_s / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def make_tables(bench: Bench, choice: Choice, done: dict[str, Outcome]) -> list[Table]:
    """
    Make a bench's tables of the cells that are done, and say how many are missing.

    Raises
    ------
    InputError
        None of them is done.
    """
    cells = plan_cells(bench, choice)
    outcomes = [done[cell.key] for cell in cells if cell.key in done]
    if not outcomes:
        raise InputError(
            f"None of the {len(cells)} cells asked for is done. Run the bench with the same options"
            " first."
        )
    first, *others = bench.tables(outcomes)
    notes = (*first.notes, *_provenance(outcomes, len(cells)))
    return [dataclasses.replace(first, notes=notes), *others]


def _provenance(outcomes: Sequence[Outcome], num_cells: int) -> list[str]:
    """Say with what the cells were run, where, and how many there are."""
    budgets = dict.fromkeys(outcome.cell.budget for outcome in outcomes)
    ours = dict.fromkeys(outcome.machine.placewright for outcome in outcomes)
    torches = dict.fromkeys(outcome.machine.torch or "missing" for outcome in outcomes)
    notes = [
        f"{' and '.join(budgets)} a cell; placewright {' and '.join(ours)},"
        f" torch {' and '.join(torches)}.",
        *ran_on(outcomes),
    ]
    if len(outcomes) < num_cells:
        notes.append(f"Unfinished: {len(outcomes)} of {num_cells} cells are done.")
    return notes
