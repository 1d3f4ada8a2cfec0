from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from placewright.bounds import lower_bounds
from placewright.errors import InputError
from placewright.graph_file import Op

from . import reference, tiny, worlds


def optimum_ps(problem):
    """The least makespan of all placements and of the two orders without priorities."""
    best = None
    for placement in itertools.product(range(problem.num_devices), repeat=problem.num_ops):
        try:
            problem.check(placement)
        except InputError:
            continue
        for discipline in ("fifo", "program"):
            makespan = reference.simulate(problem, placement, discipline).makespan
            best = makespan if best is None else min(best, makespan)
    return best


@given(worlds.problems(max_ops=5, max_devices=3))
@settings(max_examples=150, deadline=None)
def test_no_bound_is_above_the_optimum(problem):
    bounds = lower_bounds(problem)
    best = optimum_ps(problem)
    assert bounds.critical_path_ps <= best
    assert bounds.load_ps <= best
    assert bounds.combined_ps <= best


@given(worlds.problems(max_ops=4, max_devices=2))
@settings(max_examples=50, deadline=None)
def test_no_bound_is_above_the_optimum_over_all_orders(problem):
    # Every work-conserving order of ready ops is some choice of priorities.
    orders = list(itertools.permutations(range(problem.num_ops)))
    best = min(
        reference.simulate(problem, placement, "priority", order).makespan
        for placement in itertools.product(range(problem.num_devices), repeat=problem.num_ops)
        if (len(set(placement)) == 1 or not problem.colocation_members.size)
        for order in orders
    )
    assert lower_bounds(problem).best_ps <= best


@given(worlds.problems(max_ops=8, max_devices=4))
@settings(max_examples=150, deadline=None)
def test_the_load_bound_is_the_optimum_of_the_linear_program(problem):
    from placewright.bounds import _items_ps

    items = _items_ps(problem)
    items = items[np.isfinite(items).any(axis=1)]
    num_items, num_devices = items.shape
    finite = np.isfinite(items)
    price = np.where(finite, items, 0.0)
    # Variables: the share of each item on each device, and the makespan.
    c = np.zeros(num_items * num_devices + 1)
    c[-1] = 1
    load = np.hstack(
        [np.concatenate([np.diag(row) for row in price], axis=1), -np.ones((num_devices, 1))]
    )
    whole = np.hstack(
        [np.kron(np.eye(num_items), np.ones((1, num_devices))), np.zeros((num_items, 1))]
    )
    limits = [(0, 1 if ok else 0) for ok in finite.reshape(-1)] + [(0, None)]
    solved = linprog(c, load, np.zeros(num_devices), whole, np.ones(num_items), bounds=limits)
    assert lower_bounds(problem).load_ps == pytest.approx(
        np.ceil(solved.fun - 1e-6), abs=1e-6 * max(solved.fun, 1)
    )


def test_the_critical_path_takes_each_op_at_its_fastest():
    problem = tiny.problem(
        [Op(name="a", outputs=[1]), Op(name="b", inputs=["a"], outputs=[1]), Op(name="c")],
        {"a": [3, 9], "b": [8, 2], "c": [4, 4]},
    )
    assert lower_bounds(problem).critical_path_ps == 5


def test_the_critical_path_is_exact_where_floats_are_not():
    assert (
        lower_bounds(tiny.problem([Op(name="a")], {"a": 2**53 + 3})).critical_path_ps == 2**53 + 3
    )


def test_identical_devices_share_the_work():
    problem = tiny.problem([Op(name=f"op{k}") for k in range(3)], {f"op{k}": 10 for k in range(3)})
    assert lower_bounds(problem).load_ps == 15
    assert lower_bounds(problem).best_ps == 15


def test_unequal_devices_share_the_work_by_their_speed():
    # Device 1 is twice as fast: it does two thirds of 30 ps of work (at 0) in 10 ps.
    problem = tiny.problem(
        [Op(name=f"op{k}") for k in range(3)], {f"op{k}": [10, 5] for k in range(3)}
    )
    assert lower_bounds(problem).load_ps == 10


def test_the_combination_adds_what_comes_before_and_after():
    # A head of 10, four middle ops of 10 on two devices, a tail of 10: 10 + 20 + 10.
    ops = [
        Op(name="head", outputs=[1]),
        *(Op(name=f"mid{k}", inputs=["head"], outputs=[1]) for k in range(4)),
        Op(name="tail", inputs=[f"mid{k}" for k in range(4)]),
    ]
    problem = tiny.problem(ops, {op.name: 10 for op in ops})
    assert lower_bounds(problem).critical_path_ps == 30
    assert lower_bounds(problem).load_ps == 30
    assert lower_bounds(problem).combined_ps == 40
    assert lower_bounds(problem).best_ps == 40


def test_colocated_ops_count_as_one():
    ops = [Op(name="a", colocate="x"), Op(name="b", colocate="x")]
    problem = tiny.problem(ops, {"a": [1, 10], "b": [10, 1]})
    assert lower_bounds(problem).load_ps == 6  # 11 on either device, half of it on each
    assert (
        lower_bounds(
            tiny.problem([Op(name="a"), Op(name="b")], {"a": [1, 10], "b": [10, 1]})
        ).best_ps
        == 1
    )


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_bound_of_a_coarse_problem_is_no_lower(data):
    from placewright.coarsening import coarsen, split_cycles

    problem = data.draw(worlds.problems())
    groups = [data.draw(st.integers(0, 3)) for _ in range(problem.num_ops)]
    try:
        coarse = coarsen(problem, split_cycles(problem.graph, groups)).problem
    except InputError:
        return
    # Fewer placements are possible, and merged ops wait for each other.
    assert lower_bounds(coarse).critical_path_ps >= lower_bounds(problem).critical_path_ps
    assert lower_bounds(coarse).load_ps >= lower_bounds(problem).load_ps
