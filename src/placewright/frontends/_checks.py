"""
Modules that cannot be captured whatever they are called with, refused before anything is traced.

This module owns what is looked for in a module and its submodules: wrappers, compiled and quantised
code, weights without a shape, and tensors that are not dense.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from placewright.arguments import expect_type
from placewright.errors import InputError

_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
"""PyTorch's classes that wrap a module; known by name, since they take a second to load."""

_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""Packages of modules whose weights are packed."""


def check_arguments(inputs: Any, kwargs: Any) -> None:
    """
    Check that what is passed by name is named by text.

    Raises
    ------
    InputError
        It is not.
    """
    if kwargs is not None:
        expect_type(kwargs, Mapping, "kwargs", "a mapping from names to arguments")
    for field, given in (("inputs", inputs), ("kwargs", kwargs)):
        for name in given if isinstance(given, Mapping) else ():
            expect_type(name, str, field, "a mapping from names to arguments")


def check_module(module: Any, *, train: bool = True) -> None:
    """
    Check that a module and all of its submodules are of a kind that can be captured.

    Parameters
    ----------
    module
        What was given as one.
    train
        Check also what is only in the way of a backward pass.

    Raises
    ------
    InputError
        One of them is not; the message names it and the remedy.
    """
    if not isinstance(module, nn.Module):
        raise InputError(
            f"`module` is a {type(module).__name__}; expected a torch.nn.Module. Wrap a function"
            " in the `forward` of one."
        )
    for name, part in module.named_modules():
        place = f"module.{name}" if name else "module"
        _check_script(place, part)
        _check_compiled(place, part)
        _check_parallel(place, part)
        _check_quantized(place, part)
        _check_tensors(place, part)
        if train:
            _check_embedding(place, part)


def _check_script(place: str, part: nn.Module) -> None:
    if isinstance(part, torch.jit.ScriptModule):
        raise InputError(
            f"`{place}` is scripted or traced (torch.jit); expected a Python module. Pass the"
            " module that it was made from."
        )


def _check_compiled(place: str, part: nn.Module) -> None:
    if "_orig_mod" in part._modules:
        remedy = (
            "Pass `module._orig_mod`."
            if place == "module"
            else f"Put `{place}._orig_mod` in its place."
        )
        raise InputError(f"`{place}` comes from `torch.compile`; expected a plain module. {remedy}")
    if part._compiled_call_impl is not None:
        raise InputError(
            f"`{place}` was compiled in place (`.compile()`); expected a plain module. Capture it"
            " before it is compiled."
        )


def _check_parallel(place: str, part: nn.Module) -> None:
    for kind in type(part).__mro__:
        if not kind.__module__.startswith("torch."):
            continue
        if kind.__name__ in _PARALLEL:
            remedy = (
                "Pass `module.module`."
                if place == "module"
                else f"Put `{place}.module` in its place."
            )
            raise InputError(
                f"`{place}` is a {kind.__name__}; expected the module inside it, since the plan"
                f" says what runs where. {remedy}"
            )
        if kind.__name__ == "FSDPModule":
            raise InputError(
                f"The parameters of `{place}` are sharded (`fully_shard`); expected whole ones."
                " Capture the module before it is sharded."
            )


def _check_quantized(place: str, part: nn.Module) -> None:
    is_packed = any(isinstance(value, torch.ScriptObject) for value in vars(part).values())
    is_quantized = any(tensor.is_quantized for _, tensor in _own_tensors(part))
    if is_packed or is_quantized or type(part).__module__.startswith(_QUANTIZED):
        raise InputError(
            f"`{place}` ({type(part).__name__}) is quantised; expected weights in floating point."
            " Capture the module before it is quantised."
        )


def _check_tensors(place: str, part: nn.Module) -> None:
    for name, tensor in _own_tensors(part):
        path = f"{place}.{name}".removeprefix("module.")
        if nn.parameter.is_lazy(tensor):
            raise InputError(
                f"Parameter `{path}` has no shape yet. Run the module once before it is captured,"
                " as lazy modules need."
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            layout = "nested" if tensor.is_nested else str(tensor.layout)
            remedy = ".to_padded_tensor(0.0)" if tensor.is_nested else ".to_dense()"
            raise InputError(
                f"Parameter `{path}` has the layout {layout}; expected a dense tensor. Convert it"
                f" with `{remedy}`."
            )


def _check_embedding(place: str, part: nn.Module) -> None:
    is_embedding = isinstance(part, (nn.Embedding, nn.EmbeddingBag))
    if is_embedding and part.sparse and part.weight.requires_grad:
        raise InputError(
            f"`{place}` ({type(part).__name__}) has `sparse=True`, so its gradient is a sparse"
            " tensor; expected a dense one. Make it with `sparse=False`."
        )


def _own_tensors(part: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the parameters and buffers of a module without its submodules'."""
    held = itertools.chain(part._parameters.items(), part._buffers.items())
    return [(name, tensor) for name, tensor in held if tensor is not None]
