"""
Sole consumers: what only one group reads is placed with that group.

The grouping of Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning"
(2017), taken to its fixpoint; Baechi (Jeon et al., 2020) calls it co-placement.

This module owns what counts as being read.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewright.graph import BoolArray, Graph
from placewright.grouping import _kernels
from placewright.grouping._numbering import number_groups
from placewright.grouping.colocated import colocated
from placewright.problem import Problem


def sole_consumer(problem: Problem, with_gradients: bool = False) -> NDArray[np.int64]:  # [N]
    """
    Merge a group into the only other group that reads what it makes, until nothing changes.

    The start is `colocated`, with or without gradients. The result does not depend on the order
    of the merges. A parameter is merged like any other op, by its readers or, where it has an
    update, by the readers of the two. Zero-byte tensors count for an op that makes nothing else:
    that an update waits for all readers of its parameter keeps none of them from merging.
    """
    graph = problem.graph
    groups = colocated(problem, with_gradients)
    counts = _counts(graph)[graph.use_tensor]
    makers = groups[graph.tensor_op[graph.use_tensor[counts]]]
    readers = groups[graph.use_op[counts]]
    outside = makers != readers
    makers, readers = makers[outside], readers[outside]
    count = int(groups.max()) + 1
    order = np.argsort(makers, kind="stable")
    begins = np.searchsorted(makers[order], np.arange(count + 1))
    last = np.zeros(count, dtype=np.int64)
    last[groups] = np.arange(graph.num_ops)
    # Last groups first: without co-location, one sweep then finds every merge.
    merged = _kernels.merge_sole_consumers(np.argsort(-last), begins, readers[order])
    return number_groups(merged[groups])


def _counts(graph: Graph) -> BoolArray:  # [T]
    """Tell the tensors whose readers count."""
    has_bytes = graph.tensor_bytes > 0
    makes_bytes = np.zeros(graph.num_ops, dtype=np.bool_)
    makes_bytes[graph.tensor_op[has_bytes]] = True
    counts: BoolArray = has_bytes | ~makes_bytes[graph.tensor_op]
    return counts
