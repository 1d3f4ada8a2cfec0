"""
`Timeline`: everything that happened in one simulated step.

This module owns what is read off a simulation afterwards: times, memory, utilisation and the
critical path. It computes nothing that could change the makespan.

Letters: ``N`` ops, ``D`` devices, ``X`` transfers, ``C`` channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from placewright.costs import PS_PER_S
from placewright.graph import FloatArray, IdArray, IntArray
from placewright.problem import Candidate, Problem, Triggers


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfers:
    """The transfers of one step, numbered as they were requested."""

    tensor: IdArray  # [X]
    source: IdArray  # [X] device
    target: IdArray  # [X] device
    start_ps: IntArray  # [X]
    end_ps: IntArray  # [X]
    blocker: IdArray  # [X] the transfer whose end let this one start, -1 if it did not wait

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def start_s(self) -> FloatArray:  # [X]
        """Give the starts in seconds."""
        return self.start_ps / PS_PER_S

    @property
    def end_s(self) -> FloatArray:  # [X]
        """Give the ends in seconds."""
        return self.end_ps / PS_PER_S


@dataclass(frozen=True)
class Step:
    """
    One piece of the critical path.

    `cause` says why it began when it did: an ``input`` had just arrived, the ``device`` or the
    ``channel`` had just become free, a ``trigger`` had just ended, or it is the ``start`` of all.
    """

    kind: Literal["op", "transfer"]
    index: int
    start_ps: int
    end_ps: int
    cause: Literal["start", "input", "device", "channel", "trigger"]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Timeline:
    """
    One simulated step.

    Guarantees: `makespan_ps` is the end of the last op; the memory of every device, as given by
    `memory_of`, peaks at exactly `peak_bytes`; the critical path has no gaps and is as long as
    the makespan. Equal inputs give equal timelines.
    """

    problem: Problem
    candidate: Candidate
    makespan_ps: int
    peak_bytes: IntArray  # [D]
    op_start_ps: IntArray  # [N]
    op_end_ps: IntArray  # [N]
    transfers: Transfers
    triggers: Triggers  # of every fetch, default ones included
    sequence: IntArray  # ops and transfers (as N + number) in the order in which they started
    level_ps: IntArray  # times at which some device's memory changed ...
    level_device: IntArray  # ... which device ...
    level_bytes: IntArray  # ... and to what

    def __repr__(self) -> str:
        names = f"{self.problem.graph.name} on {self.problem.cluster.name}"
        verdict = "fits" if self.is_feasible else f"{self.overflow_bytes:,} bytes too many"
        return f"Timeline({names}: {self.makespan_s:.6g} s, {verdict})"

    @property
    def makespan_s(self) -> float:
        """Give the simulated time of one step in seconds."""
        return self.makespan_ps / PS_PER_S

    @property
    def op_start_s(self) -> FloatArray:  # [N]
        """Give the start of every op in seconds."""
        return self.op_start_ps / PS_PER_S

    @property
    def op_end_s(self) -> FloatArray:  # [N]
        """Give the end of every op in seconds."""
        return self.op_end_ps / PS_PER_S

    @property
    def overflow_bytes(self) -> int:
        """Add up by how much the devices' peaks pass their memory."""
        over = self.peak_bytes - self.problem.cluster.memory_bytes
        return int(np.maximum(over, 0).sum())

    @property
    def is_feasible(self) -> bool:
        """Tell whether every device's peak fits its memory."""
        return bool((self.peak_bytes <= self.problem.cluster.memory_bytes).all())

    @cached_property
    def device_busy_s(self) -> FloatArray:  # [D]
        """Add up the seconds that each device computed."""
        spent = self.op_end_ps - self.op_start_ps
        return (
            np.bincount(self.candidate.placement, weights=spent, minlength=self.problem.num_devices)
            / PS_PER_S
        )

    @cached_property
    def channel_busy_s(self) -> FloatArray:  # [C]
        """Add up the seconds that each channel was occupied."""
        cluster = self.problem.cluster
        busy = np.zeros(len(cluster.channel_names))
        occupies = self.problem.graph.tensor_bytes[self.transfers.tensor] > 0
        link = self.transfers.source * cluster.num_devices + self.transfers.target
        spent = np.where(occupies, self.transfers.end_ps - self.transfers.start_ps, 0)
        per_link = np.bincount(link, weights=spent, minlength=cluster.num_devices**2)
        for at in np.flatnonzero(per_link):
            busy[list(cluster.link_channels[at])] += per_link[at]
        return busy / PS_PER_S

    @property
    def device_utilisation(self) -> FloatArray:  # [D]
        """Give the share of the step that each device computed."""
        return self.device_busy_s / max(self.makespan_s, 1e-30)

    @property
    def channel_utilisation(self) -> FloatArray:  # [C]
        """Give the share of the step that each channel was occupied."""
        return self.channel_busy_s / max(self.makespan_s, 1e-30)

    @property
    def moved_bytes(self) -> int:
        """Add up the bytes of all transfers."""
        return int(self.problem.graph.tensor_bytes[self.transfers.tensor].sum())

    def memory_of(self, device: int) -> tuple[FloatArray, IntArray]:
        """Give the memory of a device over time: it holds ``bytes[k]`` from ``time_s[k]`` on."""
        here = self.level_device == device
        return self.level_ps[here] / PS_PER_S, self.level_bytes[here]

    @cached_property
    def critical_path(self) -> tuple[Step, ...]:
        """
        Find the chain of ops and transfers that makes the makespan what it is.

        Walking back from the op that ends last (the lowest of several): an op began because its
        last input had arrived (of several the one with the lowest tensor), or else because the
        op before it on its device had ended; a transfer began because a channel had become free,
        or else because the op that made its tensor, or the trigger of its fetch, had ended. Each
        step begins when the one before it ends; the first begins at 0.
        """
        return _walk_back(self)


def _walk_back(timeline: Timeline) -> tuple[Step, ...]:
    graph = timeline.problem.graph
    placement = timeline.candidate.placement
    transfers = timeline.transfers
    arrived = {
        (int(t), int(d)): n
        for n, (t, d) in enumerate(zip(transfers.tensor, transfers.target, strict=True))
    }
    previous = _previous_on_device(timeline)
    inputs = graph.use_tensor[graph.input_order]
    running = ~graph.op_is_resident
    if not running.any():
        return ()
    ends = np.where(running, timeline.op_end_ps, -1)
    at: tuple[Literal["op", "transfer"], int] = ("op", int(ends.argmax()))
    steps: list[Step] = []
    while True:
        kind, i = at
        if kind == "transfer":
            start, end = int(transfers.start_ps[i]), int(transfers.end_ps[i])
            tensor, target = int(transfers.tensor[i]), int(transfers.target[i])
            maker = int(graph.tensor_op[tensor])
            trigger = timeline.triggers.get((tensor, target), maker)
            if transfers.blocker[i] >= 0:
                cause, at = "channel", ("transfer", int(transfers.blocker[i]))
            elif trigger < 0 or graph.op_is_resident[trigger]:
                cause = "start"
            else:
                cause, at = ("input" if trigger == maker else "trigger"), ("op", trigger)
        else:
            start, end = int(timeline.op_start_ps[i]), int(timeline.op_end_ps[i])
            cause = "start"
            for tensor in inputs[graph.op_inputs[i] : graph.op_inputs[i + 1]].tolist():
                maker = int(graph.tensor_op[tensor])
                if placement[maker] == placement[i]:
                    if timeline.op_end_ps[maker] == start and running[maker]:
                        cause, at = "input", ("op", maker)
                        break
                elif transfers.end_ps[arrived[tensor, int(placement[i])]] == start:
                    cause, at = "input", ("transfer", arrived[tensor, int(placement[i])])
                    break
            if cause == "start" and start > 0:
                cause, at = "device", ("op", int(previous[i]))
        steps.append(Step(kind, i, start, end, cause))  # type: ignore[arg-type]
        if cause == "start":
            return tuple(reversed(steps))


def _previous_on_device(timeline: Timeline) -> IntArray:  # [N]
    """Give the op that ran before each op on its device, -1 for none."""
    num_ops = timeline.problem.num_ops
    ops = timeline.sequence[timeline.sequence < num_ops]
    order = ops[np.argsort(timeline.candidate.placement[ops], kind="stable")]
    previous = np.full(num_ops, -1, dtype=np.int64)
    same = timeline.candidate.placement[order[1:]] == timeline.candidate.placement[order[:-1]]
    previous[order[1:]] = np.where(same, order[:-1], -1)
    return previous
