"""How long a large graph takes to load and check."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from benchmarks.figures import Figure, median_s
from placewright import Graph, Op


def run() -> list[Figure]:
    """Time loading a file of 100,000 ops, plain and gzipped."""
    draw = random.Random(0)
    ops = [
        Op(
            name=f"model.layers.{i // 50}.op{i}",
            kind="aten.mm",
            module=f"model.layers.{i // 50}",
            inputs=_inputs(draw, i),
            outputs=(4096 + i,),
            flops=1e6 + i,
            bytes=1e4,
        )
        for i in range(100_000)
    ]
    graph = Graph.build("large", ops)
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".graph.json", ".graph.json.gz"):
            path = Path(folder, f"large{suffix}")
            graph.save(path)
            seconds = median_s(lambda: Graph.load(path), 5)  # noqa: B023
            figures.append(
                Figure(f"load and check 100,000 ops ({suffix})", seconds, "s", 2.0, True)
            )
    return figures


def _inputs(draw: random.Random, i: int) -> tuple[str, ...]:
    makers = {draw.randrange(max(0, i - 100), i) for _ in range(2)} if i else set()
    return tuple(f"model.layers.{k // 50}.op{k}" for k in sorted(makers))
