"""
PyTorch modules become graphs: `capture`.

This module owns what a step is: forward, loss, backward, update, and the cut between what the
module computes and what the loss and the optimiser do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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

from placewright.frontends._explain import explained
from placewright.frontends._fold import Entry, fold
from placewright.frontends._modules import leaves_of, named_tensors, swap_leaves, swapped
from placewright.frontends._optimizers import Updater, read_optimizer
from placewright.frontends._recorder import Recorder, Tape, watch_modules

Loss = Callable[..., torch.Tensor]


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
    loss_reads: tuple[str, ...]  # parameters that the loss reads itself, such as a penalty on them


@dataclass(frozen=True, eq=False)
class Returned:
    """What the module returned: its structure, and the node of each tensor in it."""

    _result: Any
    _node_of: dict[int, str]  # by the tensor's identity

    @property
    def nodes(self) -> tuple[str, ...]:
        """List the nodes whose values are in it, each once."""
        return tuple(dict.fromkeys(self._node_of.values()))

    def rebuild(self, values: Mapping[str, torch.Tensor]) -> Any:
        """Make the structure again with values of its nodes."""
        return swap_leaves(self._result, lambda leaf: values[self._node_of[id(leaf)]])


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
    entries: tuple[Entry, ...]  # tensors that are there before the step
    tape: Tape  # every call that was recorded

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
        fed = iter(leaves_of(inputs) + leaves_of(kwargs or {}) + leaves_of(targets))
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
    if not isinstance(module, torch.nn.Module):
        raise InputError(
            f"`module` is a {type(module).__name__}; expected a torch.nn.Module. Wrap a function"
            " in the `forward` of one."
        )
    if loss is not None and not callable(loss):
        raise InputError(
            f"`loss` is a {type(loss).__name__}; expected a function of the outputs and `targets`,"
            " such as `torch.nn.functional.mse_loss`."
        )
    if not train and (loss is not None or optimizer is not None):
        raise InputError("`loss` and `optimizer` belong to a training step; pass `train=True`.")
    updater = None if optimizer is None else read_optimizer(optimizer, module)
    fake = FakeTensorMode()
    recorder = Recorder(fake)
    with explained(recorder), swapped(module, recorder) as fakes:
        step = _Step(module, recorder, fakes)
        with torch.set_grad_enabled(bool(train)), fake, recorder:
            with watch_modules(recorder, module):
                result = step.forward(inputs, dict(kwargs or {}))
            step.keep_assigned_buffers()
            if train:
                step.differentiate(result, loss, targets)
                if updater is not None:
                    step.update(updater)
    graph_name = name or type(module).__name__
    return step.finish(graph_name, sums_at_end)


class _Step:
    """The step while it is traced."""

    def __init__(
        self, module: torch.nn.Module, recorder: Recorder, fakes: Mapping[int, torch.Tensor]
    ) -> None:
        self.module = module
        self.recorder = recorder
        self.entries: list[Entry] = []
        self.parameters: dict[str, torch.Tensor] = {}  # fake, by name
        self.gradients: dict[str, torch.Tensor] = {}
        self.result: Any = None
        self.loss_reads: list[str] = []
        self.loss: torch.Tensor | None = None
        self.outputs: list[torch.Tensor] = []
        self.output_gradients: list[torch.Tensor] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self._labels: set[str] = set()
        for kind, known in (("param", self.parameters), ("buffer", self.buffers)):
            for name, tensor in named_tensors(module, kind):
                known[name] = tensor
                self._enter(name, kind, tensor)
        assert len(fakes) == len(self.entries)

    def _enter(self, name: str, kind: str, tensor: torch.Tensor, label: str = "") -> None:
        identifier = (label or name).replace(".", "_")
        if not identifier.isidentifier() or identifier in self._labels:
            identifier = f"{kind}_{len(self.entries)}"
        self._labels.add(identifier)
        value = self.recorder.enter(identifier, tensor)
        owner = name.rpartition(".")[0] if kind != "input" else ""
        self.entries.append(Entry(name, kind, value, owner))

    def _feed(self, given: Any, prefix: str) -> Any:
        """Replace every tensor of a structure by a fake one, each an input of the graph."""
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
            return twin

        return swap_leaves(given, swap)

    def forward(self, inputs: Any, kwargs: dict[str, Any]) -> Any:
        """Trace the module's forward pass."""
        if isinstance(inputs, Mapping):
            inputs, kwargs = (), {**inputs, **kwargs}
        args, kwargs = self._feed((_as_tuple(inputs), kwargs), "input")
        result = self.result = self.module(*args, **kwargs)
        self.recorder.modules[:] = ["loss"]
        self.outputs = [*{id(tensor): tensor for tensor in leaves_of(result)}.values()]
        if not self.outputs:
            raise InputError(
                f"The module returned no tensor but a {type(result).__name__}. Let `forward` return"
                " a tensor, or a tuple, list, dict or dataclass of tensors."
            )
        return result

    def keep_assigned_buffers(self) -> None:
        """Write what the module assigned to a buffer (``self.total = ...``) into the buffer."""
        now = dict(named_tensors(self.module, "buffer"))
        for name, old in self.buffers.items():
            new = now.get(name)
            if new is not None and new is not old and new.shape == old.shape:
                with torch.no_grad():
                    old.copy_(new)

    def differentiate(self, result: Any, loss: Loss | None, targets: Any) -> None:
        """Trace the loss and the backward pass, cut in two where the module ends."""
        if loss is None:
            returned = _returned_loss(result)
            self.outputs = [returned]
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
            swapped = swap_leaves(result, lambda t: leaves.get(id(t), t))
            self.loss = loss(swapped, *_as_tuple(self._feed(targets, "target")))
        if not isinstance(self.loss, torch.Tensor):
            raise InputError(
                f"`loss` returned a {type(self.loss).__name__}; expected a tensor with one number."
            )
        if self.loss.numel() != 1:
            raise InputError(
                f"The loss has shape {list(self.loss.shape)}; expected one number. Reduce it with"
                " `.mean()` or `.sum()`."
            )
        recorder = self.recorder
        recorder.phase = "backward"
        names = [name for name, tensor in self.parameters.items() if tensor.requires_grad]
        sources = [self.parameters[name] for name in names]
        # A loss may also read parameters itself: a penalty on weights.
        wanted = [*leaves.values(), *(sources if loss is not None else ())]
        found = torch.autograd.grad(self.loss, wanted, allow_unused=True)
        differentiable = [tensor for tensor in self.outputs if id(tensor) in leaves]
        used = [
            (tensor, gradient)
            for tensor, gradient in zip(differentiable, found, strict=False)
            if gradient is not None
        ]
        if not used:
            raise InputError("The loss does not depend on what the module returns.")
        self.output_gradients = [gradient for _, gradient in used]
        gradients = torch.autograd.grad(
            [tensor for tensor, _ in used], sources, self.output_gradients, allow_unused=True
        )
        direct = found[len(leaves) :] or (None,) * len(names)
        for name, gradient, more in zip(names, gradients, direct, strict=True):
            self.loss_reads += [name] if more is not None else []
            parts = [part for part in (gradient, more) if part is not None]
            if parts:
                self.gradients[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        ended = {id(tensor) for tensor, _ in used}
        self.outputs.sort(key=lambda tensor: id(tensor) not in ended)

    def update(self, updater: Updater) -> None:
        """Trace the optimiser's update of every parameter that has a gradient."""
        recorder = self.recorder
        recorder.phase = "update"
        states = {}
        for name in self.gradients:
            states[name] = updater.make_state(name, self.parameters[name])
            for label, tensor in states[name].items():
                twin = states[name][label] = recorder.twin(tensor)
                self._enter(name, "state", twin, f"{name}_{label}")
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
        order = {"param": 0, "state": 1, "buffer": 2, "constant": 3, "input": 4}
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
                loss_reads=tuple(self.loss_reads),
            ),
            op_nodes=folded.op_nodes,
            tensor_nodes=folded.tensor_nodes,
            num_traced=tape.num_nodes,
            returned=Returned(
                self.result,
                {id(t): recorder.value_of(t).node.name for t in leaves_of(self.result)},
            ),
            entries=tuple(self.entries),
            tape=tape,
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _returned_loss(result: Any) -> torch.Tensor:
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
