"""
`place`: a problem and a placer's name become a plan, with its bound and its history.

This module owns the list of placers and what a `Result` holds.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewright import files
from placewright.arguments import (
    expect_flag,
    expect_function,
    expect_path,
    expect_type,
    expect_word,
    read_array,
    read_number,
    read_whole,
    refuse,
)
from placewright.bounds import Bounds, lower_bounds
from placewright.coarsening import coarsen, split_cycles
from placewright.errors import InputError
from placewright.evaluate import (
    OBJECTIVES,
    Basis,
    Confirms,
    Evaluator,
    Objective,
    SimulatedEvaluator,
)
from placewright.grouping import GROUPINGS
from placewright.placers.auto import Auto, explain
from placewright.placers.contiguous import contiguous_split
from placewright.placers.experts import BASELINES
from placewright.placers.list_scheduling import heft, m_etf, m_sct, m_topo, peft
from placewright.placers.partition import kahypar, metis, mincut, scotch
from placewright.placers.repair import repair, why_nothing_fits
from placewright.placers.run import MAX_BUDGET_S, Budget, Entry, Placement, Placer, Prepares, Run
from placewright.placers.search import SEARCHES
from placewright.plan import Plan
from placewright.policies.learned import POLICIES, Learned, with_options
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate
from placewright.timeline import Timeline
from placewright.trace import save_trace


@dataclass(frozen=True)
class OneShot:
    """A rule that gives one placement; if that does not fit, it is repaired."""

    rule: Callable[[Problem, Run], Placement]
    is_repaired: bool = True

    def __call__(self, run: Run) -> None:
        """Place by the rule: ops, or the groups that were asked for."""
        if run.grouping is None:
            placement = self.rule(run.problem, run)
        else:
            # Parameters are apart: grouped with their updates they would look like circles.
            apart = 2 * run.grouping + run.problem.graph.op_is_resident
            coarse = coarsen(run.problem, split_cycles(run.problem.graph, apart))
            placement = np.asarray(coarse.expand(self.rule(coarse.problem, run)))
        run.offer([placement])
        if run.key[0] > 0 and self.is_repaired:
            repair(run, placement)


def _rule(function: Callable[[Problem], Placement]) -> Callable[[Problem, Run], Placement]:
    return lambda problem, _: function(problem)


def _lp_seconds(run: Run) -> float:
    """Give m-SCT's linear program half of the budget, or half a minute."""
    return 30.0 if run.budget.seconds is None else max(run.budget.seconds / 2, 0.1)


PLACERS: dict[str, Placer] = {
    "auto": Auto(),
    **{name: OneShot(_rule(rule), is_repaired=False) for name, rule in BASELINES.items()},
    "m-topo": OneShot(_rule(m_topo)),
    "m-etf": OneShot(_rule(m_etf)),
    "m-sct": OneShot(lambda problem, run: m_sct(problem, _lp_seconds(run))),
    "heft": OneShot(_rule(heft)),
    "peft": OneShot(_rule(peft)),
    "contiguous": OneShot(lambda problem, run: contiguous_split(problem, run.evaluator.objective)),
    "scotch": OneShot(lambda problem, run: scotch(problem, run.seed)),
    "mincut": OneShot(lambda problem, run: mincut(problem, run.seed)),
    "metis": OneShot(lambda problem, run: metis(problem, run.seed)),
    "kahypar": OneShot(lambda problem, run: kahypar(problem, run.seed)),
    **SEARCHES,
    **POLICIES,
}
"""Every placer by its name. Baselines are as people place; what does not fit is told so."""


SUMMARIES: dict[str, str] = {
    "auto": "the default: everything quick, then annealing from the best of it",
    "cpu-only": "everything on the CPU",
    "one-gpu": "everything on one GPU",
    "expert-paper": "the papers' human expert: LSTM layers in turn, other layers in blocks",
    "expert-strong": "the best contiguous split of the layers by simulated time",
    "m-topo": "fills one device after the other in topological order (Baechi)",
    "m-etf": "earliest start first, memory-aware (Baechi)",
    "m-sct": "earliest start with favourite children from a linear program (Baechi)",
    "heft": "highest rank first, earliest finish, with insertion",
    "peft": "like HEFT, looking ahead with a table of optimistic costs",
    "contiguous": "the best contiguous split of the program order, by dynamic programming",
    "scotch": "Scotch: balance and cut, on all devices (needs an extra)",
    "mincut": "Scotch on the devices that are no CPUs: the papers' MinCut (needs an extra)",
    "metis": "METIS: balance and cut (needs an extra)",
    "kahypar": "Mt-KaHyPar: a tensor with many readers is one hyperedge (needs an extra)",
    "random": "random devices for groups of ops",
    "hill-climbing": "one group at a time to another device, while that helps",
    "annealing": "simulated annealing over groups, coarse ones first",
    "cross-entropy": "a distribution for each group, moved towards the best samples (Post)",
    "colocrl": "learned: a sequence-to-sequence policy over co-located groups (2017; torch extra)",
    "hierarchical": "learned: a Grouper and a Placer, the paper's settings (2018; torch extra)",
    "hierarchical-grappler": "learned: the same with the released code's settings (torch extra)",
    "hierarchical-plus": "learned: the same with what its critics asked for (torch extra)",
}
"""What each placer does, in a line."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """What `place` found."""

    problem: Problem
    candidate: Candidate
    timeline: Timeline  # one simulated step
    objective_s: float
    bounds: Bounds
    lower_bound_s: float
    placer: str
    seed: int
    budget: Budget
    samples: int
    wall_s: float
    history: tuple[Entry, ...]
    reason: str  # why the answer is what it is, or why nothing fits
    basis: Basis = "simulated"  # what `objective_s` is
    is_feasible: bool  # it fits memory: by simulation, or as measured

    @property
    def placement(self) -> NDArray[np.int64]:
        """Give the device of every op."""
        return np.asarray(self.candidate.placement, dtype=np.int64)

    @property
    def makespan_s(self) -> float:
        """Give the simulated time of one step."""
        return self.timeline.makespan_s

    @property
    def plan(self) -> Plan:
        """Make a plan of it."""
        return Plan.of(
            self.timeline,
            f"{self.problem.graph.name} on {self.problem.cluster.name} by {self.placer}",
            lower_bound_s=self.lower_bound_s,
            placer=self.placer,
            seed=self.seed,
            budget=str(self.budget),
        )

    def describe(self) -> dict[str, Any]:
        """Tell the answer in plain values."""
        names = self.problem.cluster.device_names
        measured = {"measured_s": self.objective_s} if self.basis == "measured" else {}
        return measured | {
            "basis": self.basis,
            "makespan_s": self.makespan_s,
            "objective_s": self.objective_s,
            "is_feasible": self.is_feasible,
            "lower_bound_s": self.lower_bound_s,
            "placer": self.placer,
            "samples": self.samples,
            "wall_s": self.wall_s,
            "peak_bytes": dict(zip(names, self.timeline.peak_bytes.tolist(), strict=True)),
            "reason": self.reason,
            "seed": self.seed,
            "budget": str(self.budget),
        }

    def save(self, folder: str | Path) -> None:
        """
        Save plan, timeline and history into a folder, each file whole or not at all.

        Raises
        ------
        InputError
            A file cannot be written.
        """
        expect_path(folder, "folder")
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`{folder}` cannot be made: {error.strerror}.") from None
        self.plan.save(Path(folder) / "plan.json")
        save_trace(self.timeline, Path(folder) / "timeline.json")
        said = {} if self.basis == "simulated" else {self.basis: True}
        lines = [json.dumps(vars(entry) | said) for entry in self.history]
        files.write(Path(folder) / "history.jsonl", "\n".join([*lines, ""]).encode())


def place(
    problem: Problem,
    placer: str | Placer = "auto",
    *,
    budget: str | Budget | None = None,
    budget_s: float | None = None,
    objective: Objective = "latency",
    overlap: bool = True,
    seed: int = 0,
    grouping: str | NDArray[np.int64] | None = None,
    progress: Callable[[Run], None] | None = None,
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    tensorboard: str | Path | None = None,
    evaluator: Evaluator | None = None,
) -> Result:
    """
    Choose a device for every op.

    Parameters
    ----------
    problem
        What to place, where.
    placer
        A name from `PLACERS`, or a placer.
    budget
        ``"60s"``, ``"5000 samples"``, ``"60s, idle 10s"``; ten seconds if neither this nor
        `budget_s` is given. Even a budget of zero gives an answer.
    budget_s
        The same, in seconds. Those of a learned placer begin once it is compiled.
    objective
        ``"latency"``, or ``"throughput"``.
    overlap
        For throughput: computing and copying overlap.
    seed
        The same seed and number of samples give the same answer.
    grouping
        Ops to place together: a name from `placewright.grouping.GROUPINGS`, or the group of every
        op. By default each placer has its own.
    progress
        Called after every batch of samples.
    options
        Settings of a learned placer to change, by name.
    folder
        Where a learned placer keeps its state, so that it can be gone on with.
    resume
        Go on with what is in `folder`: the same as if the run had never ended. Samples and seconds
        already spent count.
    tensorboard
        Where a learned placer writes scalars for TensorBoard.
    evaluator
        What candidates are judged by, for this problem and objective: by default the simulator.
        `placewright.execute.expecting.ExpectedEvaluator` tells what they should take on this
        machine, `placewright.execute.measured.MeasuredEvaluator` runs them.

    Raises
    ------
    InputError
        There is no such placer, a budget cannot be read, a library is missing, or a learned placer
        would take more memory than there is.
    """
    _check_types(problem, objective, seed, progress, folder, tensorboard, overlap, resume)
    chosen = find_placer(placer, options)
    spend = budget_s if budget is None else budget
    limits = _read_budget(spend)
    run = Run(
        problem,
        _check_evaluator(evaluator, problem, objective)
        or SimulatedEvaluator(problem, objective, overlap),
        seed,
        limits,
        progress,
        _read_grouping(problem, grouping),
        placer=placer if isinstance(placer, str) else _name_of(placer),
        folder=None if folder is None else Path(folder),
        resumes=resume,
        tensorboard=None if tensorboard is None else Path(tensorboard),
    )
    _check_run(run, chosen)
    _prepare(problem, chosen)
    run.start_clock()
    wall_s, samples = _spend(run, chosen)
    assert run.best is not None
    bounds = lower_bounds(problem)
    timeline = simulate(problem, run.best)
    reason = explain(run)
    if run.key[0] > 0:
        proof = why_nothing_fits(problem)
        reason = f"Nothing fits: {proof}" if proof else "No placement that fits was found."
        reason += chosen.advice if not proof and isinstance(chosen, Learned) else ""
    return Result(
        problem=problem,
        candidate=run.best,
        timeline=timeline,
        objective_s=run.key[1],
        bounds=bounds,
        lower_bound_s=bounds.best_s if objective == "latency" else bounds.load_ps / 1e12,
        placer=run.placer.partition(":")[0],
        seed=seed,
        budget=limits,
        samples=samples,
        wall_s=wall_s,
        history=tuple(run.history),
        reason=reason,
        basis=run.evaluator.basis,
        is_feasible=run.key[0] == 0,
    )


def _check_types(
    problem: Problem,
    objective: Objective,
    seed: int,
    progress: Callable[[Run], None] | None,
    folder: str | Path | None,
    tensorboard: str | Path | None,
    overlap: bool,
    resume: bool,
) -> None:
    expect_type(problem, Problem, "problem", "a `Problem`")
    expect_word(objective, OBJECTIVES, "objective")
    read_whole(seed, "seed", 0)
    expect_function(progress, "progress", "a function of a `Run`")
    expect_flag(overlap, "overlap")
    expect_flag(resume, "resume")
    for name, path in (("folder", folder), ("tensorboard", tensorboard)):
        if path is not None:
            expect_path(path, name)


def _name_of(placer: object) -> str:
    return str(getattr(placer, "__name__", type(placer).__name__))


def _spend(run: Run, placer: Placer) -> tuple[float, int]:
    """Place until the budget is spent, or Ctrl-C; give the seconds and samples that it took."""
    is_whole = False
    with contextlib.suppress(KeyboardInterrupt):  # the best so far is the answer
        placer(run)
        is_whole = True
    if run.best is None and is_whole:
        raise InputError(
            f"Placer `{run.placer}` offers no placement; expected at least one `run.offer([...])`."
        )
    if run.best is None:
        raise KeyboardInterrupt  # there is no answer to give
    spent = run.wall_s, run.num_samples
    if is_whole and isinstance(run.evaluator, Confirms):
        run.evaluator.evaluate([run.best])  # which may be known from before this run went on
        confirmed = run.evaluator.confirm()
        if confirmed is not None:
            run.best, run.key = confirmed[0], (0, confirmed[1])
    return spent


def _check_evaluator(
    evaluator: Evaluator | None, problem: Problem, objective: Objective
) -> Evaluator | None:
    if evaluator is None:
        return None
    if not all(hasattr(evaluator, name) for name in ("problem", "objective", "evaluate")):
        refuse(evaluator, "evaluator", "an evaluator, such as `SimulatedEvaluator(problem)`")
    if evaluator.problem is not problem or evaluator.objective != objective:
        raise InputError(
            f"`evaluator` is for {evaluator.problem} and {evaluator.objective}; expected {problem}"
            f" and {objective}."
        )
    return evaluator


def _check_run(run: Run, placer: Placer) -> None:
    """Refuse what a run cannot do before it spends its budget."""
    if isinstance(placer, Learned):
        if run.resumes and run.folder is None:
            raise InputError("There is nothing to go on with: `resume` needs a folder (`-o`).")
    elif run.resumes or run.tensorboard is not None:
        raise InputError(f"Only learned placers can do that: {', '.join(POLICIES)}.")
    if run.folder is not None and not run.resumes:
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`{run.folder}` cannot be made: {error.strerror}.") from None


def prepare(
    problem: Problem, placer: str | Placer, options: Mapping[str, Any] | None = None
) -> None:
    """
    Do what a placer does before its clock begins, such as compiling; `place` does it by itself.

    Raises
    ------
    InputError
        There is no such placer or setting, a library is missing, or it would take too much memory.
    """
    _prepare(problem, find_placer(placer, options))


def _prepare(problem: Problem, placer: Placer) -> None:
    if isinstance(placer, Prepares):
        placer.prepare(problem)


def find_placer(placer: str | Placer, options: Mapping[str, Any] | None = None) -> Placer:
    """
    Find a placer by name, with some of its settings changed.

    Raises
    ------
    InputError
        There is no such placer or setting, or it has none that can be changed.
    """
    if isinstance(placer, str):
        if placer not in PLACERS:
            raise InputError(f"There is no placer `{placer}`. There are: {', '.join(PLACERS)}.")
        placer = PLACERS[placer]
    elif not callable(placer):
        refuse(placer, "placer", "a placer's name, or a function of a `Run`")
    if options is not None:
        expect_type(options, Mapping, "options", "a mapping from settings to values")
    if not options:
        return placer
    if not isinstance(placer, Learned):
        raise InputError(f"Only learned placers have options: {', '.join(POLICIES)}.")
    return with_options(placer, options)


def _read_grouping(
    problem: Problem, grouping: str | NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    if grouping is None:
        return None
    if not isinstance(grouping, str):
        groups = read_array(grouping, "grouping", np.int64, (problem.num_ops,))
        return np.unique(groups, return_inverse=True)[1]
    if grouping not in GROUPINGS:
        raise InputError(f"There is no grouping `{grouping}`. There are: {', '.join(GROUPINGS)}.")
    return GROUPINGS[grouping](problem)


def _read_budget(budget: str | Budget | float | None) -> Budget:
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, str):
        return Budget.parse(budget)
    if budget is None:
        return Budget(seconds=10.0)
    return Budget(seconds=read_number(budget, "budget_s", 0, MAX_BUDGET_S))
