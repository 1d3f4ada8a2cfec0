"""
Lower bounds on the makespan that hold for every placement, order and choice of triggers.

This module owns three bounds and their proofs. None of them counts transfers or memory: each
says what even perfect links and boundless memory could not beat.

Letters: ``N`` ops, ``D`` devices, ``M`` items (co-location groups, and ops that are in none),
``K`` classes of devices that are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from placewright.arguments import expect_type
from placewright.costs import PS_PER_S
from placewright.graph import BoolArray, FloatArray, IntArray
from placewright.problem import Problem

_ROUNDING = 1e-9
"""Sums of up to a million floats are off by less than this share of themselves."""

_NUM_THRESHOLDS = 64


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the makespan of a problem; the combined one is never below the others."""

    critical_path_ps: int
    load_ps: int
    combined_ps: int

    @property
    def best_ps(self) -> int:
        """Give the largest bound."""
        return self.combined_ps

    @property
    def best_s(self) -> float:
        """Give the largest bound in seconds."""
        return self.best_ps / PS_PER_S


def lower_bounds(problem: Problem) -> Bounds:
    """
    Compute every bound of this module.

    The proofs are in the docstrings of `_path_ps`, `_load_ps` and `_grid_ps`.
    """
    expect_type(problem, Problem, "problem", "a `Problem`")
    heads, tails = _heads_and_tails(problem)
    weights = _device_weights(problem)
    path = _path_ps(problem, heads, tails)
    load = _load_ps(problem, weights)
    grid = _grid_ps(problem, heads, tails, weights)
    return Bounds(path, load, max(path, load, grid))


def _allowed(problem: Problem) -> BoolArray:  # [N, D]
    """Tell where each op may run together with its co-location group."""
    allowed = problem.allowed.copy()
    member = problem.graph.op_colocation >= 0
    allowed[member] &= problem.colocation_allowed[problem.graph.op_colocation[member]]
    return allowed


def _allowed_ps(problem: Problem) -> FloatArray:  # [N, D]
    """Give op times, infinite where the op may not run."""
    return np.where(_allowed(problem), problem.costs.op_ps.astype(np.float64), np.inf)


def _fastest_ps(problem: Problem) -> IntArray:  # [N]
    never = np.iinfo(np.int64).max
    times = np.where(_allowed(problem), problem.costs.op_ps, never)  # exact: no floats
    return np.where(problem.graph.op_is_resident, 0, times.min(axis=1))


def _heads_and_tails(problem: Problem) -> tuple[IntArray, IntArray]:  # [N] each
    graph = problem.graph
    fastest = _fastest_ps(problem).tolist()
    makers = graph.tensor_op[graph.use_tensor].tolist()
    readers = graph.use_op.tolist()
    heads = [0] * graph.num_ops
    for maker, reader in zip(makers, readers, strict=True):  # by maker: a maker's head is final
        through = heads[maker] + fastest[maker]
        if through > heads[reader]:
            heads[reader] = through
    tails = [0] * graph.num_ops
    order = graph.input_order[::-1]  # by falling reader: a reader's tail is final
    makers = graph.tensor_op[graph.use_tensor[order]].tolist()
    for maker, reader in zip(makers, graph.use_op[order].tolist(), strict=True):
        through = tails[reader] + fastest[reader]
        if through > tails[maker]:
            tails[maker] = through
    return np.array(heads, dtype=np.int64), np.array(tails, dtype=np.int64)


def _items_ps(problem: Problem) -> FloatArray:  # [M, D]
    """Add up the times of each co-location group; resident ops take none."""
    times = _allowed_ps(problem)
    times[problem.graph.op_is_resident] *= np.where(
        np.isinf(times[problem.graph.op_is_resident]), 1.0, 0.0
    )
    group = problem.graph.op_colocation
    together = np.zeros((len(problem.graph.colocations), problem.num_devices))
    np.add.at(together, group[group >= 0], times[group >= 0])
    return np.concatenate([together, times[group < 0]])


def _device_weights(problem: Problem) -> FloatArray:  # [D]
    """Find weights, non-negative and of sum 1, that make the load bound large."""
    items = _items_ps(problem)
    alike: dict[bytes, int] = {}
    class_of = np.array([alike.setdefault(c.tobytes(), len(alike)) for c in items.T.copy()])  # [D]
    sizes = np.bincount(class_of)  # [K]
    columns = items[:, np.unique(class_of, return_index=True)[1]]  # [M, K]
    if len(sizes) == 1:
        per_class = np.ones(1)
    elif len(sizes) == 2:
        per_class = _two_class_weights(columns, sizes)
    else:
        per_class = _many_class_weights(columns, sizes)
    weights = np.maximum(per_class, 0.0)[class_of]
    return np.asarray(weights / weights.sum())


def _two_class_weights(columns: FloatArray, sizes: IntArray) -> FloatArray:  # [2]
    # With x the weight of class 0 against 1 for class 1, an item is cheaper on class 0 as long as
    # x < p1 / p0. Between such breakpoints the bound is linear over linear in x, so one is best.
    left, right = columns.T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(left > 0, right / left, np.inf)
    order = np.argsort(ratio)
    ratio, left, right = ratio[order], left[order], right[order]
    on_right = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(right), right, 0.0))])
    on_left = np.concatenate([np.cumsum(np.where(np.isfinite(left), left, 0.0)[::-1])[::-1], [0.0]])
    usable = np.isfinite(ratio) & (ratio > 0)
    if not usable.any():
        return np.array([1.0, 1.0])
    x = ratio[usable]
    at = np.flatnonzero(usable)  # items before it are cheaper on class 1
    value = (on_right[at] + x * on_left[at]) / (sizes[0] * x + sizes[1])
    best = int(value.argmax())
    return np.array([x[best], 1.0])


def _many_class_weights(columns: FloatArray, sizes: IntArray) -> FloatArray:  # [K]
    """Kelley's cutting planes: the bound is concave in the weights and a minimum of planes."""
    from scipy.optimize import linprog

    count = len(sizes)
    weights = np.full(count, 1.0 / sizes.sum())
    best, best_weights = -math.inf, weights
    planes: list[FloatArray] = []
    for _ in range(100):
        with np.errstate(invalid="ignore"):
            priced = np.where(np.isinf(columns), np.inf, weights * columns)
        choice = priced.argmin(axis=1)
        chosen = columns[np.arange(len(columns)), choice]
        plane = np.bincount(choice, weights=chosen, minlength=count).astype(np.float64)
        value = float(plane @ weights)
        if value > best:
            best, best_weights = value, weights
        planes.append(plane)
        # Maximise z, with z below every plane and the weights a convex combination.
        scale = max(float(np.max(planes)), 1.0)
        solution = linprog(
            c=[*[0.0] * count, -1.0],
            A_ub=np.hstack([-np.array(planes) / scale, np.ones((len(planes), 1))]),
            b_ub=np.zeros(len(planes)),
            A_eq=[[*sizes, 0.0]],
            b_eq=[1.0],
            bounds=[(0.0, 1.0)] * count + [(None, None)],
        )
        if solution.x is None or -solution.fun * scale <= best * (1 + 1e-7):
            break
        weights = solution.x[:count]
    return best_weights


def _priced(times: FloatArray, weights: FloatArray) -> FloatArray:
    """Give ``min_d w_d p_d`` of each row; what may not run on a device is infinite there."""
    with np.errstate(invalid="ignore"):
        priced: FloatArray = np.where(np.isinf(times), np.inf, times * weights)
    return np.asarray(priced.min(axis=1))


def _path_ps(problem: Problem, heads: IntArray, tails: IntArray) -> int:
    """
    Bound the makespan by the longest path through the graph, each op on its fastest device.

    Proof. An op starts only when all its inputs are on its device, so not before the ops that
    make them have ended; it takes at least as long as on the fastest device that may run it
    (together with its co-location group). By induction along any path, the last op of the path
    ends no earlier than the sum of these times; the makespan is no earlier than that.
    """
    return int((heads + _fastest_ps(problem) + tails).max())


def _load_ps(problem: Problem, weights: FloatArray) -> int:
    """
    Bound the makespan by the work, however it is shared among unequal devices.

    Proof. Take any weights ``w_d >= 0`` with sum 1. In any placement a device is busy for the
    sum of its ops' times, its load, and the makespan is at least every load, so at least the
    weighted mean of the loads. That mean is the sum over items (co-location groups, or single
    ops) of ``w_d p_d``, with ``d`` the item's device and ``p_d`` its time there, and each term
    is at least ``min_d w_d p_d`` over the devices that may run the item. So for every choice of
    weights ``sum over items of min_d w_d p_d`` is a lower bound.

    The best weights make it the optimum of the linear program that may split items among devices
    (this is that program's dual). For identical devices the weights are equal and the bound is
    work / devices; for two classes of devices the optimum lies where two devices are equally
    good for some item and is found by sorting; beyond that cutting planes find it. The bound
    holds for any weights, so no numerical error of the search can break it.
    """
    total = float(_priced(_items_ps(problem), weights).sum())
    return math.ceil(total * (1 - _ROUNDING))


def _grid_ps(problem: Problem, heads: IntArray, tails: IntArray, weights: FloatArray) -> int:
    """
    Bound the makespan by what must come before, the work in the middle, and what must come after.

    Proof. Let the head of an op be the longest path to it and its tail the longest path behind
    it, each op at its fastest. For any times ``h`` and ``q``, look at the ops with a head of at
    least ``h`` and a tail of at least ``q``. None of them starts before ``h``, by the argument
    of `_path_ps`. They need at least their load bound, by the argument of `_load_ps`
    applied to them alone. When the last of them ends, its tail is still to come. So
    ``h + load + q`` is a lower bound. The largest over a grid of ``h`` and ``q`` is taken. (The
    critical path is the case of one op, the load that of all.)
    """
    running = ~problem.graph.op_is_resident
    if not running.any():
        return 0
    heads, tails = heads[running], tails[running]
    work = _priced(_allowed_ps(problem)[running], weights)
    share = np.linspace(0, 1, _NUM_THRESHOLDS)
    at_head = np.unique(np.quantile(heads, share, method="lower"))
    at_tail = np.unique(np.quantile(tails, share, method="lower"))
    # Row r, column c: the work of ops with head >= at_head[r] and tail >= at_tail[c].
    row = np.searchsorted(at_head, heads, side="right") - 1
    column = np.searchsorted(at_tail, tails, side="right") - 1
    table = np.zeros((len(at_head), len(at_tail)))
    np.add.at(table, (row, column), work)
    above = table[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    whole = above * (1 - _ROUNDING) + at_head[:, np.newaxis] + at_tail[np.newaxis]
    return math.ceil(float(np.where(above > 0, whole, 0.0).max()) * (1 - _ROUNDING))
