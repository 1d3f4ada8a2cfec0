"""
A placement carried over to another graph of the same model: other shapes, or a part of the step.

This module owns how ops of two captures of one module are found to be the same: by their names,
and where there is none of that name, by the module that they belong to. Nothing here is searched:
the devices are those that the plan names.

Letters: ``N`` ops.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from placewright.arguments import expect_type
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.plan import Plan
from placewright.problem import Candidate, Problem

Started = int | tuple[int, int]  # an op, or a tensor and the device that it goes to


@dataclass(frozen=True, eq=False)
class Placing:
    """Where the ops of a graph run, and the order in which they and the transfers start."""

    graph: Graph
    placement: Sequence[int]  # [N]
    sequence: Sequence[Started]
    device_names: tuple[str, ...]

    @classmethod
    def of_plan(cls, plan: Plan, graph: Graph) -> Placing:
        """
        Read a plan by the numbers of the graph that it was made for.

        Raises
        ------
        InputError
            The plan was made for another graph.
        """
        check_made_for(plan, graph)
        names = tuple(dict.fromkeys(plan.devices.values()))
        index = {name: k for k, name in enumerate(names)}
        tensors = {graph.tensor_name(t): t for t in range(graph.num_tensors)}
        try:
            placement = [index[plan.devices[name]] for name in graph.op_names]
            sequence: list[Started] = [
                graph.op_index[each]
                if isinstance(each, str)
                else (tensors[each[0]], index[each[1]])
                for each in plan.sequence
            ]
        except KeyError as error:
            raise InputError(
                f"Plan `{plan.name}` was edited: its devices and its sequence disagree about"
                f" {error}. Make the plan again."
            ) from None
        return cls(graph, placement, sequence, names)

    def carry_over(self, graph: Graph) -> Placing:
        """
        Place another graph of the same model alike.

        Ops that both graphs have keep their device and their order. Others run where their module
        does, as soon as they can.
        """
        if graph.op_names == self.graph.op_names and graph.fingerprint == self.graph.fingerprint:
            return Placing(graph, self.placement, self.sequence, self.device_names)
        twins = _find_twins(self.graph, graph)
        placement = _place(self, graph, twins)
        return Placing(graph, placement, _order(self, graph, twins), self.device_names)


def check_made_for(plan: Plan, graph: Graph) -> None:
    """
    Check that a plan was made for a graph.

    Raises
    ------
    InputError
        It was made for another one.
    """
    mine, theirs = plan.graph.fingerprint, graph.fingerprint
    if mine != theirs:
        raise InputError(
            f"Plan `{plan.name}` was made for model `{plan.graph.name}` (fingerprint"
            f" {mine[:12]}); this one, `{graph.name}`, has another fingerprint"
            f" ({theirs[:12]}): its structure, its shapes, its loss or its optimiser differ."
            " Make a new plan."
        )


def carry_over(plan: Plan, made_for: Graph, problem: Problem) -> Candidate:
    """
    Return a plan's placement and order for the same model at other shapes, as `apply` runs it.

    Ops that both graphs have keep their device and their order; others run where their module
    does. Simulating the result says what the plan costs at these shapes.

    Parameters
    ----------
    plan
        The plan.
    made_for
        The graph that the plan was made for.
    problem
        The same model at other shapes, on a cluster that has the plan's devices.

    Raises
    ------
    InputError
        The plan was made for another graph than `made_for`, or names a device that the cluster
        does not have.
    """
    expect_type(plan, Plan, "plan", "a `Plan`")
    expect_type(made_for, Graph, "made_for", "the `Graph` that the plan was made for")
    expect_type(problem, Problem, "problem", "a `Problem`")
    placing = Placing.of_plan(plan, made_for).carry_over(problem.graph)
    number = [problem.cluster.device_index(name) for name in placing.device_names]
    started = [each for each in placing.sequence if isinstance(each, int)]
    priorities = np.empty(problem.num_ops)
    priorities[started] = np.arange(len(started), 0, -1)
    placement = [number[device] for device in placing.placement]
    return problem.check(Candidate(placement, "priority", priorities))


def _find_twins(mine: Graph, theirs: Graph) -> list[int | None]:
    """Find for each op of another graph the one of mine that is the same; None if there is none."""
    found: list[int | None] = []
    for k, name in enumerate(theirs.op_names):
        op = mine.op_index.get(name)
        found.append(op if op is not None and _is_twin(mine, op, theirs, k) else None)
    return found


def _is_twin(mine: Graph, op: int, theirs: Graph, other: int) -> bool:
    if mine.op_kinds[op] == "input":  # numbered, so that another call may have others
        sizes = (
            mine.tensor_bytes[mine.op_outputs[op]],
            theirs.tensor_bytes[theirs.op_outputs[other]],
        )
        return theirs.op_kinds[other] == "input" and bool(sizes[0] == sizes[1])
    return (mine.op_kinds[op], mine.op_phases[op]) == (
        theirs.op_kinds[other],
        theirs.op_phases[other],
    )


def _place(mine: Placing, graph: Graph, twins: Sequence[int | None]) -> list[int]:
    """Give each op the device of its twin, or else of its module's ops, or of what it reads."""
    homes = _Homes(mine)
    placement = [-1] * graph.num_ops
    reads, readers = _edges(graph)
    for op, twin in enumerate(twins):
        if twin is not None:
            placement[op] = mine.placement[twin]
            continue
        if not reads[op]:
            continue  # an input: where it is read first
        found = homes.of(graph.op_modules[op], graph.op_phases[op])
        known = Counter(placement[other] for other in reads[op] if placement[other] >= 0)
        if found is None and known:
            found = known.most_common(1)[0][0]
        placement[op] = homes.most_used if found is None else found
    for op in range(graph.num_ops):
        if placement[op] < 0:
            first = min((placement[other] for other in readers[op]), default=-1)
            placement[op] = homes.most_used if first < 0 else placement[min(readers[op])]
    together: dict[int, int] = {}
    for op, group in enumerate(graph.op_colocation.tolist()):
        if group >= 0:
            placement[op] = together.setdefault(group, placement[op])
    return placement


class _Homes:
    """The devices where most of a module's ops run."""

    def __init__(self, placing: Placing) -> None:
        graph = placing.graph
        self._counts: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
        every: Counter[int] = Counter()
        for op, device in enumerate(placing.placement):
            module, phase = graph.op_modules[op], graph.op_phases[op]
            every[device] += 1
            for key in ((module, phase), (module, "")):
                self._counts[key][device] += 1
        self.most_used = every.most_common(1)[0][0] if every else 0

    def of(self, module: str, phase: str) -> int | None:
        """Find the device of a module, or of the nearest one around it that has ops."""
        while module:
            for key in ((module, phase), (module, "")):
                if key in self._counts:
                    return self._counts[key].most_common(1)[0][0]
            module = module.rpartition(".")[0]
        return None


def _edges(graph: Graph) -> tuple[list[set[int]], list[set[int]]]:
    """List what each op reads of which ops, and who reads it."""
    reads: list[set[int]] = [set() for _ in range(graph.num_ops)]
    readers: list[set[int]] = [set() for _ in range(graph.num_ops)]
    makers = graph.tensor_op.tolist()
    for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
        reads[op].add(makers[tensor])
        readers[makers[tensor]].add(op)
    return reads, readers


def _order(mine: Placing, graph: Graph, twins: Sequence[int | None]) -> list[Started]:
    """
    Order a graph's ops, and the copies that begin ahead, as their twins are.

    Every op comes after those that it reads, whatever the order was: so no device waits for
    another that waits for it.
    """
    at = {started: k for k, started in enumerate(mine.sequence)}
    reads, readers = _edges(graph)
    ranks = [-1] * graph.num_ops
    for op, twin in enumerate(twins):
        before = max((ranks[other] for other in reads[op]), default=-1)
        ranks[op] = before if twin is None or twin not in at else at[twin]
    missing = [len(each) for each in reads]
    ready = [(ranks[op], op) for op in range(graph.num_ops) if not missing[op]]
    heapq.heapify(ready)
    copies = deque(_copies(mine, graph))
    found: list[Started] = []
    reached = -1
    while ready:
        rank, op = heapq.heappop(ready)
        reached = max(reached, rank)
        while copies and copies[0][0] < reached:
            found.append(copies.popleft()[1])
        found.append(op)
        for other in readers[op]:
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(ready, (ranks[other], other))
    assert len(found) >= graph.num_ops
    return found


def _copies(mine: Placing, graph: Graph) -> Iterator[tuple[int, tuple[int, int]]]:
    """Find transfers of tensors that both graphs have, with their places in the order."""
    tensors = {graph.tensor_name(t): t for t in range(graph.num_tensors)}
    for k, started in enumerate(mine.sequence):
        if isinstance(started, tuple):
            tensor = tensors.get(mine.graph.tensor_name(started[0]))
            if tensor is not None:
                yield k, (tensor, started[1])
