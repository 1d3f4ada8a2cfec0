"""
One run of a placer: what it is given, and what is kept of what it tries.

This module owns budgets, the best candidate so far, and the history. A placer is a
function of a `Run`: it offers candidates until the run is over. The run keeps the best, so a placer
that is stopped at any moment has already answered.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from placewright.arguments import expect_type, read_number, read_whole, refuse
from placewright.errors import InputError
from placewright.evaluate import Evaluations, Evaluator
from placewright.problem import Candidate, Problem
from placewright.units import parse_time

Placement = NDArray[np.int64]  # [N]

MAX_BUDGET_S = 1e9
MAX_BUDGET_LETTERS = 100
_BUDGET = "text such as `60s`, `5000 samples` or `60s, idle 10s`"

MEAN_EVERY, MEAN_SHARE = 32, 0.02
"""The history has the samples' mean after so many, and so large a share of all, since the last."""


@dataclass(frozen=True)
class Budget:
    """
    When a run is over: after so many seconds, samples, or seconds without improvement.

    What is None does not end it; a run whose budget is all None ends when its placer does.

    Raises
    ------
    InputError
        One is negative, not finite or no number.
    """

    seconds: float | None = None
    samples: int | None = None
    idle_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "idle_seconds"):
            if getattr(self, name) is not None:
                read_number(getattr(self, name), name, 0, MAX_BUDGET_S)
        if self.samples is not None:
            read_whole(self.samples, "samples", 0)

    @classmethod
    def parse(cls, text: str) -> Budget:
        """
        Read a budget such as ``"60s"``, ``"5000 samples"`` or ``"60s, idle 10s"``.

        Raises
        ------
        InputError
            It cannot be read.
        """
        expect_type(text, str, "budget", _BUDGET)
        if len(text) > MAX_BUDGET_LETTERS:
            refuse(text, "budget", _BUDGET)
        found: dict[str, float | int] = {}
        for part in text.split(","):
            words = part.strip()
            samples = re.fullmatch(r"(\d+) *samples?", words)
            if samples:
                found["samples"] = int(samples[1])
            elif words.startswith("idle "):
                found["idle_seconds"] = parse_time(words[5:].strip(), "`budget`")
            elif re.fullmatch(r"(\d+\.?\d*|\.\d+) *min", words):
                found["seconds"] = 60 * float(words[:-3])
            else:
                found["seconds"] = parse_time(words, "`budget`")
        return cls(**found)  # type: ignore[arg-type]

    def __str__(self) -> str:
        words = [
            "" if self.seconds is None else f"{self.seconds:g}s",
            "" if self.samples is None else f"{self.samples} samples",
            "" if self.idle_seconds is None else f"idle {self.idle_seconds:g}s",
        ]
        return ", ".join(word for word in words if word) or "none"


@dataclass(frozen=True)
class Entry:
    """One entry of a run's history: an improvement, or how the samples since the last one were."""

    wall_s: float
    samples: int
    objective_s: float  # the best so far
    overflow_bytes: int
    placer: str
    mean_s: float | None = None  # of the samples since the last such entry
    feasible: float | None = None  # what share of them fits


class Placer(Protocol):
    """What chooses placements: offers candidates to a run until it is over."""

    def __call__(self, run: Run) -> None:
        """Place."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """A placer with something to do before its run's clock begins: checks, compiling."""

    def prepare(self, problem: Problem) -> None:
        """Get ready to place a problem; quick where that was done before."""
        ...


@dataclass(eq=False)
class Run:
    """
    What a placer is given: the problem, how candidates are judged, a seed, and a budget.

    `best` is the best candidate offered so far, and `key` what it is compared by (bytes that do not
    fit, then the objective).
    """

    problem: Problem
    evaluator: Evaluator
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    progress: Callable[[Run], None] | None = None
    grouping: NDArray[np.int64] | None = None  # [N] ops to place together; None: the placer's own
    best: Candidate | None = None
    key: tuple[int, float] = (2**62, float("inf"))
    history: list[Entry] = field(default_factory=list)
    placer: str = ""  # whose turn it is, for the history
    began_s: float = field(default_factory=time.perf_counter)
    improved_s: float = field(default_factory=time.perf_counter)
    first_sample: int = 0
    folder: Path | None = None  # where a learned placer keeps its state
    resumes: bool = False  # whether it goes on with what is there
    tensorboard: Path | None = None  # where a learned placer writes scalars
    recent: list[tuple[float, bool]] = field(default_factory=list)  # since the last mean entry

    def __post_init__(self) -> None:
        self.first_sample = self.evaluator.num_samples

    def start_clock(self) -> None:
        """Begin now: what was done until here is not of the budget."""
        self.began_s = self.improved_s = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Give the seconds since the run began."""
        return time.perf_counter() - self.began_s

    @property
    def num_samples(self) -> int:
        """Count the candidates evaluated in this run."""
        return self.evaluator.num_samples - self.first_sample

    @property
    def is_over(self) -> bool:
        """Tell whether the budget is spent. Not before there is an answer."""
        if self.best is None:
            return False
        budget = self.budget
        if budget.seconds is not None and self.wall_s >= budget.seconds:
            return True
        if budget.samples is not None and self.num_samples >= budget.samples:
            return True
        idle_s = time.perf_counter() - self.improved_s
        return budget.idle_seconds is not None and idle_s >= budget.idle_seconds

    def room(self, wanted: int) -> int:
        """Give how many of so many samples the budget still has room for."""
        if self.budget.samples is None or self.best is None:
            return wanted
        return max(0, min(wanted, self.budget.samples - self.num_samples))

    def offer(self, placements: Sequence[Placement] | NDArray[np.int64]) -> Evaluations:
        """Evaluate placements, of which there must be one, and keep the best."""
        return self.offer_candidates([Candidate(placement) for placement in placements])

    def offer_candidates(self, candidates: Sequence[Candidate]) -> Evaluations:
        """Evaluate candidates, of which there must be one, and keep the best."""
        if not len(candidates):
            raise InputError(f"Placer `{self.placer}` offers an empty list; expected candidates.")
        found = self.evaluator.evaluate(candidates)
        k = found.best
        if found.key(k) < self.key:
            self.key, self.best = found.key(k), candidates[k]
            self.improved_s = time.perf_counter()
            if np.isfinite(self.key[1]):
                self.history.append(self._entry())
        self.recent += zip(
            found.objective_s.tolist(), (found.overflow_bytes == 0).tolist(), strict=True
        )
        if len(self.recent) >= max(MEAN_EVERY, self.num_samples * MEAN_SHARE):
            times = [time_s for time_s, _ in self.recent if np.isfinite(time_s)]
            fits = [fits for _, fits in self.recent]
            if times and np.isfinite(self.key[1]):
                self.history.append(self._entry(float(np.mean(times)), float(np.mean(fits))))
            self.recent.clear()
        if self.progress is not None:
            self.progress(self)
        return found

    def _entry(self, mean_s: float | None = None, feasible: float | None = None) -> Entry:
        over, best_s = self.key
        return Entry(self.wall_s, self.num_samples, best_s, over, self.placer, mean_s, feasible)
