"""What commands share: loading, warming up, results and errors in words."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from placewright.execute.expecting import Expectation
    from placewright.execute.load_watch import Load
    from placewright.graph import Graph
    from placewright.placers.run import Run
    from placewright.problem import Candidate, Problem
    from placewright.timeline import Timeline

STILL_S = 10.0
"""How often it is said that something goes on which cannot tell how far it is."""


TICK_S = 1.0
"""How often work in other processes is looked at, and what it may take before that is said."""


@contextmanager
def user_errors() -> Iterator[None]:
    """
    Turn what ends a command early into a sentence.

    The exit code is 2 for a wrong input and an output that cannot be written, 130 for Ctrl-C.
    """
    from placewright.errors import InputError

    try:
        yield
    except InputError as error:
        typer.echo(f"placewright: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("placewright: Stopped before there was an answer.", err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        typer.echo(f"placewright: The result cannot be written: {error.strerror}.", err=True)
        sys.stdout = None  # what is left in its buffer would only fail again at exit
        raise typer.Exit(2) from None


def load_graph(model: str, dim: list[str] | None) -> Graph:
    """Load a model, saying what takes long and what it could not price."""
    from placewright.errors import InputError
    from placewright.frontends._cache import cache_folder
    from placewright.load import load_model

    dims = {}
    for text in dim or []:
        name, equals, size = text.partition("=")
        if not equals or not name or not size.isdecimal() or name in dims:
            raise InputError(
                f"`--dim {text}` cannot be used; expected `--dim NAME=SIZE`, SIZE a whole number,"
                " once for each name."
            )
        dims[name] = int(size)
    kept = ", once (later it is read from the cache)" if cache_folder() is not None else ""
    with says_after(1.0, f"Capturing {model}{kept}..."):
        graph = load_model(model, dims=dims)
    if model.endswith(".onnx"):
        from placewright.frontends.onnx import unpriced_kinds

        kinds = unpriced_kinds(graph)
        if kinds:
            words = f"placewright: Priced only by the bytes they move: {', '.join(kinds)}."
            typer.echo(words, err=True)
    return graph


def timeline_of(problem: Problem, candidate: Candidate) -> Timeline:
    """Simulate, saying so if the simulator has to be compiled first."""
    warm_up(problem)
    from placewright import simulator

    return simulator.simulate(problem, candidate)


def warm_up(problem: Problem) -> None:
    """Have the simulator compiled, saying so if that takes long."""
    words = "Compiling the simulator, once for this machine (about ten seconds)..."
    with says_after(3.0, words), _quick_imports():
        from placewright import simulator

        simulator.warm_up(problem)


def prepare(problem: Problem, placer: str, options: Mapping[str, Any]) -> None:
    """Have a placer compiled, saying so if that takes long."""
    from placewright import placing

    with says_after(5.0, "Compiling the placer, once for this machine (about a minute)..."):
        placing.prepare(problem, placer, options)


@contextmanager
def show_progress(problem: Problem, is_quiet: bool) -> Iterator[Callable[[Run], None] | None]:
    """Show how a run goes: a live line on a terminal, a line a second elsewhere, or nothing."""
    if is_quiet:
        yield None
        return
    from placewright.bounds import lower_bounds
    from placewright.report.live import Live

    live = Live(lower_bounds(problem).best_s)
    try:
        yield live
    finally:
        live.close()


class TimedWork:
    """
    What a command shows while it times something: where it is, and who else uses the cores.

    With `ticks`, what goes on is said again while it takes long, by a thread: for work that is
    timed in other processes.
    """

    def __init__(self, is_quiet: bool, *, ticks: bool = False) -> None:
        from placewright.execute.load_watch import LoadWatch
        from placewright.report.live import LiveLine

        self._is_quiet, self._line, self._watch = is_quiet, LiveLine(), LoadWatch()
        self.load: Load | None = None  # once it is over
        if self._watch.before:
            self.say(self._watch.before)
        self._words, self._since_s = "", time.monotonic()
        self._is_over, self._turn = threading.Event(), threading.Lock()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        if ticks:
            self._ticker.start()

    def __call__(self, words: str) -> None:
        """Show where the work is."""
        with self._turn:
            self._watch.look()
            self._words, self._since_s = words, time.monotonic()
            if not self._is_quiet:
                self._line(words)

    def _tick(self) -> None:
        while not self._is_over.wait(TICK_S):
            with self._turn:
                self._watch.look()
                took_s = time.monotonic() - self._since_s
                if self._words and took_s > TICK_S and not self._is_quiet:
                    self._line(f"{self._words} ({took_s:.0f} s so far)")

    def say(self, words: str) -> None:
        """Say something that stays."""
        if not self._is_quiet:
            self._line.say(words)

    def close(self) -> None:
        """Look at the cores for the last time."""
        self._is_over.set()
        if self._ticker.is_alive():
            self._ticker.join()
        if not self._is_quiet:
            self._line.close()
        self.load = self._watch.end()

    @property
    def disturbance(self) -> str:
        """Say what disturbed the work; empty if nothing did."""
        return "" if self.load is None else self.load.words()

    def describe_load(self) -> dict[str, Any]:
        """Give who else used the cores, as `--json` prints it."""
        return {"load": None if self.load is None else self.load.describe()}


def describe_timeline(timeline: Timeline) -> dict[str, Any]:
    """Give a timeline's figures, as `--json` prints them."""
    names = timeline.problem.cluster.device_names
    return {
        "makespan_s": timeline.makespan_s,
        "is_feasible": timeline.is_feasible,
        "overflow_bytes": timeline.overflow_bytes,
        "peak_bytes": dict(zip(names, timeline.peak_bytes.tolist(), strict=True)),
        "device_utilisation": dict(zip(names, timeline.device_utilisation.tolist(), strict=True)),
        "num_transfers": len(timeline.transfers),
        "moved_bytes": timeline.moved_bytes,
    }


def split_words(text: str | None) -> list[str] | None:
    """Split a list with commas between."""
    return None if text is None else [word.strip() for word in text.split(",")]


def print_out(what: Any, min_width: int = 0) -> None:
    """Print a table or a sentence for people."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.width = max(console.width, min_width)
    console.print(what, soft_wrap=isinstance(what, str))


def print_aside(what: Any) -> None:
    """Print a table for people where it is not in the way of a result for other programs."""
    from rich.console import Console

    Console(stderr=True, highlight=False, markup=False).print(what)


def print_json(what: Any) -> None:
    """Print a result for other programs."""
    print(json.dumps(what, indent=1), flush=True)


def say_unless(is_quiet: bool) -> Callable[[str], None]:
    """Give what says words on standard error, or keeps them to itself."""
    return (lambda _: None) if is_quiet else (lambda words: typer.echo(words, err=True))


@contextmanager
def says_after(seconds: float, words: str) -> Iterator[None]:
    """Say `words` if what is inside takes longer than `seconds`, and then how long it takes."""
    is_over, begin = threading.Event(), time.monotonic()

    def tell() -> None:
        if is_over.wait(seconds):
            return
        print(words, file=sys.stderr, flush=True)
        while not is_over.wait(STILL_S):
            took = f"({time.monotonic() - begin:.0f} s so far)"
            print(f"{words} {took}", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()


@contextmanager
def _quick_imports() -> Iterator[None]:
    """
    Let numba load in two thirds of its time.

    Meanwhile nothing is collected, though many objects are made; and scipy's BLAS, which numba
    looks for and the simulator has no use for, seems not to be installed.
    """
    blas = "scipy.linalg.cython_blas"
    modules: dict[str, Any] = sys.modules
    hidden = blas not in modules
    if hidden:
        modules[blas] = None
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if hidden:
            del modules[blas]


def expect_here(timeline: Timeline, is_profiled: bool) -> Expectation | None:
    """Tell what a plan would take on this machine, with measured op times; None if unknown."""
    if not is_profiled:
        return None
    from placewright.execute.expecting import expect

    return expect(timeline)
