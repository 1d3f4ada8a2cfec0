"""Ops by layer and phase, the larger of those in stretches: what searches move about."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewright.grouping._numbering import number_groups
from placewright.grouping.layers import find_layers
from placewright.problem import Problem


def layer_chunks(problem: Problem, num_groups: int = 256) -> NDArray[np.int64]:
    """
    Group ops by layer and phase, and cut the larger of those groups into stretches of the order.

    A layer of an unrolled network becomes stretches of its steps; small layers stay whole.
    Co-located ops are with the first of them.
    """
    layers = find_layers(problem.graph)
    phases = np.array([phase == "forward" for phase in problem.graph.op_phases])
    key = layers.op_layer * 2 + phases
    work = problem.costs.op_ps.min(axis=1).astype(np.float64) + 1.0
    whole = np.bincount(key, weights=work)
    parts = np.maximum(np.rint(num_groups * whole / whole.sum()), 1).astype(np.int64)
    order = np.lexsort((np.arange(problem.num_ops), key))
    total = np.cumsum(work[order])
    before = np.concatenate([[0.0], np.cumsum(whole)])[key[order]]
    share = (total - work[order] / 2 - before) / whole[key[order]]
    part = np.minimum((share * parts[key[order]]).astype(np.int64), parts[key[order]] - 1)
    grouping = np.empty(problem.num_ops, dtype=np.int64)
    grouping[order] = key[order] * (num_groups + 1) + part
    grouping[problem.colocation_members] = grouping[problem.colocation_leaders]
    return number_groups(grouping)
