"""Placements and what they are worth: `simulate`, `place` and `compare`."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

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
    load_graph,
    prepare,
    print_json,
    print_out,
    say_unless,
    show_progress,
    split_words,
    timeline_of,
    user_errors,
    warm_up,
)

if TYPE_CHECKING:
    from placewright.execute.expecting import Expectation
    from placewright.execute.measured import MeasuredEvaluator
    from placewright.problem import Candidate, Problem
    from placewright.timeline import Timeline


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
    """
    with user_errors():
        from placewright.bounds import lower_bounds
        from placewright.errors import InputError
        from placewright.load import load_problem
        from placewright.plan import Plan
        from placewright.trace import save_trace

        if trace is not None and trace == save:
            raise InputError(f"`--trace` and `--save` both name `{trace}`. Give them two names.")
        problem = load_problem(
            load_graph(model, dim), cluster, memory, is_profiled=profiled, say=say_unless(as_json)
        )
        name, candidate = _candidate(problem, plan, on, baseline, discipline)
        timeline = timeline_of(problem, candidate)
        bounds = lower_bounds(problem)
        if trace is not None:
            save_trace(timeline, trace)
        if save is not None:
            Plan.of(timeline, name, lower_bound_s=bounds.best_s, placer="given").save(save)
        expected = _expect(timeline, profiled)
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


def _expect(timeline: Timeline, is_profiled: bool) -> Expectation | None:
    """Tell what a plan would take on this machine, with measured op times; None if unknown."""
    if not is_profiled:
        return None
    from placewright.execute.expecting import expect

    return expect(timeline)


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
    measured: Annotated[
        bool,
        typer.Option(
            "--measured",
            help="Judge placements by running a few steps on this machine, each in a process of"
            " its own, not by simulation; MODEL must be something that can be run.",
        ),
    ] = False,
    prescreen: Annotated[
        bool,
        typer.Option(
            "--prescreen",
            help="With `--measured`: simulate first, and run only what fits and takes less than"
            " 1.5 times the best.",
        ),
    ] = False,
    memory: MemoryOption = None,
    profiled: ProfiledOption = True,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Choose a device for every op of a model.

    `placewright place nmt-4 --cluster k40x4-tight --budget 20s -o run/`
    """
    with user_errors():
        from placewright.load import load_problem
        from placewright.placing import place as find
        from placewright.report.terminal import show_result

        problem = load_problem(
            load_graph(model, dim), cluster, memory, is_profiled=profiled, say=say_unless(as_json)
        )
        warm_up(problem)
        settings = _settings(options)
        prepare(problem, placer, settings)
        judge = _judge(problem, model, measured, prescreen, objective.value, as_json)
        with judge as evaluator, show_progress(problem, as_json) as progress:
            result = find(
                problem,
                placer,
                budget=budget,
                objective=objective.value,
                overlap=overlap,
                seed=seed,
                grouping=grouping,
                progress=progress,
                options=settings,
                folder=output,
                resume=resume,
                tensorboard=tensorboard,
                evaluator=evaluator,
            )
        if evaluator is not None:
            say_unless(as_json)(_describe_failures(evaluator))
        if output is not None:
            result.save(output)
        expected = _expect(result.timeline, profiled and evaluator is None)
        if as_json:
            print_json(result.describe() | {"expected": expected and expected.describe()})
        else:
            print_out(show_result(result))
            if expected is not None:
                print_out(expected.words())
            if output is not None:
                print_out(f"The plan, its timeline and the history are in {output}.")
    raise typer.Exit(0 if result.is_feasible else 1)


def _judge(
    problem: Problem,
    model: str,
    is_measured: bool,
    prescreens: bool,
    objective: Literal["latency", "throughput"],
    is_quiet: bool,
) -> AbstractContextManager[MeasuredEvaluator | None]:
    """Give what judges placements, ready; None for the simulator."""
    from placewright.errors import InputError

    if not is_measured:
        if prescreens:
            raise InputError("`--prescreen` is for `--measured`, which is not asked for.")
        return nullcontext()
    from placewright.execute.measured import PRESCREEN, MeasuredEvaluator

    say_unless(is_quiet)(f"Building {model} to run it...")
    factor = PRESCREEN if prescreens else None
    evaluator = MeasuredEvaluator(problem, model, prescreen=factor, objective=objective)
    try:
        evaluator.prepare()
    except BaseException:
        evaluator.close()
        raise
    return evaluator


def _describe_failures(evaluator: MeasuredEvaluator) -> str:
    """Say how many candidates were run, and how many of them failed, of what."""
    words = f"{evaluator.num_measured:,} placements were run."
    failures = evaluator.failures
    for failure, count in Counter(outcome.failure for outcome in failures).items():
        reason = next(outcome.reason for outcome in failures if outcome.failure == failure)
        words += f"\n{count} failed ({failure}), such as: {reason}"
    return words


def _settings(texts: list[str] | None) -> dict[str, str]:
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
    profiled: ProfiledOption = True,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Compare placers on one model and cluster.

    `placewright compare nmt-4 --cluster k40x4 --budget 5s`
    """
    with user_errors():
        from placewright.comparing import compare_placers, describe_chances
        from placewright.execute.calibration import read_calibration
        from placewright.load import load_problem
        from placewright.report.terminal import show_comparison

        problem = load_problem(
            load_graph(model, dim), cluster, memory, is_profiled=profiled, say=say_unless(as_json)
        )
        warm_up(problem)
        names, say = split_words(placers), say_unless(as_json)
        known = read_calibration(problem.cluster) if profiled else None
        rows = compare_placers(problem, names, budget, objective.value, seeds, say, known)
        if as_json:
            print_json([vars(row) for row in rows])
        else:
            print_out(show_comparison(rows, problem))
            for words in describe_chances(rows):
                print_out(words)
