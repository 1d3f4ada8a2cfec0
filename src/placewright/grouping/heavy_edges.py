"""
Heavy edges: coarsening to any number of groups that never depend on each other in a circle.

As in acyclic multilevel partitioning (Herrmann et al., "Multilevel Algorithms for Acyclic
Partitioning of Directed Acyclic Graphs", 2019): rounds of matching along the heaviest edges, a
rule on levels that keeps circles out (see `_kernels.match`), and a cap on a group's time.

This module owns what makes an edge heavy, and when matching gives way to stretches.

Letters: ``N`` ops, ``G`` groups, ``E`` edges between groups, ``F`` pairs of a tensor and a group
that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewright.coarsening import split_cycles
from placewright.errors import InputError
from placewright.graph import IntArray
from placewright.grouping import _kernels
from placewright.grouping._numbering import number_groups
from placewright.grouping.colocated import colocated
from placewright.problem import Problem

TIME_CAP = 2.0
"""A group may take so many times the average group's time; more only if it started so."""
SHARE_A_ROUND = 0.1
"""At most this share of the groups disappears in a round, so that light edges wait their turn."""
MAX_LOOKS = 64
"""Matching ends after looking at every tensor so often: hubs have few matches a round."""


def heavy_edges(problem: Problem, num_groups: int = 256) -> NDArray[np.int64]:  # [N]
    """
    Merge the groups that exchange most bytes for their time, until `num_groups` are left.

    Guarantees: groups never depend on each other in a circle and some device may run each, so
    `coarsen` takes the result. The number of groups is `num_groups`, or less if there are fewer
    co-location groups and other ops to start from, or more if differing device kinds keep groups
    apart. Co-located ops stay together unless that alone would make a circle.

    A group's time is that of its ops, each on its quickest device; an edge is heavy by its bytes
    for the time of both ends. Where no edge can be contracted any more, a topological order of the
    groups is cut into stretches of about equal time.

    Raises
    ------
    InputError
        `num_groups` is less than 1.
    """
    if num_groups < 1:
        raise InputError(f"`num_groups` is {num_groups}; expected at least 1.")
    state = _State.start(problem)
    cap = max(TIME_CAP * state.time.sum() / num_groups, float(state.time.max()))
    num_idle_rounds, num_looked_at = 0, 0
    downwards = True
    most = MAX_LOOKS * len(state.tensors)
    while state.num_groups > num_groups and num_idle_rounds < 2 and num_looked_at <= most:
        num_looked_at += len(state.tensors)
        before = state.num_groups
        share = max(1, int(SHARE_A_ROUND * before))
        state.contract(cap, min(before - num_groups, share), downwards)
        downwards = not downwards
        num_idle_rounds = 0 if state.num_groups < before else num_idle_rounds + 1
    if state.num_groups > num_groups:
        state.cut(num_groups)
    return number_groups(state.groups)


@dataclass(eq=False)
class _State:
    """A grouping on its way, and what matching needs to know of it."""

    groups: IntArray  # [N]
    time: NDArray[np.float64]  # [G]
    group_duty: IntArray  # [G] groups of one duty have to share a device
    duty: IntArray  # union-find over duties
    kinds: IntArray  # device kinds that may run a duty, one bit each
    makers: IntArray  # [F] group that makes the tensor
    tensors: IntArray  # [F]
    readers: IntArray  # [F]
    sizes: IntArray  # [F] bytes
    is_resident: NDArray[np.bool_]  # [F] such tensors order nothing

    @classmethod
    def start(cls, problem: Problem) -> _State:
        graph = problem.graph
        groups = _first_groups(problem)
        op_ps = np.where(problem.allowed, problem.costs.op_ps, np.iinfo(np.int64).max).min(axis=1)
        duties = colocated(problem)
        kinds = np.full(int(duties.max()) + 1, -1, dtype=np.int64)
        np.bitwise_and.at(kinds, duties, _device_kinds(problem))
        group_duty = np.empty(int(groups.max()) + 1, dtype=np.int64)
        group_duty[groups] = duties
        tensors, readers = graph.use_tensor.astype(np.int64), groups[graph.use_op]
        leaves = groups[graph.tensor_op[tensors]] != readers  # what stays inside orders nothing
        tensors, readers = tensors[leaves], readers[leaves]
        return cls(
            groups=groups,
            time=_sums(groups, op_ps),
            group_duty=group_duty,
            duty=np.arange(len(kinds)),
            kinds=kinds,
            makers=groups[graph.tensor_op[tensors]],
            tensors=tensors,
            readers=readers,
            sizes=graph.tensor_bytes[tensors],
            is_resident=graph.op_is_resident[graph.tensor_op[tensors]],
        )

    @property
    def num_groups(self) -> int:
        return len(self.time)

    def contract(self, cap: float, limit: int, downwards: bool) -> None:
        """Do one round of matching, on levels counted from the first groups or the last."""
        edges = self._edges()
        before, after = edges.before(self.num_groups), edges.after(self.num_groups)
        if downwards:
            level = _kernels.find_levels(before[0], *after)
        else:
            level = -_kernels.find_levels(after[0], *before)
        left, right, is_free, weight = self._candidates(edges)
        per_op = self.time.sum() / len(self.groups) or 1.0
        order = np.argsort(-weight / (self.time[left] + self.time[right] + per_op), kind="stable")
        parent = _kernels.match(
            left[order], right[order], is_free[order], level, *before, *after,
            self.time.copy(), cap, self.group_duty, self.duty, self.kinds, limit,
        )  # fmt: skip
        self._merge(parent)

    def cut(self, num_groups: int) -> None:
        """Cut a topological order of the groups into stretches."""
        edges = self._edges()
        before_begins, _ = edges.before(self.num_groups)
        self._merge(
            _kernels.cut_stretches(
                before_begins, *edges.after(self.num_groups),
                self.time, self.group_duty, self.duty, self.kinds, num_groups,
            )
        )  # fmt: skip

    def _edges(self) -> _Edges:
        orders = ~self.is_resident
        keys, at = np.unique(
            self.makers[orders] * self.num_groups + self.readers[orders], return_inverse=True
        )
        return _Edges(
            left=keys // self.num_groups,
            right=keys % self.num_groups,
            weight=_sums(at, self.sizes[orders]),
        )

    def _candidates(
        self, edges: _Edges
    ) -> tuple[IntArray, IntArray, NDArray[np.bool_], NDArray[np.float64]]:
        """
        List the pairs that may be contracted: left, right, whether free, and weight.

        Weights that a group fetches add to the edges it has with their group, in either
        direction. A group of nothing but parameters is free to join any of its readers.
        """
        count, resident = self.num_groups, self.is_resident
        keys = edges.left * count + edges.right
        weight = edges.weight.copy()
        makers, readers, sizes = self.makers[resident], self.readers[resident], self.sizes[resident]
        for pair in (makers * count + readers, readers * count + makers):
            at = np.searchsorted(keys, pair)
            found = np.flatnonzero(at < len(keys))
            found = found[keys[at[found]] == pair[found]]
            np.add.at(weight, at[found], sizes[found])
        is_tied = np.zeros(count, dtype=np.bool_)
        is_tied[edges.left] = is_tied[edges.right] = True
        free, at = np.unique((readers * count + makers)[~is_tied[makers]], return_inverse=True)
        return (
            np.concatenate([edges.left, free // count]),
            np.concatenate([edges.right, free % count]),
            np.arange(len(keys) + len(free)) >= len(keys),
            np.concatenate([weight, _sums(at, sizes[~is_tied[makers]])]),
        )

    def _merge(self, labels: IntArray) -> None:
        """Replace groups by what they were merged to, and forget the tensors that stay inside."""
        number = number_groups(labels)
        self.groups = number[self.groups]
        self.time = _sums(number, self.time)
        group_duty = np.empty(len(self.time), dtype=np.int64)
        group_duty[number] = self.group_duty
        self.group_duty = group_duty
        self.makers, readers = number[self.makers], number[self.readers]
        _, kept = np.unique(self.tensors * len(self.time) + readers, return_index=True)
        kept = kept[self.makers[kept] != readers[kept]]
        self.makers, self.readers = self.makers[kept], readers[kept]
        self.tensors, self.sizes = self.tensors[kept], self.sizes[kept]
        self.is_resident = self.is_resident[kept]


@dataclass(frozen=True, eq=False)
class _Edges:
    """Which groups wait for which, sorted by (left, right)."""

    left: IntArray  # [E]
    right: IntArray  # [E]
    weight: NDArray[np.float64]  # [E] bytes

    def before(self, count: int) -> tuple[IntArray, IntArray]:
        """List each group's predecessors: where they begin, and which they are."""
        order = np.argsort(self.right, kind="stable")
        return np.searchsorted(self.right[order], np.arange(count + 1)), self.left[order]

    def after(self, count: int) -> tuple[IntArray, IntArray]:
        """List each group's successors."""
        return np.searchsorted(self.left, np.arange(count + 1)), self.right


def _first_groups(problem: Problem) -> IntArray:  # [N]
    """Group what is co-located, except where that makes a circle of ops that run."""
    graph = problem.graph
    groups = colocated(problem)
    resident = graph.op_is_resident
    running = np.bincount(groups[~resident], minlength=int(groups.max()) + 1)
    if running.max(initial=0) < 2:
        return groups
    # Parameters wait for nothing, so they are on no circle: they are set aside, then brought back.
    split = split_cycles(graph, 2 * groups + resident)
    part = np.full(len(running), -1, dtype=np.int64)
    part[groups[~resident]] = split[~resident]
    homes = np.where(part >= 0, part, graph.num_ops + np.arange(len(part)))
    return number_groups(np.where(resident, homes[groups], split))


def _sums(index: IntArray, values: NDArray[Any]) -> NDArray[np.float64]:
    """Add up the values of each index; every index from 0 to the largest occurs."""
    return np.bincount(index, weights=values).astype(np.float64)


def _device_kinds(problem: Problem) -> IntArray:  # [N]
    """Tell by bits which kinds of the cluster's devices may run each op."""
    kinds = sorted(set(problem.cluster.device_kinds))
    assert len(kinds) < 63
    first = [problem.cluster.device_kinds.index(kind) for kind in kinds]
    bits: IntArray = problem.allowed[:, first] @ (1 << np.arange(len(kinds)))
    return bits
