"""The papers' testbeds: `bench`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from placewright.cli._shared import print_out, say_unless, split_words, user_errors
from placewright.cli.fidelity import fidelity

WIDE = 150
"""Tables with many columns are this wide, even where a terminal has to wrap them."""


class BenchName(str, Enum):
    """The benches, as `placewright.bench.running` names them."""

    table1 = "table1"
    table2 = "table2"
    ablations = "ablations"
    fidelity = "fidelity"


def bench(
    name: Annotated[
        BenchName,
        typer.Argument(
            help="`table1`: all placers on the papers' testbeds; `table2`: learned against random"
            " groupings; `ablations`: learned placers, one option at a time; `fidelity`: simulated"
            " against measured step times, on this machine.",
            show_default=False,
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Few models and seeds, little budget: minutes.")
    ] = False,
    out: Annotated[
        Optional[Path],
        typer.Option(
            help="The folder of `cells.jsonl` (`plans.jsonl`); what is in it is not run again."
            "  [default: bench-NAME]",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        Optional[str],
        typer.Option(help="Instead of the bench's own: `600s`, `5000 samples`, or both."),
    ] = None,
    seeds: Annotated[
        Optional[int], typer.Option(min=1, help="Instead of the bench's own number of seeds.")
    ] = None,
    only: Annotated[
        Optional[str],
        typer.Option("--only", "--models", metavar="MODEL,...", help="Only these models."),
    ] = None,
    clusters: Annotated[
        Optional[str],
        typer.Option(
            "--clusters",
            "--cluster",
            metavar="CLUSTER,...",
            help="Only these: `k40x2`, all `k40` or `k40-tight`, or all that are `tight`. For"
            " `fidelity`, the file of this machine; without it, it is probed.",
        ),
    ] = None,
    placers: Annotated[
        Optional[str],
        typer.Option(metavar="PLACER,...", help="Run only these; tables show all that is there."),
    ] = None,
    plans: Annotated[
        Optional[int], typer.Option(min=4, help="`fidelity`: how many plans of each model.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many cells run at once.")] = 1,
    threads: Annotated[
        Optional[int],
        typer.Option(
            min=1, max=1024, help="Cores for each cell.  [default: all, shared among jobs]"
        ),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run again what failed.")] = False,
    render_only: Annotated[
        bool, typer.Option("--render-only", help="Run nothing; show what there is.")
    ] = False,
    markdown: Annotated[
        Optional[Path],
        typer.Option(
            metavar="FILE",
            help="Also write the tables there, between `<!-- NAME -->` and `<!-- /NAME -->`.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """
    Run placers on the papers' testbeds, and make tables of it.

    Every cell (a placer on a testbed with a seed) runs in a process of its own and is one line of
    `cells.jsonl`. A bench that was stopped goes on where it was. `fidelity` runs plans on this
    machine instead, one a line of `plans.jsonl`; let nothing else run meanwhile.

    `placewright bench table1 --quick --only nmt-2,nmt-4 --clusters k40 --jobs 2`
    """
    if name is BenchName.fidelity:
        refused = {"--budget": budget, "--seeds": seeds, "--placers": placers, "--threads": threads}
        refused |= {"--retry": retry or None, "--jobs": None if jobs == 1 else jobs}
        given = [option for option, value in refused.items() if value is not None]
        fidelity(quick, out, split_words(only), clusters, plans, render_only, markdown, given)
        return
    with user_errors():
        from placewright.bench.cells import Book
        from placewright.bench.pool import num_cores
        from placewright.bench.running import (
            BENCHES,
            Choice,
            cells_to_run,
            make_tables,
            run_bench,
        )
        from placewright.bench.tables import show, write_markdown
        from placewright.errors import InputError

        if plans is not None:
            raise InputError("`--plans` is for `bench fidelity`; other benches have cells.")
        chosen = BENCHES[name.value]
        choice = Choice(
            is_quick=quick,
            budget=budget,
            num_seeds=seeds,
            models=split_words(only),
            clusters=split_words(clusters),
            placers=split_words(placers),
        )
        book = Book(out or Path(f"bench-{name.value}"))
        if not render_only:
            book.open()
            cells = cells_to_run(chosen, choice, book.read(), retry)
            cores = threads or max(1, num_cores() // jobs)
            try:
                run_bench(cells, book, jobs, cores, say_unless(False))
            except KeyboardInterrupt:
                typer.echo(f"Stopped. What is done is in {book.path}.", err=True)
                raise typer.Exit(130) from None
        tables = make_tables(chosen, choice, book.read())
        for each in tables:
            print_out(show(each), WIDE)
        if markdown is not None:
            write_markdown(markdown, name.value, tables)
