"""
Plans to measure: good, middling and bad ones of one problem, spread over what step times there are.

This module owns which kinds of plan there are, and how many of each. Everything follows from the
problem and a seed.

Letters: ``N`` ops, ``D`` devices, ``L`` layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from placewright.errors import InputError
from placewright.execute.replay import Constants, Replay
from placewright.graph import FloatArray
from placewright.grouping.layers import find_layers
from placewright.placing import place
from placewright.problem import Problem
from placewright.simulator import simulate

Placement = NDArray[np.int64]  # [N]

GOOD, LISTS = (
    ("annealing 300", "annealing 30", "auto 60", "annealing 100", "annealing 1000", "auto 300"),
    ("heft", "m-etf", "m-topo", "peft"),
)
SHARES = (0.5, 0.1, 0.3, 0.02, 0.2, 0.7)
"""Of ops or layers that leave their device in random plans, in turn."""

TURNS = ("searched", "split", "random layers", "listed", "random ops", "alternating")
"""The kinds, in the order in which they get a plan, after those with a single device."""

NEAR = 1.5
"""Plans within so many times of the best are those that a search has to tell apart."""

APART = 0.01
"""Near the best, expected times that differ by less are as good as equal."""

MOVES = (1, 2, 3, 5, 8)
"""Ops of a good plan that go elsewhere in moved ones, in turn."""

RUNS = (1, 8, 2, 32, 4, 128, 16, 64)
"""Of ops after which alternating plans go on with the next device."""

POOL = 4
"""Plans that are made and replayed for each one that is chosen."""


@dataclass(frozen=True, eq=False)
class FidelityPlan:
    """A placement, and where it comes from."""

    name: str
    kind: str
    placement: Placement


def draw_plans(problem: Problem, num_plans: int, seed: int = 0) -> list[FidelityPlan]:
    """
    Make plans of all kinds, no two of them equal, in an order that is random.

    Kinds take turns at a pool of plans; one that has no more is left out. Of the pool half are
    chosen so that their expected times cover all that there are most evenly, single devices that
    differ first; the others likewise, but within `NEAR` times of the best and at least `APART`.
    Where the pool has too few of these, as with devices that are very different, some are made of
    the best plan and of the best device.

    Raises
    ------
    InputError
        Fewer than four plans are wanted.
    """
    if num_plans < 4:
        raise InputError(f"{num_plans} plans are too few; expected 4 or more.")
    random = np.random.default_rng(seed)
    pool = _Pool(problem)
    for name, placement in _single(problem):
        pool.add("one device", name, placement)
    singles = [*range(len(pool.plans))]
    sources = {
        "searched": _searched(problem, seed),
        "split": _splits(problem),
        "random layers": _random(problem, find_layers(problem.graph).op_layer, random),
        "listed": _listed(problem),
        "random ops": _random(problem, np.arange(problem.num_ops), random),
        "alternating": _alternating(problem),
    }
    while len(pool.plans) < POOL * num_plans and sources:
        for kind in [kind for kind in TURNS if kind in sources]:
            found = next(sources[kind], None)
            if found is None:
                del sources[kind]
            elif len(pool.plans) < POOL * num_plans:
                pool.add(kind, *found)
    fastest = min(singles, key=pool.times_s.__getitem__)
    best = int(np.argmin(pool.times_s))
    bases = {"best": pool.plans[best][2], "best device": pool.plans[fastest][2]}
    for name, placement in _moved(problem, bases, random):
        if len(_near(pool.times_s, num_plans)) >= num_plans // 2:
            break
        pool.add("moved", name, placement)
    made = []
    for at in _choose(pool.times_s, num_plans, singles):
        name, kind, placement = pool.plans[at]
        made.append(FidelityPlan(name, kind, placement))
    return [made[k] for k in random.permutation(len(made))]


class _Pool:
    """Different plans of a problem, and what they should take: replayed, with nothing fitted."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: set[bytes] = set()
        self.plans: list[tuple[str, str, Placement]] = []  # name, kind
        self.times_s: list[float] = []

    def add(self, kind: str, name: str, placement: Placement) -> None:
        """Add a plan, unless it is there."""
        placement = settled(self._problem, placement)
        if placement.tobytes() not in self._known:
            self._known.add(placement.tobytes())
            self.plans.append((f"{kind}: {name}", kind, placement))
            replay = Replay.of(simulate(self._problem, placement))
            self.times_s.append(replay.time_s(Constants()))


def _choose(times_s: Sequence[float], size: int, first: Sequence[int]) -> list[int]:
    """Choose times that cover all, then ones that cover those near the least; ascending."""
    values, size = np.log(times_s), min(size, len(times_s))
    every = np.arange(len(values))
    chosen = _spread(values, np.array(first), [*first[:1]], size // 2, APART)
    chosen = _spread(values, every, chosen, size // 2)
    near = np.flatnonzero(values <= values.min() + np.log(NEAR))
    chosen = _spread(values, near, chosen, size, APART)
    chosen = _spread(values, every, chosen, size)  # too few may be near
    return sorted(chosen, key=lambda at: values[at])


def _near(times_s: Sequence[float], size: int) -> list[int]:
    """Find times near the least that are apart, so many at most."""
    values = np.log(times_s)
    near = np.flatnonzero(values <= values.min() + np.log(NEAR))
    return _spread(values, near, [int(values.argmin())], size, APART)


def _spread(
    values: FloatArray,
    among: NDArray[np.int64],
    chosen: list[int],
    size: int,
    apart: float = 0.0,
) -> list[int]:
    """Choose again and again the one that is furthest from all chosen, until there are so many."""
    chosen = [*chosen]
    left = [at for at in among.tolist() if at not in chosen]
    while left and len(chosen) < size:
        gaps = np.abs(values[left][:, None] - values[chosen]).min(axis=1)
        if gaps.max() < apart:
            break
        chosen.append(left.pop(int(gaps.argmax())))
    return chosen


def settled(problem: Problem, placement: Placement) -> Placement:
    """Put ops where they may run, and co-located ones together."""
    found = np.array(placement, dtype=np.int64)
    found[problem.colocation_members] = found[problem.colocation_leaders]
    wrong = ~problem.allowed[np.arange(problem.num_ops), found]
    found[wrong] = problem.allowed[wrong].argmax(axis=1)
    found[problem.colocation_members] = found[problem.colocation_leaders]
    return found


_Source = Iterator[tuple[str, Placement]]


def _single(problem: Problem) -> _Source:
    for d, name in enumerate(problem.cluster.device_names):
        yield name, np.full(problem.num_ops, d, dtype=np.int64)


def _searched(problem: Problem, first: int) -> _Source:
    for seed in range(4 * first, 4 * first + 4):
        for words in GOOD:
            placer, _, samples = words.partition(" ")
            budget = f"{samples} samples"
            placement = place(problem, placer, budget=budget, seed=seed).placement
            yield f"{placer}, {budget}, seed {seed}", placement


def _listed(problem: Problem) -> _Source:
    for placer in LISTS:
        yield placer, place(problem, placer, budget="100 samples").placement


def _splits(problem: Problem) -> _Source:
    """Cut the layers in two, the best cut first; then elsewhere, further and further out."""
    yield "contiguous", place(problem, "contiguous", budget="100 samples").placement
    layers = find_layers(problem.graph)
    before = np.cumsum(layers.flops) - layers.flops / 2
    share = before / max(float(layers.flops.sum()), 1.0)
    last = problem.num_devices - 1
    for cut in (0.5, 0.25, 0.75, 0.9, 0.4, 0.6, 0.1, 0.33, 0.67):
        for order in ((0, last), (last, 0)):
            devices = np.where(share < cut, *order)
            yield f"{cut:.0%} on {problem.cluster.device_names[order[0]]}", devices[layers.op_layer]


def _alternating(problem: Problem) -> _Source:
    """Go from device to device after so many ops, in the order in which one device runs them."""
    alone = simulate(problem, settled(problem, np.zeros(problem.num_ops, dtype=np.int64)))
    order = alone.sequence[alone.sequence < problem.num_ops]
    for run in RUNS:
        devices = np.zeros(problem.num_ops, dtype=np.int64)
        devices[order] = np.arange(len(order)) // run % problem.num_devices
        yield f"after {run} ops", devices


def _moved(
    problem: Problem, bases: Mapping[str, Placement], random: np.random.Generator
) -> _Source:
    """Move a few ops of good plans to random devices."""
    for k in range(20 * len(MOVES)):
        number = MOVES[k % len(MOVES)]
        for name, base in bases.items():
            placement = base.copy()
            ops = random.choice(problem.num_ops, min(number, problem.num_ops), replace=False)
            placement[ops] = random.integers(problem.num_devices, size=len(ops))
            yield f"{number} of the {name}, number {k}", placement


def _random(problem: Problem, group: Placement, random: np.random.Generator) -> _Source:
    """Give random groups random devices, the others one that all of them have."""
    size = int(group.max()) + 1
    for k in count():
        if k == 200:  # there may be but a few different ones
            return
        share = SHARES[k % len(SHARES)]
        home = int(random.integers(problem.num_devices))
        leaves = random.random(size) < share
        devices = np.where(leaves, random.integers(problem.num_devices, size=size), home)
        yield f"{share:.0%}, number {k}", devices[group]
