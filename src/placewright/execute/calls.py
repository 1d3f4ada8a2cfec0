"""
Calls of a placed module: how they are told apart, and the program for each kind of them.

This module owns what a program is made for: the structure of the arguments, every value in them
that is not a tensor, the shapes, strides and types of those that are, the module's state, and
PyTorch's own (gradients, autocast). A call that differs in any of these gets a program of its own,
under the same placement.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from placewright.errors import InputError
from placewright.execute.module_watch import ModuleWatch
from placewright.frontends._structures import Scan, scan

MAX_PROGRAMS = 32
"""How many programs are kept; the one that was used longest ago goes first."""

Made = TypeVar("Made")


class NewProgramWarning(UserWarning):
    """Says once that calls of another kind take time when they are first met."""


class Signature:
    """
    The arguments of a function, to be bound by name.

    Parameters
    ----------
    function
        The function, without ``self``.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._is_plain = all(each.kind in by_name for each in parameters)
        self._order = {each.name: k for k, each in enumerate(parameters)}
        self._names = [each.name for each in parameters if each.kind is by_name[0]]
        self._required = {each.name for each in parameters if each.default is each.empty}

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """
        Give arguments by name, in the function's order, wherever they can be.

        Raises
        ------
        TypeError
            The function does not take them; as Python says it.
        """
        if not self._is_plain:
            bound = self.signature.bind(*args, **kwargs)
            return bound.args, bound.kwargs
        named = dict(zip(self._names, args, strict=False))
        if (
            len(args) > len(self._names)
            or not named.keys().isdisjoint(kwargs)
            or not self._order.keys() >= kwargs.keys()
            or not self._required <= named.keys() | kwargs.keys()
        ):
            self.signature.bind(*args, **kwargs)  # raises
        if kwargs:
            named.update(kwargs)
            named = dict(sorted(named.items(), key=lambda pair: self._order[pair[0]]))
        return (), named


class Programs(Generic[Made]):
    """
    Programs by kind of call, made when such a call is first met.

    Parameters
    ----------
    module
        The module that is called.
    kinds
        Of devices (``"cuda"``) whose settings count.
    """

    def __init__(self, module: torch.nn.Module, kinds: Collection[str]) -> None:
        self.watch = ModuleWatch(module)
        self.kinds = sorted({"cpu", *kinds})
        self._programs: OrderedDict[Any, Made] = OrderedDict()
        self._pointers: list[int] = []
        self._tensors = self.watch.tensors()  # as the call at hand has found them
        self._has_told = self._has_told_many = False

    def key_of(self, found: Scan, has_gradients: bool) -> Any:
        """Say of which kind a call is."""
        _check_modes(found.leaves)
        state = self.watch.look(self._tensors)
        casts = (*self.casts().items(),)
        return state, has_gradients, casts, torch.get_default_dtype(), found.key

    def casts(self) -> dict[str, torch.dtype]:
        """Tell to what autocast casts now, by kind of device."""
        return {
            kind: torch.get_autocast_dtype(kind)
            for kind in self.kinds
            if torch.is_autocast_enabled(kind)
        }

    def moved(self) -> bool:
        """Tell whether parameters or buffers are elsewhere than they were left; in each call."""
        self._tensors, pointers = self.watch.follow()
        return pointers != self._pointers

    def leave(self) -> None:
        """Note where parameters and buffers are."""
        self._tensors, self._pointers = self.watch.places()

    def all(self) -> list[Made]:
        """List all programs."""
        return [*self._programs.values()]

    def forget(self) -> None:
        """Drop all programs."""
        self._programs.clear()

    def get(self, key: Any, leaves: Sequence[Tensor], make: Callable[[], Made]) -> Made:
        """Find the program for a kind of call, or make it."""
        found = self._programs.get(key)
        if found is not None:
            self._programs.move_to_end(key)
            return found
        begin = time.perf_counter()
        made = make()
        self._programs[key] = made
        if len(self._programs) > 1:
            self._tell(leaves, time.perf_counter() - begin)
        if len(self._programs) > MAX_PROGRAMS:
            self._programs.popitem(last=False)
            self._tell_many()
        return made

    def put(self, key: Any, made: Made) -> None:
        """Replace the program for a kind of call."""
        self._programs[key] = made

    def _tell(self, leaves: Sequence[Tensor], took_s: float) -> None:
        if self._has_told:
            return
        self._has_told = True
        warnings.warn(
            f"This call ({tell_shapes(leaves)}) is of another kind than those before, in shapes,"
            f" flags or the module's mode. It got a program of its own under the same placement,"
            f" in {took_s:.1f} s; up to {MAX_PROGRAMS} are kept. This is said once.",
            NewProgramWarning,
            stacklevel=2,
        )

    def _tell_many(self) -> None:
        if self._has_told_many:
            return
        self._has_told_many = True
        warnings.warn(
            f"More than {MAX_PROGRAMS} kinds of calls were met, and older programs are made again."
            " Pad inputs to a few lengths, pass numbers that change as tensors, and use a cache of"
            ' fixed size (`cache_implementation="static"`), as `generate` does by itself.',
            NewProgramWarning,
            stacklevel=2,
        )


def read_arguments(value: Any) -> Scan:
    """
    Find the tensors among arguments, and what they are compared by.

    Raises
    ------
    InputError
        Something is neither a tensor nor comparable, or no plain tensor in memory.
    """
    found = scan(value)
    for leaf in found.leaves:
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise InputError(
                f"An input has the layout {'nested' if leaf.is_nested else leaf.layout}; expected"
                " a dense tensor. Convert it with"
                f" `{'.to_padded_tensor(0.0)' if leaf.is_nested else '.to_dense()'}`."
            )
        if leaf.is_meta:
            raise InputError("An input is on the meta device and has no values. Pass a real one.")
    return found


def _check_modes(leaves: Sequence[Tensor]) -> None:
    is_strange = any(
        type(leaf) is not Tensor
        and (is_traceable_wrapper_subclass(leaf) or torch._is_functional_tensor(leaf))
        for leaf in leaves
    )
    if is_strange or torch._C._len_torch_dispatch_stack() or _is_transformed():
        raise InputError(
            "A placed module runs on plain tensors with values; this call is inside a `torch.func`"
            " transform, a dispatch mode, or has tensors of another class. Call the module that"
            " was placed there."
        )


def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def tell_shapes(leaves: Sequence[Tensor]) -> str:
    """Spell the types and shapes of tensors."""
    words = [f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}" for leaf in leaves]
    return ", ".join(words[:4]) + (", ..." if len(words) > 4 else "") or "no tensors"
