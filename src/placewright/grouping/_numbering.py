"""
Group numbers as every grouping gives them.

This module owns one thing: groups are numbered from 0 in the order of their first ops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def number_groups(labels: NDArray[Any]) -> NDArray[np.int64]:
    """Turn any integer labels ([N]) into group numbers, from 0 by first op."""
    _, first, at = np.unique(labels, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    numbered: NDArray[np.int64] = number[at]
    return numbered
