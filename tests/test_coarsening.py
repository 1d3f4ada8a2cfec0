from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.coarsening import coarsen, split_cycles
from placewright.errors import InputError
from placewright.graph_file import Op, Output
from placewright.simulator import simulate

from . import tiny, worlds


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_group_for_each_op_changes_nothing(data):
    problem = data.draw(worlds.problems())
    coarse = coarsen(problem, np.arange(problem.num_ops))
    assert coarse.op_of.tolist() == list(range(problem.num_ops))
    placement = data.draw(worlds.placements(problem))
    left, right = simulate(problem, placement), simulate(coarse.problem, placement)
    assert left.op_start_ps.tolist() == right.op_start_ps.tolist()
    assert left.makespan_ps == right.makespan_ps
    # A tensor that is not read and not kept became workspace: its memory is the same.
    assert left.peak_bytes.tolist() == right.peak_bytes.tolist()


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_grouping_without_circles_gives_a_problem_whose_placements_expand(data):
    problem = data.draw(worlds.problems())
    groups = split_cycles(
        problem.graph, [data.draw(st.integers(0, 4)) for _ in range(problem.num_ops)]
    )
    try:
        coarse = coarsen(problem, groups)
    except InputError as error:
        if "may run all" in str(error):
            return
        raise
    placement = data.draw(worlds.placements(coarse.problem))
    expanded = coarse.expand(placement)
    problem.check(expanded)
    assert simulate(coarse.problem, placement).device_busy_s == pytest.approx(
        simulate(problem, expanded).device_busy_s
    )
    # Ops of one group end up on one device.
    for group in set(groups.tolist()):
        assert len(set(expanded[groups == group].tolist())) == 1


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_splitting_refines_and_leaves_groupings_without_circles_alone(data):
    problem = data.draw(worlds.problems())
    groups = np.array([data.draw(st.integers(0, 3)) for _ in range(problem.num_ops)])
    split = split_cycles(problem.graph, groups)
    pairs = set(zip(split.tolist(), groups.tolist(), strict=True))
    assert len({part for part, _ in pairs}) == len(pairs)
    try:
        coarsen(problem, groups)
    except InputError as error:
        if "circles" in str(error):
            assert len(pairs) > len(set(groups.tolist()))
            return
    # Resident ops are split off anyway, so a circle through them alone does no harm.
    if not problem.graph.op_is_resident.any():
        assert len(pairs) == len(set(groups.tolist()))


def test_a_circle_of_groups_is_refused_and_can_be_split():
    problem = tiny.chain()
    with pytest.raises(InputError, match="depend on each other in circles; the group of op `a`"):
        coarsen(problem, [0, 1, 0])
    assert split_cycles(problem.graph, [0, 1, 0]).tolist() == [0, 1, 2]
    assert split_cycles(problem.graph, [0, 0, 1]).tolist() == [0, 0, 1]


def test_inner_tensors_become_workspace():
    # Inside the group a's 5 bytes and b's 5 are alive together; c's stay as an output.
    coarse = coarsen(tiny.chain(), [0, 0, 0]).problem
    assert coarse.graph.op_workspace_bytes.tolist() == [10]
    assert coarse.graph.tensor_bytes.tolist() == [5]
    assert coarse.costs.op_ps.tolist() == [[30, 30]]


def test_tensors_that_leave_a_group_keep_their_shapes():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[Output(8, shape=(2, 1))]),
            Op(name="b", inputs=["a"], outputs=[Output(24, shape=(2, 3)), 4]),
            Op(name="c", inputs=["b", "b:1"], outputs=[Output(4, keep=True, shape=())]),
        ],
        {},
    )
    assert coarsen(problem, [0, 0, 1]).problem.graph.tensor_shapes == ((2, 3), None, ())


def test_parameters_of_a_group_become_an_op_beside_it():
    problem = tiny.problem(
        [
            Op(name="w", kind="param", outputs=[Output(10, persistent=True)]),
            Op(name="x", outputs=[1]),
            Op(name="f", inputs=["x", "w"], outputs=[Output(1, keep=True)]),
        ],
        {"x": 1, "f": 4},
    )
    coarse = coarsen(problem, [0, 0, 0])
    assert coarse.problem.graph.op_is_resident.tolist() == [True, False]
    assert coarse.problem.graph.op_colocation.tolist() == [0, 0]
    assert coarse.expand([1, 1]).tolist() == [1, 1, 1]
    assert coarse.expand([[0, 0], [1, 1]]).tolist() == [[0, 0, 0], [1, 1, 1]]


def test_groups_keep_colocation_and_device_kinds():
    ops = [
        Op(name="a", colocate="x"),
        Op(name="b"),
        Op(name="c", colocate="x", devices=["cuda"]),
        Op(name="d", devices=["cpu", "cuda"]),
    ]
    coarse = coarsen(tiny.problem(ops, {}), [0, 0, 1, 1]).problem
    assert coarse.graph.op_colocation.tolist() == [0, 0]
    assert coarse.graph.op_device_kinds == (None, ("cuda",))
    clash = [Op(name="a", devices=["cpu"]), Op(name="b", devices=["cuda"])]
    with pytest.raises(InputError, match="No device kind may run all ops of the group of `b`"):
        coarsen(tiny.problem(clash, {}, worlds.make_cluster(("cpu", "cuda"))), [0, 0])


@pytest.mark.parametrize("grouping", [[0, 0], [0.0, 1.0, 2.0], [[0, 0, 0]]])
def test_a_wrong_grouping_is_refused(grouping):
    with pytest.raises(InputError, match="expected 3 integers, one an op"):
        coarsen(tiny.chain(), grouping)
