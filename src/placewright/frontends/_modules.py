"""
Modules with their tensors swapped for others for a while.

This module owns how a module is given fake parameters, and what `forward` has set in it meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

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

    That includes plain attributes that it sets meanwhile, and what it puts into lists, dicts and
    sets among them: nothing may keep fake tensors.
    """
    fakes: dict[int, torch.Tensor] = {}
    saved: list[Any] = []
    for part in module.modules():
        own: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        contents = [
            (held, held.copy())
            for key, held in part.__dict__.items()
            if type(held) in _HOLDERS and key not in OWN
        ]
        saved.append((part, dict(part.__dict__), [dict(held) for held in own], contents))
    try:
        for part, _, _, _ in saved:
            both: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for held in both:
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
        for part, attributes, tensors, contents in saved:
            part.__dict__.clear()
            part.__dict__.update(attributes)
            both = (part._parameters, part._buffers)
            for held, before in zip(both, tensors, strict=True):
                held.clear()
                held.update(before)
            for holder, content in contents:
                _restore(holder, content)


_HOLDERS = (list, dict, set)


def _restore(holder: Any, before: Any) -> None:
    if _list_of(holder) != _list_of(before):
        holder.clear()
        (holder.extend if isinstance(holder, list) else holder.update)(before)


def _list_of(holder: Any) -> list[Any]:
    """List what a list, dict or set holds, by identity."""
    if isinstance(holder, dict):
        return [part for key, value in holder.items() for part in (key, id(value))]
    return sorted(map(id, holder)) if isinstance(holder, set) else [*map(id, holder)]


OWN = frozenset(vars(torch.nn.Module()))
"""What every module has: its tensors, parts and hooks, and its mode."""


def attributes_of(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """List what a module and its parts hold beside tensors, parts, hooks and mode, by name."""
    return {
        (prefix, name): value
        for prefix, part in module.named_modules()
        for name, value in part.__dict__.items()
        if name not in OWN
    }
