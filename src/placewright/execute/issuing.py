"""
What issuing an op takes on a device, whatever the op does.

This module owns the assortment of small ops that it is measured with: many different ones in a
straight line, as in a step, some of them on views.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from placewright.execute.devices import RealDevice

_aten = torch.ops.aten
_ROUNDS = 50


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Leave out what PyTorch does for gradients, as the executor does."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def time_issue(device: RealDevice) -> float:
    """
    Time what issuing an op takes.

    On a CPU, what an op among others takes longer than one that is called again and again; on a
    GPU, what the host takes to issue one.
    """
    with below_autograd():
        ops = _assortment(device.torch_device)
        line = _write_line(ops)
        if device.kind == "cuda":
            return _median_s(line, time.perf_counter, torch.cuda.synchronize) / len(ops)
        clock = time.thread_time if len(device.cores) == 1 else time.perf_counter
        alone_s = sum(_median_s(_write_line([op] * 20), clock) / 20 for op in ops)
        return max(0.0, _median_s(line, clock) - alone_s) / len(ops)


def _median_s(
    call: Callable[[], Any], clock: Callable[[], float], settle: Callable[[], None] = lambda: None
) -> float:
    samples = []
    for _ in range(_ROUNDS):
        begin = clock()
        call()
        samples.append(clock() - begin)
        settle()
    return statistics.median(samples[_ROUNDS // 5 :])


_Op = tuple[Any, tuple[Any, ...]]


def _write_line(ops: list[_Op]) -> Callable[[], Any]:
    """Write calls one after the other, as the executor does, each result let go of by the next."""
    names: dict[str, Any] = {}
    lines = ["def line():"]
    for k, (target, args) in enumerate(ops):
        names |= {f"f{k}": target} | {f"x{k}_{n}": arg for n, arg in enumerate(args)}
        lines.append(f" r{k} = f{k}({', '.join(f'x{k}_{n}' for n in range(len(args)))})")
        lines += [f" del r{k - 1}"] if k else []
    exec("\n".join(lines), names)
    made: Callable[[], Any] = names["line"]
    return made


def _assortment(device: torch.device) -> list[_Op]:
    x = torch.rand(16, 16, device=device)
    row = x[0].clone()
    batch: Tensor = x.expand(2, 16, 16).clone()
    words = torch.zeros(16, dtype=torch.int64, device=device)
    unary = "abs exp gelu log neg reciprocal relu rsqrt sigmoid silu sqrt tanh"
    binary = "add sub mul div maximum minimum eq gt"
    ops: list[_Op] = [(getattr(_aten, name).default, (x,)) for name in unary.split()]
    for name in binary.split():
        packet = getattr(_aten, name)
        overload = packet.Tensor if "Tensor" in packet.overloads() else packet.default
        ops.append((overload, (x, x)))
    ops += [
        (_aten.t.default, (x,)),
        (_aten.mm.default, (x, x)),
        (_aten.view.default, (x, [4, 64])),
        (_aten.addmm.default, (row, x, x)),
        (_aten.bmm.default, (batch, batch)),
        (_aten.unsqueeze.default, (x, 0)),
        (_aten.sum.dim_IntList, (x, [0])),
        (_aten.mean.dim, (x, [1])),
        (_aten.amax.default, (x, [1])),
        (_aten.transpose.int, (batch, 1, 2)),
        (_aten.clone.default, (x,)),
        (_aten.cat.default, ([x, x], 1)),
        (_aten.select.int, (x, 0, 3)),
        (_aten.where.self, (x > 0.5, x, x)),
        (_aten._softmax.default, (x, 1, False)),
        (_aten._log_softmax.default, (x, 1, False)),
        (_aten.expand.default, (row, [16, 16])),
        (_aten.embedding.default, (x, words)),
        (_aten.native_layer_norm.default, (x, [16], row, row, 1e-5)),
        (_aten.threshold_backward.default, (x, x, 0)),
        (_aten.permute.default, (batch, [2, 0, 1])),
        (_aten.tanh_backward.default, (x, x)),
        (_aten.gelu_backward.default, (x, x)),
        (_aten.cumsum.default, (x, 0)),
        (_aten.constant_pad_nd.default, (x, [1, 1])),
    ]
    return ops
