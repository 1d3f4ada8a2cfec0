"""
PyTorch modules become graphs: `capture`.

This module owns what a step is: forward, loss, backward, update, and the cut between what the
module computes and what the loss and the optimiser do with it.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from placewright.arguments import expect_flag, expect_type
from placewright.errors import InputError
from placewright.graph import Graph

try:
    import torch
except ImportError:
    raise InputError(
        "PyTorch is not installed, and capturing a model needs it. Install it with"
        " `pip install 'placewright[torch]'`."
    ) from None

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from placewright.frontends._checks import check_arguments, check_module
from placewright.frontends._explain import explained
from placewright.frontends._fold import Entry, fold
from placewright.frontends._hooks import hooks_once
from placewright.frontends._modules import (
    attributes_of,
    named_tensors,
    parts_of,
    swapped,
    with_attributes,
)
from placewright.frontends._optimizers import Updater, read_optimizer
from placewright.frontends._recorder import (
    Recorder,
    StaleTensorError,
    Storage,
    Tape,
    Value,
    is_fake,
    watch_modules,
)
from placewright.frontends._structures import (
    Copier,
    Describer,
    Leaf,
    Own,
    Passed,
    Step,
    Template,
    View,
    leaves_of,
    swap_leaves,
)

Loss = Callable[..., torch.Tensor]
_AS_STRIDED = torch.ops.aten.as_strided.default


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut:
    """
    Where the module ends and the loss begins, by node of the `torch.fx.Graph`.

    Everything before `outputs` is the module's forward pass and everything that `gradients` lead
    to its backward pass; what lies between is the loss.
    """

    outputs: tuple[str, ...]  # what the module returns, those with a gradient first
    gradients: tuple[str, ...]  # of the loss by the first of them
    loss: str | None  # the loss itself
    parameter_gradients: tuple[str, ...]  # of the loss by `Capture.parameters`


@dataclass(frozen=True)
class Effect:
    """An attribute that `forward` has set: of an object that it was passed, or of a module."""

    owner: Passed | str  # a module's name inside the captured one
    name: str
    template: Template


@dataclass(frozen=True, slots=True)
class Written:
    """An input that `forward` overwrites."""

    number: int
    made: int  # the tensor that it becomes, by number
    is_dirty: bool  # it gets a gradient from what was written; otherwise autograd sees nothing


@dataclass(frozen=True, slots=True)
class Trained:
    """A tensor whose gradient the backward pass is given."""

    number: int  # of the tensor among those that the step makes
    stride: tuple[int, ...]  # of the gradient


@dataclass(frozen=True, eq=False, kw_only=True)
class Returned:
    """What a call of the module leaves behind: its result, and what it has set or overwritten."""

    template: Template  # of the result
    effects: tuple[Effect, ...]
    nodes: tuple[str, ...]  # [M] of the tensors that the step makes
    differentiable: tuple[int, ...]  # those with a gradient, by number
    ends: tuple[int, ...]  # those that want a gradient and pass none on: views without one
    trained: tuple[Trained, ...]
    absolute: tuple[int, ...]  # inputs that `forward` looks at from where their memory begins
    written: tuple[Written, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Capture:
    """
    A captured step: the graph to place, and the same step as a `torch.fx.GraphModule` that runs.

    The module's arguments are what `bind` gives; it returns the loss (None without one), then the
    outputs, then the gradients of `parameters`. An updating step overwrites the parameters,
    buffers and optimiser state that it is given, as PyTorch's optimisers do.
    """

    graph: Graph
    parameters: tuple[str, ...]  # those with a gradient, in the order of the results
    cut: Cut
    op_nodes: tuple[tuple[str, ...], ...]  # [N] nodes that each op computes, in order
    tensor_nodes: tuple[str, ...]  # [T] the node whose result a tensor is; "" for control
    num_traced: int  # aten calls seen, free ones included
    returned: Returned
    input_gradients: tuple[tuple[int, str], ...]  # of inputs, by number: the node
    entries: tuple[Entry, ...]  # tensors that are there before the step
    tape: Tape  # every call that was recorded
    set_attributes: dict[tuple[str, str], Any]  # fake, that `forward` has set in modules
    updater: Updater | None = None

    def __iter__(self) -> Iterator[Any]:
        """Unpack as ``graph, module = capture(...)``."""
        return iter((self.graph, self.module))

    @cached_property
    def module(self) -> fx.GraphModule:
        """Build the step as a module; done when first asked for, as large steps take a while."""
        constants = {name: tensor for name, (tensor, _) in self.tape.constants.items()}
        return fx.GraphModule(constants, self.tape.graph)

    def bind(
        self,
        module: torch.nn.Module,
        inputs: Any,
        targets: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[torch.Tensor]:
        """List the arguments for `module`: real weights, fresh optimiser state, real inputs."""
        tensors = dict(named_tensors(module, "param")) | dict(named_tensors(module, "buffer"))
        fed = iter(leaves_of((inputs, kwargs or {})) + leaves_of(targets))
        made = []
        for entry in self.entries:
            if entry.kind == "input":
                made.append(next(fed))
            elif entry.kind == "state":
                shape, _, dtype = entry.value.node.meta["tensor"]
                made.append(torch.zeros(shape, dtype=dtype, device=tensors[entry.name].device))
            elif entry.kind != "constant":
                made.append(tensors[entry.name].detach())
        return made


def capture(
    module: torch.nn.Module,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    loss: Loss | None = None,
    targets: Any = (),
    optimizer: str | torch.optim.Optimizer | None = None,
    sums_at_end: bool = False,
    name: str | None = None,
) -> Capture:
    """
    Capture one step of a PyTorch module as a graph, without computing or allocating anything.

    Parameters
    ----------
    module
        Any module, its weights on any device or on ``meta``. Whether dropout and batch
        normalisation are in training mode is the module's own (``module.train()``).
    inputs
        What `module` is called with: a tensor, a tuple of arguments, or a dict of keyword
        arguments. Only shapes and dtypes matter.
    kwargs
        Keyword arguments beside a tuple of arguments.
    train
        Capture the backward pass as well.
    loss
        Called as ``loss(outputs, *targets)``; gives one number. Without it, `module` must return
        the loss: as its only output, or as ``.loss`` or ``["loss"]`` of what it returns.
    targets
        A tensor or a tuple of tensors for `loss`.
    optimizer
        ``"sgd"``, ``"momentum"``, ``"adam"``, ``"adamw"``, or a `torch.optim.SGD`, `Adam` or
        `AdamW` over the module's parameters. Without it no update is captured.
    sums_at_end
        Keep the parts of a gradient that many ops contribute to (a weight used at every step of
        an unrolled network) until all are there, and then add them up, as TensorFlow's graphs do.
        PyTorch, and this function without it, adds them up as they come.
    name
        The graph's name; the module's class if absent.

    Raises
    ------
    InputError
        The module cannot be captured; the message names the op or the line and what to do.
    """
    if name is not None:
        expect_type(name, str, "name", "text")
    expect_flag(train, "train")
    expect_flag(sums_at_end, "sums_at_end")
    trace = _read_step(module, inputs, kwargs, train, loss, targets, optimizer)
    return _trace(module, trace, has_gradients=bool(train), name=name, sums_at_end=sums_at_end)


def capture_to_run(
    module: torch.nn.Module,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    loss: Loss | None = None,
    targets: Any = (),
    optimizer: str | torch.optim.Optimizer | Updater | None = None,
    sums_at_end: bool = False,
) -> Capture:
    """
    Capture a step as `capture` does, and check that it can be run again and again.

    Raises
    ------
    InputError
        As for `capture`; or the module keeps something from call to call that a plan cannot.
    """
    trace = _read_step(module, inputs, kwargs, train, loss, targets, optimizer)
    return _trace_to_run(
        module, trace, has_gradients=bool(train), sums_at_end=sums_at_end, has_own_hooks=True
    )


def _read_step(
    module: torch.nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    train: bool,
    loss: Loss | None,
    targets: Any,
    optimizer: str | torch.optim.Optimizer | Updater | None,
) -> Callable[[_Step], None]:
    """Check what a step is described by, and give the function that traces it."""
    check_module(module, train=train)
    check_arguments(inputs, kwargs)
    if not train and (loss is not None or optimizer is not None):
        raise InputError("`loss` and `optimizer` belong to a training step; pass `train=True`.")
    if loss is not None and not callable(loss):
        raise InputError(
            f"`loss` is a {type(loss).__name__}; expected a function of the outputs and `targets`,"
            " such as `torch.nn.functional.mse_loss`."
        )
    if optimizer is None or isinstance(optimizer, Updater):
        updater = optimizer
    else:
        updater = read_optimizer(optimizer, module)

    def trace(step: _Step) -> None:
        step.forward(inputs, dict(kwargs or {}))
        if train:
            step.differentiate(loss, targets)
            if updater is not None:
                step.update(updater)

    return trace


def capture_call(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool,
    trained: Iterable[Trained] | None = None,
    sums_at_end: bool = False,
) -> Capture:
    """
    Capture a call of a module as `placewright.apply` runs it: forward, and backward from gradients.

    With `train`, the backward pass begins at gradients of the tensors that the call makes: those
    that are `trained`, or all that have one. It ends at parameters, and at inputs that
    want a gradient.

    Raises
    ------
    InputError
        The module cannot be captured, or keeps something from call to call that a plan cannot.
    """
    check_module(module, train=train)

    def trace(step: _Step) -> None:
        step.forward(inputs, dict(kwargs))
        if train:
            step.differentiate_outputs(trained)

    return _trace_to_run(
        module, trace, has_gradients=train, sums_at_end=sums_at_end, has_own_hooks=False
    )


def _trace(
    module: torch.nn.Module,
    trace: Callable[[_Step], None],
    *,
    has_gradients: bool,
    name: str | None = None,
    sums_at_end: bool = False,
) -> Capture:
    """Trace a step on fake tensors."""
    return _record(Recorder(FakeTensorMode()), module, trace, has_gradients, name, sums_at_end)


def _record(
    recorder: Recorder,
    module: torch.nn.Module,
    trace: Callable[[_Step], None],
    has_gradients: bool,
    name: str | None,
    sums_at_end: bool,
) -> Capture:
    with explained(recorder), _autocast_cache(), swapped(module, recorder) as fakes:
        step = _Step(module, recorder, fakes)
        with recorder.draws.meanwhile(), torch.set_grad_enabled(has_gradients):  # noqa: SIM117
            with recorder.fake, recorder:
                trace(step)
    return step.finish(name or type(module).__name__, sums_at_end)


def _trace_to_run(
    module: torch.nn.Module,
    trace: Callable[[_Step], None],
    *,
    has_gradients: bool,
    sums_at_end: bool,
    has_own_hooks: bool,
) -> Capture:
    """Trace a step, and check that what it does beside calling PyTorch can be done again."""
    recorder = Recorder(FakeTensorMode())
    with hooks_once(module, has_own=has_own_hooks):
        with _without_python_randomness():
            made = _record(recorder, module, trace, has_gradients, None, sums_at_end)
        if recorder.has_survivors(leaves_of([*made.set_attributes.values()])):
            raise InputError(
                "`forward`, or a hook in it, keeps a tensor outside of the module, and a plan"
                " would leave there what it was when it was captured. Return the tensor, or set"
                " it as an attribute of the module."
            )
        _check_settled(module, made, trace, has_gradients)
    return made


@contextmanager
def _autocast_cache() -> Iterator[None]:
    """Have autocast forget the weights that it has cast meanwhile: they are fake."""
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Compute gradients in the types of what they are gradients of, whatever autocast is on."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def _without_python_randomness() -> Iterator[None]:
    """
    Check that what happens meanwhile draws no random numbers but PyTorch's.

    Raises
    ------
    InputError
        It does: what was drawn once would be drawn in every step.
    """
    before: Any = random.getstate(), np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    yield
    after: Any = random.getstate(), np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    if after[0] != before[0] or str(after[1]) != str(before[1]):
        raise InputError(
            "`forward` draws random numbers from Python's `random` or from numpy, which a plan"
            " would draw once for all steps. Draw them with PyTorch, or pass them in."
        )


def _check_settled(
    module: torch.nn.Module, made: Capture, trace: Callable[[_Step], None], train: bool
) -> None:
    """
    Check that a second call computes what the first one did, whatever that has set in the module.

    A cache that is filled by the first call is fine, and so is a tensor that is set for others to
    read; a counter, or a state that the next call reads, is not.
    """
    effects = [effect for effect in made.returned.effects if isinstance(effect.owner, str)]
    if not effects:
        return
    names = ", ".join(f"`{e.owner}.{e.name}`".replace("`.", "`") for e in effects[:3])
    refusal = InputError(
        f"`forward` sets {names} to something else in each call, or reads in one call what it set"
        " in the last, and a plan keeps no Python state. Make it a buffer (`register_buffer`), or"
        " pass it in and return it; if it is a cache, call the module once before."
    )
    try:
        with with_attributes(module, made.set_attributes):
            again = _trace(module, trace, has_gradients=train)
    except StaleTensorError:
        raise refusal from None
    kept = {effect for effect in again.returned.effects if isinstance(effect.owner, str)}
    if again.tape.spelled != made.tape.spelled or not kept <= {*effects}:
        raise refusal


class _Step:
    """The step while it is traced."""

    def __init__(
        self, module: torch.nn.Module, recorder: Recorder, fakes: Mapping[int, torch.Tensor]
    ) -> None:
        self.module = module
        self.recorder = recorder
        self.entries: list[Entry] = []
        self.fakes = fakes  # of parameters and buffers, by the identity of the real ones
        self.parameters: dict[str, torch.Tensor] = {}  # fake, by name
        self.gradients: dict[str, torch.Tensor] = {}
        self.input_gradients: dict[int, torch.Tensor] = {}
        self.loss: torch.Tensor | None = None
        self.outputs: list[torch.Tensor] = []
        self.output_gradients: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.inputs: list[torch.Tensor] = []  # fake
        self.wanting: list[int] = []  # inputs that want a gradient
        self.written: list[Written] = []
        self.attributes: dict[tuple[str, str], Any] = {}  # that `forward` has set
        self.updater: Updater | None = None
        self._labels: set[str] = set()
        self._num_views = 0
        self._replaced: dict[Any, str] = {}  # buffers, by the memory that they had
        self._assigned: dict[Any, tuple[str, torch.Tensor]] = {}  # and by what they were assigned
        for kind, known in (("param", self.parameters), ("buffer", self.buffers)):
            for name, tensor in named_tensors(module, kind):
                known[name] = tensor
                self._enter(name, kind, tensor)
        assert len(fakes) == len(self.entries)

    def _enter(
        self, name: str, kind: str, tensor: torch.Tensor, label: str = "", state: str = ""
    ) -> None:
        identifier = (label or name).replace(".", "_")
        if not identifier.isidentifier() or identifier in self._labels:
            identifier = f"{kind}_{len(self.entries)}"
        self._labels.add(identifier)
        value = self.recorder.enter(identifier, tensor)
        owner = name.rpartition(".")[0] if kind in ("param", "buffer", "state") else ""
        self.entries.append(Entry(name, kind, value, owner, state))

    def _copier(self, prefix: str) -> Copier:
        """Make what replaces every tensor of a structure by a fake one, an input of the graph."""
        count = 0

        def swap(leaf: torch.Tensor) -> torch.Tensor:
            nonlocal count
            if leaf.layout is not torch.strided:
                raise InputError(
                    f"An input has the layout {leaf.layout}; expected a dense tensor. Convert it"
                    " with `.to_dense()`."
                )
            count += 1
            twin = self.recorder.twin(leaf)
            self._enter(f"{prefix}.{count - 1}", "input", twin, f"{prefix}_{count - 1}")
            if prefix == "input":
                twin.requires_grad_(leaf.requires_grad)
                self.inputs.append(twin)
            return twin

        return Copier(swap)

    def forward(self, inputs: Any, kwargs: dict[str, Any]) -> None:
        """Trace the module's forward pass."""
        if isinstance(inputs, Mapping):
            inputs, kwargs = (), {**inputs, **kwargs}
        copier = self._copier("input")
        args, kwargs = copier.copy((as_tuple(inputs), kwargs))
        if torch.is_grad_enabled():
            self.wanting = [k for k, twin in enumerate(self.inputs) if twin.requires_grad]
        known = self._known(copier.objects)
        objects = [_described(Describer(known, is_fake), held) for held in copier.objects]
        plain = Describer(known, is_fake, opens_objects=False)
        before = {key: plain.describe(v) for key, v in attributes_of(self.module).items()}
        shapes, parts = self._shapes(), parts_of(self.module)
        with watch_modules(self.recorder, self.module):
            self.result = self.module(*args, **kwargs)
        self.recorder.modules[:] = ["loss"]
        self._check_shapes(shapes)
        self._check_parts(parts)
        known |= self._keep_assigned_buffers()
        for name in self._replaced.values():  # what they were is nobody's by now
            known.pop(id(self.buffers[name]), None)
        describer = Describer(known, is_fake, find_view=self._find_view)
        self.template = describer.describe(self.result)
        self.effects = [
            Effect(Passed(k), name, template)
            for k, (held, old) in enumerate(zip(copier.objects, objects, strict=True))
            for name, template in _described(describer, held).items()
            if old.get(name) != template
        ]
        plain = describer.closed()
        for key, value in attributes_of(self.module).items():
            template = plain.describe(value)
            if before.get(key) != template:
                self.attributes[key] = value
                self.effects.append(Effect(*key, template))
        self.made = describer.made
        returned = leaves_of(self.result)
        ids = {id(tensor) for tensor in self.made}
        self.outputs = [*self.made]
        self.outputs += [t for t in returned if id(t) not in ids and is_fake(t) and t.requires_grad]
        self._note_written()
        if not returned and not self.made:
            raise InputError(
                f"The module returned no tensor but a {type(self.result).__name__}. Let `forward`"
                " return a tensor, or a tuple, list, dict or dataclass of tensors."
            )

    def _shapes(self) -> list[tuple[Any, ...]]:
        """List the shapes of what is there before the step, and which parameters are trained."""
        held = [*self.inputs, *self.buffers.values()]
        found: list[tuple[Any, ...]] = [(twin.shape, twin.stride()) for twin in held]
        own = self.parameters.values()
        return found + [(t.shape, t.stride(), t.requires_grad, t.is_leaf) for t in own]

    def _check_shapes(self, before: list[tuple[Any, ...]]) -> None:
        names = [f"input {k}" for k in range(len(self.inputs))]
        names += [f"`{name}`" for name in (*self.buffers, *self.parameters)]
        for name, now, old in zip(names, self._shapes(), before, strict=True):
            if now != old:
                raise InputError(
                    f"`forward` changes the shape of {name} in place, or detaches it. Use the form"
                    " that makes a new tensor (`unsqueeze`, `detach`), or clone it first."
                )

    def _check_parts(self, before: Mapping[tuple[str, str], Any]) -> None:
        """Check that `forward` has left submodules, parameters, buffers and hooks there."""
        now = parts_of(self.module)
        new = {key for key in now.keys() - before.keys() if "_hooks" not in key[1]}
        for owner, name in new | {key for key in before if now.get(key) is not before[key]}:
            what = "a hook" if "_hooks" in name else f"`{f'{owner}.{name}'.lstrip('.')}`"
            raise InputError(
                f"`forward` adds, replaces or removes {what}, and a plan keeps the submodules,"
                " parameters, buffers and hooks that are there. Do that before, or, if the first"
                " call does it, call the module once before."
            )

    def _note_written(self) -> None:
        """Note which inputs were overwritten, and whether buffers were left with gradients."""
        written = {v.storage for call in self.recorder.tape.calls for v in call.writes}
        for number, twin in enumerate(self.inputs):
            if self.recorder.value_of(twin).storage in written:
                is_dirty = twin.requires_grad and not twin.is_leaf
                self.written.append(Written(number, len(self.made), is_dirty))
                self.made.append(twin if is_dirty else twin.detach())
        for name, buffer in self.buffers.items():
            if buffer.grad_fn is not None:
                raise InputError(
                    f"`forward` leaves a gradient in buffer `{name}`, for which the next step"
                    " would go back through this one. Write into it under `torch.no_grad()`, or"
                    " what is detached."
                )

    def _find_view(self, tensor: torch.Tensor) -> View | None:
        """Find the input, parameter or buffer at whose memory a tensor looks, and how."""
        value = self.recorder.value_of(tensor)
        if value.storage in self._replaced:
            raise InputError(
                f"`forward` returns what buffer `{self._replaced[value.storage]}` was before it"
                " assigns something else to it. Return a copy (`.clone()`)."
            )
        if value.storage in self._assigned:
            name, base = self._assigned[value.storage]
            of: Leaf | Own = Own(name)
            steps = self._steps(value, self.recorder.value_of(base))
            if steps is None or tensor.requires_grad:
                raise InputError(
                    f"`forward` returns what it also assigns to buffer `{name}`. Assign a copy"
                    " (`.detach().clone()`)."
                )
        elif value.storage in self._roots:
            of, base = self._roots[value.storage]
            steps = self._steps(value, self.recorder.value_of(base))
            assert steps is not None
        else:
            return None
        whole = base if base._base is None else base._base
        if tensor.requires_grad and tensor._base is not whole:
            what = "an input" if isinstance(of, Leaf) else f"`{of.name}`"
            raise InputError(
                f"`forward` returns the memory of {what} with a gradient of its own, as by an"
                " in-place op on `.detach()` of it. Return a copy (`.clone()`)."
            )
        self._num_views += 1
        return View(
            of=of,
            steps=steps,
            is_detached=not tensor.requires_grad,
            number=self._num_views,
        )

    def _steps(self, value: Value, base: Value) -> tuple[Step, ...] | None:
        """List the calls by which a view is made of what it is a view of; None if it is not."""
        found: list[Step] = []
        writing = {v.node for call in self.recorder.tape.calls if call.writes for v in call.makes}
        while value is not base:
            node: Any = value.node
            item = None
            if value.parent is None:
                return None
            value = node.meta.get("called_on", value.parent)
            if node in writing:
                continue  # it gives back what it has overwritten
            has_graph = node.meta["has_graph"]
            if node.target is operator.getitem:
                node, item = node.args
            given = tuple(pair for pair in node.kwargs.items())
            step = Step(node.target, _frozen(node.args[1:]), _frozen(given), has_graph, item)
            found.append(step)
        return tuple(reversed(found))

    @cached_property
    def _roots(self) -> dict[Storage, tuple[Leaf | Own, torch.Tensor]]:
        """List whole tensors that are there before the step, by their memory."""
        value_of = self.recorder.value_of
        found: dict[Storage, tuple[Leaf | Own, torch.Tensor]] = {
            value_of(twin).storage: (Leaf(k), twin) for k, twin in enumerate(self.inputs)
        }
        own = self.parameters | self.buffers
        return found | {value_of(twin).storage: (Own(n), twin) for n, twin in own.items()}

    def _known(self, objects: Iterable[Any]) -> dict[int, Template]:
        """Tell by identity what fake tensors and copied objects stand for."""
        found: dict[int, Template] = {id(held): Passed(k) for k, held in enumerate(objects)}
        found |= {id(twin): Leaf(k) for k, twin in enumerate(self.inputs)}
        for name, twin in (self.parameters | self.buffers).items():
            found[id(twin)] = Own(name)
        for real, twin in self.fakes.items():
            found[real] = found[id(twin)]
        return found

    def _keep_assigned_buffers(self) -> dict[int, Template]:
        """
        Write what the module assigned to a buffer (``self.total = ...``) into the buffer.

        Tell by identity which of the tensors that were assigned are buffers now.
        """
        now = dict(named_tensors(self.module, "buffer"))
        assigned: dict[int, Template] = {}
        for name, old in self.buffers.items():
            new = now.get(name)
            if new is None or new is old:
                continue
            if new.shape != old.shape or new.dtype != old.dtype:
                raise InputError(
                    f"`forward` assigns {_tell(new)} to buffer `{name}`, which is {_tell(old)}."
                    " A buffer of a plan keeps its shape and type."
                )
            if overlaps_itself(old):
                raise InputError(
                    f"`forward` assigns to buffer `{name}`, several of whose elements are in one"
                    " place in memory (`expand`). Make it `.contiguous()`."
                )
            storage = self.recorder.value_of(new).storage
            is_known = storage in self._roots or self.recorder.is_constant(new)
            if is_known or storage in self._assigned:
                raise InputError(
                    f"`forward` assigns to buffer `{name}` what is also an input, a parameter or"
                    " another tensor of the module, or looks at one. Assign a copy (`.clone()`)."
                )
            if new.requires_grad:
                raise InputError(
                    f"`forward` assigns a tensor with a gradient to buffer `{name}`, for which the"
                    " next step would go back through this one. Assign it detached."
                )
            if not is_laid_out_alike(new, old):
                raise InputError(
                    f"`forward` assigns to buffer `{name}` what has other strides"
                    f" ({[*new.stride()]}) than the buffer ({[*old.stride()]}), which would keep"
                    " its own. Assign `.contiguous()`, and make the buffer so."
                )
            self._replaced[self.recorder.value_of(old).storage] = name
            self._assigned[storage] = name, new
            assigned[id(new)] = Own(name)
            with torch.no_grad():
                old.copy_(new)
        return assigned

    def differentiate(self, loss: Loss | None, targets: Any) -> None:
        """Trace the loss and the backward pass, cut in two where the module ends."""
        if loss is None:
            self.outputs = [returned_loss(self.result)]
        self.outputs.sort(key=lambda tensor: not tensor.requires_grad)  # stable
        leaves = {id(t): t.detach().requires_grad_() for t in self.outputs if t.requires_grad}
        if not leaves:
            raise InputError(
                "Nothing that the module returns has a gradient. Check that its parameters have"
                " `requires_grad` and that `forward` does not detach or run without gradients."
            )
        if loss is None:
            self.loss = next(iter(leaves.values()))
        else:
            swapped = swap_leaves(self.result, lambda t: leaves.get(id(t), t))
            fed = self._copier("target").copy(as_tuple(targets))
            self.loss = loss(swapped, *fed)
        if not isinstance(self.loss, torch.Tensor):
            raise InputError(
                f"`loss` returned a {type(self.loss).__name__}; expected a tensor with one number."
            )
        if self.loss.numel() != 1:
            raise InputError(
                f"The loss has shape {list(self.loss.shape)}; expected one number. Reduce it with"
                " `.mean()` or `.sum()`."
            )
        if not self.loss.requires_grad:
            raise InputError("The loss does not depend on what the module returns.")
        self.recorder.phase = "backward"
        names, sources = self._sources()
        # A loss may also read parameters itself: a penalty on weights.
        wanted = [*leaves.values(), *(sources if loss is not None else ())]
        with _without_autocast():
            found = torch.autograd.grad(self.loss, wanted, allow_unused=True)
        differentiable = [tensor for tensor in self.outputs if id(tensor) in leaves]
        used = [
            (tensor, gradient)
            for tensor, gradient in zip(differentiable, found, strict=False)
            if gradient is not None
        ]
        if not used:
            raise InputError("The loss does not depend on what the module returns.")
        ends = {id(source) for source in sources}
        used = [(t, gradient) for t, gradient in used if t.grad_fn is not None or id(t) in ends]
        self.trained = [tensor for tensor, _ in used]
        self.output_gradients = [gradient for _, gradient in used]
        gradients = self._go_back(sources) if used else (None,) * len(sources)
        direct = found[len(leaves) :] or (None,) * len(names)
        for name, gradient, more in zip(names, gradients, direct, strict=True):
            parts = [part for part in (gradient, more) if part is not None]
            if parts:
                self._keep(name, parts[0] if len(parts) == 1 else parts[0] + parts[1])
        ended = {id(tensor) for tensor in self.trained}
        self.outputs.sort(key=lambda tensor: id(tensor) not in ended)

    def differentiate_outputs(self, trained: Iterable[Trained] | None) -> None:
        """Trace the backward pass from gradients of what the call makes."""
        can = {k for k, tensor in enumerate(self.made) if tensor.grad_fn is not None}
        if trained is None:
            every = (Trained(k, self.recorder.stride_like(self.made[k])) for k in sorted(can))
        else:
            every = (each for each in trained if each.number in can)
        self.recorder.phase = "backward"
        for number, each in enumerate([*every]):
            tensor = self.made[each.number]
            self.trained.append(tensor)
            twin = self.recorder.blank(tensor.shape, each.stride, tensor.dtype)
            self._enter(f"gradient.{number}", "gradient", twin, f"gradient_{number}")
            self.output_gradients.append(twin)
        if self.trained:
            names, sources = self._sources()
            for name, gradient in zip(names, self._go_back(sources), strict=True):
                if gradient is not None:
                    self._keep(name, gradient)

    def _sources(self) -> tuple[list[str | int], list[torch.Tensor]]:
        """List what gets a gradient: parameters by name, and inputs by number."""
        found: dict[str | int, torch.Tensor] = {
            name: tensor for name, tensor in self.parameters.items() if tensor.requires_grad
        }
        found |= {number: self.inputs[number] for number in self.wanting}
        return [*found], [*found.values()]

    def _go_back(self, sources: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        with _without_autocast():
            return torch.autograd.grad(
                self.trained, sources, self.output_gradients, allow_unused=True
            )

    def _keep(self, source: str | int, gradient: torch.Tensor) -> None:
        if isinstance(source, str):
            self.gradients[source] = gradient
        else:
            self.input_gradients[source] = gradient

    def update(self, updater: Updater) -> None:
        """Trace the optimiser's update of every parameter that has a gradient."""
        recorder, self.updater = self.recorder, updater
        recorder.phase = "update"
        states = {}
        for name in self.gradients:
            states[name] = updater.make_state(name, self.parameters[name])
            for label, tensor in states[name].items():
                twin = states[name][label] = recorder.twin(tensor)
                self._enter(name, "state", twin, f"{name}_{label}", state=label)
        with torch.no_grad():
            for name, gradient in self.gradients.items():
                recorder.parameter = name
                recorder.modules[:] = [name.rpartition(".")[0]]
                parameter = self.parameters[name]
                if gradient.stride() != parameter.stride():
                    gradient = torch.empty_like(parameter).copy_(gradient)  # noqa: PLW2901
                updater.update(name, parameter, gradient, states[name])
        recorder.parameter = None

    def finish(self, name: str, sums_at_end: bool) -> Capture:
        """Fold the calls into a graph."""
        recorder, tape = self.recorder, self.recorder.tape
        self.entries += [
            Entry(key, "constant", value) for key, (_, value) in tape.constants.items()
        ]
        order = {"param": 0, "state": 1, "buffer": 2, "constant": 3, "input": 4, "gradient": 5}
        entries = sorted(self.entries, key=lambda entry: order[entry.kind])
        outputs = [recorder.value_of(tensor) for tensor in self.outputs]
        gradients = [recorder.value_of(tensor) for tensor in self.gradients.values()]
        ends = [] if self.loss is None else [recorder.value_of(self.loss)]
        tape.graph.output(
            (
                ends[0].node if ends else None,
                tuple(value.node for value in outputs),
                tuple(value.node for value in gradients),
            )
        )
        folded = fold(name, entries, tape.calls, ends or outputs, gradients if sums_at_end else ())
        return Capture(
            graph=folded.graph,
            parameters=tuple(self.gradients),
            cut=Cut(
                outputs=tuple(value.node.name for value in outputs),
                gradients=tuple(recorder.value_of(g).node.name for g in self.output_gradients),
                loss=ends[0].node.name if ends else None,
                parameter_gradients=tuple(value.node.name for value in gradients),
            ),
            op_nodes=folded.op_nodes,
            tensor_nodes=folded.tensor_nodes,
            num_traced=tape.num_nodes,
            returned=self._returned(),
            input_gradients=tuple(
                (number, recorder.value_of(gradient).node.name)
                for number, gradient in self.input_gradients.items()
            ),
            entries=tuple(self.entries),
            tape=tape,
            set_attributes=self.attributes,
            updater=self.updater,
        )

    def _returned(self) -> Returned:
        recorder = self.recorder
        ids = {id(tensor): k for k, tensor in enumerate(self.made)}
        return Returned(
            template=self.template,
            effects=tuple(self.effects),
            nodes=tuple(recorder.value_of(tensor).node.name for tensor in self.made),
            differentiable=tuple(k for k, t in enumerate(self.made) if t.grad_fn is not None),
            ends=tuple(k for k, t in enumerate(self.made) if t.requires_grad and t.grad_fn is None),
            trained=tuple(
                Trained(ids[id(tensor)], tuple(gradient.stride()))
                for tensor, gradient in zip(self.trained, self.output_gradients, strict=True)
                if id(tensor) in ids
            ),
            absolute=self._find_absolute(),
            written=tuple(self.written),
        )

    def _find_absolute(self) -> tuple[int, ...]:
        """Find inputs that are looked at by an offset from where their memory begins."""
        tape = self.recorder.tape
        roots = {entry.value.storage: entry for entry in self.entries}
        numbers = {self.recorder.value_of(twin).storage: k for k, twin in enumerate(self.inputs)}
        own = dict(named_tensors(self.module, "param")) | dict(named_tensors(self.module, "buffer"))
        own |= {name: tensor for name, (tensor, _) in tape.constants.items()}
        found = set()
        for call in tape.calls:
            given = call.node.args
            if call.target is not _AS_STRIDED or len(given) < 4 or given[3] is None:
                continue
            entry = roots.get(call.reads[0].storage)
            if entry is not None and entry.name in own and own[entry.name].storage_offset():
                raise InputError(
                    f"`{entry.name}` begins inside of its memory, and `forward` calls `as_strided`"
                    " on it with an offset from where that begins. Make it a copy (`.clone()`)."
                )
            if call.reads[0].storage in numbers:
                found.add(numbers[call.reads[0].storage])
        return tuple(sorted(found))


def _described(describer: Describer, held: Any) -> dict[str, Template]:
    """Describe each attribute of an object."""
    return {name: describer.describe(value) for name, value in vars(held).items()}


def _frozen(value: Any) -> Any:
    """Make tuples of lists, so that equal ones can be told."""
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def is_laid_out_alike(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors of one shape have the same strides, where these mean something."""
    strides = zip(mine.shape, mine.stride(), other.stride(), strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in strides)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether several of a tensor's elements are, or may be, in one place in memory."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    span = 1
    for stride, size in sorted(pair for pair in pairs if pair[1] > 1):
        if stride < span:
            return tensor.numel() > 0
        span += (size - 1) * stride
    return False


def _tell(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Give arguments as a tuple: one that is not a tuple or list stands alone."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def returned_loss(result: Any) -> torch.Tensor:
    """Find the loss in what a module returned."""
    found = result
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif not isinstance(result, torch.Tensor):
        found = getattr(result, "loss", None)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise InputError(
            "A training step needs a loss, and the module returns none (one number, alone or as"
            " `.loss`). Pass `loss=`, a function of the outputs and `targets`."
        )
    return found
