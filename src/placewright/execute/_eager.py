"""
The same step in plain PyTorch, on one device: what plans are held against.

This module owns what the same step is: the forward pass without gradients, or forward, loss,
backward and update. Settings that do not depend on the placement are those of a plan: updates are
fused, and memory on the CPU is kept from step to step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from placewright.execute._peaks import measure_own_peak
from placewright.execute.allocation import keep_memory
from placewright.execute.devices import find_device, settle
from placewright.frontends._optimizers import Updater, read_optimizer
from placewright.frontends._structures import scan, swap_leaves
from placewright.frontends.torch import as_tuple, returned_loss

_NOT_FUSED = {"params", "foreach", "fused", "differentiable"}


class EagerStep:
    """
    A step of a module in plain PyTorch, by the thread that makes this.

    Parameters
    ----------
    arguments
        Those of `placewright.capture`. The module is moved.
    device_name
        ``cpu``, which is all cores, or a GPU.
    """

    def __init__(self, arguments: Mapping[str, Any], device_name: str) -> None:
        self._device = find_device(device_name)
        settle(self._device)
        if self._device.kind == "cpu":
            keep_memory()
        torch.set_flush_denormal(True)  # as plans do
        self._where = self._device.torch_device
        self._module: torch.nn.Module = arguments["module"].to(self._where)
        self._loss: Callable[..., Tensor] | None = arguments.get("loss")
        self._trains = bool(arguments.get("train"))
        given = [arguments.get(key) for key in ("inputs", "kwargs", "targets")]
        self._given = swap_leaves(given, self._move)
        self._has_objects = bool(scan(given).objects)
        self._leaves = scan(self._given).leaves
        optimizer = arguments.get("optimizer")
        self._optimizer: torch.optim.Optimizer | None = None
        if optimizer is not None:
            self._optimizer = make_fused(read_optimizer(optimizer, self._module), self._module)

    @property
    def num_cores(self) -> int:
        """Count the cores that compute."""
        return len(self._device.cores)

    def _move(self, leaf: Tensor) -> Tensor:
        return leaf.detach().to(self._where).requires_grad_(leaf.requires_grad)

    def run(self) -> None:
        """Run one step, to its end."""
        # What it is passed may be changed by a call, such as a cache that grows.
        given = swap_leaves(self._given, _itself) if self._has_objects else self._given
        inputs, kwargs, targets = given
        if isinstance(inputs, Mapping):
            args, named = (), {**inputs, **(kwargs or {})}
        else:
            args, named = as_tuple(inputs), dict(kwargs or {})
        if self._trains:
            self._train(args, named, () if targets is None else as_tuple(targets))
        else:
            with torch.no_grad():
                self._module(*args, **named)
        if self._device.kind == "cuda":
            torch.cuda.synchronize(self._where)

    def _train(
        self, args: tuple[Any, ...], named: dict[str, Any], targets: tuple[Any, ...]
    ) -> None:
        self._module.zero_grad()
        for leaf in self._leaves:
            leaf.grad = None
        result = self._module(*args, **named)
        loss = returned_loss(result) if self._loss is None else self._loss(result, *targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()

    def peaks(self) -> dict[str, int | None]:
        """Run a step and give the most that the device holds; None if that is unknown."""
        held = [*self._module.parameters(), *self._module.buffers(), *self._leaves]
        if self._optimizer is not None:
            states = self._optimizer.state.values()
            held += [v for state in states for v in state.values() if isinstance(v, Tensor)]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        return {self._device.name: measure_own_peak(self.run, sum(sizes.values()), self._where)}


def _itself(leaf: Tensor) -> Tensor:
    return leaf


def make_fused(updater: Updater, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Make an optimiser of the same kind and settings whose updates are fused, as a plan's are."""
    parameters = dict(module.named_parameters())
    groups: dict[int, dict[str, Any]] = {}
    members: dict[int, list[Tensor]] = defaultdict(list)
    for name, settings in updater.settings.items():
        groups[id(settings)] = {k: v for k, v in settings.items() if k not in _NOT_FUSED}
        members[id(settings)].append(parameters[name])
    made = [{**group, "params": members[key]} for key, group in groups.items()]
    return updater.kind(made, fused=True)  # type: ignore[call-arg]
