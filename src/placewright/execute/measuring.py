"""
Step times of plans, measured on this machine: `measure`.

This module owns how a candidate is measured, and how several are compared:

* Each runs in a process of its own (see `processes`), within its memory and a time limit. Running
  out of memory or time and crashing are results.
* Steps count from where their times have settled. More are run until the median's 95 % interval
  is narrow, or until there is no more time.
* Several candidates take turns: all are alive, one runs at a time, a few steps each, in another
  order every round, so that what drifts hits all alike. The first step of a turn is not counted.
* In a race, those whose interval lies wholly above the best one's are dropped on the way.
* At the end each runs one more step, alone, that tells what memory its devices hold: how much
  depends on how far one is ahead of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from placewright.arguments import expect_type, read_whole
from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.execute._cores import own_cores
from placewright.execute._jobs import choose_eager, job_of_plan
from placewright.execute._statistics import (
    LEAST_WARM_UP,
    WINDOW,
    FloatArray,
    Interval,
    Ratio,
    compare_medians,
    count_warm_up,
    median_interval,
)
from placewright.execute._wire import Failure, Job
from placewright.execute.processes import CandidateError, CandidateProcess, Template, close_all
from placewright.plan import Plan

Answer = TypeVar("Answer")
Say = Callable[[str], None]

EAGER = "plain PyTorch"
"""What plain PyTorch is called among candidates."""

MAX_WARM_UP = 60
"""Steps after which nothing more is expected to settle."""

TURN_S, MAX_TURN = 0.25, 10
"""A turn has as many steps as take so long, and at most so many."""

MIN_ROUNDS = 3
"""Nobody is dropped from a race before so many."""


@dataclass(frozen=True)
class Effort:
    """How long candidates are measured."""

    target: float = 0.03  # half an interval by its median that is narrow enough
    max_steps: int = 200  # of each candidate, warm-up aside
    limit_s: float = 60.0  # for each candidate, warm-up aside
    step_limit_s: float | None = None  # a step that takes longer hangs; None: `limit_s`

    @property
    def answer_s(self) -> float:
        """Give how long a candidate may take for what it is asked."""
        return self.limit_s if self.step_limit_s is None else self.step_limit_s

    def __post_init__(self) -> None:
        if self.max_steps < 1 or self.limit_s <= 0 or not self.target > 0:
            raise InputError(
                f"`max_steps` {self.max_steps}, `limit_s` {self.limit_s} and `target`"
                f" {self.target} must be positive."
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Measurement:
    """What was measured of one candidate."""

    name: str
    rounds: tuple[FloatArray, ...] = ()  # seconds of each step, by turn, warm-up left out
    num_warm_up: int = 0  # steps left out at the beginning
    has_settled: bool = False
    is_dropped: bool = False  # it was clearly not the best of the race
    peak_bytes: Mapping[str, int | None] = field(default_factory=dict)  # by device
    failure: Failure | None = None
    reason: str = ""
    eager: str = ""  # the device, if this is plain PyTorch
    num_cores: int = 0  # that plain PyTorch had
    note: str = ""  # why it is this device

    @property
    def num_steps(self) -> int:
        """Count the steps that were measured."""
        return sum(map(len, self.rounds))

    @cached_property
    def interval(self) -> Interval:
        """Give the median step time and its interval; there must be a step."""
        return median_interval(np.concatenate(self.rounds))

    @property
    def median_s(self) -> float:
        """Give the median step time; infinite if it failed."""
        return self.interval.median_s if self.failure is None else float("inf")


def measure(
    model: str,
    plans: Mapping[str, Plan],
    *,
    cluster: Cluster | None = None,
    effort: Effort | None = None,
    drops: bool = False,
    seed: int = 0,
    eager: bool = True,
    progress: Say | None = None,
) -> tuple[Measurement, ...]:
    """
    Run plans of a model on this machine and time their steps, in turns with plain PyTorch.

    Parameters
    ----------
    model
        What the plans are for: a name of the zoo, ``file.py:function``, or a ``.pt2`` program. It
        is built anew in another process.
    plans
        Plans by a name for each.
    cluster
        What caps the memory of a plan's devices; without it, CPUs are capped at what is free.
    effort
        How long to measure.
    drops
        Drop plans that are clearly not the fastest of them on the way.
    seed
        Of the order of turns.
    eager
        Whether the same step is timed in plain PyTorch, too: on a GPU if a plan uses one, on all
        cores otherwise, or where the GPU has no room for it.
    progress
        Told where the work is.

    Returns
    -------
    tuple of Measurement
        One a plan, in their order, then that of plain PyTorch (`EAGER`), whose `eager` names its
        device. One that failed says so and why.

    Raises
    ------
    InputError
        The model cannot be run; a plan is for another model or for devices that are not here, or
        needs more memory than is free.
    """
    expect_type(model, str, "model", "text: a name of the zoo, or what can be run")
    expect_type(plans, Mapping, "plans", "plans by a name for each")
    for plan in plans.values():
        expect_type(plan, Plan, "plans", "plans by a name for each")
    if cluster is not None:
        expect_type(cluster, Cluster, "cluster", "a `Cluster`")
    if effort is not None:
        expect_type(effort, Effort, "effort", "an `Effort`")
    read_whole(seed, "seed", 0)
    if EAGER in plans:
        raise InputError(f"A plan is called `{EAGER}`, as what it is measured beside. Rename it.")
    effort = effort or Effort()
    jobs = {name: job_of_plan(plan, cluster) for name, plan in plans.items()}
    with Template(model) as template:
        note = ""
        if eager:
            template.wait()
            jobs[EAGER], note = choose_eager(template, plans.values(), cluster, effort.answer_s)
        found = measure_jobs(template, jobs, effort, drops=drops, seed=seed, progress=progress)
    cores = len(own_cores())
    return tuple(replace(m, note=note, num_cores=cores) if m.eager else m for m in found)


def measure_jobs(
    template: Template,
    jobs: Mapping[str, Job],
    effort: Effort,
    *,
    drops: bool = False,
    seed: int = 0,
    between: Callable[[float], None] | None = None,
    progress: Say | None = None,
) -> tuple[Measurement, ...]:
    """
    Measure candidates of a template, several of them interleaved: see `measure`.

    `between` is called after each round of turns, with the seconds that it took.
    """
    racers: list[_Racer] = []
    tell = progress or _say_nothing
    try:
        for name, job in jobs.items():
            racers.append(_Racer(name, effort, job.eager))
            racers[-1].begin(template, job)
        for racer in racers:
            tell(f"{racer.name} gets ready")
            racer.get_ready()
        for racer in racers:
            tell(f"{racer.name} warms up")
            racer.warm_up()
        _take_turns(racers, effort, drops, np.random.default_rng(seed), between, tell)
        for racer in racers:
            tell(f"memory of {racer.name}")
            racer.weigh()
        return tuple(racer.measurement() for racer in racers)
    finally:
        close_all([racer.process for racer in racers if racer.process is not None])


def _say_nothing(_: str) -> None:
    pass


def compare_with_eager(found: Sequence[Measurement], seed: int = 0) -> dict[str, Ratio]:
    """Compare each plan with plain PyTorch: its median by theirs, and how sure it is less."""
    fine = [each for each in found if each.failure is None]
    plain = next((each for each in fine if each.eager), None)
    if plain is None:
        return {}
    plans = [each for each in fine if not each.eager]
    return {each.name: compare_medians(each.rounds, plain.rounds, seed) for each in plans}


def compare_with_best(found: Sequence[Measurement], seed: int = 0) -> dict[str, Ratio]:
    """Compare the fastest plan with each other: its median by theirs, how sure it is less."""
    fine = [each for each in found if each.failure is None and not each.eager]
    if not fine:
        return {}
    best = min(fine, key=lambda each: each.median_s)
    others = [each for each in fine if each is not best]
    return {each.name: compare_medians(best.rounds, each.rounds, seed) for each in others}


class _Racer:
    """A candidate while it is measured."""

    def __init__(self, name: str, effort: Effort, eager: str) -> None:
        self.name, self.effort, self.eager = name, effort, eager
        self.process: CandidateProcess | None = None
        self.rounds: list[FloatArray] = []
        self.num_warm_up = 0
        self.has_settled = self.is_dropped = False
        self.peak_bytes: dict[str, int | None] = {}
        self.failure: Failure | None = None
        self.reason = ""

    @property
    def num_steps(self) -> int:
        return sum(map(len, self.rounds))

    @property
    def interval(self) -> Interval:
        return median_interval(np.concatenate(self.rounds))

    @property
    def is_running(self) -> bool:
        return self.process is not None and not self.is_dropped

    @property
    def is_done(self) -> bool:
        """Tell whether it is known well enough."""
        is_narrow = self.interval.half_width <= self.effort.target
        return is_narrow or self.num_steps >= self.effort.max_steps

    def begin(self, template: Template, job: Job) -> None:
        try:
            self.process = template.begin(job, self.effort.answer_s)
        except CandidateError as failed:
            self._fail(failed)

    def get_ready(self) -> None:
        """Wait until it can run; all others that have begun get ready meanwhile."""
        self._ask(lambda process, limit_s: process.ready(limit_s))

    def run(self, num_steps: int) -> list[float]:
        return self._ask(lambda process, limit_s: process.run(num_steps, limit_s)) or []

    def warm_up(self) -> None:
        """Run until times have settled; what comes after that counts."""
        times_s: list[float] = []
        found, until_s = None, time.monotonic() + self.effort.limit_s
        while found is None and len(times_s) < MAX_WARM_UP and self.process is not None:
            times_s += self.run(WINDOW if times_s else LEAST_WARM_UP + 2 * WINDOW)
            found = count_warm_up(times_s)
            if time.monotonic() > until_s:
                break
        self.has_settled = found is not None
        self.num_warm_up = len(times_s) // 2 if found is None else found
        self.rounds = [np.array(times_s[self.num_warm_up :][: self.effort.max_steps])]

    def turn(self, num_steps: int) -> None:
        """Run some steps; the first, after others have run or all have rested, is not counted."""
        times_s = self.run(1 + num_steps)
        if self.process is not None:
            self.rounds.append(np.array(times_s[1:]))

    def weigh(self) -> None:
        self.peak_bytes = self._ask(lambda process, limit_s: process.peaks(limit_s)) or {}

    def _ask(self, do: Callable[[CandidateProcess, float], Answer]) -> Answer | None:
        """Have its process do something, if it has one; None if there is no answer."""
        if self.process is None:
            return None
        try:
            return do(self.process, self.effort.answer_s)
        except CandidateError as failed:
            self._fail(failed)
            return None

    def _fail(self, failed: CandidateError) -> None:
        self.failure, self.reason = failed.failure, failed.reason
        if self.process is not None:
            self.process.close()
            self.process = None

    def measurement(self) -> Measurement:
        return Measurement(
            name=self.name,
            rounds=tuple(self.rounds),
            num_warm_up=self.num_warm_up,
            has_settled=self.has_settled,
            is_dropped=self.is_dropped,
            peak_bytes=self.peak_bytes,
            failure=self.failure,
            reason=self.reason,
            eager=self.eager,
        )


def _take_turns(
    racers: Sequence[_Racer],
    effort: Effort,
    drops: bool,
    random: np.random.Generator,
    between: Callable[[float], None] | None,
    tell: Say,
) -> None:
    """Run rounds until all that are left are known well enough, or there is no more time."""
    until_s = time.monotonic() + effort.limit_s * len(racers)
    num_rounds = 0
    warm = [racer for racer in racers if racer.is_running]
    fewest = min((racer.num_steps for racer in warm), default=0)
    for racer in warm:  # from here on all take as many steps
        racer.rounds = [racer.rounds[0][-fewest:]]
    while True:
        running = [racer for racer in racers if racer.is_running]
        if all(racer.is_done for racer in running) or time.monotonic() > until_s:
            return
        slowest_s = max(racer.interval.median_s for racer in running)
        left = effort.max_steps - min(racer.num_steps for racer in running)
        num_steps = max(1, min(int(TURN_S / slowest_s), MAX_TURN, left))
        began_s = time.monotonic()
        most = max(racer.num_steps for racer in running)
        tell(f"turn {num_rounds + 1} of each; {most} steps so far, at most {effort.max_steps}")
        for k in random.permutation(len(running)):
            running[k].turn(num_steps)
        num_rounds += 1
        if between is not None:
            ended_s = time.monotonic()
            between(ended_s - began_s)
            until_s += time.monotonic() - ended_s
        if drops and num_rounds >= MIN_ROUNDS:
            _drop(running)


def _drop(running: Sequence[_Racer]) -> None:
    """Take plans out of the race that are clearly slower than the best of them."""
    left = [racer for racer in running if racer.process is not None and not racer.eager]
    if not left:
        return
    best = min((racer.interval for racer in left), key=lambda interval: interval.median_s)
    for racer in left:
        racer.is_dropped = racer.interval.low_s > best.high_s
