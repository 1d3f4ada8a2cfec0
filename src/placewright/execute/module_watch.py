"""
What a module is from call to call: its mode, its parts, its attributes, and where its tensors are.

A program holds what the module was when it was captured. This module owns how it is noticed, in
microseconds, that the module is something else now: another mode (`train`, `eval`), another flag
or setting, other hooks, frozen parameters; or tensors that were moved or replaced.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from placewright.frontends._hooks import HOOK_DICTS
from placewright.frontends._modules import OWN

_MAX_STATES = 16
_HOLDERS = (list, dict, set)
_WANTS_GRADIENT = operator.attrgetter("requires_grad")


class ModuleWatch:
    """
    Numbers the states that a module is met in.

    Parameters
    ----------
    module
        The module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._ignored = {("", "forward")}  # which may be wrapped
        self._begin()

    def _begin(self) -> None:
        """List what is looked at."""
        named = dict(self._module.named_modules())
        self._holders: list[dict[str, Any]] = []  # of plain attributes, whose names are `_keys`
        self._keys: list[str] = []
        self._slots: list[tuple[dict[str, Any], str]] = []  # of attributes that are tensors
        self._contents: dict[int, Any] = {}  # of lists, dicts, sets and objects among attributes
        for name, part in named.items():
            held = part.__dict__
            for key, value in held.items():
                if (key in OWN and key != "training") or (name, key) in self._ignored:
                    continue
                if isinstance(value, Tensor):
                    self._slots.append((held, key))
                else:
                    self._holders.append(held)
                    self._keys.append(key)
                    self._look_into(value)
        parts = [part.__dict__ for part in named.values()]
        own = [part[kind] for part in parts for kind in ("_parameters", "_buffers")]
        holders = [*own, *(part["_modules"] for part in parts)]
        self._sized = [*parts, *filter(None, holders)]
        self._empty = [held for held in holders if not held]
        self._children = [part["_modules"] for part in parts if part["_modules"]]
        self._none = [(held, key) for held in own for key, each in held.items() if each is None]
        self._left_out = [
            (named[name].__dict__, key) for name, key in self._ignored if name in named
        ]
        root = self._module.__dict__
        self._hooks = [part[kind] for part in parts if part is not root for kind in HOOK_DICTS]
        found = [
            (f"{prefix}.{key}" if prefix else key, part.__dict__[kind], key)
            for prefix, part in named.items()
            for kind in ("_parameters", "_buffers")
            for key, tensor in part.__dict__[kind].items()
            if tensor is not None
        ]
        self.names = [name for name, _, _ in found]  # of `tensors`
        self._tensors = [(held, key) for _, held, key in found]
        self._build = self._read_build()
        self._state = self._read(self.tensors())
        self._states = [self._state]
        self.number = 0
        self._next = 1
        self._numbers = [0]

    def _look_into(self, value: Any) -> None:
        if type(value) in _HOLDERS:
            self._contents[id(value)] = value
        elif (
            hasattr(value, "__dict__")
            and not isinstance(value, (torch.nn.Module, type))
            and not callable(value)
        ):
            self._contents[id(value)] = vars(value)

    def ignore(self, attributes: Collection[tuple[str, str]]) -> bool:
        """
        Leave out attributes that `forward` sets in each call, by module and name.

        Tell whether they were not left out before, so that the state's number is another one.
        """
        if self._ignored.issuperset(attributes):
            return False
        self._ignored |= {*attributes}
        self._renew()
        return True

    def look(self, tensors: Iterable[Tensor] | None = None) -> int:
        """
        Give the number of the module's state: another one, if something is different.

        `tensors` are what `tensors` gives now, where `follow` and that were called just before.
        """
        try:
            if tensors is None:
                self._build, tensors = self._read_build(), self.tensors()
            state = self._read(tensors)
        except (KeyError, AttributeError):  # an attribute or a tensor has gone
            return self._renew()
        if _same(state, self._state):
            return self.number
        if not _is_built_alike(state, self._state):
            return self._renew()
        for number, known in zip(self._numbers, self._states, strict=True):
            if _same(state, known):
                self.number, self._state = number, known
                return number
        self._states.append(state)
        self._numbers.append(self._next)
        self.number, self._state, self._next = self._next, state, self._next + 1
        del self._states[:-_MAX_STATES], self._numbers[:-_MAX_STATES]
        return self.number

    def follow(self) -> tuple[list[Tensor], list[int]]:
        """
        Return parameters and buffers as they are now, and where: in each call, before `look`.

        What is looked at is listed anew if submodules, parameters or buffers are others now.
        """
        try:
            self._build = self._read_build()
            if _is_built_alike(self._build, self._state):
                self._build = self._state[:2]
                return self.places()
        except (KeyError, TypeError):  # one has gone, or is None now
            pass
        self._renew()
        return self.places()

    def _renew(self) -> int:
        following = self._next
        self._begin()
        self.number, self._next, self._numbers = following, following + 1, [following]
        return self.number

    def _read(self, tensors: Iterable[Tensor]) -> list[Any]:
        hooks = [(*each,) for each in self._hooks] if any(self._hooks) else None
        return [
            *self._build,
            [*map(operator.getitem, self._holders, self._keys)],
            [held[key] for held, key in self._slots],
            hooks,
            [each.copy() for each in self._contents.values()],
            [*map(_WANTS_GRADIENT, tensors)],
        ]

    def _read_build(self) -> list[Any]:
        """Read of what the module consists: how much it holds, and which submodules."""
        size = sum(map(len, self._sized))
        for held, key in self._left_out:
            size -= key in held
        is_full = any(self._empty) or not all(held[key] is None for held, key in self._none)
        children = [*chain.from_iterable(map(dict.values, self._children))]
        return [(size, is_full), children]

    def tensors(self) -> list[Tensor]:
        """List parameters and buffers as they are now."""
        return [held[key] for held, key in self._tensors]

    def places(self) -> tuple[list[Tensor], list[int]]:
        """List parameters and buffers as they are now, and where in memory."""
        tensors = self.tensors()
        return tensors, [*map(Tensor.data_ptr, tensors)]


def _is_built_alike(ours: list[Any], theirs: list[Any]) -> bool:
    if ours[1] is theirs[1]:
        return True
    return bool(ours[0] == theirs[0]) and all(map(operator.is_, ours[1], theirs[1]))


def _same(ours: list[Any], theirs: list[Any]) -> bool:
    """Compare two readings; tensors and modules by identity."""
    try:
        return (
            _is_built_alike(ours, theirs)
            and ours[2] == theirs[2]
            and all(map(operator.is_, ours[3], theirs[3]))
            and ours[4:] == theirs[4:]
        )
    except (RuntimeError, ValueError, TypeError):  # of arrays, whose equality is no truth value
        return False
