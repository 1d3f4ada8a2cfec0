"""
Tables of a bench, for the terminal and as Markdown.

This module owns how they are written: between a bench's markers in a file that has more, so that
the words around them stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from placewright import files
from placewright.errors import InputError
from placewright.report.terminal import table


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of words; its first columns hold text, the others figures."""

    title: str
    columns: tuple[str, ...]
    num_text: int
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def show(shown: Table) -> RenderableType:
    """Show a table on the terminal."""
    made = table(shown.title, *shown.columns, text=shown.columns[: shown.num_text])
    for row in shown.rows:
        made.add_row(*map(Text, row))
    return Group(made, *map(Text, shown.notes))


def to_markdown(tables: Sequence[Table]) -> str:
    """Write tables as Markdown, each under a heading."""
    return "\n\n".join(_to_markdown(each) for each in tables)


def _to_markdown(each: Table) -> str:
    rule = ["---"] * each.num_text + ["---:"] * (len(each.columns) - each.num_text)
    lines = [_row(each.columns), f"|{'|'.join(rule)}|", *map(_row, each.rows)]
    parts = [f"### {each.title}", "\n".join(lines)]
    if each.notes:
        parts.append("\n".join(f"- {note}" for note in each.notes))
    return "\n\n".join(parts)


def _row(words: Sequence[str]) -> str:
    return f"| {' | '.join(word.replace('|', '&#124;') for word in words)} |"


def write_markdown(path: Path, name: str, tables: Sequence[Table]) -> None:
    """
    Write tables between ``<!-- name -->`` and ``<!-- /name -->``.

    In a file that has these markers, what is between them is replaced; to one that does not,
    markers and tables are added at the end; one that is missing is made.

    Raises
    ------
    InputError
        The file cannot be read or written, or has one marker only.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = f"{begin}\n\n{to_markdown(tables)}\n\n{end}"
    try:
        text = files.read(path, "Markdown file").decode() if path.exists() else ""
    except UnicodeDecodeError:
        raise InputError(f"`{path}` is no text file.") from None
    if begin in text and end in text.partition(begin)[2]:
        before, _, rest = text.partition(begin)
        text = before + section + rest.partition(end)[2]
    elif begin in text or end in text:
        raise InputError(f"`{path}` has one of `{begin}` and `{end}`, but not one after the other.")
    else:
        text = f"{text.rstrip()}\n\n{section}\n".lstrip()
    files.write(path, text.encode())
