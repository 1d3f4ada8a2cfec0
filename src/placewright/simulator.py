"""
`simulate` and `simulate_many`: problems and placements in, timelines and times out.

This module owns what goes into the compiled kernel besides the problem (orders, triggers, a log)
and turns what the kernel wrote into a `Timeline`.

Letters: ``N`` ops, ``D`` devices, ``B`` placements.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewright import _kernel
from placewright._layout import layout_of
from placewright.arguments import expect_type, read_whole
from placewright.costs import PS_PER_S
from placewright.errors import InputError
from placewright.graph import FloatArray, IntArray
from placewright.problem import Candidate, Discipline, Problem, Triggers
from placewright.timeline import Timeline, Transfers

MAX_THREADS = 1024


def simulate(
    problem: Problem,
    placement: ArrayLike | Candidate,
    discipline: Discipline = "fifo",
    priorities: ArrayLike | None = None,
    triggers: Triggers | None = None,
) -> Timeline:
    """
    Simulate one step and tell everything that happens in it.

    Parameters
    ----------
    problem
        What to run, where, at which costs.
    placement
        The device of every op ([N]), or a whole `Candidate` instead of all that follows.
    discipline
        Which ready op a device takes first: ``fifo`` the one made ready first, ``program`` the
        lowest, ``priority`` the one of highest priority.
    priorities
        One number an op, for ``priority``.
    triggers
        When persistent tensors that live elsewhere are requested, by (tensor, device); those not
        named keep their default (see `default_triggers`).

    Returns
    -------
    Timeline
        Infeasible candidates get one too; ask `Timeline.is_feasible`.

    Raises
    ------
    InputError
        The candidate does not fit the problem (see `Problem.check`).
    """
    expect_type(problem, Problem, "problem", "a `Problem`")
    if not isinstance(placement, Candidate):
        placement = Candidate(placement, discipline, priorities, triggers)
    elif discipline != "fifo" or priorities is not None or triggers is not None:
        raise InputError("A `Candidate` brings its own order and triggers; give no others with it.")
    candidate = problem.check(placement)
    layout = layout_of(problem)
    log = layout.log()
    makespan_ps, peak_bytes = _results(problem, 1)
    with layout.work() as work:
        _kernel.run_many(
            layout.fixed,
            work,
            _orders(problem, candidate.discipline, candidate.priorities),
            _trigger_arrays(candidate.triggers or {}),
            log,
            candidate.placement[np.newaxis],
            makespan_ps,
            peak_bytes,
        )
        return _timeline(problem, candidate, int(makespan_ps[0]), peak_bytes[0], work, log)


def _results(problem: Problem, count: int) -> tuple[IntArray, IntArray]:
    """Make room for the makespan ([B]) and the peaks ([B, D]) of `count` placements."""
    return np.zeros(count, np.int64), np.zeros((count, problem.num_devices), np.int64)


@dataclass(frozen=True, eq=False)
class Batch:
    """The results of `simulate_many`."""

    makespan_s: FloatArray  # [B]
    overflow_bytes: IntArray  # [B]
    peak_bytes: IntArray  # [B, D]


def simulate_many(
    problem: Problem,
    placements: ArrayLike,
    discipline: Discipline = "fifo",
    priorities: ArrayLike | None = None,
    num_threads: int | None = None,
) -> Batch:
    """
    Simulate many placements on all cores, telling only times and memory.

    Parameters
    ----------
    problem
        What to run, where, at which costs.
    placements
        The device of every op, a row a placement ([B, N]).
    discipline
        As for `simulate`.
    priorities
        For ``priority``: one number an op ([N]), or a row a placement ([B, N]).
    num_threads
        How many to use; all cores this process may use if not given. The results do not depend
        on it.

    Raises
    ------
    InputError
        A placement does not fit the problem (see `Problem.check`).
    """
    expect_type(problem, Problem, "problem", "a `Problem`")
    rows = problem.check_placements(placements)
    if rows.ndim != 2:
        raise InputError(f"`placements` has shape {rows.shape}; expected (B, {problem.num_ops}).")
    count = len(rows)
    order = problem.check_priorities(discipline, priorities)
    if order is not None and order.shape not in ((problem.num_ops,), rows.shape):
        raise InputError(
            f"`priorities` has shape {order.shape}; expected ({problem.num_ops},) or {rows.shape}."
        )
    layout = layout_of(problem)
    makespan_ps, peak_bytes = _results(problem, count)
    threads = min(_read_threads(num_threads), max(count, 1))

    def run(part: slice) -> None:
        each = order[part] if order is not None and order.ndim == 2 else order
        with layout.work() as work:
            _kernel.run_many(
                layout.fixed,
                work,
                _orders(problem, discipline, each),
                _trigger_arrays({}),
                _NO_LOG,
                rows[part],
                makespan_ps[part],
                peak_bytes[part],
            )

    # Many parts a thread even out what rows and machine do; few enough to be cheap to hand out.
    size = max(1, -(-count // (16 * threads)))
    parts = [slice(begin, begin + size) for begin in range(0, count, size)]
    if threads == 1:
        for part in parts:
            run(part)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, parts))
    over = np.maximum(peak_bytes - problem.cluster.memory_bytes, 0).sum(axis=1)
    return Batch(makespan_ps / PS_PER_S, over, peak_bytes)


def _read_threads(num_threads: int | None) -> int:
    if num_threads is None:
        return _num_cores()
    return read_whole(num_threads, "num_threads", 1, MAX_THREADS)


def warm_up(problem: Problem) -> None:
    """Compile the kernel, or load it compiled, by letting it simulate no placement at all."""
    layout = layout_of(problem)
    with layout.work() as work:
        _kernel.run_many(
            layout.fixed,
            work,
            _orders(problem, "fifo", None),
            _trigger_arrays({}),
            _NO_LOG,
            np.empty((0, problem.num_ops), dtype=np.int32),
            *_results(problem, 0),
        )


def _num_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_triggers(
    problem: Problem, placement: ArrayLike, window_bytes: int | None = None
) -> dict[tuple[int, int], int]:
    """
    Choose when each persistent tensor that is read on another device is requested.

    A device's fetches are taken in the order of their first readers. Each is requested at the end
    of the lowest op there (or at time 0), not before the fetch ahead of it, from which on its
    bytes and those of the earlier fetches still to be read are at most `window_bytes`; if there is
    none, at the end of the op before its first reader.

    Parameters
    ----------
    problem, placement
        What is placed, and where.
    window_bytes
        The memory for fetches on each device; twice its largest fetch (double buffering) if not
        given.

    Returns
    -------
    dict
        (tensor, device) -> op, or -1 for time 0.
    """
    expect_type(problem, Problem, "problem", "a `Problem`")
    checked = problem.check(placement)
    if window_bytes is not None:
        window_bytes = read_whole(window_bytes, "window_bytes", 0)
    layout = layout_of(problem)
    with layout.work() as work:
        window = -1 if window_bytes is None else window_bytes
        _kernel.default_triggers(layout.fixed, work, checked.placement, window)
        return _triggers_of(work)


def _triggers_of(work: _kernel.Work) -> dict[tuple[int, int], int]:
    fetch = work.fetch[: int(work.clock[0]["fetches"])]
    pairs = zip(fetch["tensor"].tolist(), fetch["device"].tolist(), strict=True)
    return dict(zip(pairs, fetch["trigger"].tolist(), strict=True))


def _trigger_arrays(triggers: Triggers) -> _kernel.Triggers:
    pairs = np.array(list(triggers), dtype=np.int32).reshape(-1, 2)
    ops = np.array(list(triggers.values()), dtype=np.int32)
    return _kernel.Triggers(pairs[:, 0].copy(), pairs[:, 1].copy(), ops)


_NO_LOG = _kernel.Log(
    np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=_kernel.LEVEL)
)


def _orders(
    problem: Problem, discipline: Discipline, priorities: NDArray[np.float64] | None
) -> _kernel.Order:
    """Rank the ops: by index for `program`, by falling priority and then index for `priority`."""
    if discipline == "fifo":
        return _kernel.Order(*np.empty((2, 1, 0), dtype=np.int32))
    if priorities is None:
        identity = np.arange(problem.num_ops, dtype=np.int32)[np.newaxis]
        return _kernel.Order(identity, identity)
    op_at = np.argsort(-np.atleast_2d(priorities), axis=1, kind="stable").astype(np.int32)
    rank = np.empty_like(op_at)
    np.put_along_axis(rank, op_at, np.arange(problem.num_ops, dtype=np.int32)[np.newaxis], axis=1)
    return _kernel.Order(rank, op_at)


def _timeline(
    problem: Problem,
    candidate: Candidate,
    makespan_ps: int,
    peak_bytes: IntArray,
    work: _kernel.Work,
    log: _kernel.Log,
) -> Timeline:
    graph = problem.graph
    transfer = work.transfer[: int(work.clock[0]["transfers"])]
    level = log.level[: int(work.clock[0]["levels"])]
    tensor = transfer["tensor"].copy()
    source = candidate.placement[graph.tensor_op[tensor]]
    op_ps = problem.costs.op_ps[np.arange(problem.num_ops), candidate.placement]
    ops = np.flatnonzero(~graph.op_is_resident)
    # In a round transfers start before ops, transfers by number and ops by device.
    rounds = np.concatenate([log.op_round[ops], transfer["round"]])
    is_op = np.arange(len(rounds)) < len(ops)
    within = np.concatenate([candidate.placement[ops], np.arange(len(transfer))])
    started = np.concatenate([ops, problem.num_ops + np.arange(len(transfer))])
    streams = graph.tensor_is_resident[tensor].any()
    return Timeline(
        problem=problem,
        candidate=candidate,
        makespan_ps=makespan_ps,
        peak_bytes=peak_bytes,
        op_start_ps=log.op_start,
        op_end_ps=log.op_start + np.where(graph.op_is_resident, 0, op_ps),
        transfers=Transfers(
            tensor=tensor,
            source=source,
            target=transfer["device"].copy(),
            start_ps=transfer["start"].copy(),
            end_ps=transfer["end"].copy(),
            blocker=transfer["blocker"].copy(),
        ),
        triggers=_triggers_of(work) if streams else {},
        sequence=started[np.lexsort((within, is_op, rounds))],
        level_ps=level["time"].copy(),
        level_device=level["device"].copy(),
        level_bytes=level["bytes"].copy(),
    )
