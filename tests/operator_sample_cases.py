"""
PyTorch's own operator samples as modules, each held equal to eager PyTorch on two CPU devices.

PyTorch keeps a list of its operators with arguments that they are tested on (`op_db`). A sample
becomes a module that calls the operator; `check` runs that in eager PyTorch and placed, and
compares all that can be seen: results, strides, what shares memory, gradients and inputs.
"""

from __future__ import annotations

import itertools
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations as invocations
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import placewright as pw
from placewright.errors import InputError
from tests.operator_sample_comparing import Seen, difference, spread_of
from tests.random_module_cases import first_words, make_plan

KINDS = ("forward", "crossing", "gradient", "inplace", "overwrite", "strided", "stridedgradient")
"""
How an operator is called: on the module's inputs; between copies, so that tensors cross devices; as
`crossing` with a backward pass; in place, on a copy; in place, on an input; and as `forward` and
`gradient` with inputs that have gaps in memory.
"""
WITH_GRADIENT = ("gradient", "stridedgradient")
IN_PLACE = ("inplace", "overwrite")
STRIDED = ("strided", "stridedgradient")
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16)
LIMIT_S = 30.0  # for one case, after which it counts as hanging
REPEATS = 40  # calls whose random results are looked at together
PLACEMENTS = (-2, -1, 5)  # seeds of `make_plan` that random numbers may not depend on
UNDEFINED = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
UNDEFINED += ("empty_permuted",)
_VECTORS = "singular values are computed with their vectors, also where only the values are wanted"
_FILLED = "the gradient is multiplied by a mask of ones and zeros, not written where the mask is"
TRACED = {
    "linalg.cond": _VECTORS,
    "linalg.eigvalsh": _VECTORS.replace("singular values", "eigenvalues"),
    "linalg.svdvals": _VECTORS,
    "masked_fill": "the gradient of the value is summed over all elements, not those in the mask",
    "max.reduction_no_dim": _FILLED,
    "median": _FILLED,
    "nanmedian": _FILLED,
    "norm.nuc": _VECTORS,
    "prod": "the gradient is computed as where there are zeros, without looking for any",
}
"""
Operators that PyTorch computes by another formula while it is traced, and that formula. Nothing is
seen of that from outside but by tracing it: a case counts as `traced` only if its numbers are, to
the bit, what eager PyTorch computes under an empty dispatch mode.
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    kind: str
    """
    `equal`, `refused` with a sentence, `invalid` (eager PyTorch raises), `wrong`, `crash`; or
    `traced`: to the bit what eager PyTorch computes while something else traces it.
    """
    detail: str = ""
    group: str = ""


class Randomness(TorchDispatchMode):
    """Sees whether random numbers are drawn."""

    is_seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class HangError(Exception):
    """A case has taken too long."""


# --- Samples. ---


@cache
def operators() -> dict[str, Any]:
    """List PyTorch's operators by name, with the variant where an operator has several."""
    invocations.wrapper_set_seed = _call  # else samples of random operators seed what they draw
    return {name_of(op): op for op in invocations.op_db}


def _call(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def name_of(op: Any) -> str:
    """Name an operator, with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def dtype_of(op: Any) -> torch.dtype:
    """Choose the dtype that an operator is sampled in: float32 if it can be."""
    return next(d for d in DTYPES if op.supports_dtype(d, "cpu"))


def samples_of(op: Any, kind: str, count: int | None, dtype: torch.dtype | None) -> list[Any]:
    """Draw the first samples of an operator that a kind of call can be made with."""
    dtype = dtype or dtype_of(op)
    has_gradient = kind in WITH_GRADIENT
    if not op.supports_dtype(dtype, "cpu"):
        return []
    if has_gradient and dtype not in op.supported_backward_dtypes("cpu"):
        return []
    if kind in IN_PLACE and op.inplace_variant is None:
        return []
    torch.manual_seed(zlib.crc32(name_of(op).encode()))
    drawn = op.sample_inputs("cpu", dtype, requires_grad=has_gradient)
    found = [*itertools.islice(drawn, count)]
    return [sample.noncontiguous() for sample in found] if kind in STRIDED else found


# --- Modules. ---


class Sampled(nn.Module):
    """A module that calls an operator on tensors."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)


def module_of(op: Any, kind: str, sample: Any) -> tuple[Sampled, list[Tensor]]:
    """Make the module that calls an operator as a sample says, and its inputs."""
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    target = op.inplace_variant if kind in IN_PLACE else op.get_op()
    crosses = kind in ("crossing", "gradient")

    def call(*tensors: Tensor) -> Any:
        given = [*others]
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor.clone() if crosses else tensor
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        if kind == "inplace":
            first = pytree.tree_map_only(Tensor, torch.clone, first)
        result = target(first, *args, **kwargs)
        if kind in WITH_GRADIENT:
            result = sample.output_process_fn_grad(result)
        if kind == "inplace":
            return result, first
        if crosses:
            return result, pytree.tree_map_only(Tensor, torch.clone, result)
        return result

    return Sampled(call), [leaves[place] for place in places]


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors with their strides, and what they share."""
    memory: dict[int, Any] = {}
    made = []
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested or type(tensor) is not Tensor:
            made.append(tensor.detach().clone().requires_grad_(tensor.requires_grad))
            continue
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in memory:
            memory[place] = storage.clone()
        copy = torch.empty(0, dtype=tensor.dtype)
        copy.set_(memory[place], tensor.storage_offset(), tensor.shape, tensor.stride())
        copy = copy.conj() if tensor.is_conj() else copy
        made.append(copy.requires_grad_(tensor.requires_grad))
    return made


# --- Running them. ---


def look(module: Any, kind: str, given: Sequence[Tensor], seed: int) -> Seen:
    """Call a module, eager or placed, and copy what can be seen."""
    inputs = copies_of(given)
    torch.manual_seed(seed)
    with torch.set_grad_enabled(kind in WITH_GRADIENT):
        result = module(*inputs)
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    seen = Seen(
        pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), result),
        _layout(leaves, inputs, kind in WITH_GRADIENT),
        [tensor.detach().clone() for tensor in inputs],
    )
    ends = [leaf for leaf in leaves if leaf.requires_grad]
    if ends:
        generator = torch.Generator().manual_seed(seed)
        torch.autograd.backward(ends, [_cotangent(end, generator) for end in ends])
        seen.gradients = [tensor.grad for tensor in inputs]
    return seen


def _cotangent(tensor: Tensor, generator: torch.Generator) -> Tensor:
    with _disable_current_modes():  # nothing that the operator draws
        return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)


def _layout(leaves: list[Tensor], inputs: list[Tensor], trains: bool) -> list[tuple[Any, ...]]:
    """List what is to be seen of each tensor beside its values."""
    every = [*leaves, *inputs]
    found = []
    for tensor in leaves:
        if tensor.layout is not torch.strided or tensor.is_nested:
            found.append((str(tensor.layout), tensor.is_nested))
            continue
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        strides = tuple(stride if size > 1 else 0 for size, stride in pairs)
        place = tensor.untyped_storage().data_ptr()
        owners = tuple(k for k, t in enumerate(every) if place and _place(t) == place)
        same = tuple(k for k, t in enumerate(every) if t is tensor)
        bits = (tensor.is_conj(), tensor.is_neg(), trains and tensor.requires_grad)
        found.append((strides if tensor.numel() else (), owners, same, bits))
    return found


def _place(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_nested:
        return 0
    return tensor.untyped_storage().data_ptr()


def place_module(module: nn.Module, kind: str, given: Sequence[Tensor], seed: int) -> Any:
    """Capture, plan and place a module on two CPU devices."""
    train = kind in WITH_GRADIENT
    inputs = tuple(copies_of(given))
    how: dict[str, Any] = {"train": True, "loss": _sum} if train else {}
    plan = make_plan(pw.capture(module, inputs, **how).graph, seed)
    return pw.apply(plan, module, inputs, **how)


def _sum(result: Any) -> Tensor:
    """Add up what has a gradient."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    first, *rest = (leaf.abs().sum() for leaf in leaves if leaf.requires_grad)
    for each in rest:
        first = first + each
    return first


# --- Checking. ---


def check(op: Any, kind: str, sample: Any, seed: int) -> Outcome:
    """Hold one call of an operator equal to eager PyTorch."""
    module, given = module_of(op, kind, sample)
    try:
        expected = look(module, kind, given, seed)
        with Randomness() as randomness:
            traced = look(module, kind, given, seed)
    except Exception as error:
        return Outcome("invalid", f"{type(error).__name__}: {error}")
    if kind in WITH_GRADIENT and not expected.gradients:
        return Outcome("invalid", "no result has a gradient")
    is_random = randomness.is_seen
    try:
        with _time_limit():
            if is_random:
                return _check_random(module, kind, given, expected)
            placed = place_module(module, kind, given, (-2, seed % 1000)[seed % 2])
            ours = look(placed, kind, given, seed)
            placed._calls.close()
    except InputError as error:
        return _check_refused(module, kind, given, seed, expected, is_random, str(error))
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}", type(error).__name__)
    found = difference(ours, expected, op.name not in UNDEFINED)
    if found is None:
        return Outcome("equal")
    is_traced = difference(ours, traced) is None
    return Outcome("traced" if is_traced else "wrong", f"{found[0]}: {found[1]}", found[0])


def _check_refused(
    module: nn.Module,
    kind: str,
    given: list[Tensor],
    seed: int,
    expected: Seen,
    is_random: bool,
    told: str,
) -> Outcome:
    """Check that a module that was refused runs as before."""
    found = difference(look(module, kind, given, seed), expected, not is_random)
    if found:
        return Outcome("wrong", f"after a refusal: {found[0]}: {found[1]}", "after a refusal")
    return Outcome("refused", told, first_words(told))


def _check_random(module: nn.Module, kind: str, given: list[Tensor], expected: Seen) -> Outcome:
    """Check random numbers: the same on every placement, and spread as eager PyTorch's are."""
    placed = [place_module(module, kind, given, seed) for seed in PLACEMENTS]
    first = look(placed[0], kind, given, 7)
    found = difference(first, expected, False)
    if found:
        return Outcome("wrong", f"{found[0]}: {found[1]}", found[0])
    for each in placed[1:]:
        found = difference(look(each, kind, given, 7), first)
        if found:
            return Outcome("wrong", f"other placement: {found[0]}: {found[1]}", "other placement")
    mine = [look(placed[0], kind, given, seed) for seed in range(REPEATS)]
    theirs = [look(module, kind, given, seed) for seed in range(REPEATS)]
    for each in placed:
        each._calls.close()
    told = spread_of(mine, theirs)
    return Outcome("wrong", told, "distribution") if told else Outcome("equal")


@contextmanager
def _time_limit() -> Iterator[None]:
    was = signal.signal(signal.SIGALRM, _hang)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, was)


def _hang(*_: Any) -> None:
    raise HangError(f"no end after {LIMIT_S:.0f} s")
