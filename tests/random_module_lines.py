"""
Lines of random modules: which PyTorch calls there are, and how their operands are drawn.

A line is Python source. Expressions make new tensors; statements overwrite tensors, buffers or
metadata. `tests.random_modules` strings them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch


class Drawing(Protocol):
    """What a line may ask for while it is drawn."""

    def number(self, low: int, high: int) -> int: ...  # both included
    def chance(self, share: float) -> bool: ...
    def choice(self, options): ...
    def value(self, name: str) -> torch.Tensor: ...
    def any(self, fits: Callable[[torch.Tensor], bool] = ...) -> str | None: ...
    def relative(self, name: str) -> str | None: ...
    def member(self, stem: str, code: str, *, is_buffer: bool = False) -> str: ...
    def made(self, stem: str) -> list[str]: ...


Line = Callable[[Drawing], "str | None"]


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.numel() > 0


def has_dims(t: torch.Tensor) -> bool:
    return t.dim() > 0 and t.numel() > 0


# --- Operands. ---


def dim(g: Drawing, t: torch.Tensor) -> int:
    return g.number(-t.dim(), t.dim() - 1)


def index(g: Drawing, t: torch.Tensor) -> str:
    """Draw a basic index of a tensor: slices, numbers, None and an ellipsis."""
    if t.dim() > 1 and g.chance(0.4):
        return "..., " + part(g, t.shape[-1])
    parts = [part(g, size) for size in t.shape[: g.number(1, t.dim())]]
    if g.chance(0.1):
        parts.insert(g.number(0, len(parts)), "None")
    return ", ".join(parts)


def part(g: Drawing, size: int) -> str:
    kind = g.number(0, 7)
    if kind == 0:
        return ":"
    if kind == 1:
        return str(g.number(-size, size - 1))
    if kind == 2:
        return "::2"
    if kind == 3 and size > 1:
        return "1:"
    if kind == 4 and size > 1:
        return ":-1"
    start = g.number(0, size - 1)
    return f"{start}:{g.number(start + 1, size)}"


def factors(g: Drawing, count: int) -> list[int]:
    """Draw a shape of so many elements."""
    shape = []
    while count > 1 and len(shape) < 3:
        fits = [k for k in range(1, count + 1) if count % k == 0 and k <= 6]
        shape.append(g.choice(fits))
        count //= shape[-1]
    return [*shape, count] if count > 1 or not shape else shape


def fitting(g: Drawing, a: str) -> str:
    """Draw what may be broadcast to a tensor: another one, one of the same storage, a number."""
    shape = g.value(a).shape

    def fits(t: torch.Tensor) -> bool:
        if t.dim() > len(shape) or t.numel() == 0 or t.dtype == torch.bool:
            return False
        tail = shape[len(shape) - t.dim() :]
        return all(x in (1, y) for x, y in zip(t.shape, tail, strict=True))

    if g.chance(0.35):
        b = g.relative(a)
        if b is not None and fits(g.value(b)):
            return b
    b = g.any(fits)
    if b is None or g.chance(0.1):
        return g.choice(["0.5", "2", "-1.5"])
    return b


def mask_for(g: Drawing, a: str) -> str:
    shape = g.value(a).shape
    m = g.any(lambda t: t.dtype == torch.bool and t.shape == shape)
    return m or f"({a} > {g.choice(['0', '0.3'])})"


def indices(g: Drawing, size: int) -> str:
    """Draw an index tensor of one dimension, for a dimension of this size."""
    if size >= 2:
        i = g.any(lambda t: t.dtype == torch.int64 and t.dim() == 1)
        if i is not None and g.chance(0.6):
            return i
    numbers = [g.number(0, size - 1) for _ in range(g.number(1, 3))]
    return f"torch.tensor({numbers})"


def on(text: Callable[[Drawing, str, torch.Tensor], str | None], fits=has_dims) -> Line:
    """Make a line about one tensor."""

    def draw(g: Drawing) -> str | None:
        a = g.any(fits)
        return None if a is None else text(g, a, g.value(a))

    return draw


def plain(*texts: str, fits=is_float) -> Line:
    """Make a line of one of some texts, about one tensor `{a}` and what fits it, `{b}`."""

    def draw(g: Drawing) -> str | None:
        a = g.any(fits)
        if a is None:
            return None
        text = g.choice(texts)
        given = {"a": a, "b": fitting(g, a) if "{b}" in text else "", "d": ""}
        if "{d}" in text:
            if g.value(a).dim() == 0:
                return None
            given["d"] = dim(g, g.value(a))
        if "{m}" in text:
            given["m"] = mask_for(g, a)
        return text.format(**given)

    return draw


# --- Views. ---


def _expand(g: Drawing, a: str, t: torch.Tensor) -> str:
    sizes = [g.number(2, 3) if size == 1 and g.chance(0.7) else -1 for size in t.shape]
    if g.chance(0.4) or not t.dim():
        sizes.insert(0, 2)
    return f"{a}.expand({', '.join(map(str, sizes))})"


def _split(g: Drawing, a: str, t: torch.Tensor) -> str:
    d = dim(g, t)
    if t.shape[d] == 1:
        return f"{a}.unbind({d})"
    way = g.choice(["chunk(2, {})", "split(1, {})", "tensor_split(2, {})", "unbind({})"])
    return f"{a}.{way.format(d)}"


def _narrow(g: Drawing, a: str, t: torch.Tensor) -> str:
    d = dim(g, t)
    start = g.number(0, t.shape[d] - 1)
    return f"{a}.narrow({d}, {start}, {g.number(1, t.shape[d] - start)})"


def _unfold(g: Drawing, a: str, t: torch.Tensor) -> str:
    d = dim(g, t)
    size = g.number(1, t.shape[d])
    return f"{a}.unfold({d}, {size}, {g.number(1, 2)})"


def _as_strided(g: Drawing, a: str, t: torch.Tensor) -> str | None:
    room = t.untyped_storage().nbytes() // t.element_size()
    sizes = [g.number(1, 3) for _ in range(g.number(1, 2))]
    strides = [g.number(0, 2) for _ in sizes]
    last = sum((s - 1) * k for s, k in zip(sizes, strides, strict=True))
    start = g.number(0, 1)
    if start + last >= room:
        return None
    return f"{a}.as_strided({sizes}, {strides}, {start})"


def _permute(g: Drawing, a: str, t: torch.Tensor) -> str:
    order = sorted(range(t.dim()), key=lambda _: g.number(0, 99))
    return f"{a}.permute({', '.join(map(str, order))})"


def _shape(word: str) -> Line:
    return on(lambda g, a, t: f"{a}.{word}({', '.join(map(str, factors(g, t.numel())))})")


def _pair(word: str) -> Line:
    return on(lambda g, a, t: f"{a}.{word}({dim(g, t)}, {dim(g, t)})")


VIEWS: list[tuple[int, Line]] = [
    (8, on(lambda g, a, t: f"{a}[{index(g, t)}]")),
    (4, on(_split)),
    (3, on(lambda g, a, t: f"{a}.select({dim(g, t)}, 0)")),
    (3, on(_narrow)),
    (4, _pair("transpose")),
    (2, _pair("movedim")),
    (3, on(_permute)),
    (4, _shape("view")),
    (4, _shape("reshape")),
    (2, plain("{a}.view(-1)", "{a}.flatten()", "{a}.ravel()", "{a}.reshape(-1)")),
    (3, on(lambda g, a, t: f"{a}.unsqueeze({g.number(-t.dim() - 1, t.dim())})")),
    (2, plain("{a}.squeeze()", "{a}.squeeze({d})")),
    (4, on(_expand)),
    (1, plain("{b}.expand_as({a})", "torch.broadcast_tensors({a}, {b})")),
    (2, on(lambda g, a, t: f"{a}.diagonal({g.number(-1, 1)})", lambda t: t.dim() > 1)),
    (3, on(_unfold)),
    (3, on(_as_strided)),
    (2, plain("{a}.mT", "{a}.adjoint()", fits=lambda t: t.dim() > 1)),
    (2, plain("{a}.t()", "{a}.T", fits=lambda t: t.dim() == 2)),
    (2, plain("{a}.detach()", "{a}.data")),
    (3, plain("{a}[:]", "{a}[...]", "{a}.view_as({a})", "{a}.expand_as({a})", "{a}.alias()")),
    (2, plain("{a}.contiguous()", "{a}.to({a}.dtype)", "{a}.positive()", "{a}.float()")),
    (1, plain("{a}.view(torch.int32)", "{a}.view(torch.uint8)")),
    (1, on(lambda g, a, t: f"{a}.unflatten({dim(g, t)}, (1, -1))")),
]


# --- New tensors. ---


def _matmul(g: Drawing) -> str | None:
    a = g.any(lambda t: is_float(t) and t.dim() >= 1)
    if a is None:
        return None
    t = g.value(a)
    b = g.any(lambda u: u.dtype == t.dtype and u.dim() >= 1 and u.shape[0] == t.shape[-1])
    if b is not None and g.value(b).dim() <= 2:
        return f"{a} @ {b}"
    return f"{a} @ {a}.mT" if t.dim() > 1 else f"{a} @ {a}"


def _join(g: Drawing) -> str | None:
    a = g.any(has_dims)
    if a is None:
        return None
    t = g.value(a)
    b = g.any(lambda u: u.shape == t.shape and u.dtype == t.dtype)
    way = g.choice(["torch.cat([{}, {}], {})", "torch.stack([{}, {}], {})"])
    return way.format(a, b, dim(g, t))


def _choose(g: Drawing, a: str, t: torch.Tensor) -> str:
    d = dim(g, t)
    ways = [
        "{a}.index_select({d}, {i})",
        "{a}[{i}]",
        "{a}[..., {i}]",
        "{a}[:1, ..., {i}]",
        "{a}.roll(1, {d})",
        "{a}.flip({d})",
        "{a}.gather({d}, torch.zeros_like({a}, dtype=torch.int64))",
    ]
    way = g.choice(ways)
    size = t.shape[0] if way == "{a}[{i}]" else t.shape[-1] if "..." in way else t.shape[d]
    return way.format(a=a, d=d, i=indices(g, size))


def _fresh(g: Drawing) -> str:
    a = g.any() or "None"
    sizes = ", ".join(str(g.number(1, 3)) for _ in range(g.number(1, 3)))
    ways = [
        f"torch.zeros({sizes})",
        f"torch.ones({sizes})",
        f"torch.full(({sizes},), 0.5)",
        f"torch.arange({g.number(1, 4)})",
        f"torch.zeros_like({a})",
        f"{a}.new_ones(({sizes},))",
        f"torch.empty_like({a}).fill_(0.25)",
        f"torch.tensor([0.5, -1.0, {g.number(1, 4)}.0])",
        f"torch.eye({g.number(1, 3)})",
    ]
    return g.choice(ways)


COMPUTE: list[tuple[int, Line]] = [
    (10, plain("{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.maximum({a}, {a} * {b})")),
    (2, plain("{a} / ({b} * {b} + 1)", "{a} ** 2", "{a}.square() + {b}")),
    (6, plain("{a}.relu()", "{a}.tanh()", "{a}.sigmoid()", "{a}.cos()", "{a}.neg()", "{a}.abs()")),
    (3, plain("F.silu({a})", "F.gelu({a})", "F.leaky_relu({a})", "F.softplus({a})")),
    (5, plain("{a}.sum({d})", "{a}.mean({d}, keepdim=True)", "{a}.sum()", "{a}.amax({d})")),
    (2, plain("{a}.softmax({d})", "{a}.cumsum({d})", "{a}.var({d}, unbiased=False)")),
    (2, plain("{a}.max({d})", "{a}.sort({d})", "{a}.topk(1, {d})", "torch.var_mean({a}, {d})")),
    (6, _matmul),
    (4, _join),
    (4, on(_choose)),
    (4, plain("{a}.clone()", "{a}.clone(memory_format=torch.contiguous_format)", "{a} * 1")),
    (3, plain("torch.where({m}, {a}, {b})", "{a}.masked_fill({m}, 0.5)", "{a} * {m}")),
    (2, plain("{a} > {b}", "{a}.gt(0)", "{a} == {a}.abs()", "{a}.isnan()")),
    (
        4,
        plain(
            "{a}.double()", "{a}.bfloat16()", "{a}.long()", "{a}.to(torch.float32)", "{a}.bool()"
        ),
    ),
    (1, plain("{a}.contiguous(memory_format=torch.channels_last)", fits=lambda t: t.dim() == 4)),
    (1, plain("{a}.to(memory_format=torch.channels_last) * {b}", fits=lambda t: t.dim() == 4)),
    (3, _fresh),
    (1, plain("F.pad({a}, (1, 1))", "{a}.repeat_interleave(2, {d})", "{a}.tril()")),
    (1, plain("{a}.argmax({d})", "{a}.count_nonzero()", "{a}.sign().long()")),
    (1, plain("torch.einsum('...i,...i->...', {a}, {a})", "F.normalize({a}, dim={d})")),
]


# --- Overwriting. ---


def _put(g: Drawing, a: str, t: torch.Tensor) -> str:
    i, more = indices(g, t.shape[0]), g.choice(["", ", accumulate=True"])
    ways = [
        f"{a}.index_put_(({i},), {a}.sum(){more})",
        f"{a}[{i}] = {g.choice(['0.5', '-1.0'])}",
        f"{a}[{i}] += 1",
        f"{a}.index_fill_(0, {i}, 0.5)",
        f"{a}.index_add_(0, {i}, {a}.index_select(0, {i}))",
        f"{a}.index_copy_(0, {i}, {a}.index_select(0, {i}) * 2)",
        f"{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.int64), {a} * 2)",
        f"{a}[{mask_for(g, a)}] = 0.5",
        f"{a}[{mask_for(g, a)}] *= 0.5",
    ]
    return g.choice(ways)


def _assign(g: Drawing, a: str, t: torch.Tensor) -> str:
    where = index(g, t)
    rest = g.choice([f"{a}[{index(g, t)}]", f"{a}[{where}] * 2", fitting(g, a), "0.25"])
    return f"{a}[{where}] {g.choice(['=', '=', '+=', '*='])} {rest}"


def _between_views(g: Drawing, a: str, t: torch.Tensor) -> str | None:
    """Overwrite one view by another of the same storage, overlapping or not."""
    ways = [f"{a}[...] {g.choice(['*=', '+=', '='])} {a}.flip({dim(g, t)})"]
    d, size = t.dim() - 1, t.shape[-1]
    if size > 1:
        ways += [
            f"{a}[..., 1:] += {a}[..., :-1]",
            f"{a}[..., :1] = {a}[..., 1:2]",
            f"{a}.narrow({d}, 0, 1).add_({a}.narrow({d}, {size - 1}, 1))",
            f"{a}.select({d}, 0).copy_({a}.select({d}, {size - 1}))",
        ]
    if t.dim() == 2 and t.shape[0] == t.shape[1]:
        ways += [f"{a}.copy_({a}.t())", f"{a} += {a}.t()", f"{a}.diagonal().mul_({a}[0])"]
    b = g.relative(a)
    if b is not None:
        way = g.choice(["{}.copy_({})", "{}.add_({})", "{}.mul_({})", "{}[...] = {}"])
        ways += [way.format(a, b)] * 3
    return g.choice(ways)


def _metadata(g: Drawing, a: str, t: torch.Tensor) -> str:
    d, e = dim(g, t), dim(g, t)
    ways = [f"unsqueeze_({d})", f"squeeze_({d})", f"transpose_({d}, {e})", f"swapdims_({d}, {e})"]
    return f"{a}.{g.choice([*ways, 't_()'] if t.dim() == 2 else ways)}"


def _into(g: Drawing, a: str, t: torch.Tensor) -> str:
    b = fitting(g, a)
    ways = ["torch.mul({a}, {b}, out={a})", "torch.add({b}, {a}, out={a})", "{a}.data.mul_({b})"]
    return "with torch.no_grad(): " + g.choice(ways).format(a=a, b=b)


OVERWRITE: list[tuple[int, Line]] = [
    (8, plain("{a}.mul_({b})", "{a}.add_({b})", "{a}.sub_({b}, alpha=2)", "{a} += {b}")),
    (5, plain("{a}.relu_()", "{a}.zero_()", "{a}.fill_(0.3)", "{a}.clamp_(-1, 1)", "{a}.neg_()")),
    (4, plain("{a}.copy_({b})", "{a}[...] = {b}", "{a}[...] *= {a}[...]", "{a} *= {a}")),
    (3, plain("{a}.masked_fill_({m}, 0.5)", "{a}.masked_fill_({m}, {a}.sum())")),
    (4, on(_put)),
    (8, on(_assign)),
    (8, on(_between_views)),
    (
        3,
        plain("F.silu({a}, inplace=True)", "F.relu({a}, inplace=True)", "F.elu({a}, 1.0, True)"),
    ),
    (4, on(_metadata)),
    (2, plain("{a}.tanh_()", "{a}.sigmoid_()", "{a}.cumsum_({d})", "{a}.tril_()", "{a}.pow_(2)")),
    (
        2,
        plain(
            "{a}.addcmul_({b}, {b})", "{a}.lerp_({b}, 0.5)", "torch._foreach_mul_([{a}, {b}], 2)"
        ),
    ),
    (1, plain("{a}.fill_diagonal_(0.5)", "nn.init.constant_({a}, 0.5)", "{a}.detach_()")),
    (1, on(_into, is_float)),
    (1, plain("{a}.add_({b})", "{a}.mul_(2)", fits=lambda t: t.dtype == torch.int64)),
]


# --- Members: submodules, buffers, constants, counters, and control by arguments. ---


def _layer(g: Drawing) -> str | None:
    a = g.any(lambda t: t.dtype == torch.float32 and t.dim() >= 1 and t.numel() > 0)
    if a is None:
        return None
    t = g.value(a)
    last = t.shape[-1]
    makes = [f"nn.Linear({last}, {g.number(1, 3)})"] * 3 + [f"nn.LayerNorm({last})"] * 2
    makes += ["nn.ReLU(inplace=True)", "nn.Dropout(0.0)", f"nn.Linear({last}, 2, bias=False)"]
    if t.dim() in (2, 3) and t.shape[0] > 1:
        makes += [f"nn.BatchNorm1d({t.shape[1]})"] * 2
    code = g.choice(makes)
    again = [m for m in g.made("m") if repr(type(eval(code))) == repr(type(g.value(m)))]
    if again and g.chance(0.4):
        return f"{again[0]}({a})"
    return f"{g.member('m', code)}({a})"


def _recurrent(g: Drawing) -> str | None:
    a = g.any(lambda t: t.dtype == torch.float32 and t.dim() in (2, 3) and t.numel() > 0)
    if a is None:
        return None
    kind = g.choice(["GRU", "LSTM"])
    cell = g.member("m", f"nn.{kind}({g.value(a).shape[-1]}, 2)")
    return f"{cell}({a})[0]"


def _embedding(g: Drawing) -> str | None:
    i = g.any(lambda t: t.dtype == torch.int64 and 0 < t.numel() < 9)
    if i is None:
        return None
    return f"{g.member('m', f'nn.Embedding(4, {g.number(1, 3)})')}({i}.clamp(0, 3))"


def _count(g: Drawing, a: str, t: torch.Tensor) -> str:
    counter = (g.made("n") or [None])[0] or g.member("n", "0")
    return f"{a} * {counter}"


MEMBERS: list[tuple[int, Line]] = [
    (8, _layer),
    (1, _recurrent),
    (2, _embedding),
    (3, plain("{a} * scale", "{a} + {b} if flag else {a} - {b}", "{a}[:times]")),
]
COUNTERS: list[tuple[int, Line]] = [(1, on(_count))]


def _buffer(g: Drawing) -> str | None:
    buffers = g.made("b")
    if not buffers:
        return None
    b = g.choice(buffers)
    t = g.value(b)
    a = g.any(lambda u: is_float(u) and u.shape == t.shape)
    a = a or f"{g.any(is_float) or '1'}{'' if g.any(is_float) is None else '.mean()'}"
    ways = [
        f"{b}.add_({a}.detach())",
        f"{b}.copy_({a}.detach())",
        f"{b} += {a}.detach()",
        f"{b} = {b} + {a}.detach()",
        f"{b} = {b} * 0.5 + {a}.detach()",
        f"{b} = {a}.detach()",
        f"{b}.zero_()",
        f"{b}.mul_(0.5)",
        f"with torch.no_grad(): {b}[...] = {a}",
        f"with torch.no_grad(): {b}.lerp_({a}.detach().expand_as({b}), 0.5)",
    ]
    return g.choice(ways)


def _kept(g: Drawing) -> str | None:
    """Change what the module keeps without its being a buffer."""
    counters, constants, weights = g.made("n"), g.made("c"), g.made("w")
    ways = [f"{n} += 1" for n in counters] * 3
    ways += [f"{c}.add_(1)" for c in constants] + [f"{c} = {c} * 2" for c in constants]
    ways += [f"with torch.no_grad(): {w}.mul_(0.5)" for w in weights]
    return g.choice(ways) if ways else None


STATE: list[tuple[int, Line]] = [(8, _buffer), (1, _kept)]


def tensor_code(g: Drawing, shape: list[int], *, is_dense: bool = False) -> str:
    """
    Draw how a tensor of some shape is laid out in memory.

    Parameters must be dense: PyTorch's fused optimisers write past the end of others.
    """
    sizes = ", ".join(map(str, shape))
    kind = g.choice([0, 1, 2, 3, 7, 9, 10, 12] if is_dense else range(13))
    if kind <= 6 or not shape:
        return f"torch.randn({sizes})"
    if kind == 7 and len(shape) > 1:
        turned = ", ".join(map(str, [*shape[:-2], shape[-1], shape[-2]]))
        return f"torch.randn({turned}).mT"
    if kind == 8:
        larger = ", ".join(map(str, [*shape[:-1], 2 * shape[-1]]))
        return f"torch.randn({larger})[..., ::2]"
    if kind == 9:
        larger = ", ".join(map(str, [shape[0] + 1, *shape[1:]]))
        return f"torch.randn({larger})[1:]"
    if kind == 10 and len(shape) == 4:
        return f"torch.randn({sizes}).contiguous(memory_format=torch.channels_last)"
    if kind == 11:
        ones = ", ".join("1" if g.chance(0.5) else str(size) for size in shape)
        return f"torch.randn({ones}).expand({sizes})"
    return f"torch.randn({math.prod(shape)}).view({sizes})"
