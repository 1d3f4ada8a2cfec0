"""How long each grouping takes on 100,000 ops, and on one of the papers' models."""

from __future__ import annotations

from benchmarks.figures import Figure, median_s
from benchmarks.worlds import equal_devices, layered_problem
from placewright import Graph, Problem
from placewright.graph_file import Op, Output
from placewright.grouping import (
    by_module,
    colocated,
    heavy_edges,
    repeated_blocks,
    sole_consumer,
)
from placewright.load import load_model


def run() -> list[Figure]:
    """Time every grouping on a random graph, a deep one and a model."""
    layered = layered_problem(100_000)
    deep = _residual_stack(20_000)
    nmt = Problem(load_model("nmt-2"), equal_devices(4))
    heavy_edges(deep, 256)  # compiles, or loads what is compiled
    sole_consumer(deep)
    return [
        figure
        for name, problem in (
            ("100,000 ops, layered", layered),
            ("100,000 ops, residual stack", deep),
            (f"{nmt.num_ops:,} ops, nmt-2", nmt),
        )
        for figure in _times(name, problem)
    ]


def _times(name: str, problem: Problem) -> list[Figure]:
    works = (
        ("colocated", lambda: colocated(problem), None),
        ("colocated, with gradients", lambda: colocated(problem, with_gradients=True), None),
        ("sole consumer", lambda: sole_consumer(problem), 1.0),
        ("heavy edges to 256", lambda: heavy_edges(problem, 256), 3.0),
        ("heavy edges to 8", lambda: heavy_edges(problem, 8), 3.0),
        ("by module", lambda: by_module(problem), None),
        ("repeated blocks", lambda: repeated_blocks(problem), None),
    )
    return [
        Figure(f"{name}: {what}", median_s(work, 5), "s", target, at_most=True)
        for what, work, target in works
    ]


def _residual_stack(num_layers: int) -> Problem:
    """
    Make layers of a weight, a product, a gate, an activation and a sum with the layer's input.

    It is what sole consumers are slow on if merges are found in rounds: each layer becomes one
    only after the layer behind it has.
    """
    ops = [Op(name="x", outputs=[4096])]
    for k in range(num_layers):
        module, reads = f"layers.{k}", ops[-1].name
        ops += [
            Op(name=f"w{k}", kind="param", module=module, outputs=[Output(65536, persistent=True)]),
            _op(f"mm{k}", module, [reads, f"w{k}"]),
            _op(f"gate{k}", module, [f"mm{k}"]),
            _op(f"act{k}", module, [f"mm{k}", f"gate{k}"]),
            _op(f"add{k}", module, [reads, f"act{k}"]),
        ]
    return Problem(Graph.build("residual-stack", ops), equal_devices(4))


def _op(name: str, module: str, inputs: list[str]) -> Op:
    return Op(
        name=name, kind="op", module=module, inputs=inputs, outputs=[4096], flops=1e6, bytes=8192.0
    )
