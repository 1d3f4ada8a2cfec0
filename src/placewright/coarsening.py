"""
Coarsening a problem by a grouping: a smaller problem whose placements expand to the ops.

This module owns what a group of ops becomes, and how a grouping whose groups depend on each other
in circles is refined until they do not.

Letters: ``N`` ops, ``G`` groups, ``M`` coarse ops.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from placewright.arguments import expect_type, to_array
from placewright.costs import Costs
from placewright.errors import InputError
from placewright.graph import BoolArray, Graph, IdArray, IntArray
from placewright.problem import Problem


@dataclass(frozen=True, eq=False)
class Coarse:
    """A coarse problem, and how to get back from it."""

    problem: Problem  # with M ops
    op_of: IntArray  # [N] the coarse op that stands for each op

    def expand(self, placement: ArrayLike) -> IdArray:
        """Turn placements of the coarse problem ([..., M]) into ones of the ops ([..., N])."""
        placements = self.problem.check_placements(placement)
        return np.ascontiguousarray(placements[..., self.op_of])


def coarsen(problem: Problem, grouping: ArrayLike) -> Coarse:
    """
    Make each group of ops one op.

    A group's time on a device is the sum of its ops' times. Tensors that leave the group (or are
    kept, or have an alias that leaves it) stay as they are; those that do not become workspace:
    the most that is alive at once when the group runs by itself in program order. Ops with
    persistent outputs take no time and never queue, so a group that has some and other ops
    becomes two coarse ops, co-located. A coarse placement that is feasible is only an estimate
    of what the ops need; simulate the expanded placement to know.

    Parameters
    ----------
    problem
        The problem to coarsen.
    grouping
        The group of every op ([N]); any integers.

    Raises
    ------
    InputError
        The grouping has the wrong length; groups depend on each other in a circle (refine the
        grouping with `split_cycles`); or no device may run all ops of some group.
    """
    expect_type(problem, Problem, "problem", "a `Problem`")
    graph = problem.graph
    groups = _check_grouping(graph, grouping)
    op_of, num_coarse = _number_coarse_ops(graph, groups)
    merged = _colocate(graph, groups, op_of, num_coarse)
    makers, readers = op_of[graph.tensor_op[graph.use_tensor]], op_of[graph.use_op]
    leaves = np.zeros(graph.num_tensors, dtype=np.bool_)
    leaves[graph.use_tensor[makers != readers]] = True
    leaves |= graph.tensor_keep | graph.tensor_is_resident
    for t in np.flatnonzero(graph.tensor_base >= 0)[::-1]:  # an alias keeps its base
        if leaves[t] and op_of[graph.tensor_op[t]] == op_of[graph.tensor_op[graph.tensor_base[t]]]:
            leaves[graph.tensor_base[t]] = True
    coarse_graph = _coarse_graph(graph, op_of, num_coarse, merged, leaves)
    op_ps = np.zeros((num_coarse, problem.num_devices), dtype=np.int64)
    np.add.at(op_ps, op_of, problem.costs.op_ps)
    return Coarse(Problem(coarse_graph, problem.cluster, Costs(op_ps)), op_of)


def split_cycles(graph: Graph, grouping: ArrayLike) -> IntArray:
    """
    Refine a grouping until no groups depend on each other in a circle.

    Groups on no circle stay whole. Where groups form circles, an op's stage is the number of
    times the longest path to it, inside that tangle of groups, passes from one group to another,
    and ops of a group stay together only within a stage. Every dependency between two parts then
    leads to a later stage, so no circle is left.

    Returns
    -------
    array
        [N] group numbers, from 0 without gaps, in the order in which groups first appear.
    """
    expect_type(graph, Graph, "graph", "a `Graph`")
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    groups = _check_grouping(graph, grouping)
    makers, readers = graph.tensor_op[graph.use_tensor], graph.use_op
    count = int(groups.max()) + 1
    edges = coo_array(
        (np.ones(len(makers), dtype=np.int8), (groups[makers], groups[readers])), (count, count)
    )
    _, tangle = connected_components(edges, connection="strong")
    stage = [0] * graph.num_ops
    inside = tangle[groups[makers]] == tangle[groups[readers]]
    passes = (groups[makers] != groups[readers]).astype(int)
    for maker, reader, step in zip(  # sorted by maker, whose stage is final
        makers[inside].tolist(), readers[inside].tolist(), passes[inside].tolist(), strict=True
    ):
        stage[reader] = max(stage[reader], stage[maker] + step)
    return _renumber(groups * (max(stage) + 1) + np.array(stage))


def _check_grouping(graph: Graph, grouping: ArrayLike) -> IntArray:
    groups = to_array(grouping, "grouping", "the group of every op")
    if groups.shape != (graph.num_ops,) or not np.issubdtype(groups.dtype, np.integer):
        raise InputError(
            f"`grouping` has shape {groups.shape} and type {groups.dtype}; expected"
            f" {graph.num_ops} integers, one an op of graph `{graph.name}`."
        )
    return _renumber(groups)


def _renumber(groups: IntArray) -> IntArray:
    """Number groups from 0 in the order in which they first appear."""
    _, first, at = np.unique(groups, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[at]


def _number_coarse_ops(graph: Graph, groups: IntArray) -> tuple[IntArray, int]:
    """Give each op its coarse op, numbered in topological order; refuse circles."""
    parts = _renumber(groups * 2 + graph.op_is_resident)
    count = int(parts.max()) + 1
    makers, readers = parts[graph.tensor_op[graph.use_tensor]], parts[graph.use_op]
    pairs = np.unique(np.stack([makers, readers])[:, makers != readers], axis=1)
    after: list[list[int]] = [[] for _ in range(count)]
    for maker, reader in pairs.T.tolist():
        after[maker].append(reader)
    missing = np.bincount(pairs[1], minlength=count).tolist()
    ready = [part for part in range(count) if missing[part] == 0]
    number = np.full(count, -1, dtype=np.int64)
    num_done = 0
    while ready:
        part = heapq.heappop(ready)
        number[part] = num_done
        num_done += 1
        for reader in after[part]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, reader)
    if num_done < count:
        stuck = int(np.flatnonzero(number < 0)[0])
        op = graph.op_names[int(np.flatnonzero(parts == stuck)[0])]
        raise InputError(
            f"The grouping makes {count - num_done} groups depend on each other in circles; the"
            f" group of op `{op}` is on or behind one. Refine it with `split_cycles` first."
        )
    return number[parts], count


def _colocate(graph: Graph, groups: IntArray, op_of: IntArray, count: int) -> IdArray:  # [M]
    """Give coarse ops that must stay together (by group or by co-location) one id; -1 for none."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # Coarse ops, groups and co-location ids are joined wherever an op belongs to both.
    member = graph.op_colocation >= 0
    first_group, first_id = count, count + int(groups.max()) + 1
    left = np.concatenate([op_of, op_of[member]])
    right = np.concatenate([first_group + groups, first_id + graph.op_colocation[member]])
    size = first_id + len(graph.colocations)
    edges = coo_array((np.ones(len(left), dtype=np.int8), (left, right)), (size, size))
    _, label = connected_components(edges, directed=False)
    label = label[:count]
    shared = np.bincount(label)[label] > 1
    merged = np.full(count, -1, dtype=np.int32)
    merged[shared] = _renumber(label[shared])
    return merged


def _coarse_graph(
    graph: Graph, op_of: IntArray, count: int, colocation: IdArray, leaves: BoolArray
) -> Graph:
    order = np.lexsort((np.arange(graph.num_tensors), op_of[graph.tensor_op]))
    kept = order[leaves[order]]  # tensors that stay, by (coarse op, tensor)
    number = np.full(graph.num_tensors, -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    makers, readers = op_of[graph.tensor_op[graph.use_tensor]], op_of[graph.use_op]
    across = makers != readers
    keys = np.unique(number[graph.use_tensor[across]] * count + readers[across])
    leader = np.full(count, graph.num_ops, dtype=np.int64)
    np.minimum.at(leader, op_of, np.arange(graph.num_ops))
    size = np.bincount(op_of, minlength=count)
    flops, moved = np.zeros(count), np.zeros(count)
    np.add.at(flops, op_of, graph.op_flops)
    np.add.at(moved, op_of, graph.op_bytes)
    base = graph.tensor_base[kept]
    return Graph(
        name=f"{graph.name} ({count} of {graph.num_ops} ops)",
        op_names=tuple(graph.op_names[i] for i in leader),
        op_kinds=tuple(
            graph.op_kinds[i] if n == 1 else "group" for i, n in zip(leader, size, strict=True)
        ),
        op_phases=tuple(graph.op_phases[i] for i in leader),
        op_modules=tuple(graph.op_modules[i] for i in leader),
        op_dtypes=tuple(graph.op_dtypes[i] for i in leader),
        op_flops=flops,
        op_bytes=moved,
        op_workspace_bytes=_inner_peaks(graph, op_of, count, leaves),
        op_colocation=colocation,
        op_device_kinds=_common_kinds(graph, op_of, count),
        op_time_s=(None,) * count,
        colocations=tuple(f"group {k}" for k in range(int(colocation.max(initial=-1)) + 1)),
        tensor_op=op_of[graph.tensor_op[kept]].astype(np.int32),
        tensor_bytes=graph.tensor_bytes[kept],
        tensor_persistent=graph.tensor_persistent[kept],
        tensor_keep=graph.tensor_keep[kept],
        tensor_base=np.where(base >= 0, number[base], -1).astype(np.int32),
        tensor_shapes=tuple(graph.tensor_shapes[t] for t in kept),
        use_tensor=(keys // count).astype(np.int32),
        use_op=(keys % count).astype(np.int32),
    )


def _common_kinds(graph: Graph, op_of: IntArray, count: int) -> tuple[tuple[str, ...] | None, ...]:
    """Intersect the device kinds of each coarse op's ops."""
    common: list[tuple[str, ...] | None] = [None] * count
    for i, kinds in enumerate(graph.op_device_kinds):
        if kinds is None:
            continue
        at = int(op_of[i])
        before = common[at]
        both = kinds if before is None else tuple(kind for kind in before if kind in kinds)
        if not both:
            raise InputError(
                f"No device kind may run all ops of the group of `{graph.op_names[i]}`:"
                f" it may run on {', '.join(kinds)}, others of its group only on"
                f" {', '.join(before or ())}."
            )
        common[at] = both
    return tuple(common)


def _inner_peaks(graph: Graph, op_of: IntArray, count: int, leaves: BoolArray) -> IntArray:  # [M]
    """Find the most workspace and inner tensors alive at once, each group run by itself."""
    inner = ~leaves & (graph.tensor_base < 0)
    last_use = graph.tensor_op.astype(np.int64)
    np.maximum.at(last_use, graph.use_tensor, graph.use_op)
    for t in np.flatnonzero(graph.tensor_base >= 0)[::-1]:  # an alias keeps its base alive
        base = graph.tensor_base[t]
        last_use[base] = max(last_use[base], last_use[t])
    delta_at_start = graph.op_workspace_bytes.copy()
    np.add.at(delta_at_start, graph.tensor_op[inner], graph.tensor_bytes[inner])
    delta_at_end = -graph.op_workspace_bytes
    np.subtract.at(delta_at_end, last_use[inner], graph.tensor_bytes[inner])
    order = np.lexsort((np.arange(graph.num_ops), op_of))
    steps = np.stack([delta_at_start[order], delta_at_end[order]], axis=1).reshape(-1)
    level = np.cumsum(steps)  # every group ends at zero, so the next one starts there
    peaks = np.zeros(count, dtype=np.int64)
    np.maximum.at(peaks, op_of[order], level[::2])
    return peaks
