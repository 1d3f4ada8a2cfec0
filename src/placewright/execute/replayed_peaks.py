"""
Peak memory of a plan as the executor holds tensors: `replayed_peaks`.

This module owns where that differs from the simulator. Between CPU devices nothing is sent ahead:
the receiver copies a tensor right before its first reader there, so that the copy begins later
than simulated, and the sender holds the tensor until then. Ops on GPUs take the memory that they
were seen to take when they were timed.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from placewright.graph import Graph, IdArray, IntArray
from placewright.timeline import Timeline


def replayed_peaks(timeline: Timeline) -> IntArray:  # [D]
    """
    Give the most that each device holds in a step, in bytes.

    Times are the simulated ones. Where no tensor goes from one CPU device to another, and no op
    was seen to take memory of its own, these are the simulated peaks.
    """
    problem = timeline.problem
    graph, place = problem.graph, timeline.candidate.placement.tolist()
    kinds = problem.cluster.device_kinds
    start, end = timeline.op_start_ps.tolist(), timeline.op_end_ps.tolist()
    moves = timeline.transfers
    ways = zip(moves.tensor.tolist(), moves.target.tolist(), strict=True)
    times = zip(moves.start_ps.tolist(), moves.end_ps.tolist(), strict=True)
    spans = dict(zip(ways, times, strict=True))
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by root: tensor, op
    root = _roots(graph)
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        readers[int(root[tensor])].append((_received(timeline, tensor, place[op]), op))
    is_kept = np.zeros(graph.num_tensors, dtype=np.bool_)
    np.logical_or.at(is_kept, root, graph.tensor_keep)
    changes: list[list[tuple[int, int]]] = [[] for _ in kinds]  # when, and by how much
    held = [0] * len(kinds)  # all the time
    for tensor in np.flatnonzero(root == np.arange(graph.num_tensors)).tolist():
        maker, size = int(graph.tensor_op[tensor]), int(graph.tensor_bytes[tensor])
        here = place[maker]
        last = timeline.makespan_ps if is_kept[tensor] else end[maker]
        away: dict[tuple[int, int], tuple[int, int]] = {}  # by tensor and device
        first: dict[tuple[int, int], int] = {}  # reader's start, by tensor and device
        for alias, op in readers[tensor]:
            d = place[op]
            if d != here:
                first[alias, d] = min(first.get((alias, d), start[op]), start[op])
        for alias, op in readers[tensor]:
            d = place[op]
            if d == here:
                last = max(last, end[op])
                continue
            is_late = kinds[d] == kinds[here] == "cpu" or (alias, d) not in spans
            begin, arrived = (first[alias, d],) * 2 if is_late else spans[alias, d]
            last = max(last, arrived)
            _, until = away.get((alias, d), (begin, end[op]))
            away[alias, d] = begin, max(until, end[op])
        if graph.tensor_is_resident[tensor]:
            held[here] += size
        else:
            changes[here] += [(start[maker], size), (last, -size)]
        for (alias, d), (begin, until) in away.items():
            size = int(graph.tensor_bytes[alias])
            changes[d] += [(begin, size), (until, -size)]
    scratch = graph.op_workspace_bytes
    if problem.costs.scratch_bytes is not None:
        seen = problem.costs.scratch_bytes[np.arange(graph.num_ops), timeline.candidate.placement]
        scratch = np.maximum(scratch, seen)
    for op in np.flatnonzero(scratch).tolist():
        size = int(scratch[op])
        changes[place[op]] += [(start[op], size), (end[op], -size)]
    return np.array([_peak(before, of) for before, of in zip(held, changes, strict=True)])


def _received(timeline: Timeline, tensor: int, device: int) -> int:
    """Find what a device that reads a tensor has received, if it made an alias of that itself."""
    graph, place = timeline.problem.graph, timeline.candidate.placement
    while graph.tensor_base[tensor] >= 0 and place[graph.tensor_op[tensor]] == device:
        tensor = int(graph.tensor_base[tensor])
    return tensor


def _peak(held: int, changes: list[tuple[int, int]]) -> int:
    """Add changes up in their order, what is given back at a time first."""
    steps = np.array([change for _, change in sorted(changes)], dtype=np.int64)
    return held + int(max(0, np.cumsum(steps).max(initial=0)))


def _roots(graph: Graph) -> IdArray:  # [T]
    """Follow every alias to the tensor whose memory it is."""
    root = np.arange(graph.num_tensors, dtype=np.int32)
    for tensor in np.flatnonzero(graph.tensor_base >= 0):  # a base comes before its aliases
        root[tensor] = root[graph.tensor_base[tensor]]
    return root
