"""
What running a plan costs beside plain PyTorch, and what a second device brings.

A plan with one device against the same step in eager PyTorch (forward, loss, backward, update), on
one core, on all cores, and on a GPU where there is one; beside a plan for one core, also eager
PyTorch on all of them. A model with two parallel branches on two cores against one, as simulated
and as measured, and against eager PyTorch. What a call costs before its step begins, and a new
shape. Steps alternate; figures are ratios of medians. What others use of the cores is said.
"""

from __future__ import annotations

import copy
import functools
import os
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import placewright as pw
from benchmarks import placed_calls
from benchmarks.figures import Figure
from placewright.execute.devices import Lane, find_device
from placewright.execute.load_watch import LoadWatch
from placewright.execute.placed import PlacedStep
from placewright.zoo.resnet import ResNet
from placewright.zoo.transformers import Gpt2

STEPS, WARM_UP = 11, 4


def run() -> list[Figure]:
    """Measure everything that this machine can."""
    watch = LoadWatch()
    print(watch.before, file=sys.stderr)
    figures = placed_calls.figures(_cluster("cpu:0"))
    figures += [*_against_eager("cpu:0"), *_against_eager("cpu")]
    if torch.cuda.is_available():
        figures += _against_eager("cuda:0")
    figures += _two_branches()
    load = watch.end()
    print("" if load is None else load.words(), file=sys.stderr)
    return figures


def _classified(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels.flatten())


def _models(is_large: bool) -> dict[str, tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    batch, length, words = (64, 1024, 50257) if is_large else (2, 64, 8192)
    images = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
    tokens = torch.randint(words, (2, max(1, batch // 8), length))
    gpt2 = Gpt2(vocabulary=words, max_length=length)
    return {
        "ResNet-50": (ResNet((3, 4, 6, 3)), (images[0],), (images[1],)),
        "GPT-2": (gpt2, (tokens[0],), (tokens[1],)),
    }


def _cluster(*names: str) -> pw.Cluster:
    """Describe devices roughly: only the order of ops comes of it."""
    kind = "cuda" if names[0].startswith("cuda") else "cpu"
    text = f"""
    name = "box"
    [[device]]
    names = {[*names]!r}
    kind = "{kind}"
    memory = "16GiB"
    flops = {{ float32 = 5e10 }}
    memory_bandwidth = "10GB/s"
    launch = "5us"
    [link]
    latency = "30us"
    bandwidth = "8GB/s"
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "box.toml"
        path.write_text(textwrap.dedent(text))
        return pw.Cluster.load(path)


def _alternate(*steps: Callable[[], Any]) -> list[float]:
    """Run steps in turn; give the median time of each."""
    times: list[list[float]] = [[] for _ in steps]
    for k in range(WARM_UP + STEPS):
        for mine, step in zip(times, steps, strict=True):
            begin = time.perf_counter()
            step()
            if k >= WARM_UP:
                mine.append(time.perf_counter() - begin)
    return [statistics.median(mine) for mine in times]


def _against_eager(name: str) -> list[Figure]:
    models = _models(is_large=name.startswith("cuda"))
    figures = [_one_device(name, label, *model) for label, model in models.items()]
    if name.startswith("cuda"):
        small = _models(is_large=False)["GPT-2"]
        figures.append(_one_device(name, "GPT-2 on few words", *small))
    return [figure for each in figures for figure in each]


def _one_device(
    name: str,
    label: str,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    targets: tuple[Tensor, ...],
) -> list[Figure]:
    device = find_device(name)
    plain = copy.deepcopy(module).to(device.torch_device)
    step = pw.capture(
        module, inputs, train=True, loss=_classified, targets=targets, optimizer="momentum"
    )
    problem = pw.Problem(step.graph, _cluster(name))
    timeline = pw.simulate(problem, np.zeros(problem.num_ops, dtype=np.int64))
    styles = [{"graphs": True}] + ([{"graphs": False}] if device.kind == "cuda" else [])
    every = [
        PlacedStep.of_timeline(step, copy.deepcopy(module), timeline, **style) for style in styles
    ]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9, fused=True)
    x = [each.to(device.torch_device) for each in inputs]
    y = [each.to(device.torch_device) for each in targets]

    def eager() -> None:
        optimizer.zero_grad()
        _classified(plain(*x), *y).backward()
        optimizer.step()
        if device.kind == "cuda":
            torch.cuda.synchronize()

    lanes = [Lane(device)]  # eager PyTorch on the same core
    if len(device.cores) == 1:
        lanes.append(Lane(find_device("cpu")))  # and on all of them
    alone = [functools.partial(_wait_for, lane, eager) for lane in lanes]
    runs = [functools.partial(placed.run, [*x, *y]) for placed in every]
    times_s = _alternate(*alone, *runs)
    eager_s, placed_s = times_s[: len(alone)], times_s[len(alone) :]
    for each in (*lanes, *every):
        each.close()
    return _compared(label, name, eager_s, placed_s)


def _wait_for(lane: Lane, work: Callable[[], None]) -> None:
    lane.submit(work).result()


def _compared(label: str, name: str, eager_s: list[float], placed_s: list[float]) -> list[Figure]:
    """Hold a plan's times, with CUDA graphs and without, against those of eager PyTorch."""
    words = f"{label} on {name}: a plan over eager PyTorch ({eager_s[0] * 1e3:.1f} ms)"
    figures = [Figure(words, placed_s[0] / eager_s[0], "x", 1.05, at_most=True)]
    if len(eager_s) > 1:
        words = f"{label} on {name}: a plan over eager PyTorch on all cores"
        figures.append(Figure(words, placed_s[0] / eager_s[1], "x"))
    if len(placed_s) > 1:
        words = f"{label} on {name}: the same without CUDA graphs"
        figures.append(Figure(words, placed_s[1] / eager_s[0], "x"))
    return figures


class _Branches(nn.Module):
    """Two branches of equal work that meet at the end."""

    def __init__(self, width: int = 512, depth: int = 12) -> None:
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.right = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def _two_branches() -> list[Figure]:
    module, x = _Branches(), torch.randn(256, 512)
    step = pw.capture(module, x)
    problem = pw.Problem(step.graph, _cluster("cpu:0", "cpu:1"))
    alone = np.zeros(problem.num_ops, dtype=np.int64)
    apart = np.array([name.startswith("right") for name in step.graph.op_names], dtype=np.int64)
    lines = [pw.simulate(problem, placement) for placement in (alone, apart)]
    one, two = (PlacedStep.of_timeline(step, module, line) for line in lines)
    lane = Lane(find_device("cpu"))

    def eager() -> None:
        with torch.no_grad():
            module(x)

    one_s, two_s, eager_s = _alternate(
        lambda: one.run([x]), lambda: two.run([x]), lambda: lane.submit(eager).result()
    )
    for each in (one, two, lane):
        each.close()
    simulated = lines[0].makespan_s / lines[1].makespan_s
    return [
        Figure("two branches: two cores as devices over one", one_s / two_s, "x", 1.6),
        Figure("two branches: the same, simulated", simulated, "x"),
        Figure("two branches: plain PyTorch on all cores over one device", one_s / eager_s, "x"),
        Figure("two branches: two cores as devices over plain PyTorch", eager_s / two_s, "x"),
    ]
