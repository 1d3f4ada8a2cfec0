"""
A rehearsal of a learned placer: a small policy of the same kind, and a tiny problem to train it on.

Training it has every loop compiled, or loaded compiled, that the placer needs, before the clock of
a run begins. This module owns what may be small: loops are compiled for the kinds of their arrays
(and a dimension of one is of another kind), not for their sizes.
"""

from __future__ import annotations

from dataclasses import fields, replace

from placewright.cluster import Cluster
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.policies.settings import Settings, Training
from placewright.problem import Problem

_SMALL = {
    "max_groups": 8,
    "num_groups": 8,
    "num_groupings": 2,
    "num_placements": 2,
    "hidden": 4,  # two for each direction
    "grouper_hidden": 2,
    "type_size": 2,
    "num_outputs": 2,
    "num_dims": 2,
    "num_neighbours": 2,
}


def shrink(settings: Settings) -> tuple[Settings, int]:
    """
    Make a policy as small as it can be without other kinds of arrays, and say how many samples do.

    It trains for one update, begins anew with twice as many groups, and trains for two, each of two
    epochs: so it does whatever the whole policy may ever do.
    """
    own = {field.name for field in fields(settings)}
    sizes = {name: min(getattr(settings, name), _SMALL[name]) for name in own & _SMALL.keys()}
    batch = sizes["num_placements"] * sizes.get("num_groupings", 1)
    training = Training(learning_rate=0.001, epochs=2, cycle_samples=batch)
    return replace(settings, **sizes, training=training), 3 * batch


def tiny_problem() -> Problem:
    """Make a problem of everything one: layers, parameters, both passes, a tensor with readers."""
    ops = []
    for k in range(3):
        weights = Output(8, persistent=True, shape=(2,))
        out, slope = Output(8, shape=(2,)), Output(8, keep=True, shape=(2,))
        below, above = [f"forward{k - 1}"] * (k > 0), [f"backward{k + 1}"] * (k < 2)
        layer = f"layer.{k}"
        ops += [
            Op(name=f"weights{k}", kind="param", module=layer, outputs=[weights]),
            Op(
                name=f"forward{k}",
                kind="mm",
                module=layer,
                inputs=[*below, f"weights{k}"],
                outputs=[out],
                flops=1e6,
            ),
            Op(
                name=f"backward{k}",
                kind="mul",
                phase="backward",
                module=layer,
                inputs=[*above, f"forward{k}", f"weights{k}"],
                outputs=[slope],
                flops=2e6,
            ),
        ]
    return Problem(Graph.build("rehearsal", ops), Cluster.preset("k40x2"))
