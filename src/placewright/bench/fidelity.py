"""
`placewright bench fidelity`: plans of several models, simulated and measured on this machine.

This module owns which models these are, and how their plans are measured: all of a model's that
memory holds take turns, so that what drifts hits all alike, and between their turns ops are timed
again. Each runs in several processes, since those of one plan differ by more than their steps do;
by how much tells what the machine itself contributes to an error, and how many it takes to know
the order of plans that take nearly the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from placewright import __version__
from placewright.bench.fidelity_book import FidelityBook, Record, to_text
from placewright.bench.fidelity_fit import reachable_order
from placewright.bench.fidelity_plans import FidelityPlan, draw_plans
from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.execute._jobs import job_of_plan
from placewright.execute._wire import Job
from placewright.execute.measuring import Effort, Measurement, measure_jobs
from placewright.execute.op_times import measured_costs, processor_model, torch_version
from placewright.execute.processes import Template
from placewright.load import load_capture, load_cluster
from placewright.plan import Plan
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate
from placewright.timeline import Timeline
from placewright.units import format_time

if TYPE_CHECKING:
    from placewright.execute.retiming import Retiming

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
NUM_PROCESSES, QUICK_PROCESSES = (3, 8), (2, 2)  # of each plan, at least and at most
FULL = Effort(target=0.01, max_steps=70, limit_s=10.0)  # for each process of a plan
QUICK = Effort(target=0.03, max_steps=30, limit_s=1.5)

SETTLED = 0.98
"""Plans have run often enough once a prediction without error would find their order so well."""

AGAIN = 0.25
"""Of the time that plans' turns take, what goes into timing ops again."""

ROOM_BYTES = {"cpu": 2**27, "cuda": 2**30}
"""What a process takes of a device's memory beside its plan, by the device's kind."""

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
        _measure_model(book, model, problem, plans, choice, say)


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

        say("Measuring this machine (half a minute)...")
        probe().save(book.cluster_path)
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
    plans: Sequence[FidelityPlan],
    choice: FidelityChoice,
    say: Say,
) -> None:
    """Measure those of a model's plans that are not in the book."""
    done = book.read()
    missing = [plan for plan in plans if (model, plan.name) not in done]
    if not missing:
        return
    effort = QUICK if choice.is_quick else FULL
    timelines = {plan.name: _simulate(problem, plan) for plan in plans}
    groups = _deal(missing, _at_a_time(problem, [*timelines.values()]))
    retiming = _retiming(model, problem)
    found: dict[str, list[Measurement]] = {plan.name: [] for plan in missing}
    with Template(runnable(model)) as template:
        least, most = QUICK_PROCESSES if choice.is_quick else NUM_PROCESSES
        for number in range(most):
            if number >= least and _is_settled(found):
                break
            say(f"{model}: running all plans, time {number + 1}...")
            for group in groups:
                jobs = {plan.name: _job(timelines[plan.name], plan.name) for plan in group}
                for each in measure_jobs(
                    template,
                    jobs,
                    effort,
                    seed=number,
                    between=lambda took_s: retiming.go_on(AGAIN * took_s),
                ):
                    found[each.name].append(each)
    again = measured_costs(problem.graph, problem.cluster, retiming.tables())
    book.save_again(model, again.costs)
    for number, plan in enumerate(missing, start=1):
        record = _record(model, plan, timelines[plan.name], found[plan.name])
        book.append(record)
        say(f"{model} [{number}/{len(missing)}] {plan.name}: {_came_to(record)}")


def _is_settled(found: Mapping[str, Sequence[Measurement]]) -> bool:
    """Tell whether what processes of one plan differ by hardly blurs the order of plans."""
    ran = [each for each in found.values() if all(m.failure is None for m in each)]
    reached = reachable_order([[m.median_s for m in each] for each in ran])
    return reached is None or reached >= SETTLED


def _retiming(model: str, problem: Problem) -> Retiming:
    from placewright.execute.devices import find_devices
    from placewright.execute.retiming import Retiming

    return Retiming(load_capture(runnable(model)), find_devices(problem.cluster.device_names))


def _at_a_time(problem: Problem, timelines: Sequence[Timeline]) -> int:
    """Count the plans that devices hold together, one at least."""
    rooms = np.array([ROOM_BYTES[kind] for kind in problem.cluster.device_kinds])
    most = np.max([timeline.peak_bytes for timeline in timelines], axis=0) + rooms
    held = int((problem.cluster.memory_bytes // most).min())
    return max(held, 1)


def _deal(plans: Sequence[FidelityPlan], most: int) -> list[Sequence[FidelityPlan]]:
    """Deal plans into as few groups of at most so many as there can be, of about one size."""
    num_groups = -(-len(plans) // most)
    return [plans[k::num_groups] for k in range(num_groups)]


def _simulate(problem: Problem, plan: FidelityPlan) -> Timeline:
    return simulate(problem, Candidate(plan.placement))


def _job(timeline: Timeline, name: str) -> Job:
    plan = Plan.of(timeline, name, lower_bound_s=0.0, placer="fidelity")
    return job_of_plan(plan, timeline.problem.cluster)


def _record(
    model: str, plan: FidelityPlan, timeline: Timeline, measured: Sequence[Measurement]
) -> Record:
    names = timeline.problem.cluster.device_names
    failed = next((each for each in measured if each.failure is not None), None)
    processes_s = () if failed else tuple(each.median_s for each in measured)
    return Record(
        model=model,
        plan=plan.name,
        kind=plan.kind,
        placement=to_text(plan.placement),
        simulated_s=timeline.makespan_s,
        simulated_bytes=dict(zip(names, timeline.peak_bytes.tolist(), strict=True)),
        measured_s=fmean(processes_s) if processes_s else None,
        processes_s=processes_s,
        num_steps=sum(each.num_steps for each in measured),
        measured_bytes=measured[-1].peak_bytes,
        failure=failed.failure or "" if failed else "",
        reason=failed.reason if failed else "",
        machine=processor_model(),
        placewright=__version__,
        torch=torch_version() or "",
    )


def _came_to(record: Record) -> str:
    if record.measured_s is None:
        return f"failed ({record.failure}): {record.reason}"
    ratio = record.simulated_s / record.measured_s
    return f"{format_time(record.measured_s)}, simulated {ratio:.2f} of it"
