"""
List schedulers: placements in one pass over the ops, without search.

This module owns Baechi's three placers (Jeon et al., SoCC 2020), made fit for devices that differ,
and two classics for such devices:

* `m_topo` fills one device after the other in topological order.
* `m_etf` starts whatever can start first (Hwang et al. 1989), memory permitting.
* `m_sct` is `m_etf` with devices that wait for favourite children (Hanen and Munier 1995).
* `heft` takes ops by upward rank and puts each where it ends first (Topcuoglu et al. 2002).
* `peft` looks ahead with an optimistic cost table (Arabnejad and Barbosa 2014).

What they share: times are whole picoseconds. The first op of a co-location group that is placed
places all of it. Weights go where their first reader goes, if their group may; a reader elsewhere
pays for a fetch, which is requested when the last other input of that reader has been made. What
an op takes (its outputs, workspace, received inputs and the weights it brings along) must fit the
device: inputs since they were made, for that is when they are sent, and weights all along. Tensors
are given back when their last reader has been scheduled. Where no device has room, the one with
the most free bytes is taken. Since ops run in another order than that of decisions,
`m_etf`, `m_sct`, `heft` and `peft` are run again with less and less of the memory (`ROOM`) while
the simulator says that the placement does not fit; the first that fits is given back, or the one
that overflows least. Ties go to the lower index.

Letters: ``N`` ops, ``T`` tensors, ``D`` devices, ``M`` units, ``E`` edges between ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from placewright.costs import PS_PER_S
from placewright.graph import FloatArray, Graph, IdArray, IntArray
from placewright.placers._list_kernel import (
    MAX_GAPS,
    MAX_STRETCHES,
    Facts,
    Gaps,
    Queues,
    State,
    downward_ranks,
    earliest_start,
    insertion,
    optimistic_costs,
    upward_ranks,
)
from placewright.problem import Problem
from placewright.simulator import simulate_many

Placement = NDArray[np.int64]  # [N]

ROOM = (1.0, 0.9, 0.8, 0.65, 0.5)
"""The shares of memory with which a placer is run until what it gives fits."""

MAX_LP_EDGES = 10_000
"""Up to how many edges `m_sct` solves its linear program."""

FAVOURITE = 0.1
"""Below which part of its communication an edge of the linear program is a favourite: Baechi's."""


def m_topo(problem: Problem) -> Placement:
    """
    Fill one device after the other in topological order.

    Every device but CPUs is filled up to an equal share of all bytes (weights, outputs and
    workspace) and those of the largest op with the weights that it is the first to read, in order
    of index; CPUs are filled last. A device is also full when its memory is full of weights. An op
    that may not run on the device whose turn it is goes to the next one that may run it.
    """
    facts = _facts(problem, 1.0)
    filling = _Filling.empty(problem, facts)
    for op, units in _bundles(problem.graph, facts):
        first = units[0] if op == problem.num_ops else int(facts.op_unit[op])
        d = filling.unit_device[first]
        if d < 0:
            d = filling.choose(first, units)
        for unit in [first, *units]:
            if filling.unit_device[unit] < 0:
                fitting = d if facts.unit_allowed[unit, d] else filling.choose(unit, [unit])
                filling.place(unit, fitting)
    placement: Placement = filling.unit_device[facts.op_unit]
    return placement


def m_etf(problem: Problem) -> Placement:
    """
    Run the ready op that can start first, where it can, as long as there is memory.

    An op can start on a device when the device is free and its inputs are there. Transfers occupy
    the channels of their link as they do in the simulator, in the order of decisions, and a tensor
    is sent to a device once. Devices differ, and a slow one is often free: so the start on a
    device counts as later by what the op takes longer there than on its fastest device. For one op
    that is the device where it ends first; on equal devices it is ETF's rule.

    There is no scan of ready ops: every op waits in a heap of each device, and a start that
    channels have made later is corrected when it comes up (at most 64 times a step).
    """
    nobody = _Favourites.nobody(problem)
    return _fitted(problem, lambda facts: _earliest_start(facts, nobody))


def m_sct(problem: Problem, time_limit_s: float = 30.0) -> Placement:
    """
    Place as `m_etf` does, but let a device wait for the favourite child of its last op.

    Favourites are chosen by Baechi's linear program, solved with HiGHS: an edge pays its mean
    transfer time times x in [0, 1], all but one of an op's edges pay, and the makespan on
    unlimited devices is least. Edges with x below `FAVOURITE` are favourites, the lowest first;
    one that would give an op a second favourite child or parent is dropped. A device waits until
    the child's input from its last op could be anywhere else, unless the op that comes next has
    its inputs at hand wherever it runs.

    The program knows neither memory nor the number of devices, and grows dear: beyond
    `MAX_LP_EDGES` edges, or when `time_limit_s` has passed, the favourites are instead the edges
    of the longest paths (mean times, transfers included), the longest first. Whether the time
    suffices depends on the machine; the answer is otherwise the same each time.
    """
    favourites = _favourites(problem, time_limit_s)
    return _fitted(problem, lambda facts: _earliest_start(facts, favourites))


def heft(problem: Problem) -> Placement:
    """
    Take ops by upward rank and put each where it ends first, in an idle gap if one holds it.

    Transfers take their time but do not wait for each other, as in the paper. Of a device's gaps
    the `MAX_GAPS` longest are remembered.
    """
    facts = _facts(problem, 1.0)
    rank = _ranking(_upward(problem, facts))
    ahead = np.zeros((problem.num_ops, problem.num_devices), dtype=np.int64)
    return _fitted(problem, lambda facts: _insertion(facts, rank, ahead))


def peft(problem: Problem) -> Placement:
    """
    Place as `heft` does, but by an optimistic cost table.

    The table has the time that must follow an op on a device at the least, if every later op had
    its best device to itself. Of the ready ops the one with the largest mean in the table is next;
    it goes where its end and what follows are least.
    """
    facts = _facts(problem, 1.0)
    table = np.zeros((problem.num_ops, problem.num_devices), dtype=np.int64)
    optimistic_costs(facts, _tensor_ps(problem), table)
    rank = _ranking(table.mean(axis=1))
    return _fitted(problem, lambda facts: _insertion(facts, rank, table))


def _fitted(problem: Problem, schedule: Callable[[Facts], State]) -> Placement:
    """Schedule with less and less of the memory until the simulator says that it fits."""
    best: tuple[int, Placement] | None = None
    for room in ROOM:
        facts = _facts(problem, room)
        placement = schedule(facts).unit_device[facts.op_unit].astype(np.int64)
        over = int(simulate_many(problem, placement[np.newaxis], num_threads=1).overflow_bytes[0])
        if best is None or over < best[0]:
            best = over, placement
        if over == 0:
            break
    assert best is not None
    return best[1]


def _facts(problem: Problem, room: float) -> Facts:
    """Lay a problem out for the kernel, with a share of its memory."""
    graph, cluster = problem.graph, problem.cluster
    op_unit, num_units = _units(graph)
    is_held = graph.tensor_is_resident | (graph.tensor_base >= 0)
    output_bytes = _sum_at(graph.tensor_op[~is_held], graph.tensor_bytes[~is_held], problem.num_ops)
    persistent = graph.tensor_persistent
    unit_bytes = _sum_at(
        op_unit[graph.tensor_op[persistent]], graph.tensor_bytes[persistent], num_units
    )
    unit_take = np.zeros(num_units, dtype=np.int64)
    np.maximum.at(unit_take, op_unit, output_bytes + graph.op_workspace_bytes)
    unit_allowed = np.ones((num_units, problem.num_devices), dtype=np.bool_)
    np.logical_and.at(unit_allowed, op_unit, problem.allowed)
    rate = np.where(cluster.bytes_per_s > 0, cluster.bytes_per_s, 1.0)
    return Facts(
        op_ps=np.ascontiguousarray(problem.costs.op_ps),
        op_unit=op_unit,
        op_resident=graph.op_is_resident,
        op_inputs=graph.op_inputs,
        op_outputs=graph.op_outputs,
        op_output_bytes=output_bytes,
        op_workspace_bytes=graph.op_workspace_bytes,
        input_tensor=np.ascontiguousarray(graph.use_tensor[graph.input_order]),
        tensor_uses=graph.tensor_uses,
        use_op=graph.use_op,
        tensor_op=graph.tensor_op,
        tensor_bytes=graph.tensor_bytes,
        tensor_root=np.where(graph.tensor_base >= 0, graph.tensor_root, -1),
        tensor_stays=is_held | graph.tensor_keep,
        unit_allowed=unit_allowed,
        unit_bytes=unit_bytes,
        unit_take_bytes=unit_take,
        latency_ps=cluster.latency_s * PS_PER_S,
        byte_ps=PS_PER_S / rate,
        link_begin=np.cumsum([0, *map(len, cluster.link_channels)]),
        link_channel=np.array([c for cs in cluster.link_channels for c in cs], dtype=np.int64),
        capacity_bytes=(cluster.memory_bytes * room).astype(np.int64),
    )


def _sum_at(at: NDArray[np.signedinteger], values: IntArray, count: int) -> IntArray:
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, at, values)
    return total


def _units(graph: Graph) -> tuple[IntArray, int]:
    """Number the co-location groups first, then the ops that are in none."""
    unit = graph.op_colocation.astype(np.int64)
    alone = unit < 0
    unit[alone] = len(graph.colocations) + np.arange(int(alone.sum()))
    _, unit = np.unique(unit, return_inverse=True)  # a group may be empty
    return unit, int(unit.max()) + 1


def _new_state(facts: Facts) -> State:
    """Give the state in which nothing is placed."""
    num_ops, num_devices = facts.op_ps.shape
    num_tensors = len(facts.tensor_op)
    reader = np.repeat(np.arange(num_ops), np.diff(facts.op_inputs))
    made = ~facts.op_resident[facts.tensor_op[facts.input_tensor]]
    readers = np.diff(facts.tensor_uses).astype(np.int64)
    alias = np.flatnonzero(facts.tensor_root >= 0)
    held = readers.copy()
    np.add.at(held, facts.tensor_root[alias], readers[alias])
    num_channels = int(facts.link_channel.max(initial=0)) + 1
    return State(
        unit_device=np.full(len(facts.unit_bytes), -1, dtype=np.int64),
        finish=np.zeros(num_ops, dtype=np.int64),
        start=np.zeros(num_ops, dtype=np.int64),
        missing=np.bincount(reader[made], minlength=num_ops),
        copy_at=np.full((num_tensors, num_devices), -1, dtype=np.int64),
        readers=held,
        live_bytes=np.zeros(num_devices, dtype=np.int64),
        peak_bytes=np.zeros((num_devices, min(MAX_STRETCHES, num_ops)), dtype=np.int64),
        stretch=np.zeros(num_ops, dtype=np.int64),
        decisions=np.zeros(1, dtype=np.int64),
        channel=np.zeros(num_channels, dtype=np.int64),
        trial=np.zeros(num_channels, dtype=np.int64),
    )


@dataclass(frozen=True, eq=False)
class _Favourites:
    """The child that an op's device waits for, and how long."""

    child: IntArray  # [N] or -1
    wait_ps: IntArray  # [N]

    @classmethod
    def nobody(cls, problem: Problem) -> _Favourites:
        none = np.full(problem.num_ops, -1, dtype=np.int64)
        return cls(none, np.zeros_like(none))


def _earliest_start(facts: Facts, favourites: _Favourites) -> State:
    """Run the kernel of `m_etf` and `m_sct`."""
    num_ops, num_devices = facts.op_ps.shape
    state = _new_state(facts)
    heaps = (2 * num_devices, num_ops)
    queues = Queues(
        key=np.empty(heaps, dtype=np.int64),
        rank=np.empty(heaps, dtype=np.int32),
        size=np.zeros(2 * num_devices, dtype=np.int64),
        options=np.zeros(num_ops, dtype=np.int64),
        arrives=np.zeros(num_ops, dtype=np.int64),
        done=np.zeros(num_ops, dtype=np.bool_),
        free=np.zeros(num_devices, dtype=np.int64),
        child=np.full(num_devices, -1, dtype=np.int64),
        child_arrives=np.zeros(num_devices, dtype=np.int64),
        awake_until=np.zeros(num_devices, dtype=np.int64),
    )
    allowed = facts.unit_allowed[facts.op_unit]
    fastest = np.where(allowed, facts.op_ps, np.iinfo(np.int64).max).min(axis=1)
    index = np.arange(num_ops, dtype=np.int32)
    earliest_start(
        facts,
        state,
        queues,
        index,
        index,
        fastest,
        favourites.child,
        favourites.wait_ps,
        int((~facts.op_resident).sum()),
    )
    return state


def _insertion(facts: Facts, rank: IdArray, ahead_ps: IntArray) -> State:
    """Run the kernel of `heft` and `peft`."""
    num_ops, num_devices = facts.op_ps.shape
    state = _new_state(facts)
    gaps = Gaps(
        begin=np.empty((num_devices, MAX_GAPS), dtype=np.int64),
        end=np.empty((num_devices, MAX_GAPS), dtype=np.int64),
        number=np.zeros(num_devices, dtype=np.int64),
        free=np.zeros(num_devices, dtype=np.int64),
    )
    insertion(
        facts,
        state,
        gaps,
        np.empty((1, num_ops), dtype=np.int64),
        np.empty((1, num_ops), dtype=np.int32),
        np.zeros(1, dtype=np.int64),
        rank,
        np.argsort(rank).astype(np.int32),
        ahead_ps,
    )
    return state


def _ranking(priority: FloatArray) -> IdArray:
    """Number the ops by falling priority, then index."""
    rank = np.empty(len(priority), dtype=np.int32)
    rank[np.argsort(-priority, kind="stable")] = np.arange(len(priority))
    return rank


def _upward(problem: Problem, facts: Facts) -> FloatArray:
    """Give each op's upward rank: mean times, transfers included, to the end."""
    upward = np.zeros(problem.num_ops)
    upward_ranks(facts, _mean_ps(facts), _tensor_ps(problem), upward)
    return upward


def _mean_ps(facts: Facts) -> FloatArray:
    """Give each op's mean time over the devices that may run it."""
    mean: FloatArray = np.average(facts.op_ps, axis=1, weights=facts.unit_allowed[facts.op_unit])
    return mean


def _tensor_ps(problem: Problem) -> FloatArray:
    """Give each tensor's mean transfer time over all links."""
    cluster = problem.cluster
    links = ~np.eye(problem.num_devices, dtype=np.bool_)
    if not links.any():
        return np.zeros(problem.graph.num_tensors)
    latency_ps = (cluster.latency_s[links] * PS_PER_S).mean()
    byte_ps = (PS_PER_S / cluster.bytes_per_s[links]).mean()
    mean: FloatArray = latency_ps + byte_ps * problem.graph.tensor_bytes
    return mean


@dataclass(frozen=True, eq=False)
class _Edges:
    """Pairs of ops, neither resident, of which the second reads what the first makes."""

    maker: IntArray  # [E]
    reader: IntArray  # [E]
    ps: FloatArray  # [E] mean transfer time of all tensors between them

    @classmethod
    def of(cls, problem: Problem) -> _Edges:
        graph = problem.graph
        makers = graph.tensor_op[graph.use_tensor].astype(np.int64)
        inner = ~graph.op_is_resident[makers]
        pairs, at = np.unique(
            makers[inner] * graph.num_ops + graph.use_op[inner], return_inverse=True
        )
        ps = np.bincount(at, _tensor_ps(problem)[graph.use_tensor[inner]], minlength=len(pairs))
        return cls(pairs // graph.num_ops, pairs % graph.num_ops, ps.astype(np.float64))


def _favourites(problem: Problem, time_limit_s: float) -> _Favourites:
    """Choose at most one favourite child an op, and one favourite parent a child."""
    edges = _Edges.of(problem)
    facts = _facts(problem, 1.0)
    paid = None
    if len(edges.ps) <= MAX_LP_EDGES:
        paid = _solve(facts, edges, time_limit_s)
    if paid is not None:
        order = np.lexsort((-edges.ps, paid))[: int((paid < FAVOURITE).sum())]
    else:
        downward = np.zeros(problem.num_ops)
        mean_ps = _mean_ps(facts)
        downward_ranks(facts, mean_ps, _tensor_ps(problem), downward)
        through = downward[edges.maker] + mean_ps[edges.maker] + edges.ps
        through += _upward(problem, facts)[edges.reader]
        order = np.lexsort((-edges.ps, -through))
    made = _Favourites.nobody(problem)
    has_parent = np.zeros(problem.num_ops, dtype=np.bool_)
    for e in order.tolist():
        maker, reader = edges.maker[e], edges.reader[e]
        if made.child[maker] < 0 and not has_parent[reader]:
            made.child[maker] = reader
            made.wait_ps[maker] = round(edges.ps[e])
            has_parent[reader] = True
    return made


def _solve(facts: Facts, edges: _Edges, time_limit_s: float) -> FloatArray | None:
    """
    Solve the linear program of favourite children; give the part that each edge pays.

    The columns are the edges' parts, the ops' starts, and the makespan. None if the time is over.
    """
    num_edges, num_ops = len(edges.ps), len(facts.op_unit)
    if num_edges == 0 or time_limit_s <= 0:
        return None
    allowed = facts.unit_allowed[facts.op_unit]
    op_ps = np.where(allowed, facts.op_ps, np.iinfo(np.int64).max).min(axis=1)
    # Whole picoseconds are too large for the solver's tolerances.
    scale = 1.0 / max(float(op_ps.mean()), float(edges.ps.mean()), 1.0)
    last = num_edges + num_ops
    e, n = np.arange(num_edges), np.arange(num_ops)
    ones = np.ones
    rows = [e, e, e, num_edges + n, num_edges + n]
    columns = [e, num_edges + edges.maker, num_edges + edges.reader, num_edges + n]
    columns.append(np.full(num_ops, last))
    values = [edges.ps * scale, ones(num_edges), -ones(num_edges), ones(num_ops), -ones(num_ops)]
    bounds = [-op_ps[edges.maker] * scale, -op_ps * scale]
    begin = num_edges + num_ops
    for end in (edges.maker, edges.reader):  # all but one pay
        ops, at, degree = np.unique(end, return_inverse=True, return_counts=True)
        rows.append(begin + at)
        columns.append(e)
        values.append(-ones(num_edges))
        bounds.append(1.0 - degree)
        begin += len(ops)
    matrix = csr_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
        shape=(begin, last + 1),
    )
    cost = np.zeros(last + 1)
    cost[last] = 1.0
    limits = np.zeros((last + 1, 2))
    limits[:, 1] = np.where(np.arange(last + 1) < num_edges, 1.0, np.inf)
    found = linprog(
        cost,
        A_ub=matrix,
        b_ub=np.concatenate(bounds),
        bounds=limits,
        method="highs",
        options={"time_limit": float(time_limit_s)},
    )
    if found.status != 0:
        return None
    paid: FloatArray = found.x[:num_edges]
    return paid


@dataclass(eq=False)
class _Filling:
    """Devices that `m_topo` fills in turn."""

    facts: Facts
    order: list[int]  # devices, CPUs last
    unit_device: IntArray  # [M] or -1
    taken_bytes: list[int]  # [M]
    persistent_bytes: list[int]  # [M]
    filled_bytes: list[int]  # [D]
    room_bytes: list[int]  # [D] for weights
    cap_bytes: float
    turn: int = 0  # into `order`

    @classmethod
    def empty(cls, problem: Problem, facts: Facts) -> _Filling:
        kinds = problem.cluster.device_kinds
        op_bytes = facts.op_output_bytes + facts.op_workspace_bytes
        taken = facts.unit_bytes + _sum_at(facts.op_unit, op_bytes, len(facts.unit_bytes))
        bundles = _bundles(problem.graph, facts)
        starts = np.cumsum([0, *(len(units) for _, units in bundles)])[:-1]
        together = taken[[unit for _, units in bundles for unit in units]]
        largest = int(np.add.reduceat(together, starts).max())
        return cls(
            facts=facts,
            order=sorted(range(problem.num_devices), key=lambda d: (kinds[d] == "cpu", d)),
            unit_device=np.full(len(taken), -1, dtype=np.int64),
            taken_bytes=taken.tolist(),
            persistent_bytes=facts.unit_bytes.tolist(),
            filled_bytes=[0] * problem.num_devices,
            room_bytes=facts.capacity_bytes.tolist(),
            cap_bytes=int(taken.sum()) / max(sum(kind != "cpu" for kind in kinds), 1) + largest,
        )

    def choose(self, first: int, units: list[int]) -> int:
        """Choose a device for unit `first` so that `units` fit, moving on from full ones."""
        need = sum(self.taken_bytes[unit] for unit in units)
        weights = sum(self.persistent_bytes[unit] for unit in units)

        def has_room(d: int) -> bool:
            return self.filled_bytes[d] + need <= self.cap_bytes and weights <= self.room_bytes[d]

        while self.turn < len(self.order) - 1 and not has_room(self.order[self.turn]):
            self.turn += 1
        in_turn = self.order[self.turn :] + self.order[: self.turn]
        allowed = [d for d in in_turn if self.facts.unit_allowed[first, d]]
        roomiest = max(allowed, key=lambda d: self.room_bytes[d])
        return next((d for d in allowed if has_room(d)), roomiest)

    def place(self, unit: int, d: int) -> None:
        """Put a unit on a device."""
        self.unit_device[unit] = d
        self.filled_bytes[d] += self.taken_bytes[unit]
        self.room_bytes[d] -= self.persistent_bytes[unit]


def _bundles(graph: Graph, facts: Facts) -> list[tuple[int, list[int]]]:
    """
    List, op by op, the units that are placed with it: its own, and weights that it reads first.

    Weights that nobody reads come last, each by itself, with the number of ops for an op.
    """
    first = np.arange(graph.num_ops)
    first[graph.op_is_resident] = graph.num_ops
    reads = graph.op_is_resident[graph.tensor_op[graph.use_tensor]]
    np.minimum.at(first, graph.tensor_op[graph.use_tensor[reads]], graph.use_op[reads])
    unit_first = np.full(len(facts.unit_bytes), graph.num_ops)
    np.minimum.at(unit_first, facts.op_unit, first)
    bundles: list[tuple[int, list[int]]] = []
    for unit in np.argsort(unit_first, kind="stable").tolist():
        op = int(unit_first[unit])
        if bundles and bundles[-1][0] == op < graph.num_ops:
            bundles[-1][1].append(unit)
        else:
            bundles.append((op, [unit]))
    return bundles
