"""
What people do by hand: everything on one device, and the human experts.

The two experts are derived from module paths alone, and were fixed before this project had any
search, so that nobody could choose a weak opponent for it. This module owns their rules:

* `expert_paper` does what the papers describe: each layer of an unrolled recurrent network on a
  GPU of its own, in turn, embeddings with the first, what else there is (attention, softmax) with
  the last; other networks in contiguous blocks of layers with about equal work.
* `expert_strong` is the best contiguous split of the layers, in forward order, over any number of
  GPUs, one included, by simulated time.

An op that may not run where its layer is goes to the first device that may run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from placewright.errors import InputError
from placewright.grouping.layers import Layers, find_layers
from placewright.problem import Problem
from placewright.simulator import simulate_many

Placement = NDArray[np.int64]  # [N]

MAX_SPLITS = 300
"""How many splits of one number of parts `expert_strong` tries at once; beyond, it climbs."""


def cpu_only(problem: Problem) -> Placement:
    """
    Put everything on the first CPU.

    Raises
    ------
    InputError
        There is none.
    """
    found = [d for d, kind in enumerate(problem.cluster.device_kinds) if kind == "cpu"]
    if not found:
        raise InputError(f"Cluster `{problem.cluster.name}` has no device of kind `cpu`.")
    return _settled(problem, np.full(problem.num_ops, found[0]))


def one_gpu(problem: Problem) -> Placement:
    """
    Put everything on the first device that is no CPU.

    Raises
    ------
    InputError
        There is none.
    """
    return _settled(problem, np.full(problem.num_ops, accelerators(problem)[0]))


def one_device(problem: Problem) -> Placement:
    """Put everything on the first device that is no CPU, or if there is none on the first CPU."""
    has_gpu = any(kind != "cpu" for kind in problem.cluster.device_kinds)
    return one_gpu(problem) if has_gpu else cpu_only(problem)


def expert_paper(problem: Problem) -> Placement:
    """
    Place as the papers' authors describe that experts do.

    Raises
    ------
    InputError
        There is no device but CPUs.
    """
    devices = np.array(accelerators(problem))
    layers = find_layers(problem.graph)
    if layers.is_recurrent.any():
        at = _recurrent_devices(layers, len(devices))
    else:
        at = _balanced(layers.flops, len(devices))
    return _settled(problem, devices[at][layers.op_layer])


def expert_strong(problem: Problem) -> Placement:
    """
    Place by the best contiguous split of the layers, by simulated time.

    For each number of parts every split is simulated if there are at most `MAX_SPLITS`; otherwise
    the search starts from parts of equal work or of equally many layers, whichever is better, and
    moves one border at a time while that helps. A split that fits memory is better than one that
    does not. Recurrent networks are split by layer of the stack as well (encoder and decoder
    layers of one number together), and what `expert_paper` does is tried too, so that this is
    never slower.

    Raises
    ------
    InputError
        There is no device but CPUs.
    """
    devices = np.array(accelerators(problem))
    layers = find_layers(problem.graph)
    orders = [np.arange(layers.num_layers)]
    if layers.is_recurrent.any():
        orders += _stack_orders(layers)
    paper = expert_paper(problem)
    tried = simulate_many(problem, paper[None])
    best = (float(tried.overflow_bytes[0]), float(tried.makespan_s[0])), paper
    for order in orders:
        for parts in range(1, min(len(devices), layers.num_layers) + 1):
            found = _best_split(problem, layers, order, devices, parts)
            if found[0] < best[0]:
                best = found
    return best[1]


BASELINES: dict[str, Callable[[Problem], Placement]] = {
    "cpu-only": cpu_only,
    "one-gpu": one_gpu,
    "expert-paper": expert_paper,
    "expert-strong": expert_strong,
}
"""What people do by hand, by name."""


def accelerators(problem: Problem) -> list[int]:
    """
    List the devices that are no CPUs.

    Raises
    ------
    InputError
        There is none.
    """
    found = [d for d, kind in enumerate(problem.cluster.device_kinds) if kind != "cpu"]
    if not found:
        raise InputError(
            f"Cluster `{problem.cluster.name}` has only CPUs; this placement needs another device."
        )
    return found


def _settled(problem: Problem, placement: Placement) -> Placement:
    """Keep co-located ops together, where the first is, and move what may not run there."""
    settled = placement.copy()
    settled[problem.colocation_members] = placement[problem.colocation_leaders]
    ops = np.arange(problem.num_ops)
    allowed = problem.allowed.copy()
    grouped = problem.graph.op_colocation >= 0
    allowed[grouped] = problem.colocation_allowed[problem.graph.op_colocation[grouped]]
    return np.where(allowed[ops, settled], settled, allowed.argmax(axis=1))


def _position(name: str) -> int:
    """Give a layer's number in its stack: 3 of ``decoder.3``."""
    return next((int(part) for part in reversed(name.split(".")) if part.isdecimal()), 0)


def _recurrent_devices(layers: Layers, count: int) -> NDArray[np.int64]:
    """Give layer k of every stack to device k, embeddings to the first, the rest to the last."""
    at = np.where(layers.multiplies, count - 1, 0)
    for k in np.flatnonzero(layers.is_recurrent):
        if layers.names[k].rpartition(".")[2].isdecimal():
            at[k] = _position(layers.names[k]) % count
    return at


def _stack_orders(layers: Layers) -> list[NDArray[np.int64]]:
    """
    Order layers by their number in their stack, attention and softmax last.

    Embeddings come first; or, in a second order, those that are reached only after a recurrent
    layer (of the decoder's words) last.
    """
    last = max(_position(name) for name in layers.names) + 1
    first = int(np.argmax(layers.is_recurrent))
    orders = []
    for late in (-1, last):
        depth = [
            _position(name)
            if name.rpartition(".")[2].isdecimal()
            else last
            if layers.multiplies[k]
            else (-1 if k < first else late)
            for k, name in enumerate(layers.names)
        ]
        orders.append(np.argsort(depth, kind="stable"))
    return orders


def _balanced(work: Sequence[float] | NDArray[np.float64], parts: int) -> NDArray[np.int64]:
    """Cut a sequence into parts of about equal work: each layer goes where its middle falls."""
    total = np.cumsum(work)
    middle = total - np.asarray(work) / 2
    part = (middle * parts / max(float(total[-1]), 1e-300)).astype(np.int64)
    made: NDArray[np.int64] = np.minimum(part, parts - 1)
    return made


def _best_split(
    problem: Problem,
    layers: Layers,
    order: NDArray[np.int64],
    devices: NDArray[np.int64],
    parts: int,
) -> tuple[tuple[float, float], Placement]:
    """Find the best split of the layers, in `order`, into so many parts."""
    rank = np.empty(layers.num_layers, dtype=np.int64)
    rank[order] = np.arange(layers.num_layers)

    def place(borders: tuple[int, ...]) -> Placement:
        part = np.searchsorted(np.array(borders, dtype=np.int64), rank, side="right")
        return _settled(problem, devices[part][layers.op_layer])

    def judge(
        splits: Iterable[tuple[int, ...]],
    ) -> list[tuple[tuple[float, float], tuple[int, ...]]]:
        tried = [*splits]
        batch = simulate_many(problem, np.stack([place(borders) for borders in tried]))
        keys = zip(batch.overflow_bytes.tolist(), batch.makespan_s.tolist(), strict=True)
        return [*zip(keys, tried, strict=True)]

    num_layers = layers.num_layers
    if comb(num_layers - 1, parts - 1) <= MAX_SPLITS:
        key, borders = min(judge(combinations(range(1, num_layers), parts - 1)))
        return key, place(borders)
    starts = []
    for work in (layers.flops[order], np.ones(num_layers)):
        part = _balanced(work, parts)
        borders = tuple(int(np.searchsorted(part, k)) for k in range(1, parts))
        starts.append(_spread(borders, num_layers))
    key, borders = min(judge(starts))
    while True:
        found = min(judge(_neighbours(borders, num_layers)))
        if found[0] >= key:
            return key, place(borders)
        key, borders = found


def _spread(borders: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Push borders apart so that no part is empty."""
    made: list[int] = []
    for k, border in enumerate(borders):
        low = made[-1] + 1 if made else 1
        made.append(min(max(border, low), count - (len(borders) - k)))
    return tuple(made)


def _neighbours(borders: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """List the splits with one border moved by one or two layers."""
    found = []
    for k in range(len(borders)):
        for step in (-2, -1, 1, 2):
            moved = [*borders]
            moved[k] += step
            edges = [0, *moved, count]
            if all(a < b for a, b in pairwise(edges)):
                found.append(tuple(moved))
    return found
