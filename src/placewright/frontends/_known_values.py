"""
Values that are known before there are any.

This module owns what a comparison with a random number in [0, 1) gives whatever is drawn: models
ask ``torch.rand([]) < layerdrop`` before each layer, also where `layerdrop` is zero.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

_ATEN = torch.ops.aten
_COMPARISONS: dict[Any, Any] = {
    _ATEN.lt.Scalar: operator.lt,
    _ATEN.le.Scalar: operator.le,
    _ATEN.gt.Scalar: operator.gt,
    _ATEN.ge.Scalar: operator.ge,
}


class RandomChoiceError(Exception):
    """A random number decides what is computed."""


def find_known(node: torch.fx.Node) -> bool | None:
    """
    Find the only value that a comparison can have; None where that is not known.

    Parameters
    ----------
    node
        The call that made the tensor whose value is asked for.

    Raises
    ------
    RandomChoiceError
        It depends on a random number.
    """
    compare = _COMPARISONS.get(node.target)
    if compare is None or node.users:
        return None
    drawn, bound = node.args
    if not isinstance(drawn, torch.fx.Node) or drawn.target is not _ATEN.rand.default:
        return None
    if any(user.target not in _COMPARISONS for user in drawn.users):  # it may be overwritten
        return None
    is_at_zero = bound == 0 and compare in (operator.lt, operator.ge)
    if bound < 0 or bound >= 1 or is_at_zero:  # type: ignore[operator]
        return bool(compare(0.5, bound))
    raise RandomChoiceError
