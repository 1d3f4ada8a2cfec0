"""
Which arguments of an aten call are indices, and how large they may be.

A GPU stops for good at an index that is out of range, so what is made up for one has to be right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from placewright.frontends._work import name_of


def find_indices(node: fx.Node) -> Iterator[tuple[fx.Node, tuple[int, int]]]:
    """
    Find what a call uses as indices: the node, and the bound and rise of its numbers.

    Indices into a table are random, so that they hit all of it, as words do. Those that a pooling
    keeps of where its maxima were rise along with the image, those of where bags begin along with
    the words in them. Of errors there are none.
    """
    name, args = name_of(node.target), node.args
    if name == "embedding":
        yield args[1], (_size(args[0], 0), 0)  # type: ignore[misc]
    elif name == "embedding_dense_backward":
        yield args[1], (args[2], 0)  # type: ignore[misc]
    elif name in ("_embedding_bag", "_embedding_bag_forward_only"):
        yield args[1], (_size(args[0], 0), 0)  # type: ignore[misc]
        yield args[2], (_size(args[1], 0), _size(args[2], 0))  # type: ignore[misc]
    elif name == "_linalg_check_errors":
        yield args[0], (1, 0)  # type: ignore[misc]
    elif name.startswith("nll_loss"):
        scores, target = args[1:3] if name.endswith("backward") else args[:2]
        yield target, (_size(scores, 1 if len(_shape(scores)) > 1 else 0), 0)  # type: ignore[misc]
    elif name.rstrip("_") in _ALONG_A_DIMENSION:
        yield args[2], (_size(args[0], args[1]), 0)  # type: ignore[misc]
    elif name.rstrip("_") in _BY_ALL_DIMENSIONS:
        for k, index in enumerate(args[1]):  # type: ignore[arg-type]
            if isinstance(index, fx.Node):
                yield index, (min(_shape(args[0])) if _has_mask(args[1]) else _size(args[0], k), 0)
    elif "max_pool" in name and name.endswith("backward"):
        planes = 2 if "2d" in name else 3
        last = args[-1]
        rise, bound = math.prod(_shape(last)[-planes:]), math.prod(_shape(args[1])[-planes:])
        yield last, (bound, max(1, rise))  # type: ignore[misc]


_ALONG_A_DIMENSION = frozenset(
    """
    gather scatter scatter_add scatter_reduce index_select index_add index_copy index_fill
    index_reduce
    """.split()
)
_BY_ALL_DIMENSIONS = frozenset(
    "index index_put _unsafe_index _unsafe_index_put _index_put_impl".split()
)


def _shape(node: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = node.meta["tensor"][0]
    return shape


def _size(node: Any, dimension: Any) -> int:
    return int((_shape(node) or (1,))[dimension])


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(index, fx.Node) and index.meta["tensor"][2] == torch.bool for index in indices
    )
