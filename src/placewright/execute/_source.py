"""
Straight lines of calls as Python source: when a name is let go, and which calls go together.

This module owns the text of a lane's function. A name is deleted after its last use; what one part
of a step makes and another reads is kept in a list between them; and adjacent calls of one device
become a segment where the lane's are wanted as such: recorded once and replayed (a CUDA graph), or
one function that PyTorch compiles.

A segment that is replayed reads::

    if begin(3):
        r7 = o4(r5, P[2])
        del r5
        end(3, r7)
    else:
        [r7] = replay(3)
        del r5
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

_MIN_COMPILED = 4
"""Calls of a segment that are worth compiling."""


@dataclass(frozen=True, eq=False)
class Line:
    """A call, what it reads of what other lines make, and what it makes itself."""

    text: str
    reads: tuple[str, ...]
    makes: str | None
    device: int | None = None  # that computes it; None: it does something else
    globals: tuple[str, ...] = ()  # names that it reads beside those, which stay
    is_view: bool = False  # nothing is computed, it is only looked at otherwise
    is_opaque: bool = False  # PyTorch's compiler does not take it

    @property
    def names(self) -> tuple[str, ...]:
        """List all names of lines in it."""
        return (*self.reads, *([self.makes] if self.makes else ()))


@dataclass(frozen=True)
class Style:
    """How a lane's segments are written."""

    is_recorded: bool = False
    is_compiled: bool = False


@dataclass(frozen=True)
class Kept:
    """What is made in one part and read in another."""

    number: int
    first_part: int
    last_part: int


def find_kept(parts: Sequence[dict[int, list[Line]]]) -> dict[str, Kept]:
    """Number what is made in one part and read in another."""
    made: dict[str, int] = {}
    read: dict[str, int] = {}
    for part, lanes in enumerate(parts):
        for line in (line for lines in lanes.values() for line in lines):
            if line.makes is not None:
                made[line.makes] = part
            read |= dict.fromkeys(line.reads, part)
    crossing = [name for name, part in made.items() if read.get(name, part) > part]
    return {name: Kept(k, made[name], read[name]) for k, name in enumerate(crossing)}


def write_lane(lines: Sequence[Line], part: int, kept: dict[str, Kept], style: Style) -> str:
    """Write a lane's function in a part, and the functions that it has compiled."""
    writer = _Writer(lines, part, kept, style)
    body = [*writer.body()]
    return "\n".join([*writer.functions, "def run(P, S, F, R):", *_indented(body), "    return"])


def count_segments(lines: Sequence[Line]) -> int:
    """Count the runs of adjacent lines that one device computes."""
    return sum(device is not None for device, _ in groupby(lines, lambda line: line.device))


class _Writer:
    def __init__(
        self, lines: Sequence[Line], part: int, kept: dict[str, Kept], style: Style
    ) -> None:
        self.lines, self.part, self.kept, self.style = lines, part, kept, style
        self.functions: list[str] = []  # lines of compiled segments
        self.last: dict[str, int] = {}
        for k, line in enumerate(lines):
            self.last |= dict.fromkeys(line.names, k)
        self.here: set[str] = set()

    def body(self) -> Iterator[str]:
        begin = number = 0
        for device, group in groupby(self.lines, lambda line: line.device):
            end = begin + len([*group])
            if device is None or all(line.is_view for line in self.lines[begin:end]):
                yield from self.plain(begin, end)
            elif self.style.is_recorded:
                yield from self.recorded(number, begin, end)
            else:
                yield from self.computed(begin, end)
            number += device is not None
            begin = end

    def recorded(self, number: int, begin: int, end: int) -> Iterator[str]:
        """Write a segment that is run or recorded, or else replayed."""
        made = [line.makes for line in self.lines[begin:end] if line.makes]
        given = self.given(made, end)
        read = self.read_from_outside(begin, end)
        gone = [name for name in read if self.last[name] < end]
        yield f"if begin({number}):"
        yield from _indented(self.computed(begin, end))
        yield f"    end({', '.join([str(number), *given])})"
        yield "else:"
        yield f"    [{', '.join(given)}] = replay({number})"
        if gone:
            yield f"    del {', '.join(gone)}"

    def computed(self, begin: int, end: int) -> Iterator[str]:
        """Write a segment, with the parts of it that are compiled as functions."""
        if not self.style.is_compiled:
            yield from self.plain(begin, end)
            return
        for is_opaque, group in groupby(self.lines[begin:end], lambda line: line.is_opaque):
            end = begin + len([*group])
            is_short = end - begin < _MIN_COMPILED
            yield from (self.plain if is_opaque or is_short else self.compiled)(begin, end)
            begin = end

    def compiled(self, begin: int, end: int) -> Iterator[str]:
        calls = self.lines[begin:end]
        made = [line.makes for line in calls if line.makes]
        given = self.given(made, end)
        names = self.read_from_outside(begin, end)
        stay = dict.fromkeys(name for line in calls for name in line.globals)
        words = {name: f"g{k}" if name[0] == "P" else name for k, name in enumerate(stay)}
        name = f"s{self.part}_{begin}"
        self.functions.append(f"def {name}({', '.join([*names, *words.values()])}):")
        for line in calls:
            text = line.text
            for old, new in words.items():
                text = text.replace(old, new)
            self.functions.append(f"    {text}")
        self.functions += [f"    return [{', '.join(given)}]", f"{name} = compiled({name})"]
        for each in names:
            yield from self.take(each)
        yield f"[{', '.join(given)}] = {name}({', '.join([*names, *stay])})"
        self.here |= {*given}
        for each in dict.fromkeys((*names, *given)):
            yield from self.drop(each, end - 1)

    def read_from_outside(self, begin: int, end: int) -> list[str]:
        """List what lines read that they have not made themselves."""
        made = {line.makes for line in self.lines[begin:end]}
        read = (name for line in self.lines[begin:end] for name in line.reads)
        return [*dict.fromkeys(name for name in read if name not in made)]

    def given(self, made: Sequence[str], end: int) -> list[str]:
        """List what a segment makes for others: lines after it, or a later part."""
        kept = {name for name, each in self.kept.items() if self.part < each.last_part}
        return [name for name in made if self.last[name] >= end or name in kept]

    def plain(self, begin: int, end: int) -> Iterator[str]:
        for k in range(begin, end):
            line = self.lines[k]
            for name in dict.fromkeys(line.reads):
                yield from self.take(name)
            yield line.text
            if line.makes is not None:
                self.here.add(line.makes)
            for name in dict.fromkeys(line.names):
                yield from self.drop(name, k)

    def take(self, name: str) -> Iterator[str]:
        """Take over what an earlier part has made."""
        kept = self.kept.get(name)
        if name not in self.here and kept is not None and kept.first_part < self.part:
            yield f"{name} = S[{kept.number}]; S[{kept.number}] = None"
            self.here.add(name)

    def drop(self, name: str, at: int) -> Iterator[str]:
        """Let a name go if no line after this one reads it."""
        if self.last[name] > at:
            return
        kept = self.kept.get(name)
        if kept is not None and self.part < kept.last_part:
            yield f"S[{kept.number}] = {name}"
        yield f"del {name}"


def _indented(lines: Iterator[str] | Sequence[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)
