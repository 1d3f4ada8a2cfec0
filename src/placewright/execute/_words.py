"""
Calls as source: the words of a lane's lines, and what the names in them mean.

This module owns how an argument is written down, and how a call that makes a view, or a tensor out
of nothing, is; which calls there are, and where they run, is `placewright.execute.program`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from placewright.execute.kernels import VIEW, view_or_copy
from placewright.frontends._work import name_of

_AS_STRIDED = torch.ops.aten.as_strided.default


class _Identity:
    """A Python object as itself, whatever it equals."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


class Words:
    """Python objects that lines speak of, each by one name."""

    def __init__(self) -> None:
        self.meanings: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def name(self, thing: Any) -> str:
        """Give a Python object a name in the source."""
        key = (type(thing), repr(thing)) if isinstance(thing, float) else thing
        if key not in self._names:
            self._names[key] = f"o{len(self._names)}"
            is_held = isinstance(thing, _Identity)
            self.meanings[self._names[key]] = thing.thing if is_held else thing
        return self._names[key]

    def refer(self, thing: Any) -> str:
        """Give a Python object a name by its identity: it may change."""
        return self.name(_Identity(thing))

    def literal(self, value: Any, where: torch.device | None = None) -> str:
        """Write a constant argument; a device is that of the op, if it is told."""
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.literal(each, where) for each in value)}]"
        if isinstance(value, torch.device) and where is not None:
            return self.name(where)
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self.name(value)

    def viewing(self, node: fx.Node, base: str) -> str:
        """Write the call of a view."""
        words = [base if isinstance(each, fx.Node) else self.literal(each) for each in node.args]
        words += [f"{key}={self.literal(each)}" for key, each in node.kwargs.items()]
        if node.target is _AS_STRIDED and len(node.args) > 3 and node.args[3] is not None:
            viewed, _, _, offset = node.args  # counted from where the memory begins
            assert isinstance(viewed, fx.Node)
            assert isinstance(offset, int)
            words[3] = f"{base}.storage_offset() + {offset - viewed.meta['offset']}"
        target = view_or_copy if node.target is VIEW else node.target
        return f"{self.name(target)}({', '.join(words)})"

    def creation(self, node: fx.Node, where: torch.device) -> str:
        """Write the call that makes a tensor out of nothing, as it was captured."""
        name = name_of(node.target)
        shape, stride, dtype = node.meta["tensor"]
        if name in ("arange", "eye", "scalar_tensor"):
            words = [self.literal(each, where) for each in node.args]
            words += [f"{key}={self.literal(each, where)}" for key, each in node.kwargs.items()]
            return f"{self.name(node.target)}({', '.join(words)})"
        blank = (
            f"{self.name(torch.empty_strided)}({tuple(shape)!r}, {tuple(stride)!r},"
            f" dtype={self.name(dtype)}, device={self.name(where)})"
        )
        if "zeros" in name:
            return f"{blank}.zero_()"
        if "ones" in name:
            return f"{blank}.fill_(1)"
        if "full" in name:
            return f"{blank}.fill_({self.literal(node.args[-1])})"
        return blank
