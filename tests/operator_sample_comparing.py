"""What is seen of one call of an operator, and how it differs from what is seen of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass
class Seen:
    """What can be seen after a call."""

    result: Any  # with every tensor detached and copied
    layout: list[tuple[Any, ...]]  # of the tensors in the result: strides, owners, gradient
    inputs: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)


def difference(ours: Seen, theirs: Seen, has_values: bool = True) -> tuple[str, str] | None:
    """Find what differs, as a group and a sentence."""
    told = _difference_in(ours.result, theirs.result, has_values)
    if told:
        return "result", told
    for k, (mine, other) in enumerate(zip(ours.layout, theirs.layout, strict=True)):
        if mine != other:
            return "layout", f"tensor {k}: strides, owners, same, bits {mine}; eager's {other}"
    if not has_values:
        return None
    for group in ("inputs", "gradients"):
        told = _difference_in(getattr(ours, group), getattr(theirs, group), has_values)
        if told:
            return group, told
    return None


def _difference_in(x: Any, y: Any, has_values: bool) -> str:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return _difference_of(x, y, has_values)
    if type(x).__name__ != type(y).__name__:
        return f"{type(x).__name__}, eager's is {type(y).__name__}"
    if isinstance(x, (tuple, list)):
        if len(x) != len(y):
            return f"{len(x)} values, eager's are {len(y)}"
        found = (_difference_in(a, b, has_values) for a, b in zip(x, y, strict=True))
        return next((f"[{k}] {told}" for k, told in enumerate(found) if told), "")
    if isinstance(x, dict):
        return _difference_in([*x.items()], [*y.items()], has_values)
    return "" if x == y or (x != x and y != y) else f"{x!r}, eager's is {y!r}"


def _difference_of(x: Tensor, y: Tensor, has_values: bool) -> str:
    if (x.shape, x.dtype, x.layout) != (y.shape, y.dtype, y.layout):
        return f"{x.dtype} {list(x.shape)}, eager's is {y.dtype} {list(y.shape)}"
    if not has_values:
        return ""
    x, y = _plain(x), _plain(y)
    wrong = x.isnan() != y.isnan()
    if not wrong.any():
        wrong = (x != y) & ~x.isnan()
    if x.is_floating_point() and not wrong.any():
        wrong = (x.signbit() != y.signbit()) & ~x.isnan()
    if not wrong.any():
        return ""
    count, first = int(wrong.sum()), wrong.flatten().nonzero()[0]
    pair = (x.flatten()[first].item(), y.flatten()[first].item())
    nearness = ""
    if x.is_floating_point():
        gap = (x.double() - y.double())[wrong].abs().max().item()
        nearness = f", at most {gap:.2g} apart"
    return f"{count} of {x.numel()} values differ{nearness}: {pair[0]}, eager's {pair[1]}"


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def spread_of(ours: list[Seen], theirs: list[Seen]) -> str:
    """Compare means and deviations over all elements of all calls."""
    for group in ("result", "gradients"):
        pairs = [_all_values(getattr(seen, group) for seen in side) for side in (ours, theirs)]
        for k, (x, y) in enumerate(zip(*pairs, strict=True)):
            if not x.numel():
                continue
            scale = max(x.std(correction=0).item(), y.std(correction=0).item())
            slack = 6 * scale / x.numel() ** 0.5 + 1e-6
            apart = abs(x.mean() - y.mean()).item()
            spread = abs(x.std(correction=0) - y.std(correction=0)).item()
            if apart > slack or spread > max(4 * slack, 0.2 * scale):
                told = f"mean {x.mean():.4g}, deviation {x.std(correction=0):.4g}"
                eager = f"{y.mean():.4g}, {y.std(correction=0):.4g}"
                return f"{group} {k}: {told}; eager's {eager}, of {x.numel()} values"
    return ""


def _all_values(results: Iterator[Any]) -> list[Tensor]:
    """Join the values of the same tensor in many results, far ones drawn near."""
    every = [
        [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for result in results
    ]
    groups = zip(*every, strict=True)
    return [torch.cat([_plain(t).double().asinh().flatten() for t in group]) for group in groups]
