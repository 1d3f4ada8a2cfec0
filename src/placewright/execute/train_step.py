"""
A whole training step as planned: `TrainStep`.

This module owns what a step shares with its optimiser: settings that are read in each step, and
state that is where the plan wants it and yet the optimiser's own.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placewright.arguments import expect_type
from placewright.errors import InputError
from placewright.execute.call_effects import (
    check_offsets,
    check_overlaps,
    set_attributes,
    without_values,
    write_back,
)
from placewright.execute.calls import Programs, Signature, read_arguments
from placewright.execute.devices import Lanes, find_devices
from placewright.execute.placed import PlacedStep, placing_of, whole_step
from placewright.execute.program import Parts
from placewright.execute.residents import Residents
from placewright.frontends._checks import check_arguments, check_module
from placewright.frontends._modules import named_tensors
from placewright.frontends._optimizers import STATE_KEYS, Updater, make_optimizer, read_optimizer
from placewright.frontends._structures import Real, Scan, made_in, swap_leaves
from placewright.frontends.torch import Capture, Loss, as_tuple, capture, capture_to_run
from placewright.plan import Plan


class TrainStep:
    """
    A whole training step as planned: forward, loss, backward and update.

    Called with inputs and targets, it runs a step and returns the loss. The module's parameters and
    buffers are moved to where the plan wants them, and stay the module's own. So does the state of
    the optimiser, `optimizer`: its settings are read in each step, so schedules of the learning
    rate work; its state dict can be saved, and loaded before or between steps.

    A step of other shapes, flags or modes than those before gets a program of its own, under the
    same placement by module and op, when it is first met.

    Parameters
    ----------
    plan
        The plan.
    module
        The module that the plan was made for, with real weights.
    inputs, kwargs, loss, targets, optimizer, sums_at_end
        What `placewright.capture` was given, with ``train=True``, when the plan was made. An
        optimiser that is named is made over the module's parameters.
    graphs, compiles
        As for `apply`; here CUDA graphs are for training.

    Raises
    ------
    InputError
        The plan is for another model, for devices that are not here, or needs more memory than
        there is; or the module does something that a plan cannot.
    """

    optimizer: torch.optim.Optimizer | None  # None: the step updates nothing

    def __init__(
        self,
        plan: Plan,
        module: torch.nn.Module,
        inputs: Any,
        *,
        kwargs: Mapping[str, Any] | None = None,
        loss: Loss | None = None,
        targets: Any = (),
        optimizer: str | torch.optim.Optimizer | None = None,
        sums_at_end: bool = False,
        graphs: bool = True,
        compiles: bool = False,
    ) -> None:
        expect_type(plan, Plan, "plan", "a `Plan`")
        check_module(module, train=True)
        check_arguments(inputs, kwargs)
        self.module = module
        self.optimizer = (
            make_optimizer(optimizer, module) if isinstance(optimizer, str) else optimizer
        )
        self._settings = None if self.optimizer is None else _Settings(self.optimizer, module)
        self._captured: dict[str, Any] = {"loss": loss, "sums_at_end": sums_at_end}
        self._options = {"graphs": graphs, "compiles": compiles}
        self._signature = Signature(module.forward)
        self._lanes, self._residents = Lanes(), Residents(module)
        given = self._bind(inputs, targets, kwargs)
        made = self._capture(given)
        if made.graph.fingerprint != plan.graph.fingerprint:  # named arguments in another order
            check = {"kwargs": kwargs, "targets": targets, "optimizer": self.optimizer}
            raw = capture(module, inputs, train=True, **check, **self._captured)
            self._placing = placing_of(plan, raw)
        else:
            self._placing = placing_of(plan, made)
        kinds = {device.kind for device in find_devices(self._placing.device_names)}
        self._programs: Programs[_Step] = Programs(module, kinds)
        first = self._place(made)
        self._programs.get(self._key(read_arguments(given)), [], lambda: first)

    def __call__(
        self, inputs: Any, targets: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """
        Run one step and return the loss.

        Raises
        ------
        InputError
            The module does something with these arguments that a plan cannot.
        """
        given = self._bind(inputs, targets, kwargs)
        found = read_arguments(given)
        if self._programs.moved():
            self._settle_again()
        key = self._key(found)
        step = self._programs.get(
            key,
            found.leaves,
            lambda: self._place(self._capture(swap_leaves(given, without_values))),
        )
        if self._settings is not None and self._settings.follow(self._residents.states):
            for each in self._programs.all():
                each.placed.runner.begin_anew()
        return self._run(step, found)

    def close(self) -> None:
        """End the threads that worked for the step."""
        self._lanes.close()

    def _bind(self, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None) -> Any:
        """Return the arguments by name, and the targets."""
        named = dict(kwargs or {})
        if isinstance(inputs, Mapping):
            args, named = (), {**inputs, **named}
        else:
            args = as_tuple(inputs)
        return self._signature.bind(args, named), as_tuple(targets)

    def _key(self, found: Scan) -> Any:
        shape = None if self._settings is None else self._settings.shape()
        return self._programs.key_of(found, True), shape

    def _capture(self, given: Any) -> Capture:
        (args, kwargs), targets = given
        return capture_to_run(
            self.module,
            args,
            kwargs=kwargs,
            train=True,
            targets=targets,
            optimizer=None if self._settings is None else self._settings.updater,
            **self._captured,
        )

    def _make(self, given: Any) -> _Step:
        return self._place(self._capture(swap_leaves(given, without_values)))

    def _place(self, made: Capture) -> _Step:
        placing = self._placing.carry_over(made.graph)
        returned = made.returned
        needed = {number for effect in returned.effects for number in made_in(effect.template)}
        needed |= {each.made for each in returned.written}
        numbers = tuple(sorted(needed))
        whole = whole_step(made)
        wanted = [whole.wanted[0][0], *(returned.nodes[number] for number in numbers)]
        wanted += [node for _, node in made.input_gradients]
        placed = PlacedStep(
            made,
            self.module,
            placing.placement,
            placing.sequence,
            placing.device_names,
            Parts(whole.ops, whole.fed, (tuple(wanted),)),
            lanes=self._lanes,
            shared=self._residents,
            **self._options,
        )
        self._programs.leave()
        written = {value.storage for call in made.tape.calls for value in call.writes}
        overwritten = tuple(
            entry.value.node.name
            for entry in made.entries
            if entry.kind in ("param", "buffer", "constant") and entry.value.storage in written
        )
        return _Step(placed, numbers, overwritten)

    def _settle_again(self) -> None:
        """Follow parameters that somebody has moved or replaced."""
        try:
            for step in self._programs.all():
                step.placed.settle(self._residents)
        except (KeyError, RuntimeError):  # they are of other names or sizes by now
            self._programs.forget()
        self._programs.leave()

    def _run(self, step: _Step, found: Scan) -> Tensor:
        made = step.placed.capture
        returned = made.returned
        leaves = [leaf.resolve_conj().resolve_neg() for leaf in found.leaves]
        check_offsets(leaves, returned.absolute)
        written = [each.number for each in returned.written]
        check_overlaps(leaves, written, step.placed.places_of, step.overwritten)
        wanting = [leaves[number] for number, _ in made.input_gradients]
        if not all(leaf.is_leaf for leaf in wanting):
            raise InputError(
                "An input has a gradient that goes on to what it was computed from, and a whole"
                " step ends at its inputs. Pass it detached, or use `placewright.apply`."
            )
        with torch.no_grad():
            loss, *values = step.placed.run(leaves)
            begin = len(step.numbers)
            numbered = dict(zip(step.numbers, values[:begin], strict=True))
            for each in returned.written:
                write_back(leaves[each.number], numbered[each.made])
            for leaf, gradient in zip(wanting, values[begin:], strict=True):
                own = torch.empty_like(leaf).copy_(gradient)  # others may look at its memory
                leaf.grad = own if leaf.grad is None else leaf.grad + own
        real = Real(leaves, found.objects, numbered, self._own)
        set_attributes(returned.effects, real, self.module.get_submodule)
        if self._settings is not None:
            self._settings.note(made.parameters, self._residents.states)
        return loss

    def _own(self, name: str) -> Tensor:
        prefix, _, last = name.rpartition(".")
        found: Tensor = getattr(self.module.get_submodule(prefix), last)
        return found


@dataclass(frozen=True, eq=False)
class _Step:
    """One kind of step, ready to run."""

    placed: PlacedStep
    numbers: tuple[int, ...]  # of made tensors that come back beside the loss
    overwritten: tuple[str, ...]  # nodes of what stays and is overwritten


_RECORDED = ("weight_decay", "maximize", "momentum", "dampening", "nesterov", "betas", "eps")
"""Settings that a step which is replayed on a GPU has as they were when it was recorded."""


class _Adopted(NamedTuple):
    """State of the optimiser that steps overwrite: where it is held, and what is held there."""

    owners: list[dict[str, Any]]
    keys: list[str]
    tensors: list[Tensor]


class _Settings:
    """
    An optimiser as a step reads it.

    The generated code reads settings from copies of the optimiser's groups, which are brought up to
    date before each step; the optimiser's state holds the very tensors that the step overwrites.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        self._optimizer, self._module = optimizer, module
        self._read()

    def _read(self) -> None:
        found = read_optimizer(self._optimizer, self._module)
        self._groups: list[dict[str, Any]] = [dict(g) for g in self._optimizer.param_groups]
        pairs = zip(self._optimizer.param_groups, self._groups, strict=True)
        mine = {id(group): copy for group, copy in pairs}
        settings = {name: mine[id(group)] for name, group in found.settings.items()}
        self.updater = Updater(found.kind, settings)
        self._parameters = dict(named_tensors(self._module, "param"))
        self._adopted = _Adopted([], [], [])
        self._known: list[Any] = []
        self._recorded: list[list[Any]] = []

    def shape(self) -> Any:
        """
        Return what a program is made for: the kinds of state that there are, by group.

        Raises
        ------
        InputError
            The optimiser has hooks, which a step that is run as a whole never calls.
        """
        optimizer = self._optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise InputError(
                "The optimiser has step hooks, and `TrainStep` updates without calling its `step`."
                " Take them off, or use `placewright.apply` and the optimiser itself."
            )
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != [len(group["params"]) for group in self._groups]:
            self._read()
        for mine, group in zip(self._groups, optimizer.param_groups, strict=True):
            mine.update(group)
        return id(self.updater), tuple(
            (
                bool(group.get("momentum")),
                bool(group.get("amsgrad")),
                bool(group.get("decoupled_weight_decay")),
            )
            for group in self._groups
        )

    def follow(self, states: dict[tuple[str, str], Tensor]) -> bool:
        """
        Take over what was changed in the optimiser since the last step: settings and state.

        Tell whether what was recorded of steps on GPUs has to be recorded again.
        """
        self.updater.refresh_rates()
        self._follow_state(states)
        read = [[group.get(key) for key in _RECORDED] for group in self._groups]
        is_other = read != self._recorded or bool(self.updater.fresh)
        self._recorded = read
        return is_other

    def _follow_state(self, states: dict[tuple[str, str], Tensor]) -> None:
        owners, keys, mine = self._adopted
        known = [*self._optimizer.state.values()]
        if (
            len(mine) == len(states)
            and len(known) == len(self._known)
            and all(map(operator.is_, known, self._known))
            and all(map(operator.is_, map(dict.get, owners, keys), mine))
            and all(map(operator.is_, states.values(), mine))
        ):
            return
        self._adopt(states)

    def _adopt(self, states: dict[tuple[str, str], Tensor]) -> None:
        self._adopted = owners, keys, mine = _Adopted([], [], [])
        fresh = self.updater.fresh
        for (name, label), tensor in states.items():
            key = STATE_KEYS.get(label, label)
            held = self._optimizer.state[self._parameters[name]]
            value = held.get(key)
            if value is None:
                tensor.zero_()
                if label in STATE_KEYS:
                    fresh.add(name)
            elif value is not tensor:
                fresh.discard(name)
                if isinstance(value, Tensor):
                    tensor.copy_(value)
                else:
                    tensor.fill_(value)
            if name not in fresh:
                held[key] = tensor
            owners.append(held)
            keys.append(key)
            mine.append(tensor)
        self._known = [*self._optimizer.state.values()]

    def note(self, updated: tuple[str, ...], states: dict[tuple[str, str], Tensor]) -> None:
        """Note that a step was made."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
        fresh = self.updater.fresh
        if not fresh.isdisjoint(updated):
            fresh.difference_update(updated)
            for (name, label), tensor in states.items():
                if name in updated:
                    held = self._optimizer.state[self._parameters[name]]
                    held[STATE_KEYS.get(label, label)] = tensor
