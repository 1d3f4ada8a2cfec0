"""
How good candidates are: the evaluator protocol, and the evaluator that simulates.

This module owns the objectives. ``latency`` is the makespan of one step. ``throughput`` is the time
per step of steps that are pipelined back to back: the largest load of any device or channel; it
counts one step's memory and ignores dependencies between steps.

Letters: ``B`` candidates, ``D`` devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from placewright.arguments import expect_type, expect_word, refuse
from placewright.costs import PS_PER_S
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate, simulate_many

Objective = Literal["latency", "throughput"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)

Basis = Literal["simulated", "expected", "measured"]
"""What a time is: simulated; what a step should take on this machine; or what steps took."""


@dataclass(frozen=True, eq=False)
class Evaluations:
    """What candidates came to, in their order. Feasibility comes first, then the objective."""

    objective_s: NDArray[np.float64]  # [B]
    overflow_bytes: NDArray[np.int64]  # [B] 0: it fits
    peak_bytes: NDArray[np.int64]  # [B, D]

    def key(self, k: int) -> tuple[int, float]:
        """Give what candidates are compared by: less is better, and no number is worst."""
        time_s = float(self.objective_s[k])
        return int(self.overflow_bytes[k]), float("inf") if np.isnan(time_s) else time_s

    @property
    def best(self) -> int:
        """Find the best candidate, the first of equals."""
        return int(np.lexsort((self.objective_s, self.overflow_bytes))[0])


class Evaluator(Protocol):
    """What tells how good candidates are: the simulator, or a machine."""

    problem: Problem
    objective: Objective
    overlap: bool  # for throughput: computing and copying overlap
    num_samples: int  # candidates evaluated so far

    @property
    def basis(self) -> Basis:
        """Tell what its times are."""
        ...

    def evaluate(self, candidates: Sequence[Candidate]) -> Evaluations:
        """Evaluate candidates."""
        ...


@runtime_checkable
class Confirms(Protocol):
    """An evaluator whose times are measured, so that the best of many was also lucky."""

    def confirm(self) -> tuple[Candidate, float] | None:
        """Judge the best few again, with more care; give the best and its time, if there is one."""
        ...


def check_candidates(problem: Problem, candidates: Sequence[Candidate]) -> None:
    """
    Check that there is at least one candidate and that all are for a problem's ops.

    Raises
    ------
    InputError
        There is none, or one of them is something else.
    """
    if not isinstance(candidates, Sequence) or not candidates:
        refuse(candidates, "candidates", "a list of at least one `Candidate`")
    for candidate in candidates:
        expect_type(candidate, Candidate, "candidates", "a list of at least one `Candidate`")
        if len(candidate.placement) != problem.num_ops:
            problem.check(candidate)


@dataclass(eq=False)
class SimulatedEvaluator:
    """Evaluates by simulation; with `overlap` off, transfers count in their devices' load too."""

    problem: Problem
    objective: Objective = "latency"
    overlap: bool = True
    num_samples: int = 0
    basis: ClassVar[Basis] = "simulated"

    def __post_init__(self) -> None:
        expect_type(self.problem, Problem, "problem", "a `Problem`")
        expect_word(self.objective, OBJECTIVES, "objective")

    def evaluate(self, candidates: Sequence[Candidate]) -> Evaluations:
        """Simulate candidates, plain ones on all cores at once."""
        check_candidates(self.problem, candidates)
        self.num_samples += len(candidates)
        if all(c.discipline == "fifo" and c.triggers is None for c in candidates):
            batch = simulate_many(self.problem, np.stack([c.placement for c in candidates]))
            times, peaks = batch.makespan_s, batch.peak_bytes
        else:
            lines = [simulate(self.problem, candidate) for candidate in candidates]
            times = np.array([line.makespan_s for line in lines])
            peaks = np.stack([line.peak_bytes for line in lines])
        over = np.maximum(peaks - self.problem.cluster.memory_bytes, 0).sum(axis=1)
        if self.objective == "throughput":
            times = np.array(
                [step_load_s(self.problem, c.placement, self.overlap) for c in candidates]
            )
        return Evaluations(times, over, peaks)


def step_load_s(problem: Problem, placement: NDArray[np.int64], overlap: bool = True) -> float:
    """
    Give the time per step when steps are pipelined back to back.

    That is the largest load of any device or channel. Without `overlap` a device's incoming and
    outgoing transfers count in its own load, as in PipeDream and Tarnawski et al.
    """
    graph, cluster = problem.graph, problem.cluster
    count = cluster.num_devices
    placement = np.asarray(placement, dtype=np.int64)
    ops = np.arange(graph.num_ops)
    device_s = np.zeros(count)
    np.add.at(device_s, placement, problem.costs.op_ps[ops, placement] / PS_PER_S)
    source = placement[graph.tensor_op[graph.use_tensor]]
    target = placement[graph.use_op]
    moved = (source != target) & (graph.tensor_bytes[graph.use_tensor] > 0)
    pairs = np.unique(graph.use_tensor[moved].astype(np.int64) * count + target[moved])
    tensor, target = pairs // count, pairs % count
    source = placement[graph.tensor_op[tensor]]
    time_s = cluster.latency_s[source, target]
    time_s = time_s + graph.tensor_bytes[tensor] / cluster.bytes_per_s[source, target]
    link_s = np.zeros(count * count)
    np.add.at(link_s, source * count + target, time_s)
    channel_s = np.zeros(len(cluster.channel_names))
    for link in np.flatnonzero(link_s):
        channel_s[list(cluster.link_channels[link])] += link_s[link]
    if not overlap:
        device_s += link_s.reshape(count, count).sum(axis=0)
        device_s += link_s.reshape(count, count).sum(axis=1)
    return float(max(device_s.max(), channel_s.max(initial=0.0)))
