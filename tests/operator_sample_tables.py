"""What came of operators' samples: as tables on the terminal, and as a page about refusals."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

Found = dict[str, Any]
ORDER = ("equal", "traced", "refused", "invalid", "wrong", "crash")


def line_of(found: Found) -> str:
    """Write a case and what came of it as a line."""
    place = f"{found['op']} {found['how']} {found['sample']}"
    return f"{found['kind']:8} {place:50} {found['detail'][:300]}"


def print_tables(tally: list[Found]) -> None:
    """Print counts, refusals by their first words, and failures."""
    print(f"\n{'':16}" + "".join(f"{kind:>10}" for kind in ORDER))
    for how in dict.fromkeys(found["how"] for found in tally):
        counts = Counter(found["kind"] for found in tally if found["how"] == how)
        print(f"{how:16}" + "".join(f"{counts[kind]:10}" for kind in ORDER))
    counts = Counter(found["kind"] for found in tally)
    print(f"{'all':16}" + "".join(f"{counts[kind]:10}" for kind in ORDER))
    groups: dict[str, list[Found]] = {}
    for found in tally:
        if found["kind"] == "refused":
            groups.setdefault(found["group"], []).append(found)
    print("\nRefused:")
    for words, members in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        ops = list(dict.fromkeys(found["op"] for found in members))
        print(f"{len(members):7}  {words} ...  ({', '.join(ops[:6])}; {len(ops)} operators)")
    for kind in ("traced", "wrong", "crash"):
        print(f"\n{kind.capitalize()}:")
        for found in tally:
            if found["kind"] == kind:
                print(line_of(found))


# --- The page. ---

PAGE = """# Operators that are refused

PyTorch keeps a list of its operators with samples of their arguments. Each was run by `pw.apply` on
two CPU devices: called on inputs, between copies on other devices, with a backward pass, in place,
and on inputs with gaps in memory. What came of {count:,} calls of {operators} operators:

{counts}

Equal means to the bit: values, signs of zeros, strides, and what shares memory with what. Operators
that draw random numbers were compared by the distribution of what they draw, and drew the same on
every placement. *As traced* means that PyTorch chooses another formula for an operator while
anything traces it; the numbers are then those, to the bit, and differ from untraced ones in the
last digits or in the sign of a zero:

{traced}

Refused calls raise an `InputError` before anything is computed, and the module runs as before. They
are these:

{refused}

`python -m tests.operator_samples --samples {samples} --table docs/refused-ops.md` writes this page.
"""

WORDS = {
    "forward": "as is",
    "crossing": "as is",
    "gradient": "with gradients",
    "inplace": "in place",
    "overwrite": "in place on an input",
    "strided": "on inputs with gaps in memory",
    "stridedgradient": "with gradients and gaps in memory",
}


def write_page(tally: list[Found], traced: dict[str, str], samples: str) -> str:
    """Write the page about operators that are refused."""
    ran = [found for found in tally if found["kind"] != "invalid"]
    counts = Counter(found["kind"] for found in ran)
    rows = ["| outcome | calls |", "| --- | ---: |"]
    names = {"equal": "equal", "traced": "as traced", "refused": "refused"}
    rows += [f"| {names.get(kind, kind)} | {counts[kind]:,} |" for kind in ORDER if counts[kind]]
    return PAGE.format(
        count=len(ran),
        operators=len({found["op"] for found in ran}),
        counts="\n".join(rows),
        traced=_traced_rows(ran, traced),
        refused=_refused_rows(ran),
        samples=samples,
    )


def _traced_rows(ran: list[Found], traced: dict[str, str]) -> str:
    rows = ["| operator | other formula |", "| --- | --- |"]
    seen = {found["op"] for found in ran if found["kind"] == "traced"}
    rows += [f"| `{name}` | {traced.get(name, '?')} |" for name in sorted(seen)]
    return "\n".join(rows)


def _refused_rows(ran: list[Found]) -> str:
    """Write a row for each operator and reason, with how it was called."""
    ways: dict[tuple[str, str, str], dict[str, None]] = {}
    for found in ran:
        if found["kind"] == "refused":
            key = (found["op"], *reason_of(found["detail"]))
            ways.setdefault(key, {})[found["how"]] = None
    every = {(found["op"], found["how"]): set[str]() for found in ran}
    for found in ran:
        every[found["op"], found["how"]].add(found["kind"])
    rows = ["| operator | called | refused because | instead |", "| --- | --- | --- | --- |"]
    for (name, reason, remedy), hows in sorted(ways.items()):
        is_always = all(every[name, how] == {"refused"} for how in hows)
        called = _called(name, [*hows], every) + ("" if is_always else " (some samples)")
        rows.append(f"| `{name}` | {called} | {reason} | {remedy} |")
    return "\n".join(rows)


def _called(name: str, hows: list[str], every: dict[tuple[str, str], set[str]]) -> str:
    if {*hows} == {how for other, how in every if other == name}:
        return "any way"
    return "; ".join(dict.fromkeys(WORDS[how] for how in hows))


def reason_of(told: str) -> tuple[str, str]:
    """Cut a refusal into the reason and the remedy."""
    told = re.sub(r"^(In [^,]*, )?`[^`]*`, line \d+, ", "", told)
    told = re.sub(r"^The model, at `[^`]*` in its (\w+) pass, ", r"its \1 pass ", told)
    told = re.sub(r"\binput \d+", "an input", re.sub(r"\bInput \d+", "An input", told))
    told = re.sub(r"\[[\d, ]+\]", "[...]", told).replace("|", "\\|")
    reason, _, remedy = re.sub(r"\.(?= [A-Z`])", ".\n", told).partition("\n")
    return reason[:1].upper() + reason[1:], " ".join(remedy.split())
