"""
Searches on the evaluator, over groups of ops: random, hill climbing, annealing, cross-entropy.

Each is a dataclass of parameters and a placer. They start from the best candidate that the run
already has, or from everything on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.evaluate import Evaluations
from placewright.grouping import layer_chunks
from placewright.placers.experts import one_device
from placewright.placers.groups import Units
from placewright.placers.repair import repair
from placewright.placers.run import Budget, Run

Groups = NDArray[np.int64]  # [G] device of every group


def _units(run: Run, num_groups: int) -> tuple[Units, Groups]:
    """Group ops, and begin at the run's best candidate, or with everything on one device."""
    _begin(run)
    assert run.best is not None
    placement = np.asarray(run.best.placement)
    units = Units.around(run.problem, _grouping(run, num_groups), placement)
    return units, units.read(placement)


def _begin(run: Run) -> None:
    """Have a first candidate, one that fits if a device alone, or repair, gives one."""
    problem = run.problem
    if run.best is None:
        run.offer([one_device(problem)])
    able = np.flatnonzero(problem.allowed.all(axis=0))
    if run.key[0] > 0 and able.size:
        run.offer([np.full(problem.num_ops, d) for d in able])
    if run.key[0] > 0 and run.best is not None:
        repair(run, np.asarray(run.best.placement))


def _grouping(run: Run, num_groups: int) -> NDArray[np.int64]:
    """Give the grouping that was asked for, or chunks of layers."""
    return layer_chunks(run.problem, num_groups) if run.grouping is None else run.grouping


def _score(found: Evaluations, memory: float) -> NDArray[np.float64]:
    """Make one number of time and overflow: what does not fit costs ten times its share."""
    return found.objective_s * (1.0 + 10.0 * found.overflow_bytes / memory)


@dataclass(frozen=True)
class RandomPlacer:
    """Offers random devices for groups of ops (Mirhoseini et al.'s random grouping baseline)."""

    num_groups: int = 256
    batch: int = 16

    def __call__(self, run: Run) -> None:
        """Sample until the run is over; once without a budget."""
        units = Units.of(run.problem, _grouping(run, self.num_groups))
        random = np.random.default_rng(run.seed)
        while True:
            count = max(run.room(self.batch), 1)
            rows = random.integers(0, run.problem.num_devices, (count, units.num_groups))
            run.offer([units.expand(row) for row in rows])
            if run.is_over or run.budget == Budget():
                return


@dataclass(frozen=True)
class HillClimbing:
    """Moves one group at a time to another device, taking what is better, until nothing is."""

    num_groups: int = 128
    batch: int = 16

    def __call__(self, run: Run) -> None:
        """Climb to a local optimum."""
        units, devices = _units(run, self.num_groups)
        random = np.random.default_rng(run.seed)
        key = run.offer([units.expand(devices)]).key(0)
        is_better = True
        while is_better and not run.is_over:
            is_better = False
            moves = [
                (g, d)
                for g in range(units.num_groups)
                for d in range(run.problem.num_devices)
                if units.allowed[g, d]
            ]
            random.shuffle(moves)
            for begin in range(0, len(moves), self.batch):
                some = [m for m in moves[begin : begin + self.batch] if devices[m[0]] != m[1]]
                some = some[: run.room(len(some))]
                if not some or run.is_over:
                    continue
                rows = np.repeat(devices[None], len(some), axis=0)
                rows[np.arange(len(some)), [g for g, _ in some]] = [d for _, d in some]
                found = run.offer([units.expand(row) for row in rows])
                if found.key(found.best) < key:
                    devices, key, is_better = rows[found.best], found.key(found.best), True


@dataclass(frozen=True)
class Annealing:
    """
    Simulated annealing over groups, coarse ones first, several moves tried at once.

    A move gives a few groups another device: one group, a stretch of neighbours, or all of one
    device's stretch. The temperature falls over the budget (time or samples, whichever there is),
    and begins again, lower, with each finer grouping.
    """

    num_groups: tuple[int, ...] = (32, 128, 512)
    batch: int = 8
    hot: float = 0.03  # of the current objective
    cold: float = 0.0003
    default_samples: int = 2000  # without a budget

    def __call__(self, run: Run) -> None:
        """Anneal until the run is over."""
        begins = _spent(run, self.default_samples)
        coarser = sum(n < run.problem.num_ops for n in self.num_groups)
        stages = self.num_groups[: coarser + 1]  # in the last one, each op is a group, or nearly
        for k, count in enumerate(stages):
            if run.is_over:
                break
            left = 1.0 - begins
            until = begins + left * (k + 1) / len(stages)
            self._stage(run, count, begins + left * k / len(stages), until, k)

    def _stage(self, run: Run, count: int, begin: float, end: float, level: int) -> None:
        problem = run.problem
        units, devices = _units(run, count)
        random = np.random.default_rng([run.seed, level])
        memory = float(problem.cluster.memory_bytes.sum())
        first = run.offer([units.expand(devices)])
        score = float(_score(first, memory)[0])
        while not run.is_over:
            spent = _spent(run, self.default_samples)
            if spent >= end:
                break
            share = (spent - begin) / max(end - begin, 1e-9)
            heat = score * self.hot * 0.3**level * (self.cold / self.hot) ** share
            size = run.room(self.batch)
            if size == 0:
                break
            rows = np.stack([_moved(units, devices, random) for _ in range(size)])
            scores = _score(run.offer([units.expand(row) for row in rows]), memory)
            k = int(np.argmin(scores))
            is_lost = np.isinf(score)  # it failed, and anything else is no worse
            is_better = is_lost or scores[k] < score
            if is_better or random.random() < np.exp((score - scores[k]) / heat):
                devices, score = rows[k], float(scores[k])


def _spent(run: Run, default_samples: int) -> float:
    """Give the share of the budget that is spent."""
    budget = run.budget
    shares = []
    if budget.seconds is not None:
        shares.append(run.wall_s / max(budget.seconds, 1e-9))
    if budget.samples is not None:
        shares.append(run.num_samples / max(budget.samples, 1))
    return max(shares) if shares else run.num_samples / default_samples


def _moved(units: Units, devices: Groups, random: np.random.Generator) -> Groups:
    """Give another device to one group, a stretch of groups, or a run of equal ones."""
    moved = devices.copy()
    group = int(random.integers(units.num_groups))
    kind = random.random()
    begin, end = group, group + 1
    if kind > 0.6:
        end = min(group + 1 + int(random.geometric(0.3)), units.num_groups)
    if kind > 0.9:
        while begin > 0 and devices[begin - 1] == devices[group]:
            begin -= 1
    choices = np.flatnonzero(units.allowed[group])
    near = [devices[k] for k in (begin - 1, end) if 0 <= k < units.num_groups]
    if near and random.random() < 0.5:
        device = near[int(random.integers(len(near)))]  # smooths borders between devices
    else:
        device = choices[int(random.integers(len(choices)))] if len(choices) else devices[group]
    moved[begin:end] = device
    return moved


@dataclass(frozen=True)
class CrossEntropy:
    """
    Cross-entropy search over groups (Post: Gao et al., 2018, without its gradient steps).

    Each group has a distribution over devices of its own. Of each batch the best tenth moves the
    distributions towards itself, mixed with a little of the uniform one.
    """

    num_groups: int = 64
    batch: int = 64
    elite: float = 0.1
    rate: float = 0.3
    uniform: float = 0.02
    default_samples: int = 4000  # without a budget

    def __call__(self, run: Run) -> None:
        """Sample and refit until the run is over."""
        problem = run.problem
        units = Units.of(problem, _grouping(run, self.num_groups))
        random = np.random.default_rng(run.seed)
        memory = float(problem.cluster.memory_bytes.sum())
        flat = np.where(units.allowed, 1.0, 0.0)
        flat[flat.sum(axis=1) == 0] = 1.0
        flat /= flat.sum(axis=1, keepdims=True)
        chances = flat.copy()
        is_first = run.best is None
        _begin(run)
        assert run.best is not None
        if not is_first:
            chances = 0.5 * chances
            chances[np.arange(units.num_groups), units.read(np.asarray(run.best.placement))] += 0.5
        while not run.is_over and _spent(run, self.default_samples) < 1:
            size = run.room(self.batch)
            if size == 0:
                break
            drawn = random.random((size, units.num_groups, 1))
            rows = (drawn > chances.cumsum(axis=1)[None]).sum(axis=2)
            rows = np.minimum(rows, problem.num_devices - 1)
            scores = _score(run.offer([units.expand(row) for row in rows]), memory)
            best = np.argsort(scores, kind="stable")[: max(1, int(self.elite * size))]
            counts = np.zeros_like(chances)
            for row in rows[best]:
                counts[np.arange(units.num_groups), row] += 1 / len(best)
            chances = (1 - self.rate) * chances + self.rate * counts
            chances = (1 - self.uniform) * chances + self.uniform * flat


SEARCHES: dict[str, Callable[[Run], None]] = {
    "random": RandomPlacer(),
    "hill-climbing": HillClimbing(),
    "annealing": Annealing(),
    "cross-entropy": CrossEntropy(),
}
"""The searches, by name, with their usual parameters."""
