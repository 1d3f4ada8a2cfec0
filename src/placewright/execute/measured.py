"""
`MeasuredEvaluator`: candidates are run on this machine, and their step times are what they get.

So any placer or policy learns from real step times, as in the papers. This module owns how short a
measurement is good enough to learn from, what failures are worth, and what the simulator may
decide beforehand.

Letters: ``B`` candidates, ``D`` devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar

import numpy as np

from placewright.arguments import expect_type, expect_word, read_number, read_whole
from placewright.errors import InputError
from placewright.evaluate import OBJECTIVES, Basis, Evaluations, Objective, check_candidates
from placewright.execute._jobs import memory_caps
from placewright.execute._lanes import whole_gpu
from placewright.execute._probe_memory import GPU_HEADROOM_BYTES
from placewright.execute._wire import Failure, Job
from placewright.execute.devices import find_devices
from placewright.execute.measuring import Effort, measure_jobs
from placewright.execute.placed import free_bytes, sequence_of
from placewright.execute.processes import CandidateError, CandidateProcess, Template, close_all
from placewright.graph import IntArray
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate
from placewright.timeline import Timeline

PRESCREEN = 1.5
"""A usual factor for `MeasuredEvaluator.prescreen`."""

MAX_AT_ONCE = 8
"""Candidates that get ready at once, where there is a GPU."""

FINAL_STEPS, FINAL_S = 100, 20.0
"""What finalists get in the end, each, at most."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """What came of a candidate."""

    candidate: Candidate
    simulated_s: float
    time_s: float  # infinite: it failed
    overflow_bytes: int
    peak_bytes: IntArray  # [D]
    is_measured: bool
    failure: Failure | None = None
    reason: str = ""

    @property
    def key(self) -> tuple[int, float]:
        """Give what outcomes are compared by: less is better."""
        return self.overflow_bytes, self.time_s


@dataclass(eq=False)
class MeasuredEvaluator:
    """
    Evaluates by running a few steps of each candidate, in a process of its own.

    A candidate's time is the median of `num_steps` steps after `num_warm_up`; its peaks are
    measured too, and what passes a device's memory is its overflow. A candidate that fails has an
    infinite time, and all devices' memory more than its simulated overflow: whatever ran comes
    before it. Equal candidates are measured once.

    With `prescreen`, candidates are simulated first. Only those that fit in the simulation, and
    take less than `prescreen` times the best simulated time so far, are measured. The others get
    their simulated time, times what measured ones took by their simulated time (the median), and
    never less than the best measured one: they can teach a policy, but not win.

    Use it in a ``with`` statement, or `close` it: it holds a process.

    Parameters
    ----------
    problem
        What is placed; its cluster's devices must be this machine's.
    model
        The same model as something that can be run: a name of the zoo, ``file.py:function``, or a
        ``.pt2`` program.
    prescreen
        How much slower than the best, in the simulation, is still worth measuring.
    num_warm_up, num_steps
        Steps to run before those that count, and of these.
    limit_s
        How long a candidate may take.
    num_finalists
        How many are measured again in the end (`confirm`).
    say
        Told that they are, which may take a while.
    """

    problem: Problem
    model: str
    prescreen: float | None = None
    num_warm_up: int = 3
    num_steps: int = 5
    limit_s: float = 60.0
    num_finalists: int = 5
    objective: Objective = "latency"
    overlap: bool = True
    num_samples: int = 0
    say: Callable[[str], None] | None = None
    outcomes: dict[bytes, Outcome] = field(default_factory=dict)
    basis: ClassVar[Basis] = "measured"

    def __post_init__(self) -> None:
        expect_type(self.problem, Problem, "problem", "a `Problem`")
        expect_word(self.objective, OBJECTIVES, "objective")
        if self.objective != "latency":
            raise InputError("Only `latency` can be measured, one step after the other.")
        expect_type(self.model, str, "model", "text: a name of the zoo, or what can be run")
        if self.prescreen is not None:
            read_number(self.prescreen, "prescreen", 1)
        for name in ("num_warm_up", "num_steps", "num_finalists"):
            read_whole(getattr(self, name), name, 0 if name == "num_warm_up" else 1)
        read_number(self.limit_s, "limit_s", 0)
        find_devices(self.problem.cluster.device_names)  # refuses those that are not here
        self._best_simulated_s = np.inf
        self._template = Template(self.model)

    def prepare(self) -> None:
        """
        Wait until the model is built.

        Raises
        ------
        InputError
            It cannot be run, or is another one than the problem's.
        """
        mine, theirs = self.problem.graph, self._template.wait()
        if mine.fingerprint != theirs:
            raise InputError(
                f"`{self.model}` has the fingerprint {theirs[:12]}, graph `{mine.name}` that is to"
                f" be placed {mine.fingerprint[:12]}: they are not the same model."
            )

    @property
    def num_measured(self) -> int:
        """Count the candidates that were run."""
        return sum(outcome.is_measured for outcome in self.outcomes.values())

    @property
    def failures(self) -> list[Outcome]:
        """List the candidates that failed."""
        return [outcome for outcome in self.outcomes.values() if outcome.failure is not None]

    def evaluate(self, candidates: Sequence[Candidate]) -> Evaluations:
        """Measure candidates; those that were measured before are not measured again."""
        check_candidates(self.problem, candidates)
        self.prepare()
        keys = [_key(candidate) for candidate in candidates]
        new = {
            key: simulate(self.problem, candidate)
            for key, candidate in zip(keys, candidates, strict=True)
            if key not in self.outcomes
        }
        fitting_s = (line.makespan_s for line in new.values() if line.is_feasible)
        self._best_simulated_s = min(self._best_simulated_s, *fitting_s, np.inf)
        worth = [key for key, timeline in new.items() if self._is_worth_it(timeline)]
        size = self._num_at_once() if worth else 1
        for begin in range(0, len(worth), size):
            some = worth[begin : begin + size]
            measured = self._measure([new[key] for key in some])
            self.outcomes |= dict(zip(some, measured, strict=True))
        scale, least_s = self._scale()
        for key, timeline in new.items():
            if key not in self.outcomes:
                self.outcomes[key] = _guess(timeline, scale, least_s)
        found = [self.outcomes[key] for key in keys]
        self.num_samples += len(candidates)
        return Evaluations(
            np.array([outcome.time_s for outcome in found]),
            np.array([outcome.overflow_bytes for outcome in found], dtype=np.int64),
            np.stack([outcome.peak_bytes for outcome in found]),
        )

    def confirm(self) -> tuple[Candidate, float] | None:
        """
        Race the best few against each other, interleaved; give the winner and its step time.

        The best of many short measurements was also lucky. None if nothing fits.
        """
        fitting = [o for o in self.outcomes.values() if o.is_measured and o.overflow_bytes == 0]
        finalists = sorted(fitting, key=lambda outcome: outcome.key)[: self.num_finalists]
        jobs = {
            str(k): self._job(simulate(self.problem, outcome.candidate))
            for k, outcome in enumerate(finalists)
        }
        if self.say is not None and jobs:
            limit_s = FINAL_S * len(jobs)
            self.say(f"The best {len(jobs)} are run again, in turns: up to {limit_s:.0f} s...")
        effort = Effort(max_steps=FINAL_STEPS, limit_s=FINAL_S, step_limit_s=self.limit_s)
        found = measure_jobs(self._template, jobs, effort, drops=True) if jobs else ()
        best = min(found, key=lambda each: each.median_s, default=None)
        if best is None or best.failure is not None:
            return None
        return finalists[int(best.name)].candidate, best.median_s

    def _is_worth_it(self, timeline: Timeline) -> bool:
        if self.prescreen is None:
            return True
        is_quick = timeline.makespan_s <= self.prescreen * self._best_simulated_s
        return timeline.is_feasible and is_quick

    def _job(self, timeline: Timeline) -> Job:
        """Make a candidate's job, of the devices that it uses only: a GPU takes long to wake."""
        cluster, placement = self.problem.cluster, timeline.candidate.placement.tolist()
        used = sorted({*placement})
        number = {d: k for k, d in enumerate(used)}
        names = tuple(cluster.device_names[d] for d in used)
        return Job(
            device_names=names,
            placement=[number[d] for d in placement],
            sequence=[
                started if isinstance(started, int) else (started[0], number[started[1]])
                for started in sequence_of(timeline)
            ],
            **memory_caps(cluster, names),
        )

    def _num_at_once(self) -> int:
        """Tell how many candidates may get ready at once: on GPUs that takes longer than a step."""
        cluster = self.problem.cluster
        needs: Counter[str] = Counter()  # by whole GPU
        for name, kind, size in zip(
            cluster.device_names, cluster.device_kinds, cluster.memory_bytes.tolist(), strict=True
        ):
            if kind == "cuda":
                needs[whole_gpu(name)] += size
        if not needs:
            return 1
        rooms = (  # each has a context, too
            free_bytes(gpu) // (need + GPU_HEADROOM_BYTES) for gpu, need in needs.items()
        )
        return max(1, min(MAX_AT_ONCE, *rooms))

    def _measure(self, timelines: Sequence[Timeline]) -> list[Outcome]:
        """Have candidates get ready and warm up together, then run each alone."""
        limit_s, failed = self.limit_s, dict[int, CandidateError]()
        processes: dict[int, CandidateProcess] = {}

        def each(do: Callable[[int, CandidateProcess], Any]) -> dict[int, Any]:
            found = {}
            for k, process in processes.items():
                if k not in failed:
                    with _noted(failed, k):
                        found[k] = do(k, process)
            return found

        try:
            for k, timeline in enumerate(timelines):
                with _noted(failed, k):
                    processes[k] = self._template.begin(self._job(timeline), limit_s)
            each(lambda _, process: process.ready(limit_s))
            each(lambda _, process: process.begin_run(self.num_warm_up, limit_s))
            each(lambda _, process: process.times(limit_s))
            times = each(lambda _, process: process.run(self.num_steps, limit_s))
            peaks = each(lambda _, process: process.peaks(limit_s))
        finally:
            close_all(processes.values())
        return [
            self._failed(timeline, failed[k])
            if k in failed
            else self._ran(timeline, times[k], peaks[k])
            for k, timeline in enumerate(timelines)
        ]

    def _ran(
        self, timeline: Timeline, times_s: Sequence[float], peaks: Mapping[str, int | None]
    ) -> Outcome:
        names = self.problem.cluster.device_names
        known = [peaks.get(name) for name in names]
        simulated = timeline.peak_bytes.tolist()
        measured = np.array([s if k is None else k for k, s in zip(known, simulated, strict=True)])
        return Outcome(
            candidate=timeline.candidate,
            simulated_s=timeline.makespan_s,
            time_s=float(np.median(times_s)),
            overflow_bytes=int(np.maximum(measured - self._memory_bytes, 0).sum()),
            peak_bytes=measured,
            is_measured=True,
        )

    def _failed(self, timeline: Timeline, failed: CandidateError) -> Outcome:
        return Outcome(
            candidate=timeline.candidate,
            simulated_s=timeline.makespan_s,
            time_s=np.inf,
            overflow_bytes=timeline.overflow_bytes + int(self._memory_bytes.sum()),
            peak_bytes=timeline.peak_bytes,
            is_measured=True,
            failure=failed.failure,
            reason=failed.reason,
        )

    def _scale(self) -> tuple[float, float]:
        """Give what measured candidates take by their simulated time, and the best of them."""
        fine = [o for o in self.outcomes.values() if o.is_measured and o.failure is None]
        ratios = [outcome.time_s / outcome.simulated_s for outcome in fine]
        best_s = min((o.time_s for o in fine if o.overflow_bytes == 0), default=0.0)
        return (float(np.median(ratios)) if ratios else 1.0), best_s

    @property
    def _memory_bytes(self) -> IntArray:
        return self.problem.cluster.memory_bytes

    def close(self) -> None:
        """End the process that holds the model."""
        self._template.close()

    def __enter__(self) -> MeasuredEvaluator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def _noted(failed: dict[int, CandidateError], number: int) -> Iterator[None]:
    """Note a candidate's failure."""
    try:
        yield
    except CandidateError as error:
        failed[number] = error


def _guess(timeline: Timeline, scale: float, least_s: float) -> Outcome:
    """Give a candidate that is not measured a time: simulated and scaled, more than the least."""
    return Outcome(
        candidate=timeline.candidate,
        simulated_s=timeline.makespan_s,
        time_s=max(timeline.makespan_s * scale, float(np.nextafter(least_s, np.inf))),
        overflow_bytes=timeline.overflow_bytes,
        peak_bytes=timeline.peak_bytes,
        is_measured=False,
    )


def _key(candidate: Candidate) -> bytes:
    """Name a candidate by all that makes it what it is."""
    placement = np.asarray(candidate.placement, dtype=np.int64).tobytes()
    priorities = b"" if candidate.priorities is None else np.asarray(candidate.priorities).tobytes()
    order = repr((candidate.discipline, sorted((candidate.triggers or {}).items())))
    return b"".join((placement, order.encode(), priorities))
