"""
A plan put to work on a module that is called and trained as before: `apply`.

This module owns what a call of a placed module is to PyTorch: which of its results have gradients,
what it leaves in inputs and attributes, and which backward pass belongs to the gradients that come.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placewright.arguments import expect_flag, expect_type
from placewright.carrying import Placing
from placewright.errors import InputError
from placewright.execute.call_effects import (
    apart,
    as_is,
    check_offsets,
    check_overlaps,
    set_attributes,
    without_base,
    without_values,
    write_back,
)
from placewright.execute.calls import Programs, Signature, read_arguments
from placewright.execute.devices import Lanes, find_devices
from placewright.execute.generate import SETS, generation_of
from placewright.execute.placed import PlacedStep, placing_of
from placewright.execute.program import Parts
from placewright.execute.residents import Residents
from placewright.frontends._structures import Real, Scan, build, swap_leaves
from placewright.frontends._work import CREATORS, name_of
from placewright.frontends.torch import (
    Capture,
    Loss,
    Trained,
    Written,
    as_tuple,
    capture,
    capture_call,
)
from placewright.plan import Plan


def apply(
    plan: Plan,
    module: torch.nn.Module,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    loss: Loss | None = None,
    targets: Any = (),
    optimizer: str | torch.optim.Optimizer | None = None,
    sums_at_end: bool = False,
    graphs: bool = True,
    compiles: bool = False,
) -> torch.nn.Module:
    """
    Give back a module that runs as planned: called as before, and trained as before.

    It is of the module's class and shares its parameters, buffers and submodules with it; these
    are moved to where the plan wants them, so the state dict stays what it was. With a plan of a
    training step, a loss on anything that it returns puts gradients on parameters, and on inputs
    that want one; any optimiser updates them.

    A call of another kind than those before (other shapes, flags, numbers or modes) gets a program
    of its own, under the same placement by module and op, when it is first met.

    Parameters
    ----------
    plan
        The plan.
    module
        The module that the plan was made for, with real weights.
    inputs, kwargs, train, loss, targets, optimizer, sums_at_end
        What `placewright.capture` was given when the plan was made: the module is captured again,
        and must come to the same graph. Without `train`, results have no gradients.
    graphs
        Whether adjacent ops of a GPU are replayed as CUDA graphs, from the third call on: for
        inference only, with no op that draws random numbers on the GPU.
    compiles
        Whether PyTorch compiles adjacent ops of a device (`torch.compile`), on the first call.
        That takes seconds to minutes, and rounds otherwise.

    Raises
    ------
    InputError
        The plan is for another model, for devices that are not here, or needs more memory than
        there is; or the module does something that a plan cannot.
    """
    expect_type(plan, Plan, "plan", "a `Plan`")
    expect_flag(train, "train")
    step = capture(
        module,
        inputs,
        kwargs=kwargs,
        train=train,
        loss=loss,
        targets=targets,
        optimizer=optimizer,
        sums_at_end=sums_at_end,
    )
    placing = placing_of(plan, step)
    options = {"graphs": graphs, "compiles": compiles}
    calls = Calls(module, placing, train=train, sums_at_end=sums_at_end, options=options)
    if isinstance(inputs, Mapping):
        args, named = (), {**inputs, **(kwargs or {})}
    else:
        args, named = as_tuple(inputs), dict(kwargs or {})
    with torch.set_grad_enabled(train):
        calls.prepare(args, named, step.returned.trained)
    return calls.placed


_MAX_VARIANTS = 4
"""How many programs of a kind of call are kept that differ in where their backward pass begins."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One kind of call, ready to run."""

    key: Any
    casts: dict[str, torch.dtype]  # what autocast had on, by kind of device
    example: Any  # its arguments, on the meta device
    capture: Capture
    step: PlacedStep
    read_leaves: tuple[int, ...]  # inputs that the backward pass reads
    read_parameters: frozenset[str]  # and parameters
    read_made: tuple[int, ...]  # and what the forward pass made
    overwritten: tuple[str, ...]  # nodes of what stays and the forward pass overwrites

    @property
    def trained(self) -> tuple[Trained, ...]:
        """List what the backward pass begins at."""
        return self.capture.returned.trained


def _make_call(key: Any, casts: dict[str, torch.dtype], example: Any, step: PlacedStep) -> Call:
    """Find out what a backward pass needs to be there as it was."""
    made = step.capture
    calls = made.tape.calls
    values = {e.value.node.name: e.value for e in made.entries}
    values |= {value.node.name: value for call in calls for value in call.makes}
    read = {
        value.storage
        for call in calls
        if call.phase == "backward" and name_of(call.target) not in CREATORS
        for value in call.reads
    }
    written = {value.storage for c in calls if c.phase == "forward" for value in c.writes}
    leaves = [e.value.storage for e in made.entries if e.kind == "input"]
    outputs = [values[name].storage for name in made.returned.nodes]
    replaced = {each.number for each in made.returned.written}
    return Call(
        key=key,
        casts=casts,
        example=example,
        capture=made,
        step=step,
        read_leaves=tuple(k for k, s in enumerate(leaves) if s in read and k not in replaced),
        read_parameters=frozenset(
            e.name for e in made.entries if e.kind == "param" and e.value.storage in read - written
        ),
        read_made=tuple(k for k, storage in enumerate(outputs) if storage in read),
        overwritten=tuple(
            e.value.node.name
            for e in made.entries
            if e.kind in ("param", "buffer", "constant") and e.value.storage in written
        ),
    )


class Calls:
    """
    What a placed module does when it is called.

    Parameters
    ----------
    module
        The module.
    placing
        Where its ops run, as planned for one kind of call.
    train
        Whether calls have a backward pass while gradients are on.
    sums_at_end
        As for `placewright.capture`.
    options
        Of `PlacedStep`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        placing: Placing,
        *,
        train: bool,
        sums_at_end: bool,
        options: dict[str, Any],
    ) -> None:
        self.placing, self.train = placing, train
        self._sums_at_end, self._options = sums_at_end, options
        self.placed = _make_placed(module, self)
        self._module: torch.nn.Module = object.__new__(type(module))  # that is captured
        self._module.__dict__.update(module.__dict__)
        self._own_forward = {k: v for k, v in module.__dict__.items() if k == "forward"}
        self.signature = Signature(module.forward)
        kinds = {device.kind for device in find_devices(placing.device_names)}
        self.programs: Programs[Call] = Programs(self.placed, kinds)
        self.programs.watch.ignore([("", name) for name in SETS])
        self.lanes, self._residents = Lanes(), Residents(self._module)
        self.lock = threading.RLock()  # callers of several threads take turns
        self._variants: dict[Any, list[Call]] = {}  # by kind of call, where there are several

    @property
    def module(self) -> torch.nn.Module:
        """Give the module as it would be if it were not placed, in its present state."""
        held = self._module.__dict__
        held.clear()
        held.update({key: value for key, value in self.placed.__dict__.items() if key != "forward"})
        held.update(self._own_forward)
        return self._module

    def copy(self, memo: dict[int, Any]) -> Calls:
        """Place a copy of the module in the same way."""
        return Calls(
            copy.deepcopy(self.module, memo),
            self.placing,
            train=self.train,
            sums_at_end=self._sums_at_end,
            options=self._options,
        )

    def close(self) -> None:
        """End the threads that work for calls."""
        self.lanes.close()

    def prepare(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], trained: Sequence[Trained] | None
    ) -> None:
        """Make the program for a kind of call."""
        args, named = self.signature.bind(args, kwargs)
        self._find(args, named, read_arguments((args, named)), trained)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module."""
        args, named = self.signature.bind(args, kwargs)
        found = read_arguments((args, named))
        call = self._find(args, named, found, None)
        leaves = [leaf.resolve_conj().resolve_neg() for leaf in found.leaves]
        if not self.train and torch.is_grad_enabled():
            _check_inference(leaves)
        returned = call.capture.returned
        written = [each.number for each in returned.written]
        check_offsets(leaves, returned.absolute)
        check_overlaps(leaves, written, call.step.places_of, call.overwritten)
        seed = call.step.runner.draw_seed()
        if returned.differentiable and torch.is_grad_enabled():
            names, tensors = self.programs.watch.names, self.programs.watch.tensors()
            pairs = [(n, t) for n, t in zip(names, tensors, strict=True) if t.requires_grad]
            sources = [tensor for _, tensor in pairs]
            run: Any = _Run.apply  # without types
            made = run(self, call, seed, [n for n, _ in pairs], len(leaves), *leaves, *sources)
            for each in returned.written:
                if _is_written_apart(each, leaves):
                    leaves[each.number].copy_(made[each.made])
        else:
            with torch.no_grad():
                made = _write_back(call, leaves, call.step.run(leaves, 0, None, seed))
        for number in returned.ends:
            made[number].requires_grad_()
        return self._finish(call, found, made)

    def _find(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        found: Scan,
        trained: Sequence[Trained] | None,
    ) -> Call:
        trains = self.train and torch.is_grad_enabled()
        if self.programs.moved():
            self._settle_again()
        key = self.programs.key_of(found, trains)
        call = self.programs.get(
            key, found.leaves, lambda: self._make(key, (args, kwargs), trains, trained)
        )
        if call.key != key:  # the program is known to set what was looked at
            self.programs.put(call.key, call)
        return call

    def _settle_again(self) -> None:
        """Follow parameters that somebody has moved or replaced."""
        try:
            for call in self.programs.all():
                call.step.settle(self._residents)
        except (KeyError, RuntimeError):  # they are of other names or sizes by now
            self.programs.forget()
        self._variants = {}
        self.programs.leave()

    def _make(self, key: Any, given: Any, trains: bool, trained: Sequence[Trained] | None) -> Call:
        """Make the program for a kind of call."""
        casts = self.programs.casts()
        example = swap_leaves(given, without_values)
        made = self._capture(example, trains, trained)
        effects = [(e.owner, e.name) for e in made.returned.effects if isinstance(e.owner, str)]
        if self.programs.watch.ignore(effects):
            key = (self.programs.watch.number, *key[1:])
        return _make_call(key, casts, example, self._place(made, self._residents))

    def _capture(self, example: Any, trains: bool, trained: Sequence[Trained] | None) -> Capture:
        args, kwargs = example
        return capture_call(
            self.module,
            args,
            kwargs,
            train=trains,
            trained=trained,
            sums_at_end=self._sums_at_end,
        )

    def _place(self, made: Capture, residents: Residents) -> PlacedStep:
        placing = self.placing.carry_over(made.graph)
        step = PlacedStep(
            made,
            self.module,
            placing.placement,
            placing.sequence,
            placing.device_names,
            _parts_of(made),
            lanes=self.lanes,
            shared=residents,
            **self._options,
        )
        self.programs.leave()
        return step

    def _finish(self, call: Call, found: Scan, made: Sequence[Tensor]) -> Any:
        """Build what the call returns, and set the attributes that it sets."""
        returned = call.capture.returned
        real = Real(found.leaves, found.objects, made, self._own)
        set_attributes(returned.effects, real, self.placed.get_submodule)
        return build(returned.template, real)

    def _own(self, name: str) -> Tensor:
        prefix, _, last = name.rpartition(".")
        found: Tensor = getattr(self.placed.get_submodule(prefix), last)
        return found

    def go_back(
        self, call: Call, saved: _Saved, kept: list[Any] | None, gradients: dict[int, Tensor]
    ) -> dict[str | int, Tensor]:
        """
        Compute the gradients of parameters, by name, and of inputs, by number.

        The backward pass of a program begins at certain results. Where gradients come for others,
        or a second time, the call is run again, as it was, with the right backward pass.
        """
        if kept is None or not _begins_at(call, gradients):
            call, kept = self._run_again(call, saved, gradients)
        made, nodes = call.capture, call.step.parts.fed[1]
        metas = {e.value.node.name: e.value.node.meta["tensor"] for e in made.entries}
        fed = [
            _laid_out(gradients[each.number], metas[node])
            for each, node in zip(call.trained, nodes, strict=True)
        ]
        found = apart(call.step.run(fed, 1, kept, saved.seed), [*gradients.values(), *fed])
        names: list[str | int] = [*made.parameters]
        names += [number for number, _ in made.input_gradients]
        return dict(zip(names, found, strict=True))

    def _run_again(
        self, call: Call, saved: _Saved, gradients: dict[int, Tensor]
    ) -> tuple[Call, list[Any]]:
        """
        Run a forward pass again, to go back from other gradients.

        Later calls of this kind are expected to be like this one.
        """
        saved.check(self.programs.watch.tensors())
        again = self._variant(call, gradients)
        leaves, before = saved.copies()
        if before:
            again.step.settle(Residents(self._module, before))
        kept = again.step.runner.make_kept()
        again.step.run(leaves, 0, kept, saved.seed)
        if before:
            again.step.settle(self._residents)
        self.programs.put(call.key, again)
        return again, kept

    def _variant(self, call: Call, gradients: dict[int, Tensor]) -> Call:
        """Find or make the program for a kind of call whose backward pass begins at these."""
        known = self._variants.setdefault(call.key, [call])
        for variant in known:
            if _begins_at(variant, gradients):
                return variant
        if self.programs.watch.look() != call.key[0]:
            raise _changed("the module's mode or settings have")
        with contextlib.ExitStack() as stack:
            for kind in self.programs.kinds:
                dtype = call.casts.get(kind)
                stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            trained = [Trained(k, gradient.stride()) for k, gradient in gradients.items()]
            made = self._capture(call.example, True, trained)
        step = self._place(made, self._residents)
        known.append(_make_call(call.key, call.casts, call.example, step))
        del known[:-_MAX_VARIANTS]
        assert _begins_at(known[-1], gradients)
        return known[-1]


@dataclass(frozen=True, eq=False)
class _Saved:
    """What it takes to run a forward pass again."""

    leaves: list[Tensor]
    written: frozenset[int]  # those that it overwrites
    before: dict[str, Tensor]  # what else it overwrites, by node
    tensors: list[Tensor]  # the module's
    versions: list[tuple[Tensor, int]]
    seed: int

    @classmethod
    def of(cls, call: Call, leaves: Sequence[Tensor], tensors: list[Tensor], seed: int) -> _Saved:
        """Save what a forward pass is about to read."""
        written = frozenset(each.number for each in call.capture.returned.written)
        kept = [as_is(leaf) if k in written else leaf for k, leaf in enumerate(leaves)]
        residents = call.step.residents
        before = {
            node: residents[node].detach().clone() for node in call.overwritten if node in residents
        }
        places = {residents[node].data_ptr() for node in before}
        fixed = [leaf for k, leaf in enumerate(leaves) if k not in written]
        fixed += [t for t in tensors if t.data_ptr() not in places] if places else tensors
        versions = [(tensor, tensor._version) for tensor in fixed]
        return cls(kept, written, before, tensors, versions, seed)

    def copies(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Copy what the forward pass will overwrite, since it may run again more than once."""
        leaves = [as_is(t) if k in self.written else t for k, t in enumerate(self.leaves)]
        return leaves, {node: as_is(tensor) for node, tensor in self.before.items()}

    def check(self, tensors: list[Tensor]) -> None:
        """
        Check that inputs are as they were, and the module's tensors the same.

        Raises
        ------
        RuntimeError
            They are not.
        """
        is_same = len(tensors) == len(self.tensors)
        is_same = is_same and all(map(operator.is_, tensors, self.tensors))
        if not is_same or any(tensor._version != v for tensor, v in self.versions):
            raise _changed("an input, a parameter or a buffer has")


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        "This backward pass runs the placed module's forward pass again, since it begins at other"
        f" results than the last one or runs a second time; but since that forward pass, {what}"
        " changed. Run backward passes before such changes."
    )


class _Run(torch.autograd.Function):
    """A placed module's forward and backward pass, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, calls: Calls, call: Call, seed: int, names: list[str], count: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        leaves, sources = given[:count], given[count:]
        ctx.saved = _Saved.of(call, leaves, calls.programs.watch.tensors(), seed)
        ctx.kept = call.step.runner.make_kept()
        made = _write_back(call, leaves, call.step.run(leaves, 0, ctx.kept, seed), trains=True)
        made = _without_bases(call, made)
        returned = call.capture.returned
        ctx.calls, ctx.call, ctx.names, ctx.count = calls, call, names, count
        dirty = [each for each in returned.written if each.is_dirty]
        ctx.mark_dirty(*(leaves[d.number] for d in dirty if not _is_written_apart(d, leaves)))
        others = {*range(len(made))} - {*returned.differentiable}
        ctx.mark_non_differentiable(*(made[k] for k in others))
        ctx.set_materialize_grads(False)
        pairs = zip(names, sources, strict=True)
        ctx.save_for_backward(
            *(leaves[k] for k in call.read_leaves),
            *(source for name, source in pairs if name in call.read_parameters),
            *(made[k] for k in call.read_made),
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise InputError(
                "`create_graph=True` asks for gradients of gradients, which a placed module does"
                " not have. Compute them with a module that is not placed."
            )
        ctx.saved_tensors  # noqa: B018  # says what was overwritten since, or that they are gone
        differentiable = ctx.call.capture.returned.differentiable
        gradients = {k: g for k in differentiable if (g := given[k]) is not None}
        found: dict[str | int, Tensor] = {}
        if gradients:
            kept, ctx.kept = ctx.kept, None
            with ctx.calls.lock:
                found = ctx.calls.go_back(ctx.call, ctx.saved, kept, gradients)
        inputs = (found.get(k) for k in range(ctx.count))
        return None, None, None, None, None, *inputs, *(found.get(name) for name in ctx.names)


def _check_inference(leaves: Sequence[Tensor]) -> None:
    """
    Check that no input wants a gradient from a module that was placed for inference.

    Raises
    ------
    InputError
        One does.
    """
    if any(leaf.requires_grad for leaf in leaves):
        raise InputError(
            "An input requires a gradient, and this module was placed for inference. Place it with"
            " `train=True`, or call it under `torch.no_grad()`."
        )


def _parts_of(made: Capture) -> Parts:
    """Cut a captured call in two for autograd, if it has a backward pass."""
    graph = made.graph
    phases = [
        "backward" if kind == "gradient" else phase
        for kind, phase in zip(graph.op_kinds, graph.op_phases, strict=True)
    ]
    forward = frozenset(op for op, phase in enumerate(phases) if phase == "forward")
    fed = tuple(e.value.node.name for e in made.entries if e.kind == "input")
    if not made.returned.trained:
        return Parts((forward,), (fed,), (made.returned.nodes,))
    backward = frozenset(
        op for op, phase in enumerate(phases) if phase == "backward" and made.op_nodes[op]
    )
    wanted = (*made.cut.parameter_gradients, *(node for _, node in made.input_gradients))
    return Parts((forward, backward), (fed, made.cut.gradients), (made.returned.nodes, wanted))


def _begins_at(call: Call, gradients: dict[int, Tensor]) -> bool:
    """Tell whether a program's backward pass begins at gradients of these results, laid out so."""
    if [each.number for each in call.trained] != [*gradients]:
        return False
    return all(
        size == 1 or mine == theirs
        for each in call.trained
        for size, mine, theirs in zip(
            gradients[each.number].shape, each.stride, gradients[each.number].stride(), strict=True
        )
    )


def _write_back(
    call: Call, leaves: Sequence[Tensor], found: list[Tensor], *, trains: bool = False
) -> list[Tensor]:
    """Leave in inputs what was written there; give what was made, each an object of its own."""
    for each in call.capture.returned.written:
        leaf, k = leaves[each.number], each.made
        if trains and _is_written_apart(each, leaves):
            found[k] = found[k].clone() if leaf.data_ptr() == found[k].data_ptr() else found[k]
            continue
        write_back(leaf, found[k])
        found[k] = leaf if each.is_dirty else leaf.new_empty(0)  # which nobody reads
    seen: set[int] = set()
    for k, tensor in enumerate(found):
        if id(tensor) in seen:
            found[k] = tensor.detach()
        seen.add(id(found[k]))
    return found


def _without_bases(call: Call, found: list[Tensor]) -> list[Tensor]:
    """
    Return results that are not views, so that callers may write into them.

    PyTorch refuses in-place ops on views that an autograd function returns, and treats a view
    without a gradient as if it had that of its base. Results with gradients that share memory stay
    views: a write into one of them is refused, since autograd would not see it in the others.
    """
    has_gradient = {*call.capture.returned.differentiable}
    places = Counter(found[k].untyped_storage().data_ptr() for k in has_gradient)
    dirty = {each.made for each in call.capture.returned.written if each.is_dirty}
    for k, tensor in enumerate(found):
        is_alone = k not in has_gradient or places[tensor.untyped_storage().data_ptr()] == 1
        if tensor._is_view() and is_alone and k not in dirty:
            found[k] = without_base(tensor)
    return found


def _is_written_apart(each: Written, leaves: Sequence[Tensor]) -> bool:
    """Tell whether an input is written after the program: autograd wants it so for views."""
    return each.is_dirty and leaves[each.number]._is_view()


def _laid_out(gradient: Tensor, meta: tuple[Any, ...]) -> Tensor:
    """Give a gradient with the strides that the backward pass was captured with."""
    shape, stride, dtype = meta
    if gradient.stride() == stride:
        return gradient
    made = torch.empty_strided(shape, stride, dtype=dtype, device=gradient.device)
    return made.copy_(gradient)


# --- The module. ---


class PlacedModule(torch.nn.Module):
    """
    What makes a placed module of a module's class: its `forward` runs a plan.

    Copies (`copy.deepcopy`) are placed in the same way, with parameters of their own. The module
    as a whole cannot be pickled; its state dict can.
    """

    _calls: Calls

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Place a copy of the module in the same way."""
        made = self._calls.copy(memo).placed
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled."""
        raise InputError(
            "A placed module cannot be saved as a whole: its plan belongs to this machine. Save"
            " `placed.state_dict()`, load it into the module, and place that."
        )


def _make_placed(module: torch.nn.Module, calls: Calls) -> torch.nn.Module:
    """Make a module of the same class that shares everything with the given one but `forward`."""
    kind = type(module)

    def forward(_: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with calls.lock:
            return calls.run(args, kwargs)

    forward.__doc__ = kind.forward.__doc__
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]

    def make_unplaced(_: type, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return kind(*args, **kwargs)

    words: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_calls": calls,
        "__new__": make_unplaced,  # for `type(placed)(config)` and `placed.from_pretrained`
        "forward": torch._disable_dynamo(forward),  # type: ignore[attr-defined]
    }
    words |= generation_of(kind)
    made: torch.nn.Module = object.__new__(type(kind.__name__, (PlacedModule, kind), words))
    made.__dict__.update({key: v for key, v in module.__dict__.items() if key != "forward"})
    return made
