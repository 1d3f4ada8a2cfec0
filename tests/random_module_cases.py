"""
A random module as data, and whether it computes placed what it computes in eager PyTorch.

A module is a list of lines of Python, so that it can be printed, and shrunk by deleting and
simplifying lines. `check` runs it twice, eager and placed, and compares all that can be seen:
outputs, gradients, inputs and what the module keeps, after each call.
"""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import placewright as pw
from placewright.errors import InputError

BOX = """
name = "box"
[[device]]
names = ["cpu:0", "cpu:1"]
kind = "cpu"
memory = "1GiB"
flops = { float32 = 5e10 }
memory_bandwidth = "10GB/s"
launch = "5us"
[link]
latency = "20us"
bandwidth = "5GB/s"
"""
LIMIT_S = 20.0  # for one case, after which it counts as hanging
NAME = re.compile(r"self\.\w+|\b[a-z]\d+\b|\b(?:flag|times|scale)\b")
FORMS = {  # how a loss reads one output
    "sum": lambda y, scale: y.sum(),
    "mean": lambda y, scale: y.mean(),
    "square": lambda y, scale: y.square().sum(),
    "weighted": lambda y, scale: (y * scale).sum() + y.sum(),
    "row": lambda y, scale: y.reshape(-1)[0] * scale,
}
SUMMED_OTHERWISE = re.compile(r"masked_fill_?\([^,]*, (?!-?\d)")
"""
Calls whose gradient PyTorch computes by another formula when it is traced, and rounds otherwise:
that of a tensor that fills a mask is summed over all elements instead of the masked ones.
"""
GROUPS = (  # of differences, the worst first
    *("structure", "output", "input", "state", "gradient"),
    *("requires_grad", "strides", "same object", "alias"),
)


@dataclass
class Pair:
    """What a module may return: a dataclass."""

    first: Any
    rest: Any


SCOPE = {"torch": torch, "nn": nn, "F": F, "Pair": Pair}


# --- What a case is. ---


@dataclass(frozen=True)
class Line:
    """A line of `forward`, or of `__init__`, and the names that it makes."""

    makes: tuple[str, ...]
    text: str  # without "a, b = "

    @property
    def source(self) -> str:
        return f"{', '.join(self.makes)} = {self.text}" if self.makes else self.text

    @property
    def reads(self) -> set[str]:
        return {*NAME.findall(self.text)}


@dataclass(frozen=True)
class Given:
    """An argument: the code that draws it, and that of later calls if it differs."""

    name: str
    code: str
    is_keyword: bool = False
    later: str = ""


@dataclass(frozen=True)
class Call:
    """One call of the placed module, and the loss that is taken of what it returns."""

    terms: tuple[tuple[str, str], ...]  # what is returned, by name, and the form of its loss
    with_grad: bool = True
    waits: bool = False  # its backward pass follows that of the next call
    splits: bool = False  # each term is a loss of its own
    casts: bool = False  # under autocast
    evaluates: bool = False  # in evaluation mode
    repeats: bool = False  # goes back twice


@dataclass(frozen=True)
class Case:
    """A module, what it is called with, and how it is run."""

    seed: int  # of all values
    given: tuple[Given, ...]
    members: tuple[Line, ...]
    lines: tuple[Line, ...]
    returns: tuple[str, ...]
    structure: str
    mode: str  # "forward", "apply", "step"
    calls: tuple[Call, ...]
    optimizer: str = "sgd"
    placement: int = 0  # a seed; -1: all on one device, -2: devices alternate

    @property
    def source(self) -> str:
        """The module as Python."""
        names = [g.name for g in self.given if not g.is_keyword]
        named = [g.name for g in self.given if g.is_keyword]
        arguments = ", ".join(["self", *names, *(["*", *named] if named else [])])
        init = ["super().__init__()", *(line.source for line in self.members)]
        body = [*(line.source for line in self.lines), f"return {self._result()}"]
        return "\n".join(
            [
                "class Module(nn.Module):",
                "    def __init__(self):",
                *(f"        {line}" for line in init),
                "",
                f"    def forward({arguments}):",
                *(f"        {line}" for line in body),
            ]
        )

    def _result(self) -> str:
        first, *rest = self.returns
        every, others = ", ".join(self.returns), ", ".join(rest)
        keyed = ", ".join(f"'{k}': {name}" for k, name in enumerate(self.returns))
        ways = {
            "list": f"[{every}]",
            "dict": f"{{{keyed}}}",
            "dataclass": f"Pair({first}, [{others}])",
            "nested": f"{{'a': ({first}, 'word', 3), 'b': [None, [{others}]]}}",
        }
        if self.structure == "one" and not rest:
            return first
        return ways.get(self.structure, f"({every},)")

    def describe(self) -> str:
        """Print the case as Python, with how it was run as comments."""
        arguments = [
            f"{g.name} = {g.code}" + (f"  # in the second call: {g.later}" if g.later else "")
            for g in self.given
        ]
        losses = [
            f"# call {k}: "
            + (" + ".join(f"{form}({name})" for name, form in call.terms) or "no loss")
            + ("" if call.with_grad else ", under no_grad")
            + (", backward after the next call's" if call.waits else "")
            + (", as several losses" if call.splits else "")
            + (", under autocast" if call.casts else "")
            + (", in evaluation mode" if call.evaluates else "")
            + (", backward twice" if call.repeats else "")
            for k, call in enumerate(self.calls)
        ]
        how = {
            "forward": "apply",
            "apply": "apply(train=True)",
            "step": f"TrainStep({self.optimizer})",
        }
        where = {-1: "all on cpu:0", -2: "devices alternate"}.get(self.placement, self.placement)
        return "\n".join(
            [self.source, "", *arguments, f"# {how[self.mode]}, placement: {where}", *losses]
        )


@dataclass(frozen=True)
class Outcome:
    """What came of a case: "equal", "refused", "invalid", "wrong" or "crash", and why."""

    kind: str
    detail: str = ""
    group: str = ""

    @property
    def signature(self) -> str:
        """What makes two failures alike while a case is shrunk."""
        if self.kind in ("wrong", "refused"):
            return f"{self.kind}: {self.group}"
        return f"{self.kind}: {' '.join(re.sub(r'[0-9]+|`[^`]*`', 'N', self.detail).split()[:5])}"

    @property
    def is_failure(self) -> bool:
        return self.kind in ("wrong", "crash")


class HangError(Exception):
    """A case did not end in time."""


# --- Running one. ---


def build(case: Case) -> nn.Module:
    """Make the module of a case, with the same weights each time."""
    scope = dict(SCOPE)
    exec(_compiled(case.source, case.seed), scope)
    torch.manual_seed(case.seed)
    return scope["Module"]()


@cache
def _compiled_last(source: str, seed: int) -> Any:
    return compile(source, f"<case {seed}>", "exec")


def _compiled(source: str, seed: int) -> Any:
    if _compiled_last.cache_info().currsize > 500:
        _compiled_last.cache_clear()
    return _compiled_last(source, seed)


def arguments(case: Case, number: int) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
    """Draw positional and keyword arguments of a call, and the loss's target."""
    torch.manual_seed(case.seed + 1000 * (number + 1))
    scope = dict(SCOPE)
    positions, names = [], {}
    for g in case.given:
        code = g.later if g.later and number else g.code
        scope[g.name] = eval(code, scope)
        if g.is_keyword:
            names[g.name] = scope[g.name]
        else:
            positions.append(scope[g.name])
    return tuple(positions), names, torch.rand(())


def tensors_of(result: Any) -> list[torch.Tensor]:
    """List the tensors in what a module returns."""
    return [leaf for leaf in _leaves(result) if isinstance(leaf, torch.Tensor)]


def _leaves(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in _leaves(part)]
    if isinstance(result, dict):
        return [leaf for key, part in result.items() for leaf in (key, *_leaves(part))]
    if isinstance(result, Pair):
        return [*_leaves(result.first), *_leaves(result.rest)]
    return [result]


def _structure(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return (type(result).__name__, *(_structure(part) for part in result))
    if isinstance(result, dict):
        return ("dict", *((key, _structure(part)) for key, part in result.items()))
    if isinstance(result, Pair):
        return ("Pair", _structure(result.first), _structure(result.rest))
    return "tensor" if isinstance(result, torch.Tensor) else repr(result)


def losses_of(case: Case, call: Call, result: Any, scale: torch.Tensor) -> list[torch.Tensor]:
    """Compute the loss of each term of a call."""
    found = tensors_of(result)
    return [FORMS[form](found[case.returns.index(name)], scale) for name, form in call.terms]


def loss_of(case: Case, call: Call) -> Callable[..., torch.Tensor]:
    """Make the loss that a step is captured with."""

    def loss(result: Any, scale: torch.Tensor) -> torch.Tensor:
        first, *rest = losses_of(case, call, result, scale)
        for part in rest:
            first = first + part
        return first

    return loss


Shown = dict[tuple[str, str], Any]  # by group and name: tensors, or anything with an equality


def play(case: Case, module: nn.Module, forward: Callable[..., Any]) -> Iterator[Shown]:
    """Call a module, eager or placed, and go backward; yield what can be seen after each."""
    waiting: list[tuple[list[torch.Tensor], dict[str, Any], Call]] = []
    for number, call in enumerate(case.calls):
        args, kwargs, scale = arguments(case, number)
        named = _named_inputs(case, args, kwargs)
        module.train(not call.evaluates)
        has_grad = call.with_grad and case.mode != "forward"
        with torch.set_grad_enabled(has_grad), torch.autocast("cpu", enabled=call.casts):
            result = forward(*args, **kwargs)
        yield show(module, named, result, trains=case.mode == "apply")
        if not call.terms or not call.with_grad or case.mode != "apply":
            continue
        losses = losses_of(case, call, result, scale)
        del result
        if call.waits:
            waiting.append((losses, named, replace(call, splits=False)))
            continue
        yield _backward(module, losses, named, call)
    while waiting:
        losses, named, call = waiting.pop()
        yield _backward(module, losses, named, call)


def play_steps(case: Case, module: nn.Module, step: Callable[..., Any]) -> Iterator[Shown]:
    """Run training steps, eager or placed; yield what can be seen after each."""
    for number, call in enumerate(case.calls):
        args, kwargs, scale = arguments(case, number)
        module.train(not call.evaluates)
        with torch.autocast("cpu", enabled=call.casts):
            loss = step(args, (scale,), kwargs)
        named = _named_inputs(case, args, kwargs)
        yield {("output", "loss"): loss.detach().clone(), **show(module, named, None)}


def _named_inputs(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [g.name for g in case.given if not g.is_keyword]
    every = dict(zip(names, args, strict=True)) | kwargs
    return {name: value for name, value in every.items() if isinstance(value, torch.Tensor)}


def _backward(
    module: nn.Module, losses: list[torch.Tensor], named: dict[str, Any], call: Call
) -> Shown:
    ends = losses if call.splits else [sum(losses[1:], losses[0])]
    if call.repeats:
        torch.autograd.backward(ends, retain_graph=True)
    torch.autograd.backward(ends)
    held = [*module.named_parameters(), *((n, t) for n, t in named.items() if t.is_leaf)]
    found: Shown = {("gradient", name): _copy(tensor.grad) for name, tensor in held}
    for _, tensor in held:
        tensor.grad = None
    return found | show(module, named, None)


def show(
    module: nn.Module, named: dict[str, torch.Tensor], result: Any, *, trains: bool = False
) -> Shown:
    """Copy what can be seen after a call: results, inputs and what the module keeps."""
    state = _state(module)
    found: Shown = {("input", name): _copy(tensor) for name, tensor in named.items()}
    found |= {("state", name): _copy(value) for name, value in state.items()}
    if result is None:
        return found
    found["structure", "all"] = _structure(result)
    outputs = {f"output {k}": tensor for k, tensor in enumerate(tensors_of(result))}
    every = outputs | named | {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    owners: dict[int, list[str]] = {}
    for name, tensor in every.items():
        owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    first: dict[int, str] = {}
    for name, tensor in outputs.items():
        found["output", name] = _copy(tensor)
        if trains:
            found["requires_grad", name] = tensor.requires_grad
        found["strides", name] = _strides(tensor)
        found["same object", name] = first.setdefault(id(tensor), name)
        if tensor.untyped_storage().nbytes():
            found["alias", name] = tuple(owners[tensor.untyped_storage().data_ptr()])
    return found


def _state(module: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = dict(module.named_parameters())
    state |= dict(module.named_buffers())
    for name, value in vars(module).items():
        if re.fullmatch(r"[a-z]\d+", name):
            state[name] = value
    return state


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """List strides, with 0 where a dimension of one element makes them meaningless."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in pairs)


def differences(
    ours: Shown, theirs: Shown, rounded: frozenset[str] = frozenset()
) -> list[tuple[str, str]]:
    """
    Compare what is seen of our module with eager's; list groups and sentences, worst first.

    Groups that are `rounded` may differ as sums in another order do.
    """
    found = []
    for key in dict.fromkeys([*theirs, *ours]):
        group, name = key
        if key not in ours or key not in theirs:
            found.append((group, f"{group} {name} is there on one side only"))
        elif not same(ours[key], theirs[key], group not in rounded):
            told = f"{name}: ours {_tell(ours[key])}, eager's {_tell(theirs[key])}"
            found.append((group, f"{group} of {told}"))
    return sorted(found, key=lambda pair: GROUPS.index(pair[0]))


def same(x: Any, y: Any, is_exact: bool = True) -> bool:
    """Compare to the bit, or as nearly as sums in another order are; NaN equals NaN."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return type(x) is type(y) and x == y
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not is_exact and x.is_floating_point():
        return torch.allclose(x, y, rtol=1e-4, atol=1e-5, equal_nan=True)
    return torch.equal(x, y) or bool(((x == y) | ((x != x) & (y != y))).all())


def _tell(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype)[6:]} {list(value.shape)}"
        return f"{kind} {value.flatten()[:4].tolist()}"
    return str(value)


def reference(case: Case) -> list[Shown]:
    """Run a case in eager PyTorch."""
    module = build(case)
    if case.mode != "step":
        return list(play(case, module, module))
    parameters = [p for p in module.parameters() if p.requires_grad]
    makes = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.01, fused=True),
        "momentum": lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=0.001, fused=True),
    }
    optimizer = makes[case.optimizer]()
    loss = loss_of(case, case.calls[0])

    def step(args: Any, targets: Any, kwargs: Any) -> torch.Tensor:
        found = loss(module(*args, **kwargs), *targets)
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            found.backward()
        optimizer.step()
        return found

    return list(play_steps(case, module, step))


@cache
def box() -> pw.Cluster:
    """Make a machine of two cores as devices."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "box.toml"
        path.write_text(BOX)
        return pw.Cluster.load(path)


def make_plan(graph: Any, seed: int) -> Any:
    """Place a graph on two cores at random, or as a negative seed says."""
    problem = pw.Problem(graph, box())
    placement = np.random.default_rng(max(seed, 0)).integers(0, 2, problem.num_ops)
    if seed == -1:
        placement[:] = 0
    elif seed == -2:
        placement = np.arange(problem.num_ops) % 2
    placement[problem.colocation_members] = placement[problem.colocation_leaders]
    timeline = pw.simulate(problem, placement)
    return pw.Plan.of(timeline, "test", lower_bound_s=0.0, placer="random")


def placed_play(case: Case) -> Iterator[Shown]:
    """Run a case placed."""
    module = build(case)
    args, kwargs, scale = arguments(case, 0)
    how: dict[str, Any] = {"kwargs": kwargs} if kwargs else {}
    if case.mode != "forward":
        how |= {"loss": loss_of(case, case.calls[0]), "targets": (scale,)}
    if case.mode == "step":
        how["optimizer"] = case.optimizer
    train = {} if case.mode == "forward" else {"train": True}
    with _unchanged(module, "capture"):
        plan = make_plan(pw.capture(module, args, **how, **train).graph, case.placement)
    if case.mode == "step":
        with _unchanged(module, "TrainStep"):
            step = pw.TrainStep(plan, module, args, **how)
        try:
            yield from play_steps(case, module, step)
        finally:
            step.close()
        return
    with _unchanged(module, "apply"):
        placed = pw.apply(plan, module, args, **how, **train)
    try:
        yield from play(case, placed, placed)
    finally:
        placed._calls.close()


@contextmanager
def _unchanged(module: nn.Module, what: str) -> Iterator[None]:
    """Check that a module is what it was, whether what is done with it was refused or not."""
    before = show(module, {}, None)
    try:
        yield
    finally:
        changed = differences(show(module, {}, None), before)
        assert not changed, f"{what} changed the module: {changed[0][1]}"


def check(case: Case, ignored: frozenset[str] = frozenset()) -> Outcome:
    """Hold a case equal to eager PyTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = reference(case)
        except Exception as error:
            return Outcome("invalid", f"{type(error).__name__}: {error}")
        was = signal.signal(signal.SIGALRM, _hang)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            return _compare(case, expected, ignored)
        except InputError as error:
            return Outcome("refused", str(error), first_words(str(error)))
        except Exception as error:
            if ".data" in case.source and "modified by an inplace operation" in str(error):
                return Outcome("refused", str(error), "autograd sees what is written by `.data`")
            if str(error).startswith("This backward pass runs the placed module's forward"):
                return Outcome("refused", str(error), "a backward pass after a change")
            return Outcome("crash", f"{type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, was)


def _compare(case: Case, expected: list[Shown], ignored: frozenset[str]) -> Outcome:
    numbers = iter(expected)
    rounded = _rounded(case, expected)
    for count, ours in enumerate(placed_play(case)):
        found = [
            pair for pair in differences(ours, next(numbers), rounded) if pair[0] not in ignored
        ]
        if found:
            told = "; ".join(text for _, text in found[:4])
            return Outcome("wrong", f"after {count} right ones: {told}", found[0][0])
    return Outcome("equal")


def _rounded(case: Case, expected: list[Shown]) -> frozenset[str]:
    """
    Tell which groups may be rounded otherwise than in eager PyTorch: gradients, in two cases.

    One is a formula that PyTorch itself traces in another form. The other is a module that returns
    a look at a parameter, an input or another result: the gradient of that is a sum of what comes
    by the program and what comes beside it, where eager PyTorch adds up one op after the other.
    """
    if not SUMMED_OTHERWISE.search(case.source) and not _returns_given(case, expected):
        return frozenset()
    return frozenset({"gradient"} if case.mode == "apply" else {"output", "state"})


def _returns_given(case: Case, expected: list[Shown]) -> bool:
    if case.mode == "step":
        return bool({*case.returns} & ({g.name for g in case.given} | _members_in(case)))
    return any(
        key[0] == "alias" and len(value) > 1 for shown in expected for key, value in shown.items()
    )


def _members_in(case: Case) -> set[str]:
    return {name for name in case.returns if name.startswith("self.")}


def _hang(*_: Any) -> None:
    raise HangError(f"no end after {LIMIT_S:.0f} s")


def first_words(sentence: str) -> str:
    """Cut a refusal to what is alike in those of the same reason."""
    sentence = re.sub(r"^`[^`]*`, line \d+, ", "", sentence)
    sentence = re.sub(r"\d+", "N", re.sub(r"`<case[^`]*`, line \d+,", "", sentence))
    return " ".join(sentence.split()[:9])
