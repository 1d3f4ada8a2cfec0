"""How fast models become graphs, how much memory that takes, and how large the graphs are."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

from benchmarks.figures import Figure, median_s
from placewright.zoo import RECIPES

SPEED = ("nmt-8", "resnet-152", "bert-base", "llama-7b", "moe")
COMMAND = [sys.executable, "-m", "placewright.cli", "inspect", "nmt-8", "--json"]


def run() -> list[Figure]:
    """Capture in processes of their own, and load from the cache."""
    figures = []
    for name in SPEED:
        traced, wall_s, peak_kb = _capture(name)
        figures.append(Figure(f"{name}: traced nodes a second", traced / wall_s, "/s", 1000.0))
        if name == "nmt-8":
            figures.append(Figure("nmt-8: capture", wall_s, "s", 180.0, True))
            figures.append(Figure("nmt-8: memory of capture", peak_kb / 1e6, "GB", 4.0, True))
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"PLACEWRIGHT_CACHE": cache}
        _run(COMMAND, environment)
        from_cache_s = median_s(lambda: _run(COMMAND, environment), 5)
        figures.append(Figure("inspect nmt-8 from the cache", from_cache_s, "s", 2.0, True))
    return figures + _sizes()


def _sizes() -> list[Figure]:
    """Put our graphs beside the sizes that are quoted for the Hierarchical Planner's."""
    from placewright.load import load_model

    figures = []
    for name, recipe in RECIPES.items():
        if recipe.paper_ops is not None:
            ops = load_model(name).num_ops
            label = f"{name}: ops (TensorFlow's graph: {recipe.paper_ops:,}, quoted, not verified)"
            figures.append(Figure(label, float(ops), "ops"))
            figures.append(Figure(f"{name}: TensorFlow's over ours", recipe.paper_ops / ops, "x"))
    return figures


def _capture(name: str) -> tuple[int, float, int]:
    """Capture one model in a fresh process: aten calls, seconds of `capture` alone, peak memory."""
    done = _run([sys.executable, "-m", "benchmarks.bench_capture", name], {**os.environ})
    traced, wall_s, peak_kb = done.stdout.split()
    return int(traced), float(wall_s), int(peak_kb)


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def main(name: str) -> None:
    """Capture one model and print what that took."""
    from placewright import zoo
    from placewright.frontends.torch import capture

    capture(**zoo.build("tiny-resnet").arguments())  # PyTorch loads parts of itself when first used
    arguments = zoo.build(name).arguments()
    began = time.perf_counter()
    made = capture(**arguments)
    wall_s = time.perf_counter() - began
    print(made.num_traced, wall_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    main(sys.argv[1])
