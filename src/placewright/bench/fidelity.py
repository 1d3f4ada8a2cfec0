"""
`placewright bench fidelity`: plans of several models, simulated and measured on this machine.

This module owns which models these are, and in which order plans are measured: shuffled, a few at
a time that take turns, each time beside one and the same reference plan, whose times tell how the
machine itself drifted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placewright import __version__
from placewright.bench.fidelity_book import FidelityBook, Record, to_text
from placewright.bench.fidelity_plans import FidelityPlan, draw_plans, settled
from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.execute._wire import Job
from placewright.execute.measuring import Effort, Measurement, job_of_plan, measure_jobs
from placewright.execute.op_times import measured_costs, processor_model, torch_version
from placewright.execute.processes import Template
from placewright.load import load_capture, load_cluster
from placewright.plan import Plan
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate
from placewright.timeline import Timeline
from placewright.units import format_time

MODELS = (
    "branches_training",
    "branches_inference",
    "gpt2_training",
    "gpt2_inference",
    "resnet_training",
    "nmt_training",
    "inception_inference",
)
"""Functions of ``fidelity_models.py``; beside a GPU, those whose name ends with `LARGE`."""

LARGE = "_large"
QUICK_MODELS = ("branches_training", "gpt2_inference", "resnet_training")
NUM_PLANS, QUICK_PLANS = 24, 6
FULL = Effort(target=0.01, max_steps=200, limit_s=30.0)
QUICK = Effort(target=0.03, max_steps=60, limit_s=5.0)

AT_A_TIME = 4
"""Plans that take turns, the reference plan beside them."""

REFERENCE = "reference"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class FidelityChoice:
    """What is wanted; None is what the bench has by itself."""

    is_quick: bool = False
    models: Sequence[str] | None = None  # of `MODELS`, or whatever can be run
    num_plans: int | None = None
    cluster: str | None = None  # None: this machine is probed
    seed: int = 2

    def models_for(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """List the models for these kinds of devices."""
        if self.models is not None:
            return tuple(dict.fromkeys(self.models))
        standard = QUICK_MODELS if self.is_quick else MODELS
        return tuple(model + LARGE for model in standard) if "cuda" in kinds else standard

    @property
    def chosen_plans(self) -> int:
        """Give the number of plans of each model."""
        standard = QUICK_PLANS if self.is_quick else NUM_PLANS
        return standard if self.num_plans is None else self.num_plans


def runnable(model: str) -> str:
    """Name a model so that it can be loaded."""
    if model.removesuffix(LARGE) not in MODELS:
        return model
    return f"{Path(__file__).with_name('fidelity_models.py')}:{model}"


def run_fidelity(book: FidelityBook, choice: FidelityChoice, say: Say) -> None:
    """
    Measure all plans that are not in the book, and write each into it as soon as it is known.

    Raises
    ------
    InputError
        A model cannot be run here, the cluster is not this machine, or the book cannot be written.
    """
    book.open()
    cluster = _prepare_cluster(book, choice.cluster, say)
    for model in choice.models_for(cluster.device_kinds):
        problem = _prepare_problem(book, model, cluster, say)
        say(f"{model}: choosing {choice.chosen_plans} plans...")
        plans = draw_plans(problem, choice.chosen_plans, choice.seed)
        done = book.read()
        missing = [plan for plan in plans if (model, plan.name) not in done]
        if missing:
            _measure_model(book, model, problem, missing, choice, say)


def _prepare_cluster(book: FidelityBook, name: str | None, say: Say) -> Cluster:
    """Find out about this machine, once."""
    if name is not None:
        given = load_cluster(name)
        if book.cluster_path.exists():
            known = Cluster.load(book.cluster_path)
            if known.fingerprint != given.fingerprint:
                raise InputError(
                    f"`{book.folder}` has plans for another cluster than `{name}`. Use another"
                    " folder, or leave the cluster out."
                )
        given.save(book.cluster_path)
    elif not book.cluster_path.exists():
        from placewright.execute.probing import probe

        probe(progress=say).save(book.cluster_path)
    return Cluster.load(book.cluster_path)


def _prepare_problem(book: FidelityBook, model: str, cluster: Cluster, say: Say) -> Problem:
    """Capture a model and time its ops, once."""
    if not book.has_problem(model):
        from placewright.execute.devices import find_devices
        from placewright.execute.profiling import profile

        say(f"{model}: timing its ops...")
        captured = load_capture(runnable(model))
        profile(captured, find_devices(cluster.device_names), say=say)
        measured = measured_costs(captured.graph, cluster)
        say(f"{model}: {measured.describe()}")
        book.save_problem(model, Problem(captured.graph, cluster, measured.costs))
    return book.load_problem(model)


def _measure_model(
    book: FidelityBook,
    model: str,
    problem: Problem,
    missing: Sequence[FidelityPlan],
    choice: FidelityChoice,
    say: Say,
) -> None:
    effort = QUICK if choice.is_quick else FULL
    alone = [
        simulate(problem, settled(problem, np.full(problem.num_ops, d)))
        for d in range(problem.num_devices)
    ]
    single = min(alone, key=lambda timeline: (timeline.overflow_bytes, timeline.makespan_s))
    timelines = {plan.name: _simulate(problem, plan) for plan in missing}
    with Template(runnable(model)) as template:
        for begin in range(0, len(missing), AT_A_TIME):
            group = missing[begin : begin + AT_A_TIME]
            jobs = {REFERENCE: _job(single, REFERENCE)}
            jobs |= {plan.name: _job(timelines[plan.name], plan.name) for plan in group}
            reference, *found = measure_jobs(template, jobs, effort, seed=begin)
            for k, (plan, measured) in enumerate(zip(group, found, strict=True), start=begin + 1):
                record = _record(model, plan, timelines[plan.name], measured, reference)
                book.append(record)
                say(f"{model} [{k}/{len(missing)}] {plan.name}: {_came_to(record)}")


def _simulate(problem: Problem, plan: FidelityPlan) -> Timeline:
    return simulate(problem, Candidate(plan.placement))


def _job(timeline: Timeline, name: str) -> Job:
    plan = Plan.of(timeline, name, lower_bound_s=0.0, placer="fidelity")
    return job_of_plan(plan, timeline.problem.cluster)


def _record(
    model: str,
    plan: FidelityPlan,
    timeline: Timeline,
    measured: Measurement,
    reference: Measurement,
) -> Record:
    names = timeline.problem.cluster.device_names
    ran = measured.failure is None
    return Record(
        model=model,
        plan=plan.name,
        kind=plan.kind,
        part=plan.part,
        placement=to_text(plan.placement),
        simulated_s=timeline.makespan_s,
        simulated_bytes=dict(zip(names, timeline.peak_bytes.tolist(), strict=True)),
        measured_s=measured.median_s if ran else None,
        low_s=measured.interval.low_s if ran else None,
        high_s=measured.interval.high_s if ran else None,
        num_steps=measured.num_steps,
        measured_bytes=measured.peak_bytes,
        reference_s=reference.median_s if reference.failure is None else None,
        failure=measured.failure or "",
        reason=measured.reason,
        machine=processor_model(),
        placewright=__version__,
        torch=torch_version() or "",
    )


def _came_to(record: Record) -> str:
    if record.measured_s is None:
        return f"failed ({record.failure}): {record.reason}"
    ratio = record.simulated_s / record.measured_s
    return f"{format_time(record.measured_s)}, simulated {ratio:.2f} of it"
