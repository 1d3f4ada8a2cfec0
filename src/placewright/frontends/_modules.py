"""
Modules and structures of tensors, with their tensors swapped for others.

This module owns how a module is given fake parameters for a while, and what counts as a tensor of
an input or output: what PyTorch's pytrees hold, and the fields of dataclasses.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright.errors import InputError
from placewright.frontends._recorder import Recorder


def named_tensors(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """List a module's parameters or buffers by name, shared ones once, whatever class they have."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, tensor in (part._parameters if kind == "param" else part._buffers).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{prefix}.{name}" if prefix else name), tensor


@contextlib.contextmanager
def swapped(module: torch.nn.Module, recorder: Recorder) -> Iterator[dict[int, torch.Tensor]]:
    """
    Give a module fake parameters and buffers for a while, then put everything back.

    That includes plain attributes that it sets meanwhile: no cache may keep fake tensors.
    """
    fakes: dict[int, torch.Tensor] = {}
    saved = []
    for name, part in module.named_modules():
        own = (part._parameters, part._buffers)
        saved.append((part, dict(part.__dict__), [dict(held) for held in own]))
        for held in own:
            for key, tensor in held.items():
                if torch.nn.parameter.is_lazy(tensor):
                    raise InputError(
                        f"Parameter `{f'{name}.{key}'.lstrip('.')}` has no shape yet. Run the"
                        " module once before it is captured, as lazy modules need."
                    )
    try:
        for part, _, _ in saved:
            for held in (part._parameters, part._buffers):
                for key, tensor in held.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in fakes:
                        twin = recorder.twin(tensor).requires_grad_(tensor.requires_grad)
                        for hook in (tensor._backward_hooks or {}).values():
                            twin.register_hook(hook)
                        fakes[id(tensor)] = twin
                    held[key] = fakes[id(tensor)]
        yield fakes
    finally:
        for part, attributes, tensors in saved:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            for held, before in zip((part._parameters, part._buffers), tensors, strict=True):
                held.clear()
                held.update(before)


def _fields(value: Any) -> list[Any] | None:
    """List what a dataclass holds that PyTorch does not know how to look into."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def leaves_of(value: Any) -> list[torch.Tensor]:
    """List the tensors in a structure."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(value):
        parts = _fields(leaf)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif parts is not None:
            found += leaves_of(parts)
    return found


def swap_leaves(value: Any, swap: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in a structure."""

    def swap_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return swap(leaf)
        if _fields(leaf) is not None:
            names = [field.name for field in dataclasses.fields(leaf)]
            return dataclasses.replace(
                leaf, **{n: swap_leaves(getattr(leaf, n), swap) for n in names}
            )
        return leaf

    return pytree.tree_map(swap_leaf, value)
