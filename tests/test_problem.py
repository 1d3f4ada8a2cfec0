from __future__ import annotations

import numpy as np
import pytest

from placewright.costs import Costs
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.graph_file import Op
from placewright.problem import Candidate, Problem

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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"placement": None}, "`placement` is None; expected the number of a device for each op"),
        ({"placement": [[0], [0, 1]]}, r"`placement` is \[\[0\], \[0, 1\]\]; expected"),
        ({"placement": [0], "discipline": "fif"}, "`discipline` is 'fif'; .* Is it `fifo`"),
        ({"placement": [0], "discipline": None}, "`discipline` is None; expected fifo, program"),
        (
            {"placement": [0], "discipline": "priority", "priorities": "high"},
            "`priorities` is 'high'; expected a number for each op",
        ),
        (
            {"placement": [0], "discipline": "priority", "priorities": [[1], [1, 2]]},
            "expected a number for each op",
        ),
        ({"placement": [0], "triggers": [1]}, r"`triggers` is \[1\]; expected a mapping"),
        ({"placement": [0], "triggers": {1.5: 2}}, "`triggers` holds 1.5: 2; expected a mapping"),
        ({"placement": [0], "triggers": {(0.5, 0): 2}}, r"`triggers` holds \(0.5, 0\): 2"),
        ({"placement": [0], "triggers": {(0, 0): None}}, r"`triggers` holds \(0, 0\): None"),
    ],
)
def test_wrong_arguments_of_a_candidate_are_named(fields, words):
    with pytest.raises(InputError, match=words):
        Candidate(**fields)


def test_a_problem_is_of_a_graph_a_cluster_and_costs():
    graph, cluster = Graph.build("g", [Op(name="a")]), worlds.make_cluster()
    for parts, words in (
        ((None, cluster), "`graph` is None; expected a `Graph`"),
        ((graph, "k40x4"), "`cluster` is 'k40x4'; expected a `Cluster`"),
        ((graph, cluster, [[1, 1]]), r"`costs` is \[\[1, 1\]\]; expected `Costs`"),
    ):
        with pytest.raises(InputError, match=words):
            Problem(*parts)
