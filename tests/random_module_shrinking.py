"""Shrinking random modules: delete and simplify as long as the same thing is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from tests.random_module_cases import NAME, SCOPE, Call, Case, check


def shrink(case: Case, ignored: frozenset[str] = frozenset(), tries: int = 600) -> Case:
    """Delete and simplify as long as the case fails in the same way."""
    wanted = check(case, ignored).signature
    seen = {case}
    is_better = True
    while is_better and tries > 0:
        is_better = False
        for smaller in simpler(case):
            if smaller in seen:
                continue
            seen.add(smaller)
            tries -= 1
            if tries <= 0:
                break
            if _fails(smaller, wanted, ignored):
                case, is_better = smaller, True
                break
    return case


def _fails(case: Case, wanted: str, ignored: frozenset[str]) -> bool:
    try:
        return check(case, ignored).signature == wanted
    except SyntaxError:
        return False


def simpler(case: Case) -> Iterator[Case]:
    """List cases with less in them, those with much less first."""
    for k in reversed(range(len(case.lines))):
        yield from _without_line(case, k)
    if len(case.calls) > 1:
        for k in range(len(case.calls)):
            yield replace(case, calls=case.calls[:k] + case.calls[k + 1 :])
    if len(case.returns) > 1:
        for k in range(len(case.returns)):
            rest = case.returns[:k] + case.returns[k + 1 :]
            yield _with_returns(case, rest)
    if case.structure != "one":
        yield replace(case, structure="one" if len(case.returns) == 1 else "tuple")
    yield from _simpler_calls(case)
    for k in range(len(case.lines)):
        yield from _simpler_line(case, k)
    used = " ".join([*(line.text for line in case.lines), *case.returns])
    names = {*NAME.findall(used)}
    for k, line in enumerate(case.members):
        others = {n for other in case.members if other is not line for n in other.reads}
        if not {*line.makes} & (names | others):
            yield replace(case, members=case.members[:k] + case.members[k + 1 :])
    for k, given in enumerate(case.given):
        if given.name not in names:
            yield replace(case, given=case.given[:k] + case.given[k + 1 :])
        for code in _simpler_code(given.code):
            new = replace(given, code=code)
            yield replace(case, given=(*case.given[:k], new, *case.given[k + 1 :]))
        if given.later:
            new = replace(given, later="")
            yield replace(case, given=(*case.given[:k], new, *case.given[k + 1 :]))
    for k, line in enumerate(case.members):
        for code in _simpler_code(line.text):
            new = replace(line, text=code)
            yield replace(case, members=(*case.members[:k], new, *case.members[k + 1 :]))
    for placement in (-1, -2):
        if case.placement not in (-1, placement):
            yield replace(case, placement=placement)
    if case.mode == "step":
        yield replace(case, mode="apply")
        if case.optimizer != "sgd":
            yield replace(case, optimizer="sgd")
    if case.mode == "apply":
        yield replace(case, mode="forward", calls=(Call(()),) * len(case.calls))


def _without_line(case: Case, k: int) -> Iterator[Case]:
    """Delete a line: with what it made replaced by what it read, or with all that reads it."""
    line = case.lines[k]
    rest = case.lines[:k] + case.lines[k + 1 :]
    region = re.match(r"with torch.no_grad\(\): ([v\d, ]+) = ", line.text)
    makes = {*line.makes} | ({*NAME.findall(region[1])} if region else set())
    if not makes:
        yield replace(case, lines=rest)
        return
    for source in sorted(line.reads - makes):
        changed = tuple(replace(x, text=_renamed(x.text, makes, source)) for x in rest)
        terms = tuple(
            replace(c, terms=tuple((source if n in makes else n, f) for n, f in c.terms))
            for c in case.calls
        )
        returns = tuple(source if n in makes else n for n in case.returns)
        yield replace(case, lines=changed, returns=returns, calls=terms)
    gone, kept = set(makes), []
    for other in rest:
        if other.reads & gone:
            gone |= {*other.makes} | {n for n in other.reads if f"{n} = " in other.text}
        else:
            kept.append(other)
    returns = tuple(n for n in case.returns if n not in gone)
    if returns:
        yield _with_returns(replace(case, lines=tuple(kept)), returns)


def _renamed(text: str, names: set[str], new: str) -> str:
    return NAME.sub(lambda found: new if found[0] in names else found[0], text)


def _with_returns(case: Case, returns: tuple[str, ...]) -> Case:
    calls = tuple(
        replace(call, terms=tuple(t for t in call.terms if t[0] in returns)) for call in case.calls
    )
    if case.mode != "forward" and not calls[0].terms:
        calls = tuple(replace(call, terms=((returns[0], "sum"),)) for call in calls)
    return replace(case, returns=returns, calls=calls)


def _simpler_calls(case: Case) -> Iterator[Case]:
    for k, call in enumerate(case.calls):
        ways = [replace(call, waits=False), replace(call, splits=False)]
        ways += [replace(call, casts=False), replace(call, evaluates=False)]
        ways += [replace(call, repeats=False), replace(call, with_grad=True)]
        if len(call.terms) > 1:
            ways += [
                replace(call, terms=call.terms[:j] + call.terms[j + 1 :])
                for j in range(len(call.terms))
            ]
        if call.terms and k and call.terms != case.calls[0].terms:
            ways.append(replace(call, terms=case.calls[0].terms))
        ways += [
            replace(call, terms=tuple((n, "sum") for n, _ in call.terms)),
        ]
        for way in ways:
            if way != call:
                yield replace(case, calls=(*case.calls[:k], way, *case.calls[k + 1 :]))


def _simpler_line(case: Case, k: int) -> Iterator[Case]:
    line = case.lines[k]
    if line.text.startswith("with torch.no_grad(): "):
        texts = [line.text.removeprefix("with torch.no_grad(): ")]
    else:
        texts = [
            re.sub(r"^(.*[=(] *)[^=(]*\)?$", r"\g<1>" + number, line.text)
            for number in ("0.5", "0.5)")
        ]
        texts += [re.sub(r" [-+*/] .*$", "", line.text)] if line.makes else []
        for name in sorted(line.reads):
            others = {n for x in case.lines[:k] for n in x.makes}
            others |= {g.name for g in case.given} | {n for x in case.members for n in x.makes}
            texts += [
                _renamed(line.text, {name}, other)
                for other in sorted(others)
                if other < name and other.startswith(("x", "self.w"))
            ][:3]
    for text in texts:
        if text != line.text:
            new = replace(line, text=text)
            yield replace(case, lines=(*case.lines[:k], new, *case.lines[k + 1 :]))


def _simpler_code(code: str) -> Iterator[str]:
    """List simpler ways to draw a tensor of the same shape, or a smaller one."""
    for found in (r"\.requires_grad_\(\)", r"\.double\(\)"):
        if re.search(found, code):
            yield re.sub(found, "", code)
    inner = code
    for before in ("nn.Parameter(", "nn.Buffer("):
        if code.startswith(before):
            inner = code[len(before) : -1]
    if "randn" in inner and not re.fullmatch(r"torch\.randn\([\d, ]*\)", inner):
        shape = list(eval(inner, dict(SCOPE)).shape)
        yield code.replace(inner, f"torch.randn({', '.join(map(str, shape))})")
