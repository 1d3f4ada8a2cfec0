"""Placements that are looked for: `place` and `compare`."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
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
    expect_here,
    load_graph,
    prepare,
    print_json,
    print_out,
    say_unless,
    says_after,
    show_progress,
    split_words,
    user_errors,
    warm_up,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from placewright.execute.expecting import ExpectedEvaluator
    from placewright.execute.measured import MeasuredEvaluator
    from placewright.problem import Problem


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
        from placewright.errors import InputError
        from placewright.load import load_problem
        from placewright.placing import place as find
        from placewright.report.terminal import show_result

        problem = load_problem(
            load_graph(model, dim), cluster, memory, is_profiled=profiled, say=say_unless(as_json)
        )
        warm_up(problem)
        settings = _settings(options)
        prepare(problem, placer, settings)
        judge: AbstractContextManager[Any]
        if measured:
            judge = _measure(problem, model, prescreen, objective.value, as_json)
        elif prescreen:
            raise InputError("`--prescreen` is for `--measured`, which is not asked for.")
        else:
            judge = nullcontext(_expect(problem, profiled, objective.value, as_json))
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
        if measured:
            say_unless(as_json)(_describe_failures(evaluator))
        if output is not None:
            result.save(output)
        expected = expect_here(result.timeline, profiled and not measured)
        if as_json:
            print_json(result.describe() | {"expected": expected and expected.describe()})
        else:
            print_out(show_result(result))
            if expected is not None:
                print_out(expected.words())
            if output is not None:
                print_out(f"The plan, its timeline and the history are in {output}.")
    raise typer.Exit(0 if result.is_feasible else 1)


def _expect(
    problem: Problem, is_profiled: bool, objective: Literal["latency", "throughput"], is_quiet: bool
) -> ExpectedEvaluator | None:
    """Give what judges placements by their time on this machine; None if that is not known."""
    from placewright.execute.expecting import ExpectedEvaluator

    if not is_profiled or objective != "latency":
        return None
    judge = ExpectedEvaluator.find(problem)
    if judge is not None:
        known = judge.calibration
        words = "not calibrated: see `placewright bench fidelity`"
        if known is not None:
            words = f"calibrated with {len(known.residuals)} plans"
        say_unless(is_quiet)(
            f"Placements are judged by what they should take on this machine ({words})."
        )
    return judge


def _measure(
    problem: Problem,
    model: str,
    prescreens: bool,
    objective: Literal["latency", "throughput"],
    is_quiet: bool,
) -> MeasuredEvaluator:
    """Give what runs placements, ready."""
    from placewright.execute.measured import PRESCREEN, MeasuredEvaluator

    say = say_unless(is_quiet)
    factor = PRESCREEN if prescreens else None
    evaluator = MeasuredEvaluator(problem, model, prescreen=factor, objective=objective, say=say)
    try:
        with nullcontext() if is_quiet else says_after(0.0, f"Building {model} to run it..."):
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
        from placewright.load import load_problem
        from placewright.report.terminal import show_comparison

        problem = load_problem(
            load_graph(model, dim), cluster, memory, is_profiled=profiled, say=say_unless(as_json)
        )
        warm_up(problem)
        names, say = split_words(placers), say_unless(as_json)
        judge = _expect(problem, profiled, objective.value, as_json)
        rows = compare_placers(problem, names, budget, objective.value, seeds, say, judge)
        if as_json:
            print_json([vars(row) for row in rows])
        else:
            how = "simulated" if judge is None else "expected on this machine"
            print_out(show_comparison(rows, problem, how))
            for words in describe_chances(rows):
                print_out(words)
