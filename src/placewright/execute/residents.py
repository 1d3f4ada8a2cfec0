"""
What stays from step to step: parameters, buffers, constants and the optimiser's state.

This module owns where they are. Parameters and buffers stay the module's own and are moved in
place; programs of several shapes share them and the optimiser's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from placewright.errors import InputError
from placewright.execute.devices import RealDevice
from placewright.frontends._modules import named_tensors
from placewright.frontends.torch import Capture


class Residents:
    """
    The tensors of a module that stay, each on its device.

    Parameters
    ----------
    module
        The module, with real weights.
    instead
        Tensors, by node, in the places of those of the module.
    """

    def __init__(
        self, module: torch.nn.Module, instead: Mapping[str, Tensor] | None = None
    ) -> None:
        self.module = module
        self._instead = instead or {}
        self.states: dict[tuple[str, str], Tensor] = {}  # of the optimiser, by parameter and label

    def settle(
        self,
        capture: Capture,
        homes: dict[str, int],
        devices: Sequence[RealDevice],
        fetched: set[int],
    ) -> dict[str, Tensor]:
        """
        Put what a step needs where it stays; give it by node.

        `homes` tells the device of each node, and `fetched` the devices that GPUs copy from.

        Raises
        ------
        InputError
            A tensor has no values, or shares its memory with another one that is overwritten.
        """
        _check_shared(self.module, capture, devices)
        known = {kind: dict(named_tensors(self.module, kind)) for kind in ("param", "buffer")}
        placed: dict[str, Tensor] = {}
        for entry in capture.entries:
            node = entry.value.node.name
            if entry.kind in ("input", "gradient") or node not in homes:
                continue
            device = devices[homes[node]]
            if node in self._instead:
                placed[node] = self._instead[node]
                continue
            is_pinned = device.kind == "cpu" and homes[node] in fetched
            if entry.kind == "state":
                key = entry.name, entry.state
                if key not in self.states:
                    shape, stride, dtype = entry.value.node.meta["tensor"]
                    made = torch.empty_strided(shape, stride, dtype=dtype)
                    self.states[key] = made.zero_()
                self.states[key] = _move(self.states[key], device, is_pinned)
                placed[node] = self.states[key]
            elif entry.kind == "constant":
                placed[node] = _move(capture.tape.constants[node][0], device, is_pinned)
            else:
                tensor = known[entry.kind][entry.name]
                if tensor.is_meta:
                    raise InputError(
                        f"`{entry.name}` is on the meta device and has no values. Load the weights"
                        ' first, with `module.to_empty(device="cpu")` and `load_state_dict`.'
                    )
                placed[node] = _move(tensor, device, is_pinned)
                if placed[node].data_ptr() != tensor.data_ptr():
                    tensor.data = placed[node]
                    if tensor.is_leaf and tensor.grad is not None:
                        tensor.grad = tensor.grad.to(tensor.device)
        return placed


def _move(tensor: Tensor, device: RealDevice, is_pinned: bool) -> Tensor:
    made = tensor.detach().to(device.torch_device)
    return made.pin_memory() if is_pinned and not made.is_pinned() else made


def _check_shared(module: torch.nn.Module, capture: Capture, devices: Sequence[RealDevice]) -> None:
    """Check that what is overwritten, or moved to a GPU, has its memory for itself."""
    kinds = {kind: dict(named_tensors(module, kind)) for kind in ("param", "buffer")}
    written = {value.storage for call in capture.tape.calls for value in call.writes}
    has_gpu = any(device.kind == "cuda" for device in devices)
    owners: dict[int, Any] = {}
    for entry in capture.entries:
        if entry.kind == "constant":
            tensor = capture.tape.constants[entry.value.node.name][0]
        elif entry.kind in kinds:
            tensor = kinds[entry.kind][entry.name]
        else:
            continue
        where = tensor.untyped_storage().data_ptr()
        other = owners.setdefault(where, entry) if where else entry
        if other is not entry and (has_gpu or {other.value.storage, entry.value.storage} & written):
            raise InputError(
                f"`{other.name}` and `{entry.name}` share memory, which a plan cannot keep"
                " together. Make one of them a copy (`.clone()`), or the same parameter."
            )
