"""
Run the benchmarks and print their figures as a table, or with ``--json`` as JSON.

``python -m benchmarks [NAME ...] [--json]``, each NAME a module ``bench_NAME``; all of them if none
is named. Exits with 1 if a target is missed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import platform
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure

NAMES = (
    "simulator",
    "files",
    "startup",
    "capture",
    "testbeds",
    "grouping",
    "placers",
    "auto",
    "policies",
    "execute",
)


def main(arguments: list[str]) -> int:
    """Run what is named and print it."""
    as_json = "--json" in arguments
    names = [name for name in arguments if name != "--json"] or [*NAMES]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(
            f"There is no benchmark `{unknown[0]}`; there are {', '.join(NAMES)}.", file=sys.stderr
        )
        return 2
    results = {name: importlib.import_module(f"benchmarks.bench_{name}").run() for name in names}
    if as_json:
        machine = {"processor": platform.machine(), "python": platform.python_version()}
        figures = {
            name: [dataclasses.asdict(figure) | {"is_met": figure.is_met} for figure in figures]
            for name, figures in results.items()
        }
        print(json.dumps({"machine": machine, "figures": figures}, indent=1))
    else:
        _print_table(results)
    return int(any(figure.is_met is False for figures in results.values() for figure in figures))


def _print_table(results: dict[str, list[Figure]]) -> None:
    table = Table("benchmark", "figure", title="Medians", title_justify="left")
    for column in ("measured", "target", ""):
        table.add_column(column, justify="right")
    for name, figures in results.items():
        for figure in figures:
            sign = "<=" if figure.at_most else ">="
            target = "" if figure.target is None else f"{sign} {figure.target:g}"
            verdict = {True: "met", False: "[red]missed[/red]", None: ""}[figure.is_met]
            table.add_row(name, figure.name, f"{figure.value:,.3g} {figure.unit}", target, verdict)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
