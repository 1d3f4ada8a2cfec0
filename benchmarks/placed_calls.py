"""
What a call of a placed module costs beside its step, and what a new shape costs.

A decoder of twelve layers (GPT-2 small with 8,192 words), all of it on one core: called without
gradients, called to be trained, and as a `TrainStep`. What comes before a step begins is timed by
taking the step's place.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import placewright as pw
from benchmarks.figures import Figure, median_s
from placewright.execute.calls import NewProgramWarning
from placewright.execute.placed import PlacedStep
from placewright.zoo.transformers import Gpt2

WORDS, LENGTH, CALLS = 8192, 64, 1000


@dataclass(frozen=True)
class _Placed:
    """A decoder that is placed."""

    name: str
    call: Callable[[Tensor, Tensor], Any]  # with words and labels
    whole: Callable[[Tensor, Tensor], Any]  # and all that belongs to a step
    step: PlacedStep
    close: Callable[[], None]


def figures(cluster: pw.Cluster) -> list[Figure]:
    """Measure calls, and the first ones at new shapes."""
    words = torch.randint(WORDS, (2, 1, LENGTH))
    begins, shapes = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NewProgramWarning)
        for make in (_inference, _training, _train_step):
            placed = make(cluster, words)
            begins.append(_time_begin(placed, words))
            shapes.append(_time_shapes(placed, words))
            placed.close()
    return begins + shapes


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels.flatten())


def _plan(step: pw.Capture, cluster: pw.Cluster) -> pw.Plan:
    problem = pw.Problem(step.graph, cluster)
    timeline = pw.simulate(problem, np.zeros(problem.num_ops, dtype=np.int64))
    return pw.Plan.of(timeline, "one core", lower_bound_s=0.0, placer="given")


def _inference(cluster: pw.Cluster, words: Tensor) -> _Placed:
    module = Gpt2(vocabulary=WORDS, max_length=LENGTH).eval()
    placed: Any = pw.apply(_plan(pw.capture(module, words[0]), cluster), module, words[0])
    (made,) = placed._calls.programs.all()

    def call(inputs: Tensor, _: Tensor) -> Any:
        with torch.no_grad():
            return placed(inputs)

    return _Placed("called without gradients", call, call, made.step, placed._calls.close)


def _training(cluster: pw.Cluster, words: Tensor) -> _Placed:
    module = Gpt2(vocabulary=WORDS, max_length=LENGTH)
    how: Any = {"train": True, "loss": _loss, "targets": words[1]}
    plan = _plan(pw.capture(module, words[0], **how), cluster)
    placed: Any = pw.apply(plan, module, words[0], **how)
    (made,) = placed._calls.programs.all()

    def step(inputs: Tensor, labels: Tensor) -> None:
        _loss(placed(inputs), labels).backward()
        module.zero_grad()

    def call(inputs: Tensor, _: Tensor) -> Any:
        return placed(inputs)

    return _Placed("called to be trained", call, step, made.step, placed._calls.close)


def _train_step(cluster: pw.Cluster, words: Tensor) -> _Placed:
    module = Gpt2(vocabulary=WORDS, max_length=LENGTH)
    how: Any = {"loss": _loss, "targets": words[1], "optimizer": "momentum"}
    plan = _plan(pw.capture(module, words[0], train=True, **how), cluster)
    step: Any = pw.TrainStep(plan, module, words[0], **how)
    (made,) = step._programs.all()
    return _Placed("as a `TrainStep`", step, step, made.placed, step.close)


def _time_begin(placed: _Placed, words: Tensor) -> Figure:
    """Time calls until their step begins: binding arguments, guards, finding the program."""
    run = placed.step.run
    begun: list[float] = []
    made: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        begun.append(time.perf_counter())
        made[:] = made or [run(*args, **kwargs)]
        return made[0]

    times = []
    given = [*words]
    for _ in range(2):
        placed.call(*given)
    placed.step.run = note  # type: ignore[method-assign]
    for _ in range(CALLS):
        begin = time.perf_counter()
        placed.call(*given)
        times.append(begun[-1] - begin)
    placed.step.run = run  # type: ignore[method-assign]
    name = f"12-layer decoder {placed.name}: until its step begins"
    target = None if "trained" in placed.name else 50.0  # autograd has its part in that one
    return Figure(name, statistics.median(times) * 1e6, "us", target, at_most=True)


def _time_shapes(placed: _Placed, words: Tensor) -> Figure:
    """Time the first call at shapes that are new, less what later ones take."""
    times = []
    for length in (LENGTH - 1, LENGTH - 2, LENGTH - 3):
        some = words[:, :, :length]
        first_s = median_s(lambda some=some: placed.whole(*some), 1)
        times.append(first_s - median_s(lambda some=some: placed.whole(*some), 3))
    name = f"12-layer decoder {placed.name}: a new shape is ready in"
    return Figure(name, statistics.median(times), "s", 3.0, at_most=True)
