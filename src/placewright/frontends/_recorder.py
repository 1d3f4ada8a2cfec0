"""
The recorder: runs PyTorch code on fake tensors and writes down every aten call.

This module owns what one call was (what it read, made and overwrote, its module, phase and flops)
and the `torch.fx.Graph` of all calls. What becomes of them as ops is `placewright.frontends._fold`.

It is a dispatch mode below autograd, so that the backward pass is seen call by call as well, and
above a `FakeTensorMode`, so that nothing is allocated or computed.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
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

from placewright.errors import InputError
from placewright.frontends._draws import Draws
from placewright.frontends._known_values import find_known
from placewright.frontends._work import count_flops

_AS_STRIDED = torch.ops.aten.as_strided.default
_AS_STRIDED_COPY = torch.ops.aten.as_strided_copy.default
_CLONE = torch.ops.aten.clone.default
_DETACH = torch.ops.aten.detach.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_LIFT_COPY = torch.ops.aten.lift_fresh_copy.default
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_MARK = "_placewright_value"

_TURNS = ("transpose_", "t_", "swapaxes_", "swapdims_")
"""Changes of a view's own strides that PyTorch's autograd loses while a dispatch mode is on."""

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
    address: int  # of PyTorch's storage


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

    @property
    def spelled(self) -> list[str]:
        """Write down what was called on what, to be compared with another tape."""
        return [node.format_node() or node.name for node in self.graph.nodes]


class StaleTensorError(InputError):
    """A tensor of one call is read in another."""


def is_fake(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor was made or entered while something was recorded."""
    return hasattr(tensor, _MARK)


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
        self.draws = Draws()
        self.phase = "forward"
        self.parameter: str | None = None
        self.modules: list[str] = [""]
        self._module_at: dict[int, str] = {}  # by autograd's sequence number
        self._twins: dict[int, torch.Tensor] = {}  # of constants, which the tape keeps alive
        self._written_at: dict[Any, tuple[Any, ...]] = {}
        self._last_target: Any = None
        self._marked: list[weakref.ref[torch.Tensor]] = []

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
            return empty_twin(tensor, "cpu")

    def blank(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Make a fake tensor on the CPU."""
        with _disable_current_modes(), self.fake:
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")

    def stride_like(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Find the strides that PyTorch gives to a new tensor like another one."""
        with _disable_current_modes(), self.fake:
            return torch.empty_like(tensor).stride()

    def value_of(self, tensor: torch.Tensor) -> Value:
        """
        Find what is known about a tensor that a call made or that was entered.

        Raises
        ------
        InputError
            The tensor was given other memory without a call, by assigning to its ``data``.
        """
        value = getattr(tensor, _MARK, None)
        assert isinstance(value, Value), "a fake tensor from nowhere"
        if value.storage.address != tensor.untyped_storage()._cdata:
            raise InputError(
                "`forward` assigns to `.data` of a tensor, which cannot be captured. Make a new"
                " tensor, or write into the old one with `.copy_()`."
            )
        return value

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a tensor that has a value: itself, or the twin of a constant."""
        known = getattr(tensor, _MARK, None)
        if known is not None:
            if known.node.graph is not self.tape.graph:
                raise StaleTensorError("`forward` reads a tensor of an earlier call.")
            return tensor
        twin = self._twins.get(id(tensor))
        return self.constant(tensor) if twin is None else twin

    def _attach(self, tensor: torch.Tensor, node: fx.Node, parent: Value | None) -> Value:
        if parent is None:
            memory = tensor.untyped_storage()
            storage = Storage(memory.nbytes(), memory._cdata)
        else:
            storage = parent.storage
        size = tensor.numel() * tensor.element_size()
        value = Value(node, storage, size, str(tensor.dtype)[6:], parent)
        node.meta["tensor"] = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        node.meta["offset"] = tensor.storage_offset()
        node.meta["has_graph"] = torch.is_grad_enabled()
        setattr(tensor, _MARK, value)
        self._marked.append(weakref.ref(tensor))
        return value

    def has_survivors(self, allowed: Collection[torch.Tensor]) -> bool:
        """Tell whether somebody still has a fake tensor beside the `allowed` ones, all recorded."""
        known = {id(tensor) for tensor in (*allowed, *self._twins.values())}
        if self._any_alive(known):
            gc.collect()  # autograd's nodes may be in cycles
        return self._any_alive(known)

    def _any_alive(self, known: set[int]) -> bool:
        tensors = (mark() for mark in self._marked)
        return any(tensor is not None and id(tensor) not in known for tensor in tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call on fake tensors and write it down."""
        kwargs = kwargs or {}
        self._last_target = func
        args = fx.node.map_aggregate(args, self._as_known)
        kwargs = fx.node.map_aggregate(kwargs, self._as_known) if kwargs else kwargs
        if torch.Tag.inplace_view in func.tags:
            return self._view_in_place(func, args, kwargs)
        if func is _ITEM and (known := find_known(self.value_of(args[0]).node)) is not None:
            return known
        if func is _AS_STRIDED_COPY:  # which looks beyond the tensor, too
            view = self.__torch_dispatch__(_AS_STRIDED, types, args, kwargs)
            layout = {"memory_format": torch.contiguous_format}
            return self.__torch_dispatch__(_CLONE, types, (view,), layout)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.check(kwargs)
        # What only overwrites has no shape to find out, and would be run for want of a fake form.
        result = func(*args, **kwargs) if func._schema.returns else None
        if func is _DETACH:
            assert isinstance(result, torch.Tensor)
            setattr(result, _MARK, self.value_of(args[0]))
            self._marked.append(weakref.ref(result))
            self.tape.num_nodes += 1
        elif isinstance(result, (torch.Tensor, tuple, list)) or func._schema.is_mutable:
            result = self._told_apart(func, result)
            self._write_down(func, args, kwargs, result)
        return result

    def _told_apart(self, func: Any, result: Any) -> Any:
        """
        Replace what a call makes once and returns twice by two tensors.

        An LSTM's backward pass does that with the gradient of its two biases, or does not where
        PyTorch remembers the shapes of an earlier call.
        """
        if type(result) is not tuple or func._schema.is_mutable:
            return result
        seen: set[int] = set()
        made = []
        for each in result:
            is_twice = isinstance(each, torch.Tensor) and id(each) in seen
            made.append(self.blank(each.shape, each.stride(), each.dtype) if is_twice else each)
            seen.add(id(each))
        return tuple(made)

    def _as_known(self, value: Any) -> Any:
        return self._known(value) if isinstance(value, torch.Tensor) else value

    def _view_in_place(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a call that changes how a tensor looks at its memory as the view that it makes."""
        tensor, before = args[0], self.value_of(args[0])
        name = func._schema.name.partition("::")[2]
        if any(tensor is twin for twin in self._twins.values()):
            raise InputError(
                f"`forward` calls `{name}` on a tensor that the module has, which would change its"
                f" shape for good. Use `{name.removesuffix('_')}`, which makes a new tensor."
            )
        is_followed = torch.is_grad_enabled() and tensor.requires_grad
        if name in _TURNS and is_followed and (tensor._is_view() or self._has_views(before)):
            raise InputError(
                f"`forward` calls `{name}` on a tensor that has a gradient and views, which PyTorch"
                f" does not trace. Use `{name.removesuffix('_')}`, which makes a new tensor."
            )
        result = func(*args, **kwargs)
        if name == "detach_":
            return result
        view = _view_of(func)
        if view is None:
            raise InputError(
                f"`forward` calls `{name}`, which changes the memory of a tensor in place and"
                " cannot be captured. Make a new tensor instead."
            )
        self.tape.num_nodes += 1
        node_args = fx.node.map_aggregate(args, self._as_node)
        node = self.tape.graph.create_node(
            "call_function", view, (before.node, *node_args[1:]), kwargs
        )
        made = self._attach(tensor, node, before)
        self.tape.calls.append(self._call(node, view, (before,), (made,), (), 0.0))
        return result

    def _has_views(self, base: Value) -> bool:
        """Tell whether a tensor was looked at before."""
        return any(made.parent is base for call in self.tape.calls for made in call.makes)

    def _as_node(self, value: Any) -> Any:
        return self.value_of(value).node if isinstance(value, torch.Tensor) else value

    def _write_down(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        tape = self.tape
        tape.num_nodes += 1
        reads: list[Value] = []

        def as_node(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                known = self.value_of(value)
                if func is _AS_STRIDED:  # which looks beyond the tensor
                    known = _root_of(known)
                reads.append(known)
                return known.node
            return value

        if func is _RECURRENT:  # which looks at the mode that the calling thread is in
            args = (*args[:-1], torch.is_grad_enabled())
        node_args = fx.node.map_aggregate(args, as_node)
        node_kwargs = fx.node.map_aggregate(kwargs, as_node) if kwargs else kwargs
        node = tape.graph.create_node("call_function", func, node_args, node_kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            node.meta["draws_as"] = self.draws.note(node.name)
        if func is _AS_STRIDED:
            _check_end(result, reads[0])
        if func is _AS_STRIDED and reads[0] is not self.value_of(args[0]):
            node.args = (*node_args[:3], result.storage_offset())
            node.kwargs = {}
            node.meta["called_on"] = self.value_of(args[0])  # whose gradient it has
        writes = self._written(func, args, kwargs)
        _check_lists(func, args, writes)
        for value in writes:
            self._keep_constant(value)
        sources = self._sources(func, args, kwargs)
        made = []
        is_single = isinstance(result, torch.Tensor)
        for k, tensor in enumerate((result,) if is_single else result or ()):
            if not isinstance(tensor, torch.Tensor):
                continue
            source = sources.get(tensor.untyped_storage()._cdata)
            if source is not None and func is _AS_STRIDED:
                source = _root_of(source)
            if is_single:
                place = node
            else:
                place = tape.graph.create_node("call_function", operator.getitem, (node, k))
            made.append(self._attach(tensor, place, source))
        flops = count_flops(func, args, kwargs, result)
        known = tuple(dict.fromkeys(reads))
        tape.calls.append(self._call(node, func, known, tuple(made), writes, flops))

    def _call(
        self,
        node: fx.Node,
        target: Any,
        reads: tuple[Value, ...],
        makes: tuple[Value, ...],
        writes: tuple[Value, ...],
        flops: float,
    ) -> Call:
        return Call(
            node, target, reads, makes, writes, flops, self.phase, self._module(), self.parameter
        )

    def _sources(self, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[int, Value]:
        """
        Find whose memory results look into, by address: of several arguments there, the one that
        the op's schema says its result is a view of.
        """
        found: dict[int, Value] = {}
        schema = func._schema
        sets = [r.alias_info.before_set for r in schema.returns if r.alias_info is not None]
        for k, argument in enumerate(schema.arguments):
            given = args[k] if k < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            is_source = alias is not None and any(alias.before_set & names for names in sets)
            for tensor in _tensors(given):
                address = tensor.untyped_storage()._cdata
                if is_source or address not in found:
                    found[address] = self.value_of(tensor)
        return found

    def _keep_constant(self, value: Value) -> None:
        """
        Have what `torch.tensor` makes in `forward` made anew in each step, since it is overwritten.

        Until then it is a look at a constant, which has to stay as it is.
        """
        lifted = _lifted(value)
        if lifted is None or lifted.parent is None:
            return
        constant = lifted.parent
        constant.storage = Storage(constant.storage.bytes, constant.storage.address)
        lifted.parent = None
        lifted.node.target = _LIFT_COPY
        call = next(call for call in self.tape.calls if call.node is lifted.node)
        call.target = _LIFT_COPY

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor looks at one that the model brings along from call to call."""
        value = self.value_of(tensor)
        known = (constant.storage for _, constant in self.tape.constants.values())
        return _lifted(value) is None and value.storage in known

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


def _check_lists(func: Any, args: Any, writes: Sequence[Value]) -> None:
    """
    Check that autograd follows what a call overwrites: while a dispatch mode is on, PyTorch loses
    the gradient of views of what is overwritten as a list (``torch._foreach_mul_``).

    Raises
    ------
    InputError
        It does not.
    """
    if not writes or not isinstance(args[0], (tuple, list)) or not torch.is_grad_enabled():
        return
    if any(tensor.requires_grad for tensor in _tensors(args[0])):
        name = func._schema.name.partition("::")[2]
        raise InputError(
            f"`forward` calls `{name}` on tensors that have gradients, which PyTorch does not"
            " trace. Overwrite the tensors one by one."
        )


def empty_twin(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Make a tensor without values that is to autograd what another one is: a view, or whole."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.view_as(made) if tensor._is_view() else made


def _check_end(view: torch.Tensor, base: Value) -> None:
    """
    Check that a view by strides ends where the memory does that a plan has of its base.

    Raises
    ------
    InputError
        It looks further, as at the rest of what an input is a slice of.
    """
    steps = zip(view.shape, view.stride(), strict=True)
    last = view.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    if view.numel() and (last + 1) * view.element_size() > base.storage.bytes:
        raise InputError(
            "`forward` calls `as_strided` on a tensor, and looks beyond its end. Pass all that it"
            " looks at as one tensor."
        )


def _lifted(value: Value) -> Value | None:
    """Find what `torch.tensor` has made among the tensors that a tensor looks at."""
    found: Value | None = value
    while found is not None and found.node.target is not _LIFT_FRESH:
        found = found.parent
    return found


def _root_of(value: Value) -> Value:
    """Find the tensor whose memory a tensor looks at, as far as it is of the same type."""
    while value.parent is not None and value.parent.dtype == value.dtype:
        if value.node.target is _LIFT_FRESH:
            break  # it may be made anew in each step
        value = value.parent
    return value


def _view_of(func: Any) -> Any:
    """Find the op that makes the view which an op like ``transpose_`` changes a tensor to."""
    packet = getattr(torch.ops.aten, func._schema.name.partition("::")[2].removesuffix("_"), None)
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in () if packet is None else packet.overloads():
        view = getattr(packet, overload)
        given = [(a.name, str(a.type)) for a in view._schema.arguments]
        returns = view._schema.returns
        if given == wanted and len(returns) == 1 and returns[0].alias_info is not None:
            return view
    return None


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
