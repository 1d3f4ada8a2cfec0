"""Models, and what else ships with placewright: `inspect`, `capture` and `list`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from placewright.cli._options import (
    DimOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    ProfiledOption,
)
from placewright.cli._shared import (
    describe_timeline,
    load_graph,
    print_json,
    print_out,
    say_unless,
    timeline_of,
    user_errors,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from placewright.problem import Problem
    from placewright.timeline import Timeline


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
    profiled: ProfiledOption = True,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Look at a model: its ops, flops and memory, and with a cluster what bounds its step time.

    `placewright inspect nmt-8 --cluster k40x8`
    """
    with user_errors():
        from placewright.errors import InputError
        from placewright.load import load_problem
        from placewright.report.facts import describe_graph
        from placewright.report.terminal import show_graph

        if memory is not None and cluster is None:
            raise InputError("`--memory` is about a cluster; add `--cluster`.")
        graph = load_graph(model, dim)
        facts: dict[str, Any] = {**vars(describe_graph(graph))}
        shown = [show_graph(graph)]
        if cluster is not None:
            problem = load_problem(
                graph, cluster, memory, is_profiled=profiled, say=say_unless(as_json)
            )
            more, table = _by_hand(problem)
            facts |= more
            shown.append(table)
        if as_json:
            print_json(facts)
        else:
            for part in shown:
                print_out(part)


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
        experts.append((name, timeline_of(problem, Candidate(placement))))
    bounds = lower_bounds(problem)
    facts = {
        "lower_bound_s": bounds.best_s,
        "alone": {name: line and describe_timeline(line) for name, line in alone},
        "experts": {name: describe_timeline(line) for name, line in experts},
    }
    return facts, show_by_hand(alone, experts, bounds, problem.cluster)


def _simulate_alone(problem: Problem, device: int) -> Timeline | None:
    from placewright.problem import Candidate

    if not problem.allowed[:, device].all():
        return None
    return timeline_of(problem, Candidate([device] * problem.num_ops))


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
    with user_errors():
        from placewright.errors import InputError

        if not output.name.endswith((".graph.json", ".graph.json.gz")):
            raise InputError(
                f"`{output}` is no name for a graph file; expected one that ends in `.graph.json`"
                " or `.graph.json.gz`."
            )
        graph = load_graph(model, dim)
        graph.save(output)
        if as_json:
            print_json({"path": str(output), "fingerprint": graph.fingerprint})
        else:
            print_out(f"{graph.num_ops:,} ops and {graph.num_tensors:,} tensors are in {output}.")


class Listing(str, Enum):
    """What can be listed."""

    models = "models"
    clusters = "clusters"
    placers = "placers"


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
    with user_errors():
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
            print_json(list(names))
        else:
            print_out(shown)
