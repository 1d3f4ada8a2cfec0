"""
Structures of arguments and results: the tensors in them, and everything beside these.

This module owns what can be looked into: tuples, lists, dicts, what PyTorch's pytrees know,
dataclasses, and objects with attributes, such as a cache of keys and values. It reads them
(`scan`), copies them with their tensors swapped (`Copier`), and describes what a step makes of them
(`Describer`), so that the same can be built again around real tensors (`build`).
"""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from placewright.errors import InputError

_MAX_PARTS = 20_000
_WORDS = (bool, int, str)
_OPAQUE = (
    torch.nn.Module, torch.dtype, torch.device, torch.Generator, torch.Size, enum.Enum, type,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Scan:
    """What is in a structure."""

    leaves: list[torch.Tensor]  # each once, in order
    objects: list[Any]  # with attributes of their own, each once, in order
    key: Key  # equal for structures that differ in nothing but the numbers in their tensors


def scan(value: Any) -> Scan:
    """
    Read a structure.

    Raises
    ------
    InputError
        Something in it can be neither looked into nor compared.
    """
    found = _Scanner()
    found.read(value)
    return Scan(found.leaves, found.objects, tuple(found.key))


def leaves_of(value: Any) -> list[torch.Tensor]:
    """List the tensors in a structure, each once."""
    return scan(value).leaves


class _Scanner:
    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self.key: list[Any] = []
        self._seen: dict[int, int] = {}

    def read(self, value: Any) -> None:
        kind, key = type(value), self.key
        if isinstance(value, torch.Tensor):
            known = self._seen.get(id(value))
            if known is not None:
                key.append((torch.Tensor, known))
                return
            self._seen[id(value)] = len(self.leaves)
            self.leaves.append(value)
            if value.layout is torch.strided:
                wants_gradient = value.requires_grad and (2 if value._is_view() else 1)
                key.append((value.shape, value.stride(), value.dtype, wants_gradient))
        elif value is None or kind in _WORDS:
            key.append((kind, value))
        elif kind is float:
            key.append((kind, repr(value)))  # a NaN equals itself, and 0.0 is not -0.0
        else:
            self._read_parts(value, kind)

    def _read_parts(self, value: Any, kind: type) -> None:
        opened = open_up(value)
        if opened is None:
            try:
                hash(value)
            except TypeError:
                raise InputError(
                    f"An argument holds a {kind.__module__}.{kind.__name__}, which can be neither"
                    " looked into nor compared from call to call. Pass tensors, numbers, or"
                    " containers of them (`torch.as_tensor` makes a tensor of an array)."
                ) from None
            self.key.append((kind, value))
            return
        parts, context, is_object = opened
        if is_object:
            known = self._seen.get(id(value))
            if known is not None:
                self.key.append((object, known))
                return
            self._seen[id(value)] = len(self.objects)
            self.objects.append(value)
        self.key.append((kind, len(parts), _hashable(context)))
        if len(self.key) > _MAX_PARTS:
            raise InputError(
                f"An argument is a structure of more than {_MAX_PARTS:,} parts. Pass only what"
                " the model needs."
            )
        for part in parts:
            self.read(part)


def open_up(value: Any) -> tuple[Sequence[Any], Any, bool] | None:
    """
    Take a container apart: its parts, what `assemble` needs beside them, and whether it is an
    object with attributes. None for anything that is not a container.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        return value, None, False
    if kind is dict:
        return [*value.values()], (*value,), False
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        return *node.flatten_fn(value), False
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value, None, False
    if kind is weakref.ReferenceType:
        held = value()
        return None if held is None else ([held], None, False)
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return None
    held = vars(value)
    return [*held.values()], (*held,), True


def assemble(kind: type, context: Any, parts: Sequence[Any]) -> Any:
    """Put a container together, as `open_up` has taken it apart."""
    if kind is tuple or kind is list:
        return kind(parts)
    if kind is dict:
        return dict(zip(context, parts, strict=True))
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None:
        return node.unflatten_fn([*parts], context)
    if issubclass(kind, tuple):
        return kind(*parts)
    if kind is weakref.ReferenceType:
        return weakref.ref(parts[0])
    made = object.__new__(kind)
    made.__dict__.update(zip(context, parts, strict=True))
    return made


def _hashable(context: Any) -> Any:
    try:
        hash(context)
    except TypeError:
        return repr(context)
    return context


class Copier:
    """
    Copies structures, their tensors swapped, and keeps what was copied to tell what changes.

    A tensor or object that stands in several places is one in the copy, too.
    """

    def __init__(self, swap: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._swap = swap
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that identities stay theirs
        self.objects: list[Any] = []  # copies, in the order of `Scan.objects`

    def copy(self, value: Any) -> Any:
        """Copy a structure."""
        if isinstance(value, torch.Tensor):
            return self._once(value, self._swap)
        opened = open_up(value)
        if opened is None:
            return value
        parts, context, is_object = opened
        if is_object:
            return self._once(value, self._copy_object)
        return assemble(type(value), context, [self.copy(part) for part in parts])

    def _once(self, value: Any, make: Callable[[Any], Any]) -> Any:
        if id(value) not in self._copies:
            self._kept.append(value)
            made = make(value)
            self._copies.setdefault(id(value), made)
        return self._copies[id(value)]

    def _copy_object(self, value: Any) -> Any:
        made = object.__new__(type(value))
        self._copies[id(value)] = made  # it may stand inside itself
        self.objects.append(made)
        made.__dict__.update({name: self.copy(part) for name, part in vars(value).items()})
        return made


def swap_leaves(value: Any, swap: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace the tensors in a structure."""
    return Copier(swap).copy(value)


# What a step makes.


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that the caller passed, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class Own:
    """A parameter or buffer of the module, by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the step makes, by its number among those."""

    number: int


@dataclass(frozen=True, slots=True)
class Step:
    """A call that makes one view, or several of which one is taken, of its first argument."""

    target: Callable[..., Any]
    args: tuple[Any, ...]  # the others
    kwargs: tuple[tuple[str, Any], ...]
    has_graph: bool  # made while gradients were on
    item: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A look at the memory of a tensor that was passed, or is the module's own."""

    of: Leaf | Own
    steps: tuple[Step, ...]  # from that tensor on
    is_detached: bool  # it wants none
    number: int  # of the tensor that it is in the capture, which may stand in several places


@dataclass(frozen=True, slots=True)
class Passed:
    """An object that the caller passed, by number."""

    number: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """Something that is the same in every step."""

    value: Any

    def __eq__(self, other: object) -> bool:
        """Compare numbers and words by value, all else by identity."""
        if not isinstance(other, Fixed):
            return NotImplemented
        mine, theirs = self.value, other.value
        if mine is theirs:
            return True
        is_word = isinstance(mine, (bool, int, float, str, bytes, enum.Enum, torch.device))
        return is_word and type(mine) is type(theirs) and bool(mine == theirs)

    def __hash__(self) -> int:
        """Hash the kind only: values may be anything."""
        return hash(type(self.value))


@dataclass(frozen=True, slots=True)
class Container:
    """A container of these parts, and what `assemble` needs beside them."""

    kind: type
    context: Any
    parts: tuple[Template, ...]

    def __eq__(self, other: object) -> bool:
        """Compare contexts as far as they can be."""
        if not isinstance(other, Container):
            return NotImplemented
        mine, theirs = self._key, other._key
        return mine == theirs

    def __hash__(self) -> int:
        """Hash what is compared."""
        return hash(self._key)

    @property
    def _key(self) -> Key:
        return self.kind, _hashable(self.context), self.parts


@dataclass(frozen=True, slots=True)
class Seen:
    """A new object that is being described further up."""

    number: int


Template = Leaf | Own | Made | View | Passed | Fixed | Container | Seen


def made_in(template: Template) -> set[int]:
    """Find which tensors that the step makes are in a template, by number."""
    match template:
        case Made(number):
            return {number}
        case Container(_, _, parts):
            return {number for part in parts for number in made_in(part)}
    return set()


class Describer:
    """
    Describes structures of a captured step.

    `known` says what tensors and objects of the capture stand for, by identity, and `find_view`
    which of the others are views of such; all others are `made`, each once. Without
    `opens_objects`, objects with attributes stand for themselves.
    """

    def __init__(
        self,
        known: Mapping[int, Template],
        is_made: Callable[[torch.Tensor], bool],
        *,
        find_view: Callable[[torch.Tensor], View | None] = lambda _: None,
        opens_objects: bool = True,
    ) -> None:
        self.made: list[torch.Tensor] = []
        self._known = dict(known)
        self._is_made = is_made
        self._find_view = find_view
        self._kept: list[Any] = []  # so that identities stay theirs
        self._opens_objects = opens_objects
        self._open: dict[int, Seen] = {}

    def describe(self, value: Any) -> Template:
        """Describe a structure."""
        found = self._known.get(id(value))
        if found is not None:
            return found
        if isinstance(value, torch.Tensor):
            if not self._is_made(value):
                return Fixed(value)
            self._kept.append(value)
            self._known[id(value)] = self._describe_tensor(value)
            return self._known[id(value)]
        opened = open_up(value)
        if opened is None or (opened[2] and not self._opens_objects):
            return Fixed(value)
        parts, context, is_object = opened
        if is_object:
            if id(value) in self._open:
                return self._open[id(value)]
            self._open[id(value)] = Seen(len(self._open))
        described = tuple(self.describe(part) for part in parts)
        return Container(type(value), context, described)

    def _describe_tensor(self, value: torch.Tensor) -> Template:
        found = self._find_view(value)
        if found is None:
            self.made.append(value)
            return Made(len(self.made) - 1)
        return found

    def closed(self) -> Describer:
        """Make one that goes on with this one's tensors, but does not open objects."""
        made = copy.copy(self)
        made._opens_objects = False
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Real:
    """What `build` puts in the places of a template."""

    leaves: Sequence[torch.Tensor]
    objects: Sequence[Any]
    made: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]  # by number
    own: Callable[[str], torch.Tensor]
    views: dict[int, torch.Tensor] = field(default_factory=dict)  # those built so far


def build(template: Template, real: Real) -> Any:
    """
    Build what a template describes.

    Raises
    ------
    InputError
        A new object holds itself.
    """
    match template:
        case Fixed(value):
            return value
        case Made(number):
            return real.made[number]
        case Leaf(number):
            return real.leaves[number]
        case Passed(number):
            return real.objects[number]
        case Own(name):
            return real.own(name)
        case View():
            if template.number not in real.views:
                real.views[template.number] = _look(template, build(template.of, real))
            return real.views[template.number]
        case Container(kind, context, parts):
            return assemble(kind, context, [build(part, real) for part in parts])
        case Seen():
            raise InputError(
                "What the module returns holds an object that holds itself. Return tensors, or"
                " containers of them."
            )


def _look(view: View, base: torch.Tensor) -> torch.Tensor:
    base = base.detach() if view.is_detached else base
    has_gradients = torch.is_grad_enabled()
    for step in view.steps:
        with torch.set_grad_enabled(step.has_graph and has_gradients):
            made = step.target(base, *step.args, **dict(step.kwargs))
            base = made if step.item is None else made[step.item]
    return base
