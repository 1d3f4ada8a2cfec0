"""
How many placements a second learned placers sample and learn from, everything included.

`hierarchical` at m=1, k=4 and 256 groups, as it learns, and with a learning rate of 0, when all of
its 256 groups stay in use: what soon stands empty is left out of the Placer's sequence.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from benchmarks.figures import Figure
from placewright.load import load_model, load_problem
from placewright.placing import place

ROWS = (("nmt-8", "k40x8", 20.0), ("inception-v3-b1", "k40x2", 100.0))
SECONDS = 15.0
VARIANTS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("hierarchical", "hierarchical", {}),
    ("hierarchical, no group empty", "hierarchical", {"learning_rate": 0.0}),
    ("colocrl", "colocrl", {}),
    ("hierarchical-plus", "hierarchical-plus", {}),
)


def run() -> list[Figure]:
    """Measure samples and updates a second of every learned placer on both models."""
    figures = []
    for model, cluster, target in ROWS:
        problem = load_problem(load_model(model), cluster)
        for label, placer, options in VARIANTS:
            place(problem, placer, budget="128 samples", options=options)  # compiles
            result = place(problem, placer, budget_s=SECONDS, options=options)
            rate = result.samples / result.wall_s
            batch = {"colocrl": 10, "hierarchical-plus": 64}.get(placer, 4)
            goal = target if placer == "hierarchical" and not options else None
            figures.append(Figure(f"{model}: {label}, placements a second", rate, "", goal))
            figures.append(Figure(f"{model}: {label}, updates a second", rate / batch, ""))
    return figures
