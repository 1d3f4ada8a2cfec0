"""
Peak memory of a plan as the executor holds tensors: `replayed_peaks`.

This module owns where that differs from the simulator:

* Only parameters are sent ahead, to GPUs. What else a device receives it has from its first reader
  on. The sender holds the tensor until then if both are CPUs or both are GPUs, since the receiver
  copies it; a GPU, else, until it has arrived; a CPU no longer than it reads it itself: what it
  sends to a GPU is in pinned memory at once, which belongs to no device.
* A sum of many tensors is made by one call after the other. Each receives what it adds, and gives
  back what it has added.
* Ops take the memory that they were seen to take when they were timed.

Letters: ``D`` devices, ``T`` tensors, ``U`` uses.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from placewright.graph import IntArray
from placewright.timeline import Timeline

SUM = "aten.add"
"""What sums are, of however many tensors."""


def replayed_peaks(timeline: Timeline) -> IntArray:  # [D]
    """
    Give the most that each device holds in a step, in bytes.

    Times are the simulated ones. With one device, no sum of more than two, and no op that was seen
    to take memory of its own, these are the simulated peaks.
    """
    problem = timeline.problem
    graph, place = problem.graph, timeline.candidate.placement.tolist()
    kinds = problem.cluster.device_kinds
    start, end = timeline.op_start_ps.tolist(), timeline.op_end_ps.tolist()
    moves = timeline.transfers
    ways = zip(moves.tensor.tolist(), moves.target.tolist(), strict=True)
    times = zip(moves.start_ps.tolist(), moves.end_ps.tolist(), strict=True)
    spans = dict(zip(ways, times, strict=True))
    changes: list[list[tuple[int, int]]] = [[] for _ in kinds]  # when, and by how much
    root = graph.tensor_root
    uses: dict[int, list[int]] = defaultdict(list)  # by root
    for use, tensor in enumerate(graph.use_tensor.tolist()):
        uses[int(root[tensor])].append(use)
    reads, lets_go = _call_times(timeline, changes)
    is_kept = np.zeros(graph.num_tensors, dtype=np.bool_)
    np.logical_or.at(is_kept, root, graph.tensor_keep)
    held = [0] * len(kinds)  # all the time
    for tensor in np.flatnonzero(root == np.arange(graph.num_tensors)).tolist():
        maker, size = int(graph.tensor_op[tensor]), int(graph.tensor_bytes[tensor])
        here, is_resident = place[maker], bool(graph.tensor_is_resident[tensor])
        last = timeline.makespan_ps if is_kept[tensor] else end[maker]
        away: dict[tuple[int, int], tuple[int, int]] = {}  # from when to when, by tensor and device
        for use in uses[tensor]:
            d = place[graph.use_op[use]]
            if d == here:
                last = max(last, lets_go[use])
                continue
            way = _received(timeline, int(graph.use_tensor[use]), d), d
            begin, until = away.get(way, (reads[use], lets_go[use]))
            away[way] = min(begin, reads[use]), max(until, lets_go[use])
        for way, (read, until) in away.items():
            alias, d = way
            is_ahead = is_resident and kinds[d] == "cuda" and way in spans
            begin = min(read, spans[way][0]) if is_ahead else read
            if kinds[here] == kinds[d]:
                last = max(last, begin)
            elif kinds[here] == "cuda" and way in spans:
                last = max(last, spans[way][1])
            there = int(graph.tensor_bytes[alias])
            changes[d] += [(begin, there), (until, -there)]
        if is_resident:
            held[here] += size
        else:
            changes[here] += [(start[maker], size), (last, -size)]
    scratch = graph.op_workspace_bytes
    if problem.costs.scratch_bytes is not None:
        seen = problem.costs.scratch_bytes[np.arange(graph.num_ops), timeline.candidate.placement]
        scratch = np.maximum(scratch, seen)
    for op in np.flatnonzero(scratch).tolist():
        size = int(scratch[op])
        changes[place[op]] += [(start[op], size), (end[op], -size)]
    return np.array([_peak(before, of) for before, of in zip(held, changes, strict=True)])


def _call_times(
    timeline: Timeline, changes: list[list[tuple[int, int]]]
) -> tuple[list[int], list[int]]:  # [U] each
    """
    Tell when each use of a tensor begins and ends: with its op, or with its call of a sum.

    Between two calls of a sum there is what has been added up so far and what is being made of it:
    one more than the sum itself, which is put down in `changes`.
    """
    graph, place = timeline.problem.graph, timeline.candidate.placement
    begin, end = (of[graph.use_op].copy() for of in (timeline.op_start_ps, timeline.op_end_ps))
    has_bytes = graph.tensor_bytes[graph.use_tensor] > 0
    for op in np.flatnonzero([kind == SUM for kind in graph.op_kinds]).tolist():
        uses = graph.input_order[graph.op_inputs[op] : graph.op_inputs[op + 1]]
        uses = uses[has_bytes[uses]]
        num_calls = len(uses) - 1
        if num_calls < 2:
            continue
        first, last = int(timeline.op_start_ps[op]), int(timeline.op_end_ps[op])
        edges = first + (last - first) * np.arange(num_calls + 1) // num_calls
        call = np.maximum(np.arange(len(uses)) - 1, 0)  # the first one adds two
        begin[uses], end[uses] = edges[call], edges[call + 1]
        made = slice(graph.op_outputs[op], graph.op_outputs[op + 1])
        size = int(graph.tensor_bytes[made].max(initial=0))
        changes[place[op]] += [(int(edges[1]), size), (last, -size)]
    return begin.tolist(), end.tolist()


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
