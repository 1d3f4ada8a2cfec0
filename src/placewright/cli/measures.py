"""Plans on this machine: `measure`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from placewright.cli._options import JsonOption
from placewright.cli._shared import TimedWork, print_json, print_out, user_errors

if TYPE_CHECKING:
    from placewright.cluster import Cluster
    from placewright.execute.measuring import Measurement
    from placewright.plan import Plan

WIDE = 92
"""Columns that the tables need."""


def measure(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="What the plans are for, as something that can be run: a model's name,"
            " `file.py:function` (this runs `file.py`), or a `.pt2` file.",
            show_default=False,
        ),
    ],
    plan: Annotated[
        list[Path],
        typer.Option(metavar="PLAN", help="A plan to run (may be repeated).", show_default=False),
    ],
    cluster: Annotated[
        Optional[str],
        typer.Option(
            help="A cluster's name or file: its devices' memory is what plans may use.  [default:"
            " all that is free]",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=1, help="How many steps to measure of each plan, at most.")
    ] = 200,
    limit: Annotated[
        str, typer.Option(help="How long to measure each plan, at most; and how long a step lasts.")
    ] = "60s",
    race: Annotated[
        bool,
        typer.Option("--race", help="Drop plans that are clearly not the fastest on the way."),
    ] = False,
    eager: Annotated[
        bool,
        typer.Option(
            "--eager/--no-eager",
            help="Time the same step in plain PyTorch, too: on all cores, or on the GPU alone where"
            " a plan uses one.",
        ),
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Of the order in which plans take turns.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """
    Run plans on this machine and time their steps, beside plain PyTorch.

    Each plan runs in a process of its own, and so does the same step in plain PyTorch; all take
    turns. Says the median step time and how sure it is, whether the plan is faster than plain
    PyTorch, what memory the devices held, and how far the simulation was off. Let nothing else run
    meanwhile; what others used of the cores is said. Exit code 1: a plan ran out of memory or time,
    or crashed.

    `placewright measure gpt2-small --plan run/plan.json --plan other/plan.json`
    """
    with user_errors():
        from placewright.execute.measuring import Effort, compare_with_best, compare_with_eager
        from placewright.execute.measuring import measure as run_plans
        from placewright.load import load_cluster
        from placewright.report.measurements import describe_measurements, show_measurements
        from placewright.units import parse_time

        effort = Effort(max_steps=steps, limit_s=parse_time(limit, "`--limit`"))
        plans = _load(plan)
        caps = None if cluster is None else load_cluster(cluster)
        try:
            with closing(TimedWork(as_json, ticks=True)) as work:
                work(f"Building {model} to run it...")
                found = run_plans(
                    model,
                    plans,
                    cluster=caps,
                    effort=effort,
                    drops=race,
                    seed=seed,
                    eager=eager,
                    progress=work,
                )
        except KeyboardInterrupt:
            typer.echo("Stopped: nothing was measured to its end.", err=True)
            raise typer.Exit(130) from None
        ratios, beside = compare_with_best(found, seed), compare_with_eager(found, seed)
        if as_json:
            told = describe_measurements(found, plans, ratios, beside)
            print_json(told | work.describe_load())
        else:
            print_out(show_measurements(found, plans, ratios, beside, caps), WIDE)
            if work.disturbance:
                print_out(work.disturbance)
    raise typer.Exit(0 if all(_is_fine(each, caps) for each in found) else 1)


def _load(paths: list[Path]) -> dict[str, Plan]:
    """Load plans, by the names that they were given by."""
    from placewright.errors import InputError
    from placewright.plan import Plan

    twice = next((path for k, path in enumerate(paths) if path in paths[:k]), None)
    if twice is not None:
        raise InputError(f"`--plan {twice}` is given twice.")
    return {str(path): Plan.load(path) for path in paths}


def _is_fine(found: Measurement, cluster: Cluster | None) -> bool:
    """Tell whether a plan ran, and fitted what it was given."""
    if found.eager or found.failure is not None or cluster is None:
        return bool(found.eager) or found.failure is None
    sizes = dict(zip(cluster.device_names, cluster.memory_bytes.tolist(), strict=True))
    return all(peak is None or peak <= sizes[name] for name, peak in found.peak_bytes.items())
