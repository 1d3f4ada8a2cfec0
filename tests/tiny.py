"""Named small problems, worked out by hand in the tests that use them."""

from __future__ import annotations

import numpy as np

from placewright.costs import Costs
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.problem import Problem

from .worlds import make_cluster


def problem(ops, times, cluster=None):
    """A problem whose op times are given in picoseconds, one an op or one a device."""
    graph = Graph.build("tiny", ops)
    cluster = cluster or make_cluster()
    rows = np.array(
        [np.broadcast_to(times.get(name, 0), cluster.num_devices) for name in graph.op_names]
    )
    return Problem(graph, cluster, Costs(rows.astype(np.int64)))


def chain():
    """a -> b -> c, 10 ps each, tensors of 5 bytes."""
    return problem(
        [
            Op(name="a", outputs=[5]),
            Op(name="b", inputs=["a"], outputs=[5]),
            Op(name="c", inputs=["b"], outputs=[Output(5, keep=True)]),
        ],
        {"a": 10, "b": 10, "c": 10},
    )


def diamond():
    """a feeds b and c, which feed d."""
    return problem(
        [
            Op(name="a", outputs=[4]),
            Op(name="b", inputs=["a"], outputs=[4]),
            Op(name="c", inputs=["a"], outputs=[4]),
            Op(name="d", inputs=["b", "c"], outputs=[Output(1, keep=True)]),
        ],
        {"a": 2, "b": 10, "c": 6, "d": 3},
    )


def streamed():
    """Three layers, each with 10 bytes of weights that may live elsewhere."""
    ops = [Op(name="x", outputs=[1])]
    for k in range(3):
        ops += [
            Op(name=f"w{k}", kind="param", outputs=[Output(10, persistent=True)]),
            Op(name=f"f{k}", inputs=["x" if k == 0 else f"f{k - 1}", f"w{k}"], outputs=[1]),
        ]
    return problem(ops, {"f0": 5, "f1": 5, "f2": 5})
