"""What a given placement is worth: `simulate`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from placewright.cli._options import (
    ClusterOption,
    DimOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    ProfiledOption,
)
from placewright.cli._shared import (
    describe_timeline,
    expect_here,
    load_graph,
    print_json,
    print_out,
    say_unless,
    timeline_of,
    user_errors,
)

if TYPE_CHECKING:
    from placewright.graph import Graph
    from placewright.problem import Candidate, Problem


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
    made_for: Annotated[
        Optional[str],
        typer.Option(
            metavar="MODEL",
            help="The model that the plan was made for, if MODEL is the same at other shapes: its"
            " ops run where they did, or where their module's did, as `apply` runs such calls.",
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
    profiled: ProfiledOption = True,
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

    A plan at a shape that it was not made for:

    `placewright simulate m.py:long --cluster box.toml --plan plan.json --made-for m.py:short`
    """
    with user_errors():
        from placewright.bounds import lower_bounds
        from placewright.errors import InputError
        from placewright.load import load_problem
        from placewright.plan import Plan
        from placewright.trace import save_trace

        if trace is not None and trace == save:
            raise InputError(f"`--trace` and `--save` both name `{trace}`. Give them two names.")
        if made_for is not None and plan is None:
            raise InputError("`--made-for` says what a plan was made for; give it with `--plan`.")
        problem = load_problem(
            load_graph(model, dim), cluster, memory, is_profiled=profiled, say=say_unless(as_json)
        )
        original = None if made_for is None else load_graph(made_for, None)
        name, candidate = _candidate(problem, plan, original, on, baseline, discipline)
        timeline = timeline_of(problem, candidate)
        bounds = lower_bounds(problem)
        if trace is not None:
            save_trace(timeline, trace)
        if save is not None:
            Plan.of(timeline, name, lower_bound_s=bounds.best_s, placer="given").save(save)
        expected = expect_here(timeline, profiled)
        if as_json:
            told = describe_timeline(timeline) | {"lower_bound_s": bounds.best_s, "name": name}
            print_json(told | {"expected": expected and expected.describe()})
        else:
            from placewright.report.terminal import show_timeline

            print_out(show_timeline(timeline, bounds, name))
            if expected is not None:
                print_out(expected.words())
            for path, what in ((trace, "timeline"), (save, "plan")):
                if path is not None:
                    print_out(f"The {what} is in {path}.")
    raise typer.Exit(0 if timeline.is_feasible else 1)


def _candidate(
    problem: Problem,
    plan: Path | None,
    made_for: Graph | None,
    on: str | None,
    baseline: Baseline | None,
    discipline: Discipline | None,
) -> tuple[str, Candidate]:
    """Find the candidate that the options name, and a name for it."""
    from placewright.carrying import carry_over
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
        if made_for is not None:
            raise InputError(f"`{plan}` is a bare placement; `--made-for` goes with a plan.")
        return plan.name, Candidate(placement_by_name(problem, loaded), order)
    if discipline is not None:
        raise InputError(f"`{plan}` is a plan, which brings its own order; drop `--discipline`.")
    if made_for is not None:
        return loaded.name, carry_over(loaded, made_for, problem)
    return loaded.name, loaded.candidate(problem)
