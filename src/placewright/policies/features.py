"""
What policies see of ops, groups and devices.

This module owns the papers' embeddings (type, output shapes, adjacency), what can be seen beside
them, and how the features of ops become those of groups.

A *unit* is what a Grouper decides on: an op, or ops that are always together.

Letters: ``N`` ops, ``U`` units, ``T`` op types, ``G`` groups, ``M`` groupings, ``D`` devices.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.graph import Graph
from placewright.policies import _kernels
from placewright.problem import Problem

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

NUM_TYPES = 200
"""The most common op types have an embedding each; all others share one."""


@dataclass(frozen=True)
class Room:
    """What an op's embedding has room for: outputs, their dimensions, neighbours on either side."""

    num_outputs: int = 6
    num_dims: int = 4
    num_neighbours: int = 6


@dataclass(frozen=True, eq=False)
class UnitFeatures:
    """Units in figures, and what goes between them."""

    unit_of: IntArray  # [N]
    types: FloatArray  # [U, T] share of the unit's ops of each type
    shapes: FloatArray  # [U, F] logarithms of the first outputs' sizes; -1 where there is none
    neighbours: FloatArray  # [U, F] where in the graph the first ones are, from 0 to 1; -1 for none
    flow: FloatArray  # [U, F] any number of edges: types and sizes on either side
    path: FloatArray  # [U, F] place on the critical path, time and memory
    resident_bytes: NDArray[np.float64]  # [U] what stays, or is kept from forward to backward
    edge_from: IntArray  # [E]
    edge_to: IntArray  # [E]
    edge_bytes: NDArray[np.float64]  # [E]

    @property
    def num_units(self) -> int:
        """Count the units."""
        return len(self.types)

    @classmethod
    def of(cls, problem: Problem, unit_of: IntArray, room: Room) -> UnitFeatures:
        """Describe the units of a problem."""
        graph = problem.graph
        count = int(unit_of.max()) + 1
        types = op_types(graph)
        share = np.zeros((count, int(types.max()) + 1), dtype=np.float32)
        np.add.at(share, (unit_of, types), 1.0)
        first = np.full(count, graph.num_ops)
        np.minimum.at(first, unit_of, np.arange(graph.num_ops))
        maker, reader = graph.tensor_op[graph.use_tensor], graph.use_op
        source, target = unit_of[maker], unit_of[reader]
        crosses = source != target
        return cls(
            unit_of=unit_of,
            types=share / share.sum(axis=1, keepdims=True),
            shapes=output_shapes(graph, room)[first],
            neighbours=neighbours(graph, room)[first],
            flow=_mean(unit_of, _flow(graph, types)),
            path=_path(problem, unit_of),
            resident_bytes=_sum(unit_of, _resident_bytes(graph)),
            edge_from=source[crosses],
            edge_to=target[crosses],
            edge_bytes=graph.tensor_bytes[graph.use_tensor[crosses]].astype(np.float64),
        )


def op_types(graph: Graph) -> IntArray:  # [N]
    """Number op types, the most common first; what is not among `NUM_TYPES` has the last number."""
    common = [kind for kind, _ in Counter(graph.op_kinds).most_common(NUM_TYPES)]
    number = {kind: k for k, kind in enumerate(common)}
    return np.array([number.get(kind, NUM_TYPES) for kind in graph.op_kinds], dtype=np.int64)


def output_shapes(graph: Graph, room: Room) -> FloatArray:  # [N, outputs * dims]
    """
    List the sizes of each op's first outputs, as logarithms; -1 where there is nothing.

    A tensor of unknown shape counts as a line of its bytes.
    """
    table = np.full((graph.num_ops, room.num_outputs, room.num_dims), -1.0, dtype=np.float32)
    place = np.arange(graph.num_tensors) - graph.op_outputs[graph.tensor_op]
    for t in np.flatnonzero(place < room.num_outputs).tolist():
        shape = graph.tensor_shapes[t]
        sizes = (int(graph.tensor_bytes[t]),) if shape is None else shape[: room.num_dims]
        table[graph.tensor_op[t], place[t], : len(sizes)] = np.log2(np.array(sizes) + 1.0) / 16
    return table.reshape(graph.num_ops, -1)


def neighbours(graph: Graph, room: Room) -> FloatArray:  # [N, 2 * neighbours]
    """List where in the graph each op's first inputs and readers are, from 0 to 1; -1 for none."""
    width = room.num_neighbours
    table = np.full((graph.num_ops, 2 * width), -1.0, dtype=np.float32)
    maker, reader = graph.tensor_op[graph.use_tensor], graph.use_op
    for column, (op, other) in ((0, (reader, maker)), (width, (maker, reader))):
        order = np.lexsort((other, op))
        rank = np.arange(len(order)) - np.searchsorted(op[order], op[order])
        few = order[rank < width]
        table[op[few], column + rank[rank < width]] = other[few] / graph.num_ops
    return table


def _flow(graph: Graph, types: IntArray) -> FloatArray:  # [N, F]
    """Sum up all edges of each op: the types on either side, their number and bytes."""
    maker, reader = graph.tensor_op[graph.use_tensor], graph.use_op
    size = graph.tensor_bytes[graph.use_tensor]
    columns = []
    for op, other in ((reader, maker), (maker, reader)):
        seen = np.zeros((graph.num_ops, int(types.max()) + 1), dtype=np.float32)
        np.add.at(seen, (op, types[other]), 1.0)
        count = seen.sum(axis=1, keepdims=True)
        total = np.bincount(op, weights=size, minlength=graph.num_ops)[:, None]
        place = np.bincount(op, weights=other / graph.num_ops, minlength=graph.num_ops)[:, None]
        columns += [seen / np.maximum(count, 1), np.log1p(count) / 4, np.log1p(total) / 20]
        columns += [place / np.maximum(count, 1)]
    return np.concatenate(columns, axis=1).astype(np.float32)


def _path(problem: Problem, unit_of: IntArray) -> FloatArray:  # [U, F]
    """Tell each unit's place in time: first, last and critical; its share of time and memory."""
    graph = problem.graph
    time_s = problem.costs.op_ps.min(axis=1) / 1e12
    ahead, behind = levels(graph, time_s)
    whole = max(float((ahead + behind).max()), 1e-12)
    tight = 1.0 - (ahead + behind) / whole  # 0 on the critical path
    order = np.arange(graph.num_ops) / graph.num_ops
    is_forward = np.array([phase == "forward" for phase in graph.op_phases])
    means = _mean(unit_of, np.stack([ahead / whole, behind / whole, tight, order, is_forward], 1))
    sums = np.stack([time_s, _resident_bytes(graph), graph.op_bytes], axis=1)
    total = np.zeros((len(means), sums.shape[1]))
    np.add.at(total, unit_of, sums)
    share = total / np.maximum(sums.sum(axis=0), 1e-12)
    return np.concatenate([means, share, np.log10(share + 1e-9) / 9], axis=1).astype(np.float32)


def levels(graph: Graph, time_s: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Give the longest path before each op, and the one from its start to the end (b-level)."""
    maker, reader = graph.tensor_op[graph.use_tensor], graph.use_op
    by_reader = np.argsort(reader, kind="stable")
    ahead = _kernels.longest_paths(maker[by_reader], reader[by_reader], time_s)
    by_maker = np.argsort(-maker, kind="stable")
    behind = _kernels.longest_paths(reader[by_maker], maker[by_maker], time_s) + time_s
    return ahead, behind


def _resident_bytes(graph: Graph) -> NDArray[np.float64]:  # [N]
    """Estimate what each op keeps in memory: what persists, and what waits for the backward."""
    is_back = np.array([phase != "forward" for phase in graph.op_phases])
    waits = np.zeros(graph.num_tensors, dtype=np.bool_)
    waits[graph.use_tensor[is_back[graph.use_op]]] = True
    waits &= ~is_back[graph.tensor_op]
    base = np.where(graph.tensor_base < 0, np.arange(graph.num_tensors), graph.tensor_base)
    kept = graph.tensor_persistent.copy()
    np.logical_or.at(kept, base, waits)
    kept &= graph.tensor_base < 0
    found = np.zeros(graph.num_ops)
    np.add.at(found, graph.tensor_op[kept], graph.tensor_bytes[kept])
    return found


def _sum(unit_of: IntArray, values: NDArray[np.float64]) -> NDArray[np.float64]:  # [U]
    total = np.zeros(int(unit_of.max()) + 1)
    np.add.at(total, unit_of, values)
    return total


def _mean(unit_of: IntArray, values: NDArray[np.floating]) -> FloatArray:
    total = np.zeros((int(unit_of.max()) + 1, values.shape[1]))
    np.add.at(total, unit_of, values)
    return (total / np.bincount(unit_of)[:, None]).astype(np.float32)


def device_features(problem: Problem) -> FloatArray:  # [D, F]
    """
    Describe devices by what they can do: rate, bandwidth, memory, links, and how full alone.

    A number of its own at the end tells equal devices apart.
    """
    cluster = problem.cluster
    time_s = problem.costs.op_ps.sum(axis=0) / 1e12
    need = float(_resident_bytes(problem.graph).sum())
    off = ~np.eye(cluster.num_devices, dtype=np.bool_)
    rates = np.where(off, cluster.bytes_per_s, np.nan)
    if cluster.num_devices == 1:
        rates = np.ones((1, 1))
    is_cpu = np.array([kind == "cpu" for kind in cluster.device_kinds])
    columns = [
        time_s.min() / np.maximum(time_s, 1e-12),
        np.minimum(cluster.memory_bytes / max(need, 1.0), 4.0) / 4,
        np.log10(np.nanmean(rates, axis=1)) / 12,
        np.log10(np.nanmean(rates, axis=0)) / 12,
        is_cpu,
    ]
    return np.concatenate([np.stack(columns, axis=1), np.eye(len(is_cpu))], axis=1).astype(
        np.float32
    )


def equal_devices(problem: Problem) -> IntArray:  # [D]
    """Give each device the last one before it that nothing but its name tells it from, or -1."""
    count = problem.num_devices
    twin_of = np.full(count, -1)
    for d in range(count):
        for e in range(d - 1, -1, -1):
            if _is_equal(problem, d, e):
                twin_of[d] = e
                break
    return twin_of


def _is_equal(problem: Problem, d: int, e: int) -> bool:
    """Tell whether swapping two devices changes nothing: times, memory, links, channels."""
    cluster, op_ps = problem.cluster, problem.costs.op_ps
    swapped = np.arange(cluster.num_devices)
    swapped[[d, e]] = e, d
    if cluster.memory_bytes[d] != cluster.memory_bytes[e]:
        return False
    if not np.array_equal(problem.allowed[:, d], problem.allowed[:, e]):
        return False
    if not np.array_equal(op_ps[:, d], op_ps[:, e]):
        return False
    for table in (cluster.latency_s, cluster.bytes_per_s):
        if not np.array_equal(table, table[np.ix_(swapped, swapped)], equal_nan=True):
            return False
    there: dict[int, int] = {}  # channels, once the devices are swapped
    for a in range(cluster.num_devices):
        for b in range(cluster.num_devices):
            now = sorted(cluster.link_channels[a * cluster.num_devices + b])
            then = sorted(cluster.link_channels[swapped[a] * cluster.num_devices + swapped[b]])
            if len(now) != len(then):
                return False
            if any(there.setdefault(x, y) != y for x, y in zip(now, then, strict=True)):
                return False
    return len(set(there.values())) == len(there)
