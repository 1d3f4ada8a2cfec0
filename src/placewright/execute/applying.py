"""
A plan put to work: `apply` for a module that is called and trained as before, `TrainStep` for all.

This module owns where a captured step is cut for autograd: the module's forward pass in one part,
its backward pass in another, the loss and the optimiser left to the user.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from placewright.errors import InputError
from placewright.execute.placed import PlacedStep, whole_step
from placewright.execute.program import Parts
from placewright.frontends._modules import leaves_of, named_tensors
from placewright.frontends.torch import Capture, Loss, capture
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

    Its parameters and buffers are the module's own, moved to where the plan wants them; so the
    state dict stays what it was. With a plan of a training step, ``loss(placed(x)).backward()``
    puts gradients on them, and any optimiser updates them. The loss that the plan was made with
    need not be the loss that is used.

    Parameters
    ----------
    plan
        The plan.
    module
        The module that the plan was made for, with real weights.
    inputs, kwargs, train, loss, targets, optimizer, sums_at_end
        What `placewright.capture` was given when the plan was made: the module is captured again,
        and must come to the same graph.
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
        there is; or the loss reads parameters itself, which only `TrainStep` can run.
    """
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
    parts = module_parts(step)
    placed = PlacedStep.of_plan(step, module, plan, parts, graphs=graphs, compiles=compiles)
    return _wrap(module, placed, (inputs, kwargs or {}))


def _wrap(module: torch.nn.Module, placed: PlacedStep, given: Any) -> torch.nn.Module:
    """Make a module of the same class that shares everything with the given one but `forward`."""
    known = dict(named_tensors(module, "param"))
    sources = [known[name] for name in placed.capture.parameters]
    inputs = _Inputs(given)
    was_training = module.training

    def forward(*args: Any, **kwargs: Any) -> Any:
        if made.training != was_training:
            mode = "training" if was_training else "evaluation"
            raise InputError(
                f"The plan is for the module in {mode} mode, and it is not any more. Set it back,"
                " or make a plan for the other mode."
            )
        leaves = inputs.check((args, kwargs))
        run: Any = _Placed.apply  # without types
        found = run(placed, len(leaves), *leaves, *sources)
        values = dict(zip(placed.parts.wanted[0], found, strict=True))
        return placed.capture.returned.rebuild(values)

    made = copy.copy(module)
    made.forward = forward
    made.__dict__["_placed"] = placed
    return made


class _Inputs:
    """What a step was captured with: later inputs must be alike."""

    def __init__(self, given: Any) -> None:
        self.shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves_of(_normal(given))]

    def check(self, given: Any) -> list[Tensor]:
        leaves = leaves_of(_normal(given))
        shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
        if shapes != self.shapes:
            raise InputError(
                f"The plan is for inputs of {_tell(self.shapes)}, and these are {_tell(shapes)}."
                " Make a plan for them."
            )
        if any(leaf.requires_grad for leaf in leaves):
            raise InputError(
                "An input wants a gradient, and a plan computes those of parameters only. Pass it"
                " detached."
            )
        return leaves


def _normal(given: Any) -> Any:
    """Order arguments as `capture` does: positions first, then names."""
    inputs, kwargs = given
    return ((), {**inputs, **kwargs}) if isinstance(inputs, Mapping) else (inputs, kwargs)


def _tell(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> str:
    words = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in shapes]
    return ", ".join(words) or "nothing"


class _Placed(torch.autograd.Function):
    """A placed module's forward and backward pass, for autograd."""

    @staticmethod
    def forward(ctx: Any, placed: PlacedStep, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        kept = placed.runner.make_kept()
        found = placed.run(tensors[:count], 0, kept)
        ctx.kept, ctx.placed, ctx.count = kept, placed, count
        trained = placed.capture.cut.outputs[: len(placed.capture.cut.gradients)]
        wanted = placed.parts.wanted[0]
        ctx.at = [wanted.index(name) for name in trained]
        others = [found[k] for k in range(len(wanted)) if k not in ctx.at]
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(True)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.kept is None:
            raise RuntimeError(
                "The backward pass of a placed module runs once for each forward pass; call the"
                " module again."
            )
        fed = [gradients[k] for k in ctx.at]
        found = ctx.placed.run(fed, 1, ctx.kept)
        ctx.kept = None
        return None, None, *(None for _ in range(ctx.count)), *found


class TrainStep:
    """
    A whole training step as planned: forward, loss, backward and update.

    Called with inputs and targets, it runs a step and gives the loss. The module's parameters and
    buffers are moved to where the plan wants them, and stay the module's own; the optimiser's
    state lives here, and is new.

    Parameters
    ----------
    plan
        The plan.
    module
        The module that the plan was made for, with real weights.
    inputs, kwargs, loss, targets, optimizer, sums_at_end
        What `placewright.capture` was given, with ``train=True``, when the plan was made.
    graphs, compiles
        As for `apply`; here CUDA graphs are for training.

    Raises
    ------
    InputError
        The plan is for another model, for devices that are not here, or needs more memory than
        there is.
    """

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
        step = capture(
            module,
            inputs,
            kwargs=kwargs,
            train=True,
            loss=loss,
            targets=targets,
            optimizer=optimizer,
            sums_at_end=sums_at_end,
        )
        self._placed = PlacedStep.of_plan(
            step, module, plan, whole_step(step), graphs=graphs, compiles=compiles
        )
        self._inputs = _Inputs((_with(inputs, kwargs), {"targets": targets}))
        self.module = module

    def __call__(
        self, inputs: Any, targets: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """
        Run one step and give the loss.

        Raises
        ------
        InputError
            Shapes or types of inputs or targets are not those that were captured.
        """
        leaves = self._inputs.check((_with(inputs, kwargs), {"targets": targets}))
        return self._placed.run(leaves)[0]

    def close(self) -> None:
        """End the threads that worked for the step."""
        self._placed.close()


def _with(inputs: Any, kwargs: Mapping[str, Any] | None) -> Any:
    if isinstance(inputs, Mapping):
        return ((), {**inputs, **(kwargs or {})})
    return (inputs, dict(kwargs or {}))


def module_parts(step: Capture) -> Parts:
    """
    Cut a captured step for autograd: what the module computes, and how its gradients are found.

    Raises
    ------
    InputError
        The loss reads parameters itself, so that a part of their gradient is not the module's.
    """
    graph, fed = step.graph, _input_nodes(step)
    wanted = step.returned.nodes
    links = _Links(step)
    forward = links.before(wanted, ())
    targets = {
        int(graph.tensor_op[tensor])
        for tensor, label in enumerate(step.tensor_nodes)
        if label in links.inputs - {*fed}
    }
    residents = {op for op in range(graph.num_ops) if not step.op_nodes[op]} - targets
    if not step.parameters:
        return Parts((frozenset(forward | residents),), (fed,), (wanted,))
    if step.cut.loss_reads:
        raise InputError(
            f"The loss reads parameters itself (`{step.cut.loss_reads[0]}`), beside what the module"
            " returns; run the whole step with `TrainStep`."
        )
    names = step.cut.parameter_gradients
    backward = links.before(names, step.cut.gradients) - forward - residents
    return Parts(
        (frozenset(forward | residents), frozenset(backward)),
        (fed, step.cut.gradients),
        (wanted, names),
    )


def _input_nodes(step: Capture) -> tuple[str, ...]:
    """List the inputs of the module, without the targets of the loss."""
    return tuple(
        entry.value.node.name
        for entry in step.entries
        if entry.kind == "input" and entry.name.startswith("input.")
    )


class _Links:
    """Which ops a value depends on."""

    def __init__(self, step: Capture) -> None:
        graph, tape = step.graph, step.tape
        there = [entry.value for entry in step.entries]
        made = [value for call in tape.calls for value in call.makes]
        self.values = {value.node.name: value for value in (*there, *made)}
        self.maker: dict[Any, int] = {}  # the last op that makes or overwrites a storage
        self.label_of = step.tensor_nodes
        for tensor, label in enumerate(step.tensor_nodes):
            op = int(graph.tensor_op[tensor])
            if label and graph.op_phases[op] != "update":  # some updates scale gradients in place
                self.maker[self.values[label].storage] = op
        self.reads: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            if step.tensor_nodes[tensor]:
                self.reads[op].append(tensor)
        self.tensor_op = graph.tensor_op.tolist()
        self.inputs = {e.value.node.name for e in step.entries if e.kind == "input"}
        buffers = {e.value.storage for e in step.entries if e.kind == "buffer"}
        op_of = {name: op for op, names in enumerate(step.op_nodes) for name in names}
        self.assigning = [
            op_of[call.node.name]
            for call in tape.calls
            if call.node.name in op_of
            and call.phase == "forward"
            and any(value.storage in buffers for value in call.writes)
        ]

    def before(self, nodes: Iterable[str], stops: Iterable[str]) -> set[int]:
        """Find the ops that nodes depend on, as far as the nodes where that stops."""
        ended = {self.values[name].storage for name in stops}
        storages = [self.values[name].storage for name in nodes]
        waiting = [self.maker[s] for s in storages if s in self.maker and s not in ended]
        waiting += [] if ended else self.assigning  # buffers change in the forward pass
        found: set[int] = set()
        while waiting:
            op = waiting.pop()
            if op in found:
                continue
            found.add(op)
            for tensor in self.reads[op]:
                if self.values[self.label_of[tensor]].storage not in ended:
                    waiting.append(self.tensor_op[tensor])
        return found
