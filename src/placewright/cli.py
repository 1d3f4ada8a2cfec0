"""
The command line: one function a subcommand, no logic.

Exit codes: 0 fine, 1 the placement does not fit memory, 2 the input is wrong. With ``--json`` the
result, and nothing else, goes to standard output; words for people go to standard error.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from placewright.graph import Graph
    from placewright.placers.run import Run
    from placewright.problem import Candidate, Problem
    from placewright.timeline import Timeline

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

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model's name (see `placewright list models`), a `.graph.json`, `.onnx` or `.pt2`"
        " file, or `file.py:function` that returns a PyTorch module and its inputs.",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A cluster's name (see `placewright list clusters`) or a `.toml` file; `NAME-tight`"
        " is `NAME` with `--memory 60%`.",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    Optional[str],
    typer.Option(
        help="Give every device but CPUs this much memory: a size (`8GiB`), or a share of what the"
        " model needs on one of them alone (`60%`).",
        show_default=False,
    ),
]
DimOption = Annotated[
    Optional[list[str]],
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="The size of a dimension that an ONNX file leaves open (may be repeated).",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, for other programs to read.")
]


WIDE = 150
"""Tables with many columns are this wide, even where a terminal has to wrap them."""


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


class Discipline(str, Enum):
    """The orders that can be chosen here; `priority` needs a plan that has priorities."""

    fifo = "fifo"
    program = "program"


class Baseline(str, Enum):
    """The placements by hand, as `placewright.placers.experts` names them."""

    cpu_only = "cpu-only"
    one_gpu = "one-gpu"
    expert_paper = "expert-paper"
    expert_strong = "expert-strong"


class Listing(str, Enum):
    """What can be listed."""

    models = "models"
    clusters = "clusters"
    placers = "placers"


@app.command()
def simulate(
    model: ModelArgument,
    cluster: ClusterOption,
    plan: Annotated[
        Optional[Path],
        typer.Option(
            help="A plan, or a placement: a JSON object from op names to device names.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        Optional[str],
        typer.Option(
            metavar="DEVICE", help="Put every op on this device instead.", show_default=False
        ),
    ] = None,
    baseline: Annotated[
        Optional[Baseline],
        typer.Option(
            help="Place by hand instead: all on the CPU, all on one GPU, as the papers' human"
            " expert, or by the best contiguous split of the layers.",
            show_default=False,
        ),
    ] = None,
    discipline: Annotated[
        Optional[Discipline],
        typer.Option(
            help="Which ready op a device takes: the one made ready first (fifo), or the lowest in"
            " the graph (program). A plan brings its own.  [default: fifo]",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Optional[Path],
        typer.Option(
            help="Write the timeline as a Chrome trace, to open at ui.perfetto.dev.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Optional[Path],
        typer.Option(help="Write the placement as a plan file.", show_default=False),
    ] = None,
    memory: MemoryOption = None,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Simulate one step of a model under a placement.

    Says how long the step takes, how near that is to the proven lower bound, how busy each device
    and channel is, whether memory suffices, and which chain of ops and transfers makes the step as
    long as it is.

    Everything on one GPU, and what a human expert would do:

    `placewright simulate gpt2-small --cluster k40x4 --on cuda:0`

    `placewright simulate nmt-4 --cluster k40x4 --baseline expert-strong`
    """
    with _user_errors():
        from placewright.bounds import lower_bounds
        from placewright.errors import InputError
        from placewright.load import load_problem
        from placewright.plan import Plan
        from placewright.trace import save_trace

        if trace is not None and trace == save:
            raise InputError(f"`--trace` and `--save` both name `{trace}`. Give them two names.")
        problem = load_problem(_load(model, dim), cluster, memory)
        name, candidate = _candidate(problem, plan, on, baseline, discipline)
        timeline = _simulate(problem, candidate)
        bounds = lower_bounds(problem)
        if trace is not None:
            save_trace(timeline, trace)
        if save is not None:
            Plan.of(timeline, name, lower_bound_s=bounds.best_s, placer="given").save(save)
        if as_json:
            _print_json(_describe(timeline) | {"lower_bound_s": bounds.best_s, "name": name})
        else:
            from placewright.report.terminal import show_timeline

            _print(show_timeline(timeline, bounds, name))
            for path, what in ((trace, "timeline"), (save, "plan")):
                if path is not None:
                    _print(f"The {what} is in {path}.")
    raise typer.Exit(0 if timeline.is_feasible else 1)


class Objective(str, Enum):
    """What is made as small as possible."""

    latency = "latency"
    throughput = "throughput"


BudgetOption = Annotated[
    str,
    typer.Option(help="How long to search: `60s`, `5000 samples`, `60s, idle 10s`."),
]
ObjectiveOption = Annotated[
    Objective,
    typer.Option(help="The time of one step, or of each of many steps back to back."),
]


@app.command()
def place(
    model: ModelArgument,
    cluster: ClusterOption,
    placer: Annotated[
        str, typer.Option(help="Which placer (see `placewright list placers`).")
    ] = "auto",
    budget: BudgetOption = "10s",
    objective: ObjectiveOption = Objective.latency,
    overlap: Annotated[
        bool, typer.Option(help="For throughput: computing and copying overlap.")
    ] = True,
    seed: Annotated[int, typer.Option(help="The same seed and samples, the same answer.")] = 0,
    grouping: Annotated[
        Optional[str],
        typer.Option(
            help="Ops to place together: `colocated`, `sole-consumer`, `heavy-edges`,"
            " `by-module` or `layer-chunks`; by default each placer has its own.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output",
            "-o",
            help="A folder for the plan, its timeline, the history, and a learned placer's state.",
            show_default=False,
        ),
    ] = None,
    options: Annotated[
        Optional[list[str]],
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change a setting of a learned placer, such as `num_groups=64` (may be repeated;"
            " see docs/learned.md).",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the learned placer whose state is in -o.")
    ] = False,
    tensorboard: Annotated[
        Optional[Path],
        typer.Option(
            help="A folder for a learned placer's scalars, for TensorBoard.", show_default=False
        ),
    ] = None,
    memory: MemoryOption = None,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Choose a device for every op of a model.

    `placewright place nmt-4 --cluster k40x4-tight --budget 20s -o run/`
    """
    with _user_errors():
        from placewright.load import load_problem
        from placewright.placing import place as find
        from placewright.report.terminal import show_result

        problem = load_problem(_load(model, dim), cluster, memory)
        _warm_up(problem)
        with _progress(problem, as_json) as progress:
            result = find(
                problem,
                placer,
                budget=budget,
                objective=objective.value,
                overlap=overlap,
                seed=seed,
                grouping=grouping,
                progress=progress,
                options=_options(options),
                folder=output,
                resume=resume,
                tensorboard=tensorboard,
            )
        if output is not None:
            result.save(output)
        if as_json:
            _print_json(result.describe())
        else:
            _print(show_result(result))
            if output is not None:
                _print(f"The plan, its timeline and the history are in {output}.")
    raise typer.Exit(0 if result.is_feasible else 1)


@app.command()
def compare(
    model: ModelArgument,
    cluster: ClusterOption,
    placers: Annotated[
        Optional[str],
        typer.Option(help="Placers to compare, with commas between; all by default."),
    ] = None,
    budget: BudgetOption = "10s",
    objective: ObjectiveOption = Objective.latency,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds for those that search.")] = 1,
    memory: MemoryOption = None,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Compare placers on one model and cluster.

    `placewright compare nmt-4 --cluster k40x4 --budget 5s`
    """
    with _user_errors():
        from placewright.comparing import compare_placers
        from placewright.load import load_problem
        from placewright.report.terminal import show_comparison

        problem = load_problem(_load(model, dim), cluster, memory)
        _warm_up(problem)
        names, say = _words(placers), _say_unless(as_json)
        rows = compare_placers(problem, names, budget, objective.value, seeds, say)
        if as_json:
            _print_json([vars(row) for row in rows])
        else:
            _print(show_comparison(rows, problem))


class BenchName(str, Enum):
    """The benches, as `placewright.bench.running` names them."""

    table1 = "table1"
    table2 = "table2"
    ablations = "ablations"


@app.command()
def bench(
    name: Annotated[
        BenchName,
        typer.Argument(
            help="`table1`: all placers on the papers' testbeds; `table2`: learned against random"
            " groupings; `ablations`: learned placers, one option at a time.",
            show_default=False,
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Little budget and few seeds: to see that it works.")
    ] = False,
    out: Annotated[
        Optional[Path],
        typer.Option(
            help="The folder of `cells.jsonl`; what is in it is not run again."
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
        Optional[str], typer.Option(metavar="MODEL,...", help="Only these models.")
    ] = None,
    clusters: Annotated[
        Optional[str],
        typer.Option(
            metavar="CLUSTER,...",
            help="Only these: `k40x2`, all `k40` or `k40-tight`, or all that are `tight`.",
        ),
    ] = None,
    placers: Annotated[
        Optional[str],
        typer.Option(metavar="PLACER,...", help="Run only these; tables show all that is there."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many cells run at once.")] = 1,
    threads: Annotated[
        Optional[int],
        typer.Option(min=1, help="Cores for each cell.  [default: all, shared among jobs]"),
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
    `cells.jsonl`. A bench that was stopped goes on where it was.

    `placewright bench table1 --quick --only nmt-2,nmt-4 --clusters k40 --jobs 2`
    """
    with _user_errors():
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

        chosen = BENCHES[name.value]
        choice = Choice(
            is_quick=quick,
            budget=budget,
            num_seeds=seeds,
            models=_words(only),
            clusters=_words(clusters),
            placers=_words(placers),
        )
        book = Book(out or Path(f"bench-{name.value}"))
        if not render_only:
            book.open()
            cells = cells_to_run(chosen, choice, book.read(), retry)
            cores = threads or max(1, num_cores() // jobs)
            try:
                run_bench(cells, book, jobs, cores, _say_unless(False))
            except KeyboardInterrupt:
                typer.echo(f"Stopped. What is done is in {book.path}.", err=True)
                raise typer.Exit(130) from None
        tables = make_tables(chosen, choice, book.read())
        for each in tables:
            _print(show(each), WIDE)
        if markdown is not None:
            write_markdown(markdown, name.value, tables)


def _words(text: str | None) -> list[str] | None:
    """Split a list with commas between."""
    return None if text is None else [word.strip() for word in text.split(",")]


@app.command()
def inspect(
    model: ModelArgument,
    cluster: Annotated[
        Optional[str],
        typer.Option(
            help="Also show what each device of this cluster would do by itself, what human"
            " experts would do, and the lower bounds on any placement's step time.",
            show_default=False,
        ),
    ] = None,
    memory: MemoryOption = None,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Look at a model: its ops, flops and memory, and with a cluster what bounds its step time.

    `placewright inspect nmt-8 --cluster k40x8`
    """
    with _user_errors():
        from placewright.errors import InputError
        from placewright.load import load_problem
        from placewright.report.facts import describe_graph
        from placewright.report.terminal import show_graph

        if memory is not None and cluster is None:
            raise InputError("`--memory` is about a cluster; add `--cluster`.")
        graph = _load(model, dim)
        facts: dict[str, Any] = {**vars(describe_graph(graph))}
        shown = [show_graph(graph)]
        if cluster is not None:
            problem = load_problem(graph, cluster, memory)
            more, table = _by_hand(problem)
            facts |= more
            shown.append(table)
        if as_json:
            _print_json(facts)
        else:
            for part in shown:
                _print(part)


PictureOption = Annotated[
    Optional[Path],
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="The picture to write, `.svg` or `.png`; by default one of each.",
        show_default=False,
    ),
]


@app.command()
def draw(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN",
            help="A plan, a folder that `placewright place -o` wrote, or a placement: a JSON object"
            " from op names to device names.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Optional[str],
        typer.Option(
            help="The model, if its name in the plan is none of `placewright list models`.",
            show_default=False,
        ),
    ] = None,
    output: PictureOption = None,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Draw which device runs what, as `placement.svg` and `placement.png` beside the plan.

    `placewright draw run/`
    """
    with _user_errors():
        from placewright.report._figure import check_picture_path
        from placewright.report.drawing import draw_placement
        from placewright.report.named import read_placement

        file = plan / "plan.json" if plan.is_dir() else plan
        paths = _pictures(output, file.with_name("placement"))
        for path in paths:
            check_picture_path(path)
        title, graph, devices, known = _drawn(file, model, dim)
        named = read_placement(graph, devices, known)
        where = named.device_names, named.device_kinds, named.placement
        for path in paths:
            draw_placement(graph, *where, path, title)
        _tell_pictures(paths, as_json)


@app.command()
def curves(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Folders that `placewright place -o` wrote, each as `DIR` or `LABEL=DIR`; those of"
            " one label (by default the placer) are drawn as one curve.",
            show_default=False,
        ),
    ],
    output: PictureOption = None,
    reference: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME=TIME",
            help="A time to compare with, such as `expert-strong=570ms` (may be repeated).",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """
    Draw what runs had found, by samples and by time, as `curves.svg` and `curves.png`.

    `placewright curves runs/annealing-* mine=runs/mine --reference expert-strong=570ms`
    """
    with _user_errors():
        from placewright.report._figure import check_picture_path
        from placewright.report.curves import draw_curves, load_run
        from placewright.units import parse_time

        paths = _pictures(output, Path("curves"))
        for path in paths:
            check_picture_path(path)
        times = {
            name: parse_time(text, f"`--reference {name}`")
            for name, text in (_name_and_value(text, "--reference") for text in reference or [])
        }
        histories = []
        for text in runs:
            label, equals, folder = text.partition("=")
            is_plain = not equals or Path(text).exists()
            histories.append(load_run(text) if is_plain else load_run(folder, label))
        for path in paths:
            draw_curves(histories, path, references=times)
        _tell_pictures(paths, as_json)


@app.command()
def capture(
    model: ModelArgument,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="The graph file to write, gzipped if it ends in `.gz`.",
            show_default=False,
        ),
    ],
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Write a model as a graph file.

    `placewright capture mymodel.py:build -o mymodel.graph.json.gz`
    """
    with _user_errors():
        from placewright.errors import InputError

        if not output.name.endswith((".graph.json", ".graph.json.gz")):
            raise InputError(
                f"`{output}` is no name for a graph file; expected one that ends in `.graph.json`"
                " or `.graph.json.gz`."
            )
        graph = _load(model, dim)
        graph.save(output)
        if as_json:
            _print_json({"path": str(output), "fingerprint": graph.fingerprint})
        else:
            _print(f"{graph.num_ops:,} ops and {graph.num_tensors:,} tensors are in {output}.")


@app.command("list")
def list_(
    what: Annotated[
        Listing, typer.Argument(help="`models`, `clusters` or `placers`.", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """
    List what ships with placewright.

    `placewright list clusters`
    """
    with _user_errors():
        from placewright.cluster import Cluster
        from placewright.report.terminal import show_clusters, show_models
        from placewright.zoo import RECIPES

        if what is Listing.models:
            names = tuple(RECIPES)
            shown = show_models([(name, recipe.summary) for name, recipe in RECIPES.items()])
        elif what is Listing.placers:
            from placewright.placing import SUMMARIES
            from placewright.report.terminal import show_placers

            names = tuple(SUMMARIES)
            shown = show_placers([*SUMMARIES.items()])
        else:
            names = Cluster.presets()
            shown = show_clusters([Cluster.preset(name) for name in names])
        if as_json:
            _print_json(list(names))
        else:
            _print(shown)


def _load(model: str, dim: list[str] | None) -> Graph:
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
    with _says_after(1.0, f"Capturing {model}{kept}..."):
        graph = load_model(model, dims=dims)
    if model.endswith(".onnx"):
        from placewright.frontends.onnx import unpriced_kinds

        kinds = unpriced_kinds(graph)
        if kinds:
            words = f"placewright: Priced only by the bytes they move: {', '.join(kinds)}."
            typer.echo(words, err=True)
    return graph


def _drawn(
    file: Path, model: str | None, dim: list[str] | None
) -> tuple[str, Graph, dict[str, str], list[str]]:
    """Load what a picture shows: its title, the graph, each op's device, and all devices known."""
    from placewright.errors import InputError
    from placewright.plan import Plan, load_plan_or_placement
    from placewright.units import format_time
    from placewright.zoo import RECIPES

    loaded = load_plan_or_placement(file)
    if not isinstance(loaded, Plan):
        if model is None:
            raise InputError(f"`{file}` is a placement, which names no model; add `--model`.")
        return f"{model} by {file.name}", _load(model, dim), loaded, []
    if model is None and loaded.graph.name not in RECIPES:
        raise InputError(
            f"Plan `{loaded.name}` is for graph `{loaded.graph.name}`, which is no model that ships"
            " with placewright. Say where it comes from with `--model`."
        )
    graph = _load(model or loaded.graph.name, dim)
    if graph.fingerprint != loaded.graph.fingerprint:
        raise InputError(
            f"Plan `{loaded.name}` was made for graph `{loaded.graph.name}` (fingerprint"
            f" {loaded.graph.fingerprint[:12]}), not for `{graph.name}`"
            f" ({graph.fingerprint[:12]}). Give that one with `--model`."
        )
    verdict = "" if loaded.predicted.is_feasible else ", does not fit memory"
    time = format_time(loaded.predicted.makespan_s)
    title = f"{loaded.name}, simulated step {time}{verdict}"
    return title, graph, loaded.devices, [*loaded.predicted.peak_bytes]


def _pictures(output: Path | None, default: Path) -> list[Path]:
    """Give the picture that was asked for, or one of each kind."""
    both = [default.with_suffix(".svg"), default.with_suffix(".png")]
    return both if output is None else [output]


def _tell_pictures(paths: list[Path], as_json: bool) -> None:
    if as_json:
        _print_json({"paths": [str(path) for path in paths]})
    else:
        _print(f"The picture is in {' and '.join(str(path) for path in paths)}.")


def _name_and_value(text: str, option: str) -> tuple[str, str]:
    from placewright.errors import InputError

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"`{option} {text}` cannot be used; expected `{option} NAME=VALUE`.")
    return name, value


def _options(texts: list[str] | None) -> dict[str, str]:
    """Read settings such as `num_groups=64`."""
    from placewright.errors import InputError

    found: dict[str, str] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name or not value or name in found:
            raise InputError(
                f"`--set {text}` cannot be used; expected `--set NAME=VALUE`, once for each name."
            )
        found[name] = value
    return found


def _by_hand(problem: Problem) -> tuple[dict[str, Any], RenderableType]:
    """Describe and show what each device, and each human expert, would do."""
    from placewright.bounds import lower_bounds
    from placewright.errors import InputError
    from placewright.placers.experts import BASELINES
    from placewright.problem import Candidate
    from placewright.report.terminal import show_by_hand

    names = problem.cluster.device_names
    alone = [(name, _simulate_alone(problem, d)) for d, name in enumerate(names)]
    experts = []
    for name in ("expert-paper", "expert-strong"):
        try:
            placement = BASELINES[name](problem)
        except InputError:  # there are only CPUs
            continue
        experts.append((name, _simulate(problem, Candidate(placement))))
    bounds = lower_bounds(problem)
    facts = {
        "lower_bound_s": bounds.best_s,
        "alone": {name: line and _describe(line) for name, line in alone},
        "experts": {name: _describe(line) for name, line in experts},
    }
    return facts, show_by_hand(alone, experts, bounds, problem.cluster)


def _candidate(
    problem: Problem,
    plan: Path | None,
    on: str | None,
    baseline: Baseline | None,
    discipline: Discipline | None,
) -> tuple[str, Candidate]:
    """Find the candidate that the options name, and a name for it."""
    from placewright.errors import InputError
    from placewright.plan import Plan, load_plan_or_placement, placement_by_name
    from placewright.problem import Candidate

    if [plan, on, baseline].count(None) != 2:
        raise InputError(
            "Say where ops run, in one way: with `--plan FILE`, `--on DEVICE` or `--baseline NAME`."
        )
    order: Any = (discipline or Discipline.fifo).value
    if baseline is not None:
        from placewright.placers.experts import BASELINES

        return baseline.value, Candidate(BASELINES[baseline.value](problem), order)
    if on is not None:
        placement = [problem.cluster.device_index(on)] * problem.num_ops
        return f"everything on {on}", Candidate(placement, order)
    assert plan is not None
    loaded = load_plan_or_placement(plan)
    if not isinstance(loaded, Plan):
        return plan.name, Candidate(placement_by_name(problem, loaded), order)
    if discipline is not None:
        raise InputError(f"`{plan}` is a plan, which brings its own order; drop `--discipline`.")
    return loaded.name, loaded.candidate(problem)


def _simulate(problem: Problem, candidate: Candidate) -> Timeline:
    _warm_up(problem)
    from placewright import simulator

    return simulator.simulate(problem, candidate)


def _warm_up(problem: Problem) -> None:
    words = "Compiling the simulator, once for this machine (about ten seconds)..."
    with _says_after(1.0, words), _quick_imports():
        from placewright import simulator

        simulator.warm_up(problem)


@contextmanager
def _progress(problem: Problem, is_quiet: bool) -> Iterator[Callable[[Run], None] | None]:
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


def _say_unless(is_quiet: bool) -> Callable[[str], None]:
    return (lambda _: None) if is_quiet else (lambda words: typer.echo(words, err=True))


def _simulate_alone(problem: Problem, device: int) -> Timeline | None:
    from placewright.problem import Candidate

    if not problem.allowed[:, device].all():
        return None
    return _simulate(problem, Candidate([device] * problem.num_ops))


def _describe(timeline: Timeline) -> dict[str, Any]:
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


@contextmanager
def _says_after(seconds: float, words: str) -> Iterator[None]:
    """Say `words` if what is inside takes longer than `seconds`."""
    timer = threading.Timer(seconds, lambda: print(words, file=sys.stderr, flush=True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn a wrong input, or an output that cannot be written, into a sentence and exit code 2."""
    from placewright.errors import InputError

    try:
        yield
    except InputError as error:
        typer.echo(f"placewright: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        typer.echo(f"placewright: The result cannot be written: {error.strerror}.", err=True)
        sys.stdout = None  # what is left in its buffer would only fail again at exit
        raise typer.Exit(2) from None


def _print(what: Any, min_width: int = 0) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.width = max(console.width, min_width)
    console.print(what, soft_wrap=isinstance(what, str))


def _print_json(what: Any) -> None:
    print(json.dumps(what, indent=1), flush=True)


def main() -> None:
    """Run the command line; a reader that goes away (``| head``) ends it quietly."""
    # PyTorch and numba have threads of their own; waiting ones must not take the others' cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    app()


if __name__ == "__main__":
    main()
