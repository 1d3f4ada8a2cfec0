"""
What is called for an aten op on a kind of device.

Steps are captured as a CPU would run them. Most ops have one name everywhere; this module owns the
few that a GPU knows under another one, with the same arguments and results, so that the forward
pass of an op may run on one kind of device and its backward pass on another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_ROW = 32
"""GPUs pad the logarithms of attention's sums to a multiple of so many queries."""


def kernel_for(target: Any, kind: str) -> Callable[..., Any]:
    """Find what to call for an aten op on a kind of device (``"cpu"``, ``"cuda"``)."""
    found: Callable[..., Any] = _ON_CUDA.get(target, target) if kind == "cuda" else target
    return found


def is_random(target: Any) -> bool:
    """Tell whether an aten op draws random numbers from a generator that it can be given."""
    takes = any(argument.name == "generator" for argument in target._schema.arguments)
    return takes and torch.Tag.nondeterministic_seeded in target.tags


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    found = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )
    return found[0], found[1][..., : query.shape[2]].contiguous()


def _attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    length = query.shape[2]
    missing = -length % _ROW
    padded = torch.nn.functional.pad(logsumexp, (0, missing), value=float("inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    found = aten._scaled_dot_product_efficient_attention_backward.default(
        grad_out, query, key, value, attn_mask, out, padded, seed, seed, dropout_p,
        [True, True, True, False], is_causal, scale=scale,
    )  # fmt: skip
    return found[0], found[1], found[2]


_ON_CUDA: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
