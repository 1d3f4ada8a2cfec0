"""
The best split of a linear order into contiguous stretches, by dynamic programming.

As in PipeDream (Narayanan et al., 2019) and Tarnawski et al. (2020): groups of ops in topological
order are cut into stretches, one a device, in any order of devices that keeps equal ones in the
order of their numbers. Memory is counted as what stays all step long plus the largest op.

Letters: ``G`` groups, ``D`` devices.
"""

from __future__ import annotations

from itertools import islice, permutations

import numpy as np
from numpy.typing import NDArray

from placewright.costs import PS_PER_S
from placewright.evaluate import Objective
from placewright.placers.groups import Units
from placewright.placers.run import Placement
from placewright.problem import Problem

FORBIDDEN_S = 1e9
"""What a group costs on a device that may not run it."""

MAX_ORDERS = 24
"""How many orders of different devices are tried."""


def stretches(problem: Problem, num_groups: int) -> NDArray[np.int64]:
    """Group ops into stretches of the program order with about equal work."""
    work = problem.costs.op_ps.min(axis=1).astype(np.float64) + 1.0
    total = np.cumsum(work)
    part = (total - work / 2) * num_groups / total[-1]
    _, grouping = np.unique(np.minimum(part.astype(np.int64), num_groups - 1), return_inverse=True)
    return grouping.astype(np.int64)


def contiguous_split(
    problem: Problem,
    objective: Objective = "latency",
    num_groups: int = 256,
    overlap: bool = True,
) -> Placement:
    """
    Find the best contiguous split of the program order into stretches, one a device.

    For ``throughput`` the largest load of a stretch is least; with `overlap` a stretch's load is
    its computing or what crosses one of its borders, whichever is longer, otherwise their sum. For
    ``latency`` the sum over stretches of computing and of what crosses their borders is least, as
    if they ran one after the other. Bytes that cross a border are those of every tensor made
    before and read after it. Stretches that need more memory than their device has are avoided
    where that is possible.
    """
    units = Units.of(problem, stretches(problem, num_groups))
    tables = _Tables(problem, units)
    best: tuple[float, NDArray[np.int64]] | None = None
    for order in _device_orders(problem):
        cost, devices = _split(tables, order, objective, overlap)
        if best is None or cost < best[0]:
            best = cost, devices
    assert best is not None
    return units.expand(best[1])


def _device_orders(problem: Problem) -> list[tuple[int, ...]]:
    """List orders of the devices; those that are alike keep their own order."""
    kinds = [
        (problem.costs.op_ps[:, d].tobytes(), int(problem.cluster.memory_bytes[d]))
        for d in range(problem.num_devices)
    ]
    classes = [kinds.index(kind) for kind in kinds]
    different = sorted(set(classes))
    return [
        tuple(d for c in order for d in range(len(kinds)) if classes[d] == c)
        for order in islice(permutations(different), MAX_ORDERS)
    ]


class _Tables:
    """Prefix sums over groups: time on each device, bytes that stay, bytes across borders."""

    def __init__(self, problem: Problem, units: Units) -> None:
        graph, count = problem.graph, units.num_groups
        self.problem = problem
        time_ps = np.zeros((count, problem.num_devices))
        np.add.at(time_ps, units.group_of, problem.costs.op_ps)
        time_ps[~units.allowed] = FORBIDDEN_S * PS_PER_S
        self.time_s = np.vstack([np.zeros(problem.num_devices), time_ps]) / PS_PER_S  # [G + 1, D]
        self.time_s = np.cumsum(self.time_s, axis=0)
        stay = np.zeros(count + 1)
        kept = graph.tensor_persistent
        np.add.at(stay, units.group_of[graph.tensor_op[kept]] + 1, graph.tensor_bytes[kept])
        self.stay = np.cumsum(stay)  # [G + 1]
        first = units.group_of[graph.tensor_op]
        last = first.copy()
        np.maximum.at(last, graph.use_tensor, units.group_of[graph.use_op])
        crossing = np.zeros(count + 1)
        moved = last > first
        np.add.at(crossing, first[moved] + 1, graph.tensor_bytes[moved])
        np.add.at(crossing, last[moved] + 1, -graph.tensor_bytes[moved])
        self.crossing = np.cumsum(crossing)  # [G + 1] bytes across the border before group g


def _split(
    tables: _Tables, order: tuple[int, ...], objective: Objective, overlap: bool
) -> tuple[float, NDArray[np.int64]]:
    """Split for one order of devices: its cost, and the device of every group."""
    cluster = tables.problem.cluster
    count = len(tables.stay) - 1
    best = np.full(count + 1, np.inf)  # least cost of the first g groups on devices so far
    best[0] = 0.0
    choices = []
    previous = order[0]
    begins, ends = np.arange(count + 1)[:, None], np.arange(count + 1)[None, :]
    for device in order:
        rate = cluster.bytes_per_s[previous, device] if previous != device else np.inf
        delay = cluster.latency_s[previous, device] if previous != device else 0.0
        across = np.where(tables.crossing > 0, delay + tables.crossing / rate, 0.0)
        work = tables.time_s[None, :, device] - tables.time_s[:, None, device]
        over = np.maximum(
            tables.stay[None, :] - tables.stay[:, None] - cluster.memory_bytes[device], 0.0
        )
        arrives = np.where(begins > 0, across[:, None], 0.0)
        if objective == "latency":
            cost = best[:, None] + work + arrives
        elif overlap:
            cost = np.maximum(best[:, None], np.maximum(work, arrives))
        else:
            leaves = np.where(ends < count, across[None, :], 0.0)
            cost = np.maximum(best[:, None], work + arrives + leaves)
        cost = cost + over  # a byte too much weighs as a second
        cost = np.where(ends > begins, cost, np.inf)
        stay = np.where(ends == begins, best[:, None], np.inf)  # the device gets nothing
        both = np.minimum(cost, stay)
        choice = both.argmin(axis=0)
        choices.append(choice)
        best = both[choice, np.arange(count + 1)]
        previous = device
    devices = np.zeros(count, dtype=np.int64)
    end = count
    for device, choice in zip(reversed(order), reversed(choices), strict=True):
        begin = int(choice[end])
        devices[begin:end] = device
        end = begin
    return float(best[count]), devices
