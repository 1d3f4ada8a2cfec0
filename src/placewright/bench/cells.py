"""
Cells: one placer on one problem with one seed, what came of it, and the file that keeps that.

This module owns what makes two cells the same, what is written down of a run, and ``cells.jsonl``:
one cell a line, appended whole, so that a bench that is stopped goes on where it was.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from placewright import files
from placewright.errors import InputError

Option = str | int | float | bool | None
Failure = Literal["", "input", "memory", "time", "crash"]

MAX_POINTS = 60
"""The most improvements that are kept of a run's history."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is run: a placer with its options on a model and cluster, a seed, and a budget."""

    bench: str
    model: str
    cluster: str
    placer: str
    options: dict[str, Option] = {}
    seed: int = 0
    budget: str

    @property
    def key(self) -> str:
        """Give what makes it this cell and no other."""
        return json.dumps(msgspec.to_builtins(self), sort_keys=True)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.options.items()]
        return " ".join([f"{self.model}@{self.cluster}", self.placer, *words, f"seed {self.seed}"])


@dataclass(frozen=True)
class Effort:
    """How much a bench does in each cell, and over how many seeds."""

    budget: str
    num_seeds: int
    num_groupings: int = 0  # random ones, where a bench draws some
    models: tuple[str, ...] | None = None  # only these, unless others are asked for


class Point(msgspec.Struct, frozen=True, array_like=True):
    """An improvement, in a run's history."""

    wall_s: float
    samples: int
    objective_s: float
    overflow_bytes: int


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a cell ran, and with what."""

    cpu: str
    threads: int
    placewright: str
    torch: str | None


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a placer found."""

    objective_s: float  # simulated step time
    is_feasible: bool  # it fits memory
    overflow_bytes: int
    wall_s: float  # planning
    samples: int
    samples_per_s: float
    lower_bound_s: float
    num_devices: int  # that compute
    history: list[Point]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of a cell: an answer, or the way in which it failed."""

    cell: Cell
    answer: Answer | None = None
    failure: Failure = ""
    reason: str  # why the answer is what it is, or why there is none
    machine: Machine

    @property
    def short_reason(self) -> str:
        """Give the reason in a line, without the full stop."""
        return textwrap.shorten(self.reason, 160, placeholder="...").rstrip(".")


def thin(history: list[Point]) -> list[Point]:
    """Keep at most `MAX_POINTS` of a history, the first and the last among them."""
    if len(history) <= MAX_POINTS:
        return history
    last, steps = len(history) - 1, MAX_POINTS - 1
    return [history[round(k * last / steps)] for k in range(MAX_POINTS)]


@dataclass(frozen=True)
class Book:
    """The file that outcomes are kept in."""

    folder: Path

    @property
    def path(self) -> Path:
        """Give the file."""
        return self.folder / "cells.jsonl"

    def open(self) -> None:
        """
        Make the folder and the file, where they are missing.

        Raises
        ------
        InputError
            They cannot be made or written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"):
                pass
        except OSError as error:
            raise InputError(f"`{self.path}` cannot be written: {error.strerror}.") from None

    def read(self) -> dict[str, Outcome]:
        """
        Read all outcomes by their cells' keys; of a cell that ran twice, the later one.

        Raises
        ------
        InputError
            The file is missing, or a line of it is wrong.
        """
        outcomes = {}
        lines = files.read(self.path, "file of cells").split(b"\n")
        for number, line in enumerate(lines, start=1):
            if line:
                outcome = self._decode(line, number)
                outcomes[outcome.cell.key] = outcome
        return outcomes

    def _decode(self, line: bytes, number: int) -> Outcome:
        try:
            return msgspec.json.decode(line, type=Outcome)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(
                f"Line {number} of `{self.path}` is no cell: {files.reason_of(error)}. Delete that"
                " line to go on without it."
            ) from None

    def append(self, outcome: Outcome) -> None:
        """
        Write one outcome: the whole line, or nothing.

        Raises
        ------
        InputError
            The disk is full, or the file cannot be written to any more.
        """
        files.append_line(self.path, msgspec.json.encode(outcome))
