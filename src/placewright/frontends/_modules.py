"""
Modules with their tensors swapped for others for a while.

This module owns how a module is given fake parameters, and what `forward` has set in it meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from placewright.frontends._recorder import Recorder


def named_tensors(module: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """List a module's parameters or buffers by name, shared ones once, whatever class they have."""
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for name, tensor in (part._parameters if kind == "param" else part._buffers).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (f"{prefix}.{name}" if prefix else name), tensor


class _FakeParameter(FakeTensor):
    """A fake parameter: a subclass, since Python asks those first what a comparison gives."""


@contextlib.contextmanager
def swapped(module: torch.nn.Module, recorder: Recorder) -> Iterator[dict[int, torch.Tensor]]:
    """
    Give a module fake parameters and buffers for a while, then put everything back.

    That includes plain attributes that it sets meanwhile, what it puts into lists, dicts and sets
    among them, hooks and submodules: nothing may keep fake tensors.
    """
    fakes: dict[int, torch.Tensor] = {}
    saved: list[Any] = []
    for part in module.modules():
        own: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        contents = [
            (held, held.copy())
            for key, held in part.__dict__.items()
            if type(held) in _HOLDERS and key not in ("_parameters", "_buffers")
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
                        if isinstance(tensor, torch.nn.Parameter):
                            twin.__class__ = _FakeParameter
                            twin._is_param = True  # isinstance asks
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


_HOLDERS = (list, dict, set, OrderedDict)


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


_HOOKS = frozenset(name for name in OWN if "_hooks" in name)


def attributes_of(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """
    List what a module and its parts hold beside tensors, parts and mode, by name.

    Hooks are listed as pairs of their numbers and what is called.
    """
    return {
        (prefix, name): (*value.items(),) if name in _HOOKS else value
        for prefix, part in module.named_modules()
        for name, value in part.__dict__.items()
        if name not in OWN or name in _HOOKS
    }


def parts_of(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    """List what `forward` has to leave there, by module and name: submodules, tensors, hooks."""
    found: dict[tuple[str, str], Any] = {}
    for prefix, part in module.named_modules():
        for kind in ("_modules", "_parameters", "_buffers"):
            for name, value in part.__dict__[kind].items():
                if value is not None:
                    found[prefix, name] = value if kind == "_modules" else kind
        for kind in _HOOKS:
            for number, hook in part.__dict__[kind].items():
                found[prefix, f"{kind}.{number}"] = hook
    return found


def set_attribute(part: torch.nn.Module, name: str, value: Any) -> None:
    """Set what `attributes_of` lists; hooks that `part` has beside those given stay."""
    if name in _HOOKS:
        part.__dict__[name].update(value)
    else:
        setattr(part, name, value)


_MISSING = object()


@contextlib.contextmanager
def with_attributes(
    module: torch.nn.Module, values: Mapping[tuple[str, str], Any]
) -> Iterator[None]:
    """Set what `attributes_of` lists for a while."""
    before: list[tuple[torch.nn.Module, str, Any]] = []
    try:
        for (owner, name), value in values.items():
            part = module.get_submodule(owner)
            old = part.__dict__.get(name, _MISSING)
            before.append((part, name, old.copy() if name in _HOOKS else old))
            set_attribute(part, name, value)
        yield
    finally:
        for part, name, old in reversed(before):
            if old is _MISSING:
                part.__dict__.pop(name, None)
            elif name in _HOOKS:
                _restore(part.__dict__[name], old)
            else:
                part.__dict__[name] = old
