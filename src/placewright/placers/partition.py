"""
Graph partitioners: Scotch, METIS and Mt-KaHyPar, given the op graph.

They balance work and keep little traffic between devices. None of them knows that ops wait for
each other, nor of memory; the papers use `scotch` and `mincut` as opponents. This module owns
what each library is given:

* A vertex is an op, or a co-location group as one. It weighs its time on the fastest of the
  devices; parameters weigh nothing, but stay with their edges.
* A device should get work in proportion to its speed: the inverse of the time that it would take
  for all of the ops.
* An edge joins an op to every reader of its tensor and weighs the tensor's bytes (at least one
  unit, for control dependencies). For `kahypar`, a tensor and all of its readers are one
  hyperedge.

Devices that no op may use are left out. What ends up where it may not run moves to the first
device that may run it. The results depend on the seed alone, not on threads or on the machine.

Letters: ``N`` ops, ``T`` tensors, ``D`` devices, ``V`` vertices, ``E`` edges, ``P`` parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewright.errors import InputError
from placewright.placers import _scotch
from placewright.placers.experts import accelerators
from placewright.problem import Problem

Placement = NDArray[np.int64]  # [N]
IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

MAX_TOTAL = _scotch.MAX_TOTAL
"""What the weights of all vertices, or of all edges, are scaled to at most."""

_SHARE_UNITS = 10_000
_MIN_SHARE = 1e-6
_SAME_LINKS = 1.25
_MAX_DISTANCE = 64
_MIN_LINK_S = 1e-12
_IMBALANCE = 0.03


def scotch(problem: Problem, seed: int = 0) -> Placement:
    """
    Map the op graph onto all devices with Scotch, as the papers do.

    The target is a complete graph of the devices with their speeds; where some link is more than
    a quarter slower than another, its edges are as long as links are slow. A link's slowness is
    the time that a tensor of mean size takes, both ways averaged, up to 32 times the fastest.

    Raises
    ------
    InputError
        Scotch is not installed.
    """
    _load_scotch("scotch")

    def split(task: _Task) -> IntArray:
        return _scotch_parts(task, _distances(task), seed)

    return _place(problem, range(problem.num_devices), split)


def mincut(problem: Problem, seed: int = 0) -> Placement:
    """
    Cut the op graph with Scotch for the devices that are no CPUs, by bytes alone.

    Only what may run on nothing else is placed on a CPU.

    Raises
    ------
    InputError
        Scotch is not installed, or there is no device but CPUs.
    """
    _load_scotch("mincut")

    def split(task: _Task) -> IntArray:
        return _scotch_parts(task, None, seed)

    return _place(problem, accelerators(problem), split)


def metis(problem: Problem, seed: int = 0) -> Placement:
    """
    Partition the op graph over all devices with METIS, by recursive bisection.

    Raises
    ------
    InputError
        METIS is not installed.
    """
    try:
        import pymetis
    except ImportError:
        raise _missing("METIS", "metis", "metis") from None
    options = pymetis.Options(seed=_positive(seed))

    def bisect(edges: _Edges, weight: IntArray, share: FloatArray) -> IntArray:
        parts = pymetis.part_graph(
            2,
            pymetis.CSRAdjacency(edges.begins, edges.neighbours),
            vweights=weight,
            eweights=edges.weights,
            tpwgts=share.tolist(),
            recursive=True,
            options=options,
        ).vertex_part
        return np.asarray(parts, dtype=np.int64)

    def split(task: _Task) -> IntArray:
        return _bisected(bisect, task.edges(MAX_TOTAL), task.weight, task.share)

    return _place(problem, range(problem.num_devices), split)


def kahypar(problem: Problem, seed: int = 0) -> Placement:
    """
    Partition the ops over all devices with Mt-KaHyPar, a tensor being one hyperedge.

    What is minimised is the bytes that are sent when each device fetches a tensor once.

    Raises
    ------
    InputError
        Mt-KaHyPar is not installed.
    """
    try:
        import mtkahypar
    except ImportError:
        raise _missing("Mt-KaHyPar", "kahypar", "kahypar") from None

    def split(task: _Task) -> IntArray:
        # Its deterministic presets ignore their seed, but not how vertices are numbered.
        number = np.random.default_rng(_positive(seed)).permutation(len(task.weight))
        library = _start_kahypar(mtkahypar)
        context = library.context_from_preset(mtkahypar.PresetType.DETERMINISTIC_QUALITY)
        context.logging = False
        context.set_partitioning_parameters(len(task.share), _IMBALANCE, mtkahypar.Objective.KM1)
        most = np.ceil(task.weight.sum() * task.share * (1 + _IMBALANCE)).astype(np.int64) + 1
        context.set_individual_target_block_weights(most.tolist())
        nets, weights = task.nets(number)
        weight = np.empty_like(task.weight)
        weight[number] = task.weight
        hypergraph = library.create_hypergraph(
            context, len(weight), len(nets), nets, weight.tolist(), weights.tolist()
        )
        parts = np.array(hypergraph.partition(context).get_partition(), dtype=np.int64)
        return parts[number]

    return _place(problem, range(problem.num_devices), split)


@dataclass(frozen=True, eq=False)
class _Edges:
    """An undirected graph as compressed rows, every edge from both ends."""

    begins: IntArray  # [V + 1]
    neighbours: IntArray  # [2E]
    weights: IntArray  # [2E] at least 1

    def within(self, inside: BoolArray) -> _Edges:  # [V]
        """Give the graph of some vertices."""
        number = np.cumsum(inside) - 1
        row = np.repeat(np.arange(len(inside)), np.diff(self.begins))
        kept = inside[row] & inside[self.neighbours]
        return _Edges(
            _begins(number[row[kept]], int(inside.sum())),
            number[self.neighbours[kept]],
            self.weights[kept],
        )


@dataclass(frozen=True, eq=False)
class _Task:
    """What is left of a problem for a partitioner: vertices, and the parts wanted."""

    problem: Problem
    devices: IntArray  # [P] the device of each part
    vertex: IntArray  # [N] of each op
    weight: IntArray  # [V] scaled
    share: FloatArray  # [P] of all work; they add up to 1

    def edges(self, max_total: int) -> _Edges:
        """Join makers to readers; a vertex that reads a tensor twice fetches it once."""
        graph, count = self.problem.graph, len(self.weight)
        reads = np.unique(graph.use_tensor.astype(np.int64) * count + self.vertex[graph.use_op])
        tensor, reader = reads // count, reads % count
        maker = self.vertex[graph.tensor_op[tensor]]
        apart = maker != reader
        low, high = np.minimum(maker, reader)[apart], np.maximum(maker, reader)[apart]
        pairs, at = np.unique(low * count + high, return_inverse=True)
        size = np.bincount(at, graph.tensor_bytes[tensor[apart]], minlength=len(pairs))
        weights = np.maximum(_scaled(size, max_total), 1)
        left, right = pairs // count, pairs % count
        row, column = np.concatenate((left, right)), np.concatenate((right, left))
        order = np.lexsort((column, row))
        return _Edges(
            _begins(row[order], count), column[order], np.concatenate((weights, weights))[order]
        )

    def nets(self, number: IntArray) -> tuple[list[list[int]], IntArray]:
        """List the numbers of each tensor's vertices, where there are several, and its weight."""
        graph, count = self.problem.graph, len(self.weight)
        made = np.arange(graph.num_tensors) * count + self.vertex[graph.tensor_op]
        read = graph.use_tensor.astype(np.int64) * count + self.vertex[graph.use_op]
        pins = np.unique(np.concatenate((made, read)))
        size = np.bincount(pins // count, minlength=graph.num_tensors)
        pins = pins[size[pins // count] > 1]
        tensor, begins = np.unique(pins // count, return_index=True)
        flat = number[pins % count].tolist()
        nets = [flat[a:b] for a, b in pairwise([*begins.tolist(), len(flat)])]
        return nets, np.maximum(_scaled(graph.tensor_bytes[tensor], MAX_TOTAL), 1)


def _place(
    problem: Problem, devices: Sequence[int], split: Callable[[_Task], IntArray]
) -> Placement:
    """Split a problem over the devices that some op may use, and keep to what ops allow."""
    first = np.arange(problem.num_ops)
    first[problem.colocation_members] = problem.colocation_leaders
    ops, vertex = np.unique(first, return_inverse=True)
    allowed = problem.allowed[ops]
    group = problem.graph.op_colocation[ops]
    allowed[group >= 0] = problem.colocation_allowed[group[group >= 0]]
    wanted = np.zeros(problem.num_devices, dtype=np.bool_)
    wanted[[*devices]] = True
    usable = np.flatnonzero(wanted & allowed.any(axis=0))
    at = np.zeros(len(ops), dtype=np.int64)
    if len(usable) > 0:
        task = _make_task(problem, usable, vertex, len(ops))
        alone = len(usable) == 1 or len(ops) == 1
        at = usable[np.full(len(ops), task.share.argmax()) if alone else split(task)]
    best = (allowed * (1 + wanted)).argmax(axis=1)  # the first of the wanted, else of all
    placement: Placement = np.where(allowed[np.arange(len(ops)), at], at, best)[vertex]
    return placement


def _make_task(problem: Problem, devices: IntArray, vertex: IntArray, count: int) -> _Task:
    total_ps = problem.costs.op_ps[:, devices].sum(axis=0)
    fastest = devices[total_ps.argmin()]
    work = np.bincount(vertex, problem.costs.op_ps[:, fastest], minlength=count)
    weight = np.maximum(_scaled(work, MAX_TOTAL), work > 0)
    speed = 1.0 / np.maximum(total_ps, 1)
    share = np.maximum(speed / speed.sum(), _MIN_SHARE)
    if weight.sum() == 0:
        weight = np.ones_like(weight)
    return _Task(problem, devices, vertex, weight, share / share.sum())


def _scaled(values: NDArray[Any], max_total: int) -> IntArray:
    """Round down to whole numbers, after scaling so that they add up to `max_total` at most."""
    total = float(values.sum())
    scaled: IntArray = (values * min(1.0, max_total / max(total, 1.0))).astype(np.int64)
    return scaled


def _begins(rows: IntArray, count: int) -> IntArray:
    """Give each row's first place among sorted row numbers."""
    return np.searchsorted(rows, np.arange(count + 1)).astype(np.int64)


def _distances(task: _Task) -> IntArray | None:  # [P, P]
    """Tell how much slower each link is than the fastest, in halves; None if all are alike."""
    cluster, graph = task.problem.cluster, task.problem.graph
    mean = float(graph.tensor_bytes[graph.use_tensor].mean()) if graph.num_uses else 0.0
    links = np.ix_(task.devices, task.devices)
    time_s = cluster.latency_s[links] + mean / np.maximum(cluster.bytes_per_s[links], 1.0)
    time_s = (time_s + time_s.T) / 2
    others = time_s[~np.eye(len(time_s), dtype=np.bool_)]
    if others.max() <= _SAME_LINKS * others.min():
        return None
    halves = np.rint(2 * time_s / max(others.min(), _MIN_LINK_S))
    distances: IntArray = np.clip(halves, 2, _MAX_DISTANCE).astype(np.int64)
    np.fill_diagonal(distances, 0)
    return distances


def _scotch_parts(task: _Task, distances: IntArray | None, seed: int) -> IntArray:
    farthest = 1 if distances is None else int(distances.max())
    edges = task.edges(MAX_TOTAL // farthest)
    return _scotch.map_graph(
        edges.begins,
        edges.neighbours,
        edges.weights,
        task.weight,
        np.maximum(np.rint(task.share * _SHARE_UNITS), 1).astype(np.int64),
        distances,
        _positive(seed),
    )


def _bisected(
    bisect: Callable[[_Edges, IntArray, FloatArray], IntArray],
    edges: _Edges,
    weight: IntArray,
    share: FloatArray,
) -> IntArray:
    """
    Halve the parts, and the vertices with them, until each part is alone.

    METIS would do the same by itself, but prints when one half of the parts gets no vertex.
    """
    if len(share) == 1 or len(weight) <= 1:
        return np.full(len(weight), share.argmax(), dtype=np.int64)
    half = len(share) // 2
    left = float(share[:half].sum() / share.sum())
    side = bisect(edges, weight, np.array([left, 1.0 - left]))
    parts = np.empty(len(weight), dtype=np.int64)
    for k, (first, shares) in enumerate(((0, share[:half]), (half, share[half:]))):
        inside = side == k
        parts[inside] = first + _bisected(bisect, edges.within(inside), weight[inside], shares)
    return parts


@cache
def _start_kahypar(library: Any) -> Any:
    """Start Mt-KaHyPar's threads, which a process does once."""
    return library.initialize(1, False)


def _load_scotch(placer: str) -> None:
    try:
        _scotch.load()
    except OSError:
        raise _missing("Scotch", placer, "scotch") from None


def _missing(library: str, placer: str, extra: str) -> InputError:
    return InputError(
        f"{library} is not installed, and the placer `{placer}` needs it. Install it with"
        f" `pip install 'placewright[{extra}]'`."
    )


def _positive(seed: int) -> int:
    """Fold a seed into what the libraries take; 0 and 1 are the same to them."""
    return 1 + seed % (2**31 - 1)
