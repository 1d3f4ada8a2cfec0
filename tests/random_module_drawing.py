"""
Drawing random modules: lines are run as they are drawn, and those that eager PyTorch cannot run
are dropped.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.random_module_cases import (
    FORMS,
    NAME,
    SCOPE,
    Call,
    Case,
    Given,
    Line,
    arguments,
    build,
    reference,
)
from tests.random_module_lines import (
    COMPUTE,
    COUNTERS,
    MEMBERS,
    OVERWRITE,
    STATE,
    VIEWS,
    tensor_code,
)

FLAGS = (("flag", "True", "False"), ("times", "2", "1"), ("scale", "0.5", "-1.5"))


class Drawer:
    """Draws a case line by line, running each so that only what eager PyTorch can run is kept."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.module = nn.Module()
        self.scope: dict[str, Any] = dict(SCOPE) | {"self": self.module}
        self.given: list[Given] = []
        self.members: list[Line] = []
        self.lines: list[Line] = []
        self.names: list[str] = []  # of tensors, the latest last
        self.count = 0

    # What lines ask for.

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, max(low, high))

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def choice(self, options: Any) -> Any:
        return self.random.choice(options)

    def value(self, name: str) -> Any:
        return getattr(self.module, name[5:]) if name.startswith("self.") else self.scope[name]

    def any(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        known = [name for name in self.names if fits(self.value(name))]
        if not known:
            return None
        return self.choice(known[-4:] if self.chance(0.5) else known)

    def relative(self, name: str) -> str | None:
        """Draw another tensor that looks at the same storage."""
        where = self.value(name).untyped_storage().data_ptr()
        known = [
            other
            for other in self.names
            if other != name and self.value(other).untyped_storage().data_ptr() == where
        ]
        return self.choice(known) if known else None

    def made(self, stem: str) -> list[str]:
        """List members with this first letter."""
        return [line.makes[0] for line in self.members if line.makes[0][5:6] == stem]

    def member(self, stem: str, code: str, *, is_buffer: bool = False) -> str:
        name = f"self.{stem}{sum(n[5:6] == stem for n in self.made(stem))}"
        code = f"nn.Buffer({code})" if is_buffer else code
        line = Line((name,), code)
        exec(line.source, self.scope)
        self.members.append(line)
        if isinstance(self.value(name), torch.Tensor):
            self.names.insert(0, name)
        return name

    # Drawing.

    def shape(self) -> list[int]:
        """Draw a shape that can often be broadcast with the others of this case."""
        shape = list(self.base)
        if self.chance(0.3):
            shape = shape[self.number(0, len(shape) - 1) :]
        if self.chance(0.3):
            at = self.number(0, len(shape) - 1)
            shape[at] = 1
        if self.chance(0.1):
            self.random.shuffle(shape)
        return shape

    def start(self) -> None:
        """Draw arguments, parameters, buffers and constants."""
        torch.manual_seed(self.seed)
        self.base = [self.choice([1, 2, 2, 3, 3, 4]) for _ in range(self.choice([2, 2, 3, 3, 4]))]
        for k in range(self.choice([1, 1, 2, 2, 3])):
            code = tensor_code(self, self.shape())
            if k and self.chance(0.06):
                code = self.choice(["x0", "x0[:1]", "x0.detach()", "x0[None]"])
            elif self.chance(0.08):
                code = f"({code}).double()"
            elif self.chance(0.2):
                code = f"({code}).requires_grad_()"
            self._argument(Given(f"x{k}", code, later=self._later(code)))
        if self.chance(0.3):
            self._argument(Given("i0", f"torch.randint(0, 2, ({self.number(1, 3)},))"))
        if self.chance(0.15):
            sizes = ", ".join(map(str, self.base))
            self._argument(Given("k0", f"torch.rand({sizes}) > 0.5", self.chance(0.3)))
        if self.chance(0.25):
            differs = self.chance(0.2)
            for name, code, later in (
                ("flag", "True", "False"),
                ("times", "2", "1"),
                ("scale", "0.5", "-1.5"),
            ):
                if self.chance(0.6):
                    self._argument(Given(name, code, True, later if differs else ""))
        for _ in range(self.choice([1, 1, 2, 3])):
            code = tensor_code(self, self.shape(), is_dense=True)
            self.member("w", f"nn.Parameter({code})")
        if self.chance(0.03):
            self.member("w", self.made("w")[0])
        for _ in range(self.choice([0, 0, 1, 1, 2])):
            self.member("b", tensor_code(self, self.shape()), is_buffer=True)
        if self.chance(0.2):
            self.member("c", tensor_code(self, self.shape()))
        elif self.chance(0.04):
            self.member(
                "c", self.choice(["{}.detach()", "{}.detach()[:1]"]).format(self.made("w")[0])
            )

    def _later(self, code: str) -> str:
        """Draw how an argument of later calls differs: its layout, size or type; mostly not."""
        if not self.chance(0.12) or "x0" in code:
            return ""
        leaf = ".requires_grad_()" if "requires_grad" in code else ""
        ways = [
            "({}).detach().mT",
            "({}).detach().flip(0)",
            "({}).detach()[:1]",
            "torch.cat([({}).detach()] * 2)",
            "({}).detach().double()",
            "({}).detach()[None]",
            "({}).detach().repeat_interleave(2, -1)[..., ::2]",
        ]
        return self.choice(ways).format(code) + leaf

    def _argument(self, given: Given) -> None:
        self.scope[given.name] = eval(given.code, self.scope)
        self.given.append(given)
        if isinstance(self.scope[given.name], torch.Tensor):
            self.names.append(given.name)

    def body(self, count: int) -> None:
        """Draw so many lines of `forward`."""
        kinds = [(VIEWS, 30), (COMPUTE, 32), (OVERWRITE, 26), (MEMBERS, 8), (STATE, 5)]
        if self.chance(0.03):
            kinds.append((COUNTERS, 5))
        tables, weights = zip(*kinds, strict=True)
        tries = 0
        while len(self.lines) < count and tries < 12 * count:
            tries += 1
            table = self.random.choices(tables, weights)[0]
            draw = self.random.choices([d for _, d in table], [w for w, _ in table])[0]
            members = len(self.members)
            is_kept = False
            try:
                text = draw(self)
                is_kept = text is not None and self._run(text, table in (OVERWRITE, STATE))
            except Exception:  # eager PyTorch does not run this
                is_kept = False
            if not is_kept:
                self._forget_members(members)

    def _forget_members(self, count: int) -> None:
        for line in self.members[count:]:
            delattr(self.module, line.makes[0][5:])
            self.names = [name for name in self.names if name != line.makes[0]]
        del self.members[count:]

    def _run(self, text: str, is_statement: bool) -> bool:
        """Run one line; False if it is of no use."""
        if is_statement:
            exec(text, self.scope)
            self.lines.append(Line((), text))
            if self._is_valid():
                return True
            self.lines.pop()
            self._replay()
            return False
        in_region = not text.startswith("with ") and self.chance(0.06)
        with torch.set_grad_enabled(not in_region):
            result = eval(text, self.scope)
        parts = [result] if isinstance(result, torch.Tensor) else list(result)
        if parts[0] is not result and len(parts) == 1:
            text = f"{text}[0]"
        if not 0 < len(parts) <= 4 or sum(p.numel() for p in parts) > 200:
            return False
        makes = tuple(f"v{self.count + k}" for k in range(len(parts)))
        self.count += len(parts)
        self.scope.update(zip(makes, parts, strict=True))
        self.names += makes
        if in_region:
            line = Line(makes, text)
            self.lines.append(Line((), f"with torch.no_grad(): {line.source}"))
        else:
            left = (
                makes if isinstance(result, torch.Tensor) or len(makes) > 1 else (f"({makes[0]},)",)
            )
            self.lines.append(Line(left, text))
        return True

    def _case(self, returns: tuple[str, ...], mode: str = "forward") -> Case:
        return Case(
            self.seed,
            tuple(self.given),
            tuple(self.members),
            tuple(self.lines),
            returns,
            "tuple",
            mode,
            (Call(()),),
        )

    def _trained(self) -> list[str]:
        return [
            n
            for n in self.names
            if self.value(n).is_floating_point() and self.value(n).requires_grad
        ]

    def _is_valid(self) -> bool:
        """Try a backward pass through everything that has been made."""
        names = self._trained()
        if not names:
            return True
        case = self._case(tuple(names))
        module = build(case)
        args, kwargs, _ = arguments(case, 0)
        try:
            result = module(*args, **kwargs)
            sum(t.sum().double() for t in result if t.requires_grad).backward()
        except Exception:
            return False
        return True

    def _replay(self) -> None:
        """Make all values anew, without a line that was dropped."""
        torch.manual_seed(self.seed)
        for line in self.members:
            if not line.reads:
                delattr(self.module, line.makes[0][5:])
            exec(line.source, self.scope)
        for given in self.given:
            self.scope[given.name] = eval(given.code, self.scope)
        for line in self.lines:
            exec(line.source, self.scope)

    def finish(self) -> Case:
        """Draw what is returned and how the module is run."""
        latest = self.names[-6:]
        written = [n for line in self.lines if not line.makes for n in NAME.findall(line.text)]
        known = [n for n in (*latest, *latest, *written, *self.names) if n in self.names]
        returns = [self.choice(known) for _ in range(self.choice([1, 1, 2, 2, 3, 4]))]
        if self.chance(0.1):
            returns.append(returns[0])
        trained = self._trained()
        mode = self.random.choices(["forward", "apply", "step"], [1, 3, 2])[0]
        if mode != "forward" and trained and not {*returns} & {*trained}:
            returns.append(self.choice(trained[-5:]))
        if not {*returns} & {*trained}:
            mode = "forward"
        shapes = ["one", "tuple", "tuple", "list", "dict", "dataclass", "nested"]
        case = replace(self._case(tuple(returns)), structure=self.choice(shapes), mode=mode)
        ends = [*dict.fromkeys(n for n in returns if n in trained)]
        calls = [self._call(ends, mode, k) for k in range(self.choice([2, 2, 3]))]
        if mode == "apply" and self.chance(0.75):
            calls = [replace(call, terms=calls[0].terms) for call in calls]
        placement = self.random.choice([-1, *range(12)])
        optimizer = self.choice(["sgd", "momentum", "adamw"])
        case = replace(case, calls=tuple(calls), placement=placement, optimizer=optimizer)
        return self._mended(case)

    def _call(self, ends: list[str], mode: str, number: int) -> Call:
        how = {"casts": self.chance(0.08), "evaluates": self.chance(0.15)}
        if mode == "forward":
            return Call((), with_grad=self.chance(0.5), **how)
        chosen = [name for name in ends if self.chance(0.6)] or [self.choice(ends)]
        chosen += [name for name in chosen if self.chance(0.1)]
        terms = tuple((name, self.choice([*FORMS])) for name in chosen)
        if mode == "step":
            return Call(terms, **how)
        waits = number == 0 and self.chance(0.3)
        how["repeats"] = self.chance(0.08)
        return Call(terms, self.chance(0.93), waits, self.chance(0.2), **how)

    def _mended(self, case: Case) -> Case:
        """Leave out what eager PyTorch refuses: backward passes that wait, later losses."""
        plain = replace(case, given=tuple(replace(g, later="") for g in case.given))
        calls = tuple(replace(c, casts=False, repeats=False) for c in case.calls)
        ways = [
            case,
            plain,
            replace(plain, calls=calls),
            replace(plain, calls=tuple(replace(call, waits=False) for call in calls)),
            replace(plain, calls=(replace(calls[0], waits=False),)),
            replace(plain, calls=(Call(()),), mode="forward"),
        ]
        for way in ways:
            try:
                reference(way)
            except Exception:
                continue
            return way
        return case


def draw(seed: int) -> Case:
    """Draw a case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawer = Drawer(seed)
        drawer.start()
        drawer.body(drawer.number(3, 12))
        return drawer.finish()
