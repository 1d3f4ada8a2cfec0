"""
The command line: one function a subcommand, no logic; a module for each family of commands.

Exit codes: 0 fine, 1 the placement does not fit memory, 2 the input is wrong, 130 stopped by Ctrl-C
before there was an answer. With ``--json`` the result, and nothing else, goes to standard output;
words for people go to standard error.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from placewright.cli.benches import bench
from placewright.cli.machine import probe
from placewright.cli.measures import measure
from placewright.cli.models import capture, inspect, list_
from placewright.cli.pictures import curves, draw
from placewright.cli.placing import compare, place
from placewright.cli.profiles import profile
from placewright.cli.simulating import simulate
from placewright.execute._cores import sleep_at_once

app = typer.Typer(
    name="placewright",
    help="""Decide which device runs which operation of a neural network, and see how good that is.

    Start with `placewright list models` and `placewright list clusters`, then look at one:
    `placewright inspect gpt2-small --cluster k40x4`.""",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from placewright import __version__

        print(f"placewright {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


# In the order that `placewright --help` shows.
for _command in (
    simulate,
    place,
    compare,
    measure,
    probe,
    profile,
    bench,
    inspect,
    draw,
    curves,
    capture,
):
    app.command()(_command)
app.command("list")(list_)


def main() -> None:
    """Run the command line; a reader that goes away (``| head``) ends it quietly."""
    if not {*sys.argv[1:3]} & {"probe", "profile", "measure", "fidelity"}:  # they time real ops
        sleep_at_once()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    app()
