"""
What is called for an aten op on a kind of device.

Steps are captured as a CPU would run them. Most ops have one name everywhere; this module owns the
few that a GPU knows under another one, or has a faster kernel for, with the same arguments and
results, so that the forward pass of an op may run on one kind of device and its backward pass on
another. It also owns the few that a CPU computes otherwise below autograd than above it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_ALIGNED = 8
"""Rows of a mask begin at multiples of so many values."""

_ROW = 32
"""GPUs pad the logarithms of attention's sums to a multiple of so many queries."""

_RECURRENT = aten.mkldnn_rnn_layer.default


def kernel_for(target: Any, kind: str) -> Callable[..., Any]:
    """Find what to call for an aten op on a kind of device (``"cpu"``, ``"cuda"``)."""
    forms = _ON_CUDA if kind == "cuda" else _ON_CPU
    found: Callable[..., Any] = forms.get(target, target)
    return found


@cache
def seeded(target: Any) -> Any:
    """Find the form of an aten op that draws random numbers from a generator; None if it cannot."""
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return None
    names = [argument.name for argument in target._schema.arguments]
    if "generator" in names:
        return target
    forms = (getattr(target.overloadpacket, name) for name in target.overloadpacket.overloads())
    for form in forms:
        theirs = [argument.name for argument in form._schema.arguments]
        if "generator" in theirs and sorted(theirs) == sorted([*names, "generator"]):
            return form
    return None


STRICT = frozenset({aten.view.dtype, aten.view_as_complex.default, aten.as_strided.default})
"""Views that look at memory by its strides, or ask for certain ones."""

VIEW = aten.view.default


def view_or_copy(made: Tensor, size: Sequence[int]) -> Tensor:
    """
    Return a look at a result in another shape, or a copy where its strides do not allow that.

    They do for those that it was captured with, and nobody writes into it.
    """
    try:
        return made.view(size)
    except RuntimeError:
        return made.reshape(size)


def laid_out(made: Tensor, stride: tuple[int, ...]) -> Tensor:
    """
    Give a tensor the strides that it was captured with.

    Kernels may lay out their results otherwise than PyTorch says without running them: a GPU's
    attention, or `roll` with channels last.
    """
    pairs = zip(made.shape, made.stride(), stride, strict=True)
    if all(size == 1 or mine == wanted for size, mine, wanted in pairs):
        return made
    twin = torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device)
    return twin.copy_(made)


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
    key, value = _spread(key, query), _spread(value, query)
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
        grad_out, query, _spread(key, query), _spread(value, query), mask, out, padded, seed, seed,
        dropout_p, [True, True, True, False], is_causal, scale=scale,
    )  # fmt: skip
    return found[0], _gathered(found[1], key), _gathered(found[2], value)


def _spread(shared: Tensor, query: Tensor) -> Tensor:
    """Repeat keys or values that several of the query's heads share."""
    times = query.shape[1] // shared.shape[1]
    return shared if times == 1 else shared.repeat_interleave(times, dim=1)


def _gathered(gradient: Tensor, shared: Tensor) -> Tensor:
    """Add up the gradients of keys or values that several heads share."""
    if gradient.shape == shared.shape:
        return gradient
    batch, _, *rest = gradient.shape
    return gradient.reshape(batch, shared.shape[1], -1, *rest).sum(2)


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


# --- One layer of an LSTM in one direction. ---
#
# The forward pass leaves a workspace to the backward pass that only the library which made it
# understands: oneDNN's has one dimension, cuDNN's is given two here. Without the right one (the
# forward pass ran on another kind of device, or made none, as in evaluation mode), the backward
# pass makes its own.


def _lstm_on_cpu(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Run an LSTM layer with oneDNN.

    The op looks at the grad mode, not at its argument, to decide whether it makes a workspace, and
    may round otherwise; captures have that mode in the argument.
    """
    *_, train = args
    with torch.set_grad_enabled(train):
        output, hy, cy, workspace = _RECURRENT(*args)
    if workspace is None:
        workspace = output.new_empty(0, dtype=torch.uint8)
    return output, hy, cy, workspace


def _lstm_backward_on_cpu(*args: Any) -> tuple[Tensor, ...]:
    *given, workspace = args
    if workspace.dim() != 1 or workspace.numel() == 0:
        *_, workspace = _lstm_on_cpu(*_forward_arguments(args))
    found: tuple[Tensor, ...] = aten.mkldnn_rnn_layer_backward.default(*given, workspace)
    return found


def _forward_arguments(args: Sequence[Any]) -> tuple[Any, ...]:
    """Give the arguments of the training forward pass that a backward pass belongs to."""
    reverse, mode, hidden_size, num_layers, has_biases, _, bidirectional = args[13:20]
    batch_sizes, batch_first = args[20:22]
    return (
        *args[:7], reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional,
        batch_first, True,
    )  # fmt: skip


def _lstm_on_cuda(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, hy, cy, reserve, _ = _cudnn_lstm(_CudnnLayer.of(args), args[-1])
    return _in_time(output, args[7]), hy[0], cy[0], reserve[None]


def _lstm_backward_on_cuda(*args: Any) -> tuple[Tensor, ...]:
    layer = _CudnnLayer.of(_forward_arguments(args))
    reverse, reserve = layer.reverse, args[-1]
    if reserve.dim() == 2 and reserve.numel():
        output, reserve = _in_time(args[7], reverse).contiguous(), reserve[0]
    else:
        output, _, _, reserve, _ = _cudnn_lstm(layer, True)
    grad_output, grad_hy, grad_cy = args[10:13]
    found = aten._cudnn_rnn_backward.default(
        layer.x, layer.weights, len(layer.weights), layer.buffer, layer.hx, layer.cx, output,
        None if grad_output is None else _in_time(grad_output, reverse),
        None if grad_hy is None else grad_hy[None],
        None if grad_cy is None else grad_cy[None],
        layer.mode, layer.hidden_size, 0, 1, False, 0.0, True, False, [], None, reserve,
        [True, True, True, True],
    )  # fmt: skip
    dx, dhx, dcx, weights = found
    if len(weights) == 2:  # without biases, whose gradients nobody reads
        weights = [*weights, *weights[0].new_zeros(2, 4 * layer.hidden_size)]
    made = (_in_time(dx, reverse), *weights, dhx[0], dcx[0])
    return tuple(each.float() for each in made)  # as oneDNN's are, whatever the input's dtype


@dataclass(frozen=True)
class _CudnnLayer:
    """A layer as cuDNN takes it: always forward in time, its weights in one buffer."""

    x: Tensor
    weights: list[Tensor]
    buffer: Tensor
    hx: Tensor
    cx: Tensor
    mode: int
    hidden_size: int
    reverse: bool

    @classmethod
    def of(cls, args: Sequence[Any]) -> _CudnnLayer:
        """Read the arguments of a forward pass."""
        x, hx, cx, reverse = args[0], args[5], args[6], args[7]
        mode, hidden_size, _, has_biases = args[9:13]
        given = args[1:5] if has_biases else args[1:3]
        # cuDNN points tensors to their part of the buffer: these, not the module's parameters.
        weights = [aten.alias.default(weight.contiguous()) for weight in given]
        buffer = aten._cudnn_rnn_flatten_weight.default(
            weights, len(weights), x.shape[2], mode, hidden_size, 0, 1, False, False
        )
        return cls(
            _in_time(x, reverse).contiguous(), weights, buffer, hx[None].contiguous(),
            cx[None].contiguous(), mode, hidden_size, reverse,
        )  # fmt: skip


def _cudnn_lstm(layer: _CudnnLayer, train: bool) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = aten._cudnn_rnn.default(
        layer.x, layer.weights, len(layer.weights), layer.buffer, layer.hx, layer.cx, layer.mode,
        layer.hidden_size, 0, 1, False, 0.0, train, False, [], None,
    )  # fmt: skip
    return found


def _in_time(tensor: Tensor, reverse: bool) -> Tensor:
    """Turn a sequence around if a layer reads it from its end."""
    return tensor.flip(0) if reverse else tensor


# --- Updates. ---


def _update_with(target: Any) -> Callable[..., Any]:
    """
    Update one parameter, whose gradient may be laid out in memory otherwise than it.

    These kernels take their arguments for alike, and what a capture says of strides is not always
    what a kernel makes.
    """

    def update(
        parameters: list[Tensor], gradients: list[Tensor], *args: Any, **kwargs: Any
    ) -> None:
        parameter, gradient = parameters[0], gradients[0]
        if gradient.stride() != parameter.stride():
            gradients = [torch.empty_like(parameter).copy_(gradient)]
        target(parameters, gradients, *args, **kwargs)

    return update


_FUSED = {
    target: _update_with(target)
    for packet in (aten._fused_sgd_, aten._fused_adam_, aten._fused_adamw_)
    for target in (packet.default, packet.tensor_lr)
}

_ON_CPU: dict[Any, Callable[..., Any]] = {
    **_FUSED,
    _RECURRENT: _lstm_on_cpu,
    aten.mkldnn_rnn_layer_backward.default: _lstm_backward_on_cpu,
}

_ON_CUDA: dict[Any, Callable[..., Any]] = {
    **_FUSED,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    _RECURRENT: _lstm_on_cuda,
    aten.mkldnn_rnn_layer_backward.default: _lstm_backward_on_cuda,
}
