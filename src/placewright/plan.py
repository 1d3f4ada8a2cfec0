"""
`Plan`: a candidate with a name and a history, and the ``plan.json`` file it is kept in.

This module owns the plan's file format (version 1) and the check that a plan belongs to a problem.
A plan names ops and devices, never numbers, so it can be read by people and other tools.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from placewright import files
from placewright.arguments import expect_path, expect_type
from placewright.errors import InputError
from placewright.problem import Candidate, Discipline, Problem
from placewright.timeline import Timeline

Value = TypeVar("Value")


class Fingerprint(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a plan was made for: a name for people and a fingerprint that must match."""

    name: str
    fingerprint: str


class Trigger(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """When a persistent tensor is requested by a device: after an op there, or at time 0."""

    tensor: str
    device: str
    after: str | None


class Predicted(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What the simulator said of the plan when it was made."""

    makespan_s: float
    lower_bound_s: float
    is_feasible: bool
    peak_bytes: dict[str, int]  # by device


class Origin(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Where the plan came from."""

    placer: str
    seed: int | None
    budget: str | None
    versions: dict[str, str]


class Plan(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """
    Where every op of a graph runs on a cluster, in which order, and what that was predicted to do.

    `sequence` lists what starts, in simulated order: ``"op"`` for an op, ``["tensor", "device"]``
    for a transfer to that device.
    """

    format: str = "placewright-plan"
    version: int = 1
    name: str
    graph: Fingerprint
    cluster: Fingerprint
    devices: dict[str, str]  # by op
    discipline: Discipline
    priorities: dict[str, float] | None
    triggers: list[Trigger] | None
    sequence: list[str | tuple[str, str]]
    predicted: Predicted
    origin: Origin

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        name: str,
        *,
        lower_bound_s: float,
        placer: str,
        seed: int | None = None,
        budget: str | None = None,
    ) -> Plan:
        """Make a plan of a simulated candidate."""
        expect_type(timeline, Timeline, "timeline", "a `Timeline`, such as `simulate` gives")
        problem, candidate = timeline.problem, timeline.candidate
        graph, cluster = problem.graph, problem.cluster
        devices = cluster.device_names
        names = graph.op_names
        return cls(
            name=name,
            graph=Fingerprint(graph.name, graph.fingerprint),
            cluster=Fingerprint(cluster.name, cluster.fingerprint),
            devices={n: devices[d] for n, d in zip(names, candidate.placement, strict=True)},
            discipline=candidate.discipline,
            priorities=None
            if candidate.priorities is None
            else dict(zip(names, candidate.priorities.tolist(), strict=True)),
            triggers=None
            if candidate.triggers is None
            else [
                Trigger(graph.tensor_name(t), devices[d], None if op < 0 else names[op])
                for (t, d), op in candidate.triggers.items()
            ],
            sequence=_sequence(timeline),
            predicted=Predicted(
                makespan_s=timeline.makespan_s,
                lower_bound_s=lower_bound_s,
                is_feasible=timeline.is_feasible,
                peak_bytes=dict(zip(devices, timeline.peak_bytes.tolist(), strict=True)),
            ),
            origin=Origin(placer=placer, seed=seed, budget=budget, versions=_versions()),
        )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """
        Load a ``plan.json`` file.

        Raises
        ------
        InputError
            The file cannot be read or is not a plan.
        """
        expect_path(path, "path")
        return files.read_json(path, cls, "plan file")

    def save(self, path: str | Path) -> None:
        """Save as a ``plan.json`` file, whole or not at all."""
        expect_path(path, "path")
        files.write(path, msgspec.json.format(msgspec.json.encode(self), indent=1))

    def candidate(self, problem: Problem) -> Candidate:
        """
        Give the plan's candidate back, for the problem it was made for.

        Raises
        ------
        InputError
            The graph or the cluster is another one (their fingerprints differ), or the plan does
            not fit it.
        """
        expect_type(problem, Problem, "problem", "a `Problem`")
        for what, mine, theirs in (
            ("graph", self.graph, problem.graph),
            ("cluster", self.cluster, problem.cluster),
        ):
            if mine.fingerprint != theirs.fingerprint:
                raise InputError(
                    f"Plan `{self.name}` was made for {what} `{mine.name}` (fingerprint"
                    f" {mine.fingerprint[:12]}), not for `{theirs.name}`"
                    f" ({theirs.fingerprint[:12]}). Make a new plan."
                )
        graph, cluster = problem.graph, problem.cluster
        triggers = None
        if self.triggers is not None:
            tensors = {graph.tensor_name(t): t for t in range(graph.num_tensors)}
            triggers = {
                (
                    _lookup(tensors, trigger.tensor, "tensor", self.name),
                    cluster.device_index(trigger.device),
                ): -1
                if trigger.after is None
                else _lookup(graph.op_index, trigger.after, "op", self.name)
                for trigger in self.triggers
            }
        priorities = None
        if self.priorities is not None:
            for name in self.priorities.keys() ^ set(graph.op_names):
                where = "plan" if name in self.priorities else "graph"
                raise InputError(
                    f"Plan `{self.name}` should have a priority for every op and nothing else; op"
                    f" `{name}` is only in the {where}."
                )
            priorities = [self.priorities[name] for name in graph.op_names]
        placement = placement_by_name(problem, self.devices)
        return problem.check(Candidate(placement, self.discipline, priorities, triggers))


def placement_by_name(problem: Problem, devices: dict[str, str]) -> list[int]:
    """
    Turn op names and device names into a placement.

    Raises
    ------
    InputError
        An op is missing or unknown, or a device is unknown.
    """
    unknown = next((name for name in devices if name not in problem.graph.op_index), None)
    if unknown is not None:
        raise InputError(
            f"The placement names op `{unknown}`, which graph `{problem.graph.name}` does not have."
        )
    missing = next((name for name in problem.graph.op_names if name not in devices), None)
    if missing is not None:
        raise InputError(
            f"The placement has {len(devices)} entries and none for op `{missing}`; expected"
            f" {problem.num_ops}, one an op of graph `{problem.graph.name}`."
        )
    number = {name: problem.cluster.device_index(name) for name in dict.fromkeys(devices.values())}
    return [number[devices[name]] for name in problem.graph.op_names]


def load_plan_or_placement(path: str | Path) -> Plan | dict[str, str]:
    """
    Load a plan file, or a bare placement: a JSON object from op names to device names.

    Raises
    ------
    InputError
        It is neither.
    """
    data = files.read(path, "plan or placement file")
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(data, type=dict[str, str])
    return files.decode_json(data, path, Plan, "plan file")


def _lookup(table: Mapping[str, Value], key: str, what: str, plan: str) -> Value:
    if key not in table:
        raise InputError(f"Plan `{plan}` names {what} `{key}`, which does not exist.")
    return table[key]


def _sequence(timeline: Timeline) -> list[str | tuple[str, str]]:
    graph, cluster = timeline.problem.graph, timeline.problem.cluster
    moves = timeline.transfers
    names: list[str | tuple[str, str]] = []
    for started in timeline.sequence.tolist():
        if started < graph.num_ops:
            names.append(graph.op_names[started])
        else:
            n = started - graph.num_ops
            target = cluster.device_names[moves.target[n]]
            names.append((graph.tensor_name(int(moves.tensor[n])), target))
    return names


def _versions() -> dict[str, str]:
    return {
        "placewright": metadata.version("placewright"),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
