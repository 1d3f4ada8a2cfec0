"""
What is called for an aten op on a kind of device.

Steps are captured as a CPU would run them. Most ops have one name everywhere; this module owns the
few that a GPU knows under another one, or has a faster kernel for, with the same arguments and
results, so that the forward pass of an op may run on one kind of device and its backward pass on
another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_ALIGNED = 8
"""Rows of a mask begin at multiples of so many values."""

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


def overwrites_lists(target: Any) -> bool:
    """Tell whether an aten op overwrites lists of tensors, as fused optimisers do."""
    return any(
        argument.alias_info is not None
        and argument.alias_info.is_write
        and isinstance(argument.type, torch.ListType)
        for argument in target._schema.arguments
    )


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
    mask = _aligned(attn_mask, query, key)
    found = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, mask, True, dropout_p, is_causal, scale=scale
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
    padded = torch.nn.functional.pad(logsumexp, (0, missing), value=float("inf")).contiguous()
    mask = _aligned(attn_mask, query, key)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    found = aten._scaled_dot_product_efficient_attention_backward.default(
        grad_out, query, key, value, mask, out, padded, seed, seed, dropout_p,
        [True, True, True, False], is_causal, scale=scale,
    )  # fmt: skip
    return found[0], found[1], found[2]


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Give a mask rows that begin where a GPU can load them."""
    if mask is None:
        return None
    length = key.shape[2]
    if length % _ALIGNED:
        if mask.shape[-1] != length:
            mask = mask.expand(*mask.shape[:-1], length)
        mask = torch.nn.functional.pad(mask, (0, -length % _ALIGNED))[..., :length]
    return mask.expand(*query.shape[:3], length)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if not (training and _suits_cudnn(x, weight)):
        found: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm.default(
            x, weight, bias, running_mean, running_var, training, momentum, eps
        )
        return found
    made = aten.cudnn_batch_norm.default(
        x, weight, bias, running_mean, running_var, training, momentum, eps
    )
    return made[0], made[1], made[2]


def _batch_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    if not (train and _suits_cudnn(x, weight)):
        found: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm_backward.default(
            grad_out, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps,
            output_mask,
        )  # fmt: skip
        return found
    nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
    made = aten.cudnn_batch_norm_backward.default(
        x, grad_out, weight, running_mean, running_var, save_mean, save_invstd, eps, nothing
    )
    return made[0], made[1], made[2]


def _suits_cudnn(x: Tensor, weight: Tensor | None) -> bool:
    """Tell whether PyTorch would leave this batch norm to cuDNN, and nothing more is kept by it."""
    return (
        weight is not None
        and torch.backends.cudnn.enabled
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and x.dim() > 2
        and x.is_contiguous()
        and not (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    )


_ON_CUDA: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
