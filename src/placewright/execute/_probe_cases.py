"""
The ops that a probe times: aten calls of every family that costs tell apart, from small to large.

This module owns their shapes, and where their inputs are: what the op before would have just made
is in the cache, a weight or an activation saved long ago is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from placewright.frontends._work import count_flops, moved_bytes, name_of

aten = torch.ops.aten

_BLOCK = 2**20
"""Elements that are drawn; a larger tensor repeats them."""

_ROW = 256
"""Elements in a row of what is normalised, reduced or looked up."""


class Inputs:
    """
    Tensors for ops to read, on one device and of one dtype.

    Parameters
    ----------
    device, dtype
        What they are on and of.
    pool_bytes
        How much memory has to be read until a `cold` tensor comes again: more than caches hold.
    """

    def __init__(self, device: torch.device, dtype: str, pool_bytes: int) -> None:
        self.dtype = dtype
        self._device, self._dtype = device, getattr(torch, dtype)
        self._pool = self._draw(max(pool_bytes // self._dtype.itemsize, _ROW))
        self._at = 0
        self._warm: dict[tuple[int, ...], Tensor] = {}

    def _draw(self, count: int) -> Tensor:
        block = torch.rand(min(count, _BLOCK), device=self._device).to(self._dtype)
        return block.repeat(-(-count // len(block)))[:count]

    @property
    def pool_bytes(self) -> int:
        """Count the bytes of the pool."""
        return self._pool.nbytes

    def forget(self) -> None:
        """Let go of warm tensors."""
        self._warm.clear()

    def warm(self, *shape: int) -> Tensor:
        """Give the same tensor again for the same shape."""
        if shape not in self._warm:
            self._warm[shape] = self._draw(_product(shape)).view(shape)
        return self._warm[shape]

    def cold(self, *shape: int) -> Tensor:
        """Give the next part of the pool, or one tensor where that is too small."""
        count = _product(shape)
        if count > len(self._pool):
            return self.warm(*shape)
        if self._at + count > len(self._pool):
            self._at = 0
        start, self._at = self._at, self._at + -(-count // 64) * 64
        return self._pool[start : start + count].view(shape)

    def table(self) -> Tensor:
        """Give all of the pool, in rows."""
        return self._pool[: len(self._pool) // _ROW * _ROW].view(-1, _ROW)

    def rows(self, count: int) -> Tensor:
        """Draw numbers of rows of the table."""
        return torch.randint(len(self._pool) // _ROW, (count,), device=self._device)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Ladder:
    """One aten op, from small to large."""

    target: Any  # the aten overload
    shapes: tuple[Shape, ...]  # one a rung
    arguments: Callable[[Inputs, Shape], tuple[Any, ...]]
    keywords: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32",)

    @property
    def kind(self) -> str:
        """Give the op's kind, as captured graphs spell it."""
        return f"aten.{name_of(self.target)}"


def work_of(ladder: Ladder, arguments: tuple[Any, ...], result: Any) -> tuple[float, float]:
    """Count a call's flops and the bytes it moves, as captured graphs count them."""
    flops = count_flops(ladder.target, arguments, ladder.keywords, result)
    reads = [tensor.nbytes for tensor in _tensors(arguments)]
    made = [tensor.untyped_storage().nbytes() for tensor in _tensors(result)]
    return flops, moved_bytes(name_of(ladder.target), reads, made, ())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


_COUNTS = tuple((4**k,) for k in range(3, 14))  # 64 elements to 64 Mi
_ROWS = tuple((4**k, _ROW) for k in range(10))  # 256 elements to 64 Mi

_SQUARES = tuple((2**k,) for k in range(4, 14))
_BATCHES = tuple((64, 2**k) for k in range(5, 14))
_STACKS = tuple((8, 2**k, 64) for k in range(3, 12))
_IMAGES = (  # batch, channels, height and width
    (1, 8, 7), (1, 16, 14), (1, 32, 14), (1, 32, 28), (1, 64, 28), (4, 64, 28), (4, 128, 28),
    (16, 128, 28), (32, 256, 28), (64, 256, 56), (64, 512, 56),
)  # fmt: skip
_HEADS = (  # batch, heads, queries, size of a head
    (1, 2, 8, 16), (1, 4, 16, 32), (1, 8, 32, 64), (2, 8, 64, 64), (4, 8, 64, 64), (4, 8, 128, 64),
    (4, 12, 256, 64), (8, 12, 512, 64), (8, 16, 1024, 64), (16, 16, 2048, 64),
)  # fmt: skip

_MATMUL_DTYPES = ("float32", "bfloat16", "float16")


def _convolve(size: int) -> Callable[[Inputs, Shape], tuple[Any, ...]]:
    def arguments(inputs: Inputs, shape: Shape) -> tuple[Any, ...]:
        batch, channels, side = shape
        x = inputs.warm(batch, channels, side, side)
        weight = inputs.cold(channels, channels, size, size)
        return (x, weight, None, [1, 1], [size // 2] * 2, [1, 1], False, [0, 0], 1)

    return arguments


def _convolve_back(inputs: Inputs, shape: Shape) -> tuple[Any, ...]:
    batch, channels, side = shape
    gradient = inputs.warm(batch, channels, side, side)
    x = inputs.cold(batch, channels, side, side)
    weight = inputs.cold(channels, channels, 3, 3)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    return (gradient, x, weight, None, *how)


LADDERS = (
    Ladder(aten.add.Tensor, _COUNTS, lambda i, s: (i.warm(*s), i.cold(*s))),
    Ladder(aten.mul.Tensor, _COUNTS, lambda i, s: (i.warm(*s), 0.5)),
    Ladder(aten.relu.default, _COUNTS, lambda i, s: (i.warm(*s),)),
    Ladder(aten.gelu.default, _COUNTS, lambda i, s: (i.warm(*s),)),
    Ladder(aten.threshold_backward.default, _COUNTS, lambda i, s: (i.warm(*s), i.cold(*s), 0)),
    Ladder(aten.clone.default, _COUNTS, lambda i, s: (i.cold(*s),)),
    Ladder(aten.clone.default, _ROWS, lambda i, s: (i.warm(*s).t(),),
           {"memory_format": torch.contiguous_format}),
    Ladder(aten.zeros_like.default, _COUNTS, lambda i, s: (i.warm(*s),)),
    Ladder(aten.cat.default, _COUNTS, lambda i, s: ([i.warm(*s), i.cold(*s)],)),
    Ladder(aten.sum.dim_IntList, _ROWS, lambda i, s: (i.warm(*s), [0])),
    Ladder(aten._softmax.default, _ROWS, lambda i, s: (i.warm(*s), 1, False)),
    Ladder(aten.native_layer_norm.default, _ROWS,
           lambda i, s: (i.warm(*s), [_ROW], i.cold(_ROW), i.cold(_ROW), 1e-5)),
    Ladder(aten.embedding.default, _ROWS, lambda i, s: (i.table(), i.rows(s[0]))),
    Ladder(aten.index.Tensor, _ROWS, lambda i, s: (i.table(), [i.rows(s[0])])),
    Ladder(aten.mm.default, _SQUARES, lambda i, s: (i.warm(s[0], s[0]), i.cold(s[0], s[0])),
           dtypes=_MATMUL_DTYPES),
    Ladder(aten.addmm.default, _BATCHES,
           lambda i, s: (i.cold(s[1]), i.warm(*s), i.cold(s[1], s[1]).t())),
    Ladder(aten.bmm.default, _STACKS, lambda i, s: (i.warm(*s), i.cold(*s).transpose(1, 2))),
    Ladder(aten.convolution.default, _IMAGES, _convolve(3)),
    Ladder(aten.convolution.default, _IMAGES, _convolve(1)),
    Ladder(aten.convolution_backward.default, _IMAGES, _convolve_back),
    Ladder(aten._scaled_dot_product_flash_attention_for_cpu.default, _HEADS,
           lambda i, s: (i.warm(*s), i.cold(*s), i.cold(*s))),
)  # fmt: skip
