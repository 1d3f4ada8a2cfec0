"""
How much work an aten call is: its floating-point operations and the bytes it must move.

Flops come from PyTorch's own formulas (`torch.utils.flop_counter`) where there is one, a
multiplication and an addition counting as two. Calls without a formula count one for each element
of what is more, all they read or all they make; those that only move data count none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten
_Formula = Callable[..., int]


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = query.shape, *_spread(query, key, value)
    return int(sdpa_flop_count(*shapes))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = query.shape, *_spread(query, key, value)
    return int(sdpa_backward_flop_count(gradient.shape, *shapes))


def _spread(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Size]:
    """List shapes with a head for each of the query's: several of these may share one."""
    heads = query.shape[1]
    return [torch.Size((t.shape[0], heads, *t.shape[2:])) for t in others]


def _convolution_backward(gradient: Any, x: Any, weight: Any, *args: Any, **_: Any) -> int:
    # PyTorch's formula counts the gradient of a grouped convolution's weight once per group. Each
    # of the two gradients costs what the forward pass does.
    forward = 2 * gradient.numel() * weight.numel() // weight.shape[0]
    is_transposed, mask = args[4], args[7]
    if is_transposed:
        forward = 2 * x.numel() * weight.numel() // weight.shape[0]
    return int(forward * (int(mask[0]) + int(mask[1])))


def _matrix_vector(matrix: Any, *_: Any, **__: Any) -> int:
    return 2 * int(matrix.numel())


_OURS: dict[Any, _Formula] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.convolution_backward: _convolution_backward,
    _aten.mv: _matrix_vector,
    _aten.dot: _matrix_vector,
}

_MOVES = frozenset(
    """
    _to_copy arange cat clone constant_pad_nd copy copy_ embedding empty empty_like
    empty_strided eye fill fill_ flip full full_like gather index index_put index_put_
    index_select lift_fresh lift_fresh_copy masked_fill masked_fill_ new_empty new_empty_strided
    new_full new_ones new_zeros ones ones_like repeat roll scalar_tensor scatter scatter_
    select_backward slice_backward slice_scatter split_with_sizes_copy stack tril triu where
    zero_ zeros zeros_like
    """.split()
)

_GATHERS = {"embedding", "gather", "index", "index_select", "take"}
"""Reads as much of its table as it gives back, whatever the table's size."""

_SCATTERS = {"index_add_", "index_put_", "scatter_", "scatter_add_", "_unsafe_index_put"}
"""Overwrites as much of its table as it is given."""

CREATORS = frozenset(
    """
    arange empty empty_like empty_strided eye full full_like new_empty new_empty_strided
    new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like
    """.split()
)
"""Makes a tensor out of nothing but numbers; what it is given lends its shape at most."""


def name_of(target: Any) -> str:
    """Name an aten op without its overload: ``"mm"``."""
    return str(target._schema.name).partition("::")[2]


def count_flops(target: Any, args: Any, kwargs: dict[str, Any], result: Any) -> float:
    """Count a call's floating-point operations from its tensors' shapes."""
    packet = target.overloadpacket
    if packet in _OURS:
        return float(_OURS[packet](*args, **kwargs))
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if name_of(target) in _MOVES:
        return 0.0
    return float(max(_elements(args), _elements(result)))


def _elements(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (tuple, list)):
        return sum(_elements(part) for part in value)
    return 0


def moved_bytes(
    name: str, reads: Iterable[int], made: Iterable[int], written: Iterable[int]
) -> float:
    """
    Count the bytes that a call moves at least, from those of the tensors it reads (overwritten
    ones included), makes and overwrites.
    """
    sizes = [*reads]
    made_bytes, written_bytes = sum(made), sum(written)
    if name in _GATHERS and sizes:
        return float(2 * made_bytes + sum(sizes[1:]))
    if name in _SCATTERS and sizes:
        return float(3 * sum(sizes[1:]))
    if name in CREATORS:
        return float(made_bytes)
    if name in ("zero_", "fill_"):
        return float(written_bytes)
    return float(sum(sizes) + made_bytes + written_bytes)
