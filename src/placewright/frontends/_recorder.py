"""
The recorder: runs PyTorch code on fake tensors and writes down every aten call.

This module owns what one call was (what it read, made and overwrote, its module, phase and flops)
and the `torch.fx.Graph` of all calls. What becomes of them as ops is `placewright.frontends._fold`.

It is a dispatch mode below autograd, so that the backward pass is seen call by call as well, and
above a `FakeTensorMode`, so that nothing is allocated or computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from placewright.frontends._work import count_flops

_DETACH = torch.ops.aten.detach.default
_MARK = "_placewright_value"

# These overwrite running statistics although their schemas do not say so.
_SILENT_WRITES: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.native_batch_norm.default: (3, 4),
    torch.ops.aten.cudnn_batch_norm.default: (3, 4),
    torch.ops.aten.miopen_batch_norm.default: (3, 4),
}
_TRAINING_ARGUMENT = 5  # of all of those


@dataclass(slots=True, eq=False)
class Storage:
    """Memory that one or several tensors look into."""

    bytes: int


@dataclass(slots=True, eq=False)
class Value:
    """A tensor: a node's result, which looks at all of a storage or a part of it."""

    node: fx.Node
    storage: Storage
    bytes: int  # its elements' own: less than the storage's for a slice, more if expanded
    dtype: str
    parent: Value | None = None  # the tensor that this one is a view of


@dataclass(slots=True, eq=False)
class Call:
    """One aten call."""

    node: fx.Node
    target: Any  # torch.ops.aten.mm.default
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    writes: tuple[Value, ...]  # those of `reads` that are overwritten
    flops: float
    phase: str
    module: str
    parameter: str | None  # the parameter whose update this is a part of

    @property
    def is_view(self) -> bool:
        """Tell a call that only looks at memory that was there."""
        return not self.writes and all(value.parent is not None for value in self.makes)


@dataclass(eq=False)
class Tape:
    """Everything that was recorded."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    calls: list[Call] = field(default_factory=list)
    constants: dict[str, tuple[torch.Tensor, Value]] = field(default_factory=dict)
    num_nodes: int = 0  # dispatched, those without a place in the graph included


class Recorder(TorchDispatchMode):
    """
    Records the aten calls made while it is active.

    `phase`, `module` and `parameter` are written into every call; `modules` is a stack that
    `watch_modules` keeps, and a backward call belongs to the module of the forward call whose
    gradient it computes (autograd numbers both alike).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Stay clear of PyTorch's compiler, which would take a second to load."""
        return False

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self.tape = Tape()
        self.phase = "forward"
        self.parameter: str | None = None
        self.modules: list[str] = [""]
        self._module_at: dict[int, str] = {}  # by autograd's sequence number
        self._twins: dict[int, torch.Tensor] = {}  # of constants, which the tape keeps alive
        self._written_at: dict[Any, tuple[Any, ...]] = {}
        self._last_target: Any = None
        self._running = ""  # the module that the call being written down belongs to

    @property
    def last_target(self) -> Any:
        """Name the aten op that was called last, for messages."""
        return self._last_target

    def enter(self, name: str, tensor: torch.Tensor) -> Value:
        """Register a tensor that is there before the first call, as a placeholder."""
        node = self.tape.graph.placeholder(name)
        return self._attach(tensor, node, None)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Register a tensor that the model brings along without being a parameter or buffer."""
        name = f"constant_{len(self.tape.constants)}"
        twin = self.twin(tensor)
        value = self._attach(twin, self.tape.graph.create_node("get_attr", name, name=name), None)
        self.tape.constants[name] = (tensor, value)
        self._twins[id(tensor)] = twin
        return twin

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a fake tensor of the same shape on the CPU, wherever the real one is."""
        with _disable_current_modes(), self.fake:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            )

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Find what is known about a tensor that a call made or that was entered."""
        value = getattr(tensor, _MARK, None)
        assert isinstance(value, Value), "a fake tensor from nowhere"
        return value

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor that has a value: itself, or the twin of a constant."""
        if hasattr(tensor, _MARK):
            return tensor
        twin = self._twins.get(id(tensor))
        return self.constant(tensor) if twin is None else twin

    def _attach(self, tensor: torch.Tensor, node: fx.Node, parent: Value | None) -> Value:
        storage = Storage(tensor.untyped_storage().nbytes()) if parent is None else parent.storage
        size = tensor.numel() * tensor.element_size()
        value = Value(node, storage, size, str(tensor.dtype)[6:], parent)
        node.meta["tensor"] = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        setattr(tensor, _MARK, value)
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call on fake tensors and write it down."""
        kwargs = kwargs or {}
        self._last_target = func
        args = fx.node.map_aggregate(args, self._as_known)
        kwargs = fx.node.map_aggregate(kwargs, self._as_known) if kwargs else kwargs
        # What only overwrites has no shape to find out, and would be run for want of a fake form.
        result = func(*args, **kwargs) if func._schema.returns else None
        if func is _DETACH:
            setattr(result, _MARK, self.value_of(args[0]))
            self.tape.num_nodes += 1
        elif isinstance(result, (torch.Tensor, tuple, list)) or func._schema.is_mutable:
            self._write_down(func, args, kwargs, result)
        return result

    def _as_known(self, value: Any) -> Any:
        return self._known(value) if isinstance(value, torch.Tensor) else value

    def _write_down(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        tape = self.tape
        tape.num_nodes += 1
        reads: list[Value] = []

        def as_node(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                known = self.value_of(value)
                reads.append(known)
                return known.node
            return value

        node_args = fx.node.map_aggregate(args, as_node)
        node_kwargs = fx.node.map_aggregate(kwargs, as_node) if kwargs else kwargs
        node = tape.graph.create_node("call_function", func, node_args, node_kwargs)
        writes = self._written(func, args, kwargs)
        self._running = self._module()
        sources = {
            tensor.untyped_storage()._cdata: self.value_of(tensor)
            for tensor in _tensors((args, kwargs))
        }
        made = []
        is_single = isinstance(result, torch.Tensor)
        for k, tensor in enumerate((result,) if is_single else result or ()):
            if not isinstance(tensor, torch.Tensor):
                continue
            source = sources.get(tensor.untyped_storage()._cdata)
            if is_single:
                place = node
            else:
                place = tape.graph.create_node("call_function", operator.getitem, (node, k))
            made.append(self._attach(tensor, place, source))
        tape.calls.append(
            Call(
                node=node,
                target=func,
                reads=tuple(dict.fromkeys(reads)),
                makes=tuple(made),
                writes=writes,
                flops=count_flops(func, args, kwargs, result),
                phase=self.phase,
                module=self._running,
                parameter=self.parameter,
            )
        )

    def _module(self) -> str:
        """Tell whose call this is: the running module's, or in backward its forward call's."""
        running = torch._C._current_autograd_node()
        if running is not None:
            return self._module_at.get(running._sequence_nr(), self.modules[-1])
        if self.phase == "forward":
            self._module_at.setdefault(torch.autograd._get_sequence_nr() - 1, self.modules[-1])
        return self.modules[-1]

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Value, ...]:
        places = self._written_at.get(func)
        if places is None:
            arguments = func._schema.arguments
            places = tuple(
                (k, argument.name)
                for k, argument in enumerate(arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            )
            places += tuple((k, arguments[k].name) for k in _SILENT_WRITES.get(func, ()))
            self._written_at[func] = places
        if not places or (func in _SILENT_WRITES and not args[_TRAINING_ARGUMENT]):
            return ()
        found = []
        for k, name in places:
            given = args[k] if k < len(args) else kwargs.get(name)
            found += [self.value_of(tensor) for tensor in _tensors(given)]
        return tuple(found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


@contextmanager
def watch_modules(recorder: Recorder, module: torch.nn.Module) -> Iterator[None]:
    """Keep the recorder's stack of running modules, by their names inside `module`."""
    names = {id(part): name for name, part in module.named_modules()}

    def enter(part: torch.nn.Module, _: Any) -> None:
        recorder.modules.append(names.get(id(part), recorder.modules[-1]))

    def leave(_part: torch.nn.Module, _args: Any, _result: Any) -> None:
        recorder.modules.pop()

    handles: list[Callable[[], None]] = [
        register_module_forward_pre_hook(enter).remove,
        register_module_forward_hook(leave).remove,
    ]
    try:
        yield
    finally:
        for remove in handles:
            remove()
