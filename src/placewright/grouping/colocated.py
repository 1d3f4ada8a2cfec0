"""
Co-location: what a framework keeps together by itself.

This module owns which backward op belongs to which forward op.

Letters: ``N`` ops, ``G`` groups.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from placewright.graph import Graph
from placewright.grouping._numbering import number_groups
from placewright.problem import Problem


def colocated(problem: Problem, with_gradients: bool = False) -> NDArray[np.int64]:  # [N]
    """
    Group what the graph co-locates: a parameter with its update, a buffer with who overwrites it.

    Every other op is a group of its own.

    Parameters
    ----------
    problem
        The problem whose ops are grouped.
    with_gradients
        Also put each backward op with a forward op of its module, as TensorFlow's
        ``colocate_gradients_with_ops`` does. A module may run many times (the steps of an LSTM),
        so the forward op is told by what both read. It is the first that there is of: the last
        one of the module that made an input of the backward op; the last one that reads one of
        its inputs, parameters aside; the one of another backward op of the module that reads or
        makes one of its inputs; the module's first forward op. An op of no module, and one whose
        module has no forward op, stays alone.
    """
    graph = problem.graph
    label = np.arange(graph.num_ops)
    label[problem.colocation_members] = problem.colocation_leaders
    if with_gradients:
        forward = _forward_ops(graph)
        # A backward op that is itself co-located brings its whole co-location group along.
        moved = np.flatnonzero(forward >= 0)
        return _join(label, moved, forward[moved])
    return number_groups(label)


def _join(
    label: NDArray[np.int64], left: NDArray[np.int64], right: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Join the groups of each pair of ops."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    size = len(label)
    rows = np.concatenate([np.arange(size), left])
    columns = np.concatenate([label, right])
    edges = coo_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), (size, size))
    _, joined = connected_components(edges, directed=False)
    return number_groups(joined)


def _forward_ops(graph: Graph) -> NDArray[np.int64]:  # [N]
    """Give each backward op the forward op whose gradient it computes; -1 if it has none."""
    module, phase = graph.op_modules, graph.op_phases
    maker = graph.tensor_op.tolist()
    resident = graph.tensor_is_resident.tolist()
    inputs = _inputs(graph)
    is_forward = [
        p == "forward" and not r for p, r in zip(phase, graph.op_is_resident, strict=True)
    ]
    first_of: dict[str, int] = {}  # a module's first forward op
    reader_of: dict[tuple[str, int], int] = {}  # a module's last forward op that reads a tensor
    for i in range(graph.num_ops):
        if is_forward[i] and module[i]:
            first_of.setdefault(module[i], i)
            reader_of.update(((module[i], t), i) for t in inputs[i] if not resident[t])
    forward = np.full(graph.num_ops, -1, dtype=np.int64)
    backward = [i for i in range(graph.num_ops) if phase[i] == "backward" and module[i] in first_of]
    found_by: dict[tuple[str, int], int] = {}  # the same, by way of a backward op
    for i in backward:
        made = (maker[t] for t in inputs[i])
        own = [m for m in made if is_forward[m] and module[m] == module[i]]
        own = own or [reader_of[key] for t in inputs[i] if (key := (module[i], t)) in reader_of]
        if own:
            forward[i] = max(own)
            for t in inputs[i]:
                if not resident[t]:
                    found_by.setdefault((module[i], t), max(own))
    for i in backward:
        if forward[i] < 0:
            known = [found_by[key] for t in inputs[i] if (key := (module[i], t)) in found_by]
            made = (m for t in inputs[i] if phase[m := maker[t]] == "backward")
            known += [int(forward[m]) for m in made if module[m] == module[i]]
            forward[i] = known[0] if known else first_of[module[i]]
    return forward


def _inputs(graph: Graph) -> list[list[int]]:
    """List the tensors that each op reads."""
    tensors = graph.use_tensor[graph.input_order].tolist()
    begins = graph.op_inputs.tolist()
    return [tensors[a:b] for a, b in pairwise(begins)]
