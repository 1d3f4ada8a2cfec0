"""
Making placements fit: moves groups of ops off devices that overflow, with little loss.

Also what can be said for certain when nothing fits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewright.grouping import layer_chunks
from placewright.placers.run import Placement, Run
from placewright.problem import Problem
from placewright.units import format_bytes

TRIES = 48
"""How many moves are simulated before one of them is made."""

NUM_GROUPS = 128
"""Into how many groups ops are put, about."""


def repair(run: Run, placement: Placement) -> Placement:
    """
    Make a placement fit, moving one group at a time, while that brings it nearer.

    Of the groups (chunks of layers) on the device that overflows most, and devices with room for
    them, `TRIES` moves are simulated; the one that leaves least overflow, and among those the least
    time, is made. Gives the placement as far as it got; all that was tried was offered to the run.
    """
    random = np.random.default_rng(run.seed)
    grouping = layer_chunks(run.problem, NUM_GROUPS)
    found = run.offer([placement])
    peaks, key = found.peak_bytes[0], found.key(0)
    while key[0] > 0 and not run.is_over:
        moves = _moves(run.problem, placement, grouping, peaks, random)[: run.room(TRIES)]
        if not moves:
            break
        found = run.offer(moves)
        k = found.best
        if found.key(k) >= key:
            break
        placement, key, peaks = moves[k], found.key(k), found.peak_bytes[k]
    return placement


def _moves(
    problem: Problem,
    placement: Placement,
    grouping: NDArray[np.int64],
    peaks: NDArray[np.int64],
    random: np.random.Generator,
) -> list[Placement]:
    """List placements with one group moved off the fullest device, a mix of large and any."""
    free = problem.cluster.memory_bytes - peaks
    fullest = int(np.argmin(free))
    groups = np.unique(grouping[placement == fullest])
    sizes = np.zeros(grouping.max() + 1)
    owns = problem.graph.tensor_base < 0
    np.add.at(sizes, grouping[problem.graph.tensor_op[owns]], problem.graph.tensor_bytes[owns])
    largest = groups[np.argsort(-sizes[groups], kind="stable")]
    others = random.permutation(groups)
    targets = [d for d in np.argsort(-free, kind="stable").tolist() if free[d] > 0 and d != fullest]
    moves = []
    for group in dict.fromkeys([*largest[:8].tolist(), *others.tolist()]):
        members = np.flatnonzero((grouping == group) & (placement == fullest))
        for device in targets:
            allowed = members[problem.allowed[members, device]]
            if allowed.size:
                moved = placement.copy()
                moved[allowed] = device
                moved[problem.colocation_members] = moved[problem.colocation_leaders]
                if is_valid(problem, moved):
                    moves.append(moved)
        if len(moves) >= TRIES:
            break
    return moves


def is_valid(problem: Problem, placement: Placement) -> bool:
    """Tell whether every op is where it may run (co-location is the caller's)."""
    return bool(problem.allowed[np.arange(problem.num_ops), placement].all())


def why_nothing_fits(problem: Problem) -> str | None:
    """Prove that no placement fits, if that is easy: give the proof as a sentence, else None."""
    graph, cluster = problem.graph, problem.cluster
    total = int(graph.tensor_bytes[graph.tensor_persistent].sum())
    memory = int(cluster.memory_bytes.sum())
    if total > memory:
        return (
            f"What stays in memory all step long takes {format_bytes(total)}, and all devices"
            f" together have {format_bytes(memory)}."
        )
    made = np.zeros(graph.num_ops, dtype=np.int64)
    owns = graph.tensor_base < 0
    np.add.at(made, graph.tensor_op[owns], graph.tensor_bytes[owns])
    made += graph.op_workspace_bytes
    room = np.where(problem.allowed, cluster.memory_bytes, 0).max(axis=1)
    bad = np.flatnonzero(made > room)
    if bad.size:
        i = int(bad[0])
        return (
            f"Op `{graph.op_names[i]}` makes {format_bytes(made[i])} at once, and no device that"
            f" may run it has more than {format_bytes(room[i])}."
        )
    return None
