"""
`auto`, the default placer: a portfolio that is never worse than its best member.

First what is quick: everything on one device, the experts, list scheduling, partitions, contiguous
splits. What does not fit is repaired. Then annealing over groups from the best of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from placewright.errors import InputError
from placewright.placers.contiguous import contiguous_split
from placewright.placers.experts import (
    MAX_SPLITS,
    accelerators,
    expert_paper,
    expert_strong,
    one_device,
)
from placewright.placers.groups import Units
from placewright.placers.list_scheduling import heft, m_etf, m_topo, peft
from placewright.placers.partition import metis, mincut, scotch
from placewright.placers.repair import repair
from placewright.placers.run import Placement, Run
from placewright.placers.search import Annealing
from placewright.problem import Problem
from placewright.units import format_time

STRONG_SHARE = 0.5
"""What share of a budget in seconds `expert_strong` may take, at a guess."""

MAX_ENUMERATED = 20_000
"""Up to so many placements, all of them are tried."""


@dataclass(frozen=True)
class Auto:
    """Tries what is quick, repairs, then anneals from the best until the budget is spent."""

    annealing: Annealing = field(default_factory=Annealing)

    def __call__(self, run: Run) -> None:
        """Place."""
        if _enumerate(run):
            return
        for name, way in _quick(run):
            run.placer = f"auto: {name}"
            with contextlib.suppress(InputError):  # no such device, or a library is missing
                run.offer([way(run.problem)])
            if run.is_over:
                return
        assert run.best is not None
        if run.key[0] > 0:
            run.placer = "auto: repair"
            repair(run, np.asarray(run.best.placement))
        run.placer = "auto: annealing"
        if not run.is_over:
            self.annealing(run)


def _enumerate(run: Run) -> bool:
    """Try everything, if that is little; tell whether it was."""
    problem = run.problem
    units = Units.of(problem, np.arange(problem.num_ops))
    choices = [np.flatnonzero(row) for row in units.allowed]
    count = 1
    for row in choices:
        count *= len(row)
        if count > MAX_ENUMERATED:
            return False
    run.placer = "auto: all placements"
    rows = np.array([*product(*choices)], dtype=np.int64)
    for begin in range(0, len(rows), 1024):
        size = run.room(min(1024, len(rows) - begin))
        if size == 0 or run.is_over:
            break
        run.offer([units.expand(row) for row in rows[begin : begin + size]])
    return True


def _quick(run: Run) -> Iterator[tuple[str, Callable[[Problem], Placement]]]:
    """List ways to place that take little time, each device alone first, the slowest last."""
    problem = run.problem
    yield "one device", one_device
    first_s = run.wall_s
    ways: dict[str, Callable[[Problem], Placement]] = {
        "contiguous": lambda p: contiguous_split(p, run.evaluator.objective),
        "expert-paper": expert_paper,
        "m-topo": m_topo,
        "m-etf": m_etf,
        "heft": heft,
        "peft": peft,
        "mincut": mincut,
        "scotch": scotch,
        "metis": metis,
    }
    for d, kind in enumerate(problem.cluster.device_kinds):
        if problem.allowed[:, d].all() and kind not in problem.cluster.device_kinds[:d]:
            yield f"all on {problem.cluster.device_names[d]}", _alone(d)
    yield from ways.items()
    # It simulates hundreds of splits for each number of devices: not if that takes the budget.
    seconds = run.budget.seconds
    spends_s = first_s * MAX_SPLITS * problem.num_devices
    if seconds is None or spends_s < STRONG_SHARE * seconds:
        yield "expert-strong", expert_strong


def _alone(device: int) -> Callable[[Problem], Placement]:
    return lambda problem: np.full(problem.num_ops, device)


def explain(run: Run) -> str:
    """Say in one sentence why the answer is what it is."""
    problem = run.problem
    assert run.best is not None
    placement = np.asarray(run.best.placement)
    used = np.unique(placement[~problem.graph.op_is_resident])
    names = [problem.cluster.device_names[d] for d in used]
    found = run.evaluator.evaluate([type(run.best)(one_device(problem))])
    alone_s, over = float(found.objective_s[0]), int(found.overflow_bytes[0])
    best_s = run.key[1]
    if len(used) == 1:
        return _explain_one(run, names[0])
    if over > 0:
        return (
            f"{len(used)} devices: the model does not fit one alone, which would take"
            f" {format_time(alone_s)}."
        )
    if best_s > alone_s:
        return f"{len(used)} devices, though one alone would take {format_time(alone_s)}."
    return (
        f"{len(used)} devices: {format_time(alone_s - best_s)} less than"
        f" {format_time(alone_s)} on one alone, transfers included."
    )


def _explain_one(run: Run, name: str) -> str:
    """Say what splitting would have cost and saved, by the best contiguous split."""
    from placewright.simulator import simulate

    problem = run.problem
    try:
        accelerators(problem)
        split = simulate(problem, contiguous_split(problem, run.evaluator.objective))
    except InputError:
        return f"{name} alone: there is no other device that could help."
    moved_s = float(split.channel_busy_s.max(initial=0.0))
    busy_s = float(split.device_utilisation.max() * split.makespan_s)
    alone_s = run.key[1]
    if run.evaluator.basis != "simulated":
        assert run.best is not None
        alone_s = simulate(problem, run.best).makespan_s
    if len(split.transfers) == 0:
        return f"{name} alone: no split was faster."
    return (
        f"{name} alone: the best contiguous split would spend {format_time(moved_s)} on transfers"
        f" to save {format_time(max(alone_s - busy_s, 0.0))} of computing on the busiest device."
    )
