from __future__ import annotations

import numpy as np
import pytest

from placewright.costs import Costs
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.graph_file import Op
from placewright.problem import Problem

from . import worlds


def problem(ops, kinds=("cpu", "cuda")):
    return Problem(Graph.build("g", ops), worlds.make_cluster(kinds))


def test_an_op_that_no_device_may_run_is_named():
    with pytest.raises(
        InputError, match="Op `a` may run on tpu, but cluster `world` has only cpu, cuda"
    ):
        problem([Op(name="a", devices=["tpu"])])
    with pytest.raises(InputError, match="Op `a` may run on no device"):
        problem([Op(name="a", devices=[])])


def test_a_colocation_that_no_device_satisfies_is_named():
    ops = [
        Op(name="a", devices=["cpu"], colocate="pair"),
        Op(name="b", devices=["cuda"], colocate="pair"),
    ]
    with pytest.raises(InputError, match=r"all of the co-location group `pair` \(a, b\)"):
        problem(ops)


def test_placements_respect_device_kinds_and_colocation():
    made = problem(
        [
            Op(name="a", devices=["cpu"]),
            Op(name="b", colocate="x"),
            Op(name="c"),
            Op(name="d", colocate="x"),
        ]
    )
    assert made.check([0, 1, 0, 1]).placement.tolist() == [0, 1, 0, 1]
    with pytest.raises(InputError, match="Op `a` is placed on `cuda:1`, but may run only on cpu"):
        made.check([1, 1, 0, 1])
    with pytest.raises(
        InputError, match="Ops `b` and `d` are co-located, but placed on `cuda:1` and `cpu:0`"
    ):
        made.check([0, 1, 0, 0])
    with pytest.raises(InputError, match="co-located"):
        made.check_placements([[0, 1, 0, 1], [0, 1, 0, 0]])


def test_a_step_that_could_outlast_int64_is_refused():
    cluster = worlds.make_cluster(bytes_per_ps=1e-12)
    graph = Graph.build("g", [Op(name="a", outputs=[10**8]), Op(name="b", inputs=["a"])])
    with pytest.raises(InputError, match=r"could take 1e\+08 s"):
        Problem(graph, cluster)


def test_costs_of_another_shape_are_refused():
    graph = Graph.build("g", [Op(name="a")])
    with pytest.raises(InputError, match=r"is for \(3, 2\) \(ops, devices\); expected \(1, 2\)"):
        Problem(graph, worlds.make_cluster(), Costs(np.zeros((3, 2), dtype=np.int64)))
