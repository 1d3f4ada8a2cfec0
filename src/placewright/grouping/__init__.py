"""
Groupings: which ops are placed together, so that a placer decides on fewer things.

This package owns one grouping a file. Each is a function from a `Problem` to the group of every op
([N] int64, groups numbered from 0 by their first op). Unless a grouping says otherwise, its groups
may depend on each other in circles, which is no harm to a placement; `split_cycles` refines it for
`coarsen`, which refuses circles.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from placewright.grouping.colocated import colocated
from placewright.grouping.heavy_edges import heavy_edges
from placewright.grouping.layer_chunks import layer_chunks
from placewright.grouping.modules import by_module
from placewright.grouping.repeated_blocks import Blocks, repeated_blocks
from placewright.grouping.sole_consumer import sole_consumer
from placewright.problem import Problem

GROUPINGS: dict[str, Callable[[Problem], NDArray[np.int64]]] = {
    "colocated": colocated,
    "sole-consumer": sole_consumer,
    "heavy-edges": heavy_edges,
    "by-module": by_module,
    "layer-chunks": layer_chunks,
}
"""Every grouping with its default settings, by name."""

__all__ = [
    "GROUPINGS",
    "Blocks",
    "by_module",
    "colocated",
    "heavy_edges",
    "layer_chunks",
    "repeated_blocks",
    "sole_consumer",
]
