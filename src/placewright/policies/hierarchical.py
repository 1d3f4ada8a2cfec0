"""
The Hierarchical Planner: Mirhoseini et al., "A Hierarchical Model for Device Placement" (2018).

A feed-forward Grouper gives each op a group, independently of the others; the groups, embedded by
what is in them and what goes between them, are placed by a sequence-to-sequence Placer. Both are
trained at once by the step time of the placements that come out: ``m`` groupings are drawn, and for
each ``k`` placements.

What differs from the paper, in all presets: sizes are taken as logarithms and places in the graph
as shares, not as raw integers; co-located ops are one; groups without ops are left out of the
Placer's sequence.

Letters: ``N`` ops, ``U`` units (what the Grouper decides on), ``C`` classes (units that it decides
on together), ``G`` groups, ``M`` groupings, ``K`` placements for each, ``D`` devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from placewright.grouping import repeated_blocks
from placewright.grouping.layers import find_layers
from placewright.placers.experts import one_device
from placewright.placers.run import Run
from placewright.policies import _kernels
from placewright.policies.features import Room, UnitFeatures, device_features, equal_devices
from placewright.policies.seq2seq import Groups, Limits, Placer, Shaping, glorot
from placewright.policies.settings import Hierarchical, describe
from placewright.policies.training import Cycle, Sample, train
from placewright.problem import Problem
from placewright.simulator import simulate

IntArray = NDArray[np.int64]

NUM_STRETCHES = 8
"""Into how many stretches a layer's pass is cut, for a Grouper that is tied to layers."""

NUM_ELSEWHERE = 4
"""How many groups are placed elsewhere, in the mean, by a policy that begins near a placement."""

NUM_CUTS = 2
"""How often a policy that follows changes the device before it has learned, for each device."""

TOGETHER = 0.99
"""How likely a tied Grouper puts a stretch with the first of its pass before it has learned."""


@dataclass(frozen=True, eq=False)
class Decisions:
    """
    What a Grouper decides: an option for each class of units.

    A unit's group is ``base_of[unit] + option of its class``. Without ties a unit is a class, bases
    are 0 and options are the groups. With ties a class is a stretch of a layer, alike in all equal
    layers, and its option is into which of the layer's groups it goes.
    """

    unit_of: IntArray  # [N]
    class_of: IntArray  # [U]
    base_of: IntArray  # [U]
    num_options: int
    num_groups: int
    prior: float = 0.0  # added to the first option's logit

    @property
    def num_classes(self) -> int:
        """Count the classes."""
        return int(self.class_of.max()) + 1

    @property
    def num_at_first(self) -> int:
        """Count the groups that a Grouper fills before it has learned."""
        return self.num_groups // self.num_options if self.prior else self.num_groups


def place_hierarchical(run: Run, settings: Hierarchical) -> None:
    """Train a Hierarchical Planner on the run's problem until the run is over."""
    room = Room(settings.num_outputs, settings.num_dims, settings.num_neighbours)

    def make_planner(cycle: Cycle) -> Planner:
        times = 2 ** (cycle.round + cycle.is_near)
        finer = replace(settings, num_groups=settings.num_groups * times)
        decisions = _decisions(run.problem, finer, run.grouping, times)
        units = UnitFeatures.of(run.problem, decisions.unit_of, room)
        fixed = _fixed_grouping(settings, decisions, run.seed)
        planner = Planner(run.problem, settings, decisions, units, fixed)
        if cycle.is_near and run.best is not None:
            planner.begin_near(run.best.placement)
        return planner

    train(
        run,
        make_planner,
        settings.training,
        describe(settings),
    )


def _decisions(
    problem: Problem, settings: Hierarchical, grouping: IntArray | None, least: int
) -> Decisions:
    """
    Find what the Grouper decides on: ops, layers, or the groups that were asked for.

    A pass of a layer has `least` groups of its own, or more where there are groups enough.
    """
    if settings.tied_layers and settings.grouping == "learned" and grouping is None:
        return _tied(problem, settings.num_groups, least)
    unit_of = np.arange(problem.num_ops) if grouping is None else np.array(grouping)
    unit_of[problem.colocation_members] = unit_of[problem.colocation_leaders]
    _, unit_of = np.unique(unit_of, return_inverse=True)
    count = int(unit_of.max()) + 1
    most = settings.num_groups
    if settings.groups_per_device is not None:
        most = min(most, settings.groups_per_device * problem.num_devices)
    num_groups = count if settings.grouping == "none" else min(most, count)
    return Decisions(unit_of, np.arange(count), np.zeros(count, np.int64), num_groups, num_groups)


def _tied(problem: Problem, num_groups: int, least: int) -> Decisions:
    """
    Cut each layer's forward and backward pass into stretches of equal work; tie equal layers.

    Each pass has groups of its own, as many as `num_groups` allows, not fewer than `least`. Which
    stretch goes into which of them is decided once for all layers that are equal.
    """
    graph = problem.graph
    layers = find_layers(graph)
    is_back = np.array([phase != "forward" for phase in graph.op_phases])
    passes, pass_of = np.unique(2 * layers.op_layer + is_back, return_inverse=True)
    pass_of[problem.colocation_members] = pass_of[problem.colocation_leaders]
    work = problem.costs.op_ps.min(axis=1) + 1.0
    whole = np.bincount(pass_of, weights=work, minlength=len(passes))
    order = np.argsort(pass_of, kind="stable")
    before = np.cumsum(work[order]) - work[order] / 2
    before -= (np.cumsum(whole) - whole)[pass_of[order]]
    stretch = np.empty(graph.num_ops, dtype=np.int64)
    stretch[order] = NUM_STRETCHES * before / whole[pass_of[order]]
    stretch = np.clip(stretch, 0, NUM_STRETCHES - 1)
    stretch[problem.colocation_members] = stretch[problem.colocation_leaders]
    keys, unit_of = np.unique(pass_of * NUM_STRETCHES + stretch, return_inverse=True)
    unit_pass, unit_stretch = keys // NUM_STRETCHES, keys % NUM_STRETCHES
    pattern = _patterns(problem, passes, layers.names)
    _, class_of = np.unique(pattern[unit_pass] * NUM_STRETCHES + unit_stretch, return_inverse=True)
    options = min(max(num_groups // len(passes), least), NUM_STRETCHES)
    others = max(options - 1, 1)
    return Decisions(
        unit_of,
        class_of,
        unit_pass * options,
        options,
        options * len(passes),
        prior=float(np.log(TOGETHER / (1 - TOGETHER) * others)),
    )


def _patterns(problem: Problem, passes: IntArray, names: tuple[str, ...]) -> IntArray:
    """Number the passes so that those of equal layers have the same number."""
    blocks = repeated_blocks(problem)
    same = {
        (layer, phase == "backward"): pattern
        for layer, phase, pattern in zip(
            blocks.block_layers, blocks.block_phases, blocks.pattern_of_block.tolist(), strict=True
        )
        if phase != "update"
    }
    alone = blocks.num_patterns + np.arange(len(passes))
    found = [same.get((names[p // 2], bool(p % 2)), alone[k]) for k, p in enumerate(passes)]
    return np.array(found, dtype=np.int64)


def _fixed_grouping(settings: Hierarchical, decisions: Decisions, seed: int) -> IntArray | None:
    """Draw the grouping of the ablations; None if it is learned."""
    if settings.grouping == "learned":
        return None
    if settings.grouping == "none":
        return np.arange(decisions.num_classes)
    random = np.random.default_rng([seed, *b"grouping"])
    return random.integers(0, decisions.num_groups, decisions.num_classes)


class Grouper(nn.Module):
    """Scores options for classes, each by itself: two layers, a ReLU between them."""

    def __init__(
        self, type_shares: Tensor, inputs: Tensor, settings: Hierarchical, decisions: Decisions
    ) -> None:
        super().__init__()
        self.type_shares, self.inputs = type_shares, inputs  # [C, T], [C, F]
        hidden = settings.grouper_hidden
        self.types = glorot(type_shares.shape[1], settings.type_size)
        self.inner = glorot(settings.type_size + inputs.shape[1], hidden)
        self.inner_bias = nn.Parameter(torch.zeros(hidden))
        self.outer = glorot(hidden, decisions.num_options)
        bias = torch.zeros(decisions.num_options)
        bias[0] = decisions.prior
        self.outer_bias = nn.Parameter(bias)

    def forward(self) -> Tensor:
        """Give scores, [C, options]."""
        inputs = torch.cat([self.type_shares @ self.types, self.inputs], dim=1)
        return torch.relu(inputs @ self.inner + self.inner_bias) @ self.outer + self.outer_bias


@dataclass(frozen=True, eq=False)
class Drawn:
    """Groupings that were drawn."""

    options: IntArray  # [M, C]
    groups: Groups
    place_of: IntArray  # [M, U] where in the Placer's sequence a unit's group is
    log_chance: Tensor  # [M, C]


class Planner:
    """Draws groupings, and placements of their groups: the policy that is trained."""

    def __init__(
        self,
        problem: Problem,
        settings: Hierarchical,
        decisions: Decisions,
        units: UnitFeatures,
        fixed: IntArray | None,
    ) -> None:
        self.settings, self.decisions, self.units, self.fixed = settings, decisions, units, fixed
        self.num_samples = settings.num_groupings * settings.num_placements
        is_drawn = fixed is None and decisions.num_options > 1
        self.num_groupings = settings.num_groupings if is_drawn else 1
        op_ps = problem.costs.op_ps.min(axis=1)
        self.work = np.bincount(decisions.unit_of, weights=op_ps, minlength=units.num_units) + 1.0
        self.allowed = np.ones((units.num_units, problem.num_devices), dtype=np.bool_)
        np.logical_and.at(self.allowed, decisions.unit_of, problem.allowed)
        self.default = self.allowed.argmax(axis=1)
        self.limits = Limits.none(problem.num_devices)
        self.needs = np.zeros(units.num_units)
        if settings.fit == "mask":
            capacity = problem.cluster.memory_bytes.astype(np.float64)
            self.limits = replace(self.limits, capacity_bytes=capacity)
            self.needs = _needs(problem, units)
        if settings.equal_devices:
            self.limits = replace(self.limits, twin_of=equal_devices(problem))
        self.op_inputs, self.unit_sums = self._inputs()
        devices: int | Tensor = problem.num_devices
        if settings.device_features:
            devices = torch.from_numpy(device_features(problem))
        size = self._group_size()
        self.placer = Placer(size, settings.hidden, devices, is_aligned=settings.aligned)
        self.grouper: Grouper | None = None
        if fixed is None:
            types = torch.from_numpy(_by_class(units.types, decisions))
            self.grouper = Grouper(types, self.op_inputs, settings, decisions)
        self.networks = nn.ModuleList([net for net in (self.placer, self.grouper) if net])
        self.begins_at = torch.full((units.num_units,), -1)  # a checkpoint has it too
        self.networks.register_buffer("begins_at", self.begins_at)

    def _inputs(self) -> tuple[Tensor, NDArray[np.float32]]:
        """Give what the Grouper sees of classes beside types, and what groups sum up of units."""
        settings, units = self.settings, self.units
        seen = [units.shapes, units.flow if settings.any_edges else units.neighbours]
        summed = [units.types, np.maximum(units.shapes, 0.0)]
        if settings.any_edges:
            summed.append(units.flow)
        if settings.path_features:
            seen.append(units.path)
            summed.append(units.path)
        inputs = _by_class(np.concatenate(seen, axis=1), self.decisions)
        sums = np.concatenate([*summed, np.ones((units.num_units, 1))], axis=1)
        return torch.from_numpy(inputs), np.ascontiguousarray(sums, dtype=np.float32)

    def _group_size(self) -> int:
        ways = 2 if self.settings.counts_edges or self.settings.any_edges else 1
        own = self.decisions.num_groups if self.settings.tied_layers else 0
        return self.unit_sums.shape[1] + ways * self.decisions.num_groups + own

    def sample(self, random: np.random.Generator, shaping: Shaping) -> Sample:
        """Draw groupings and placements."""
        drawn = self._group(shaping, random)
        return self._place(drawn, shaping, random, None)

    def _group(
        self,
        shaping: Shaping,
        random: np.random.Generator | None,
        options: IntArray | None = None,
    ) -> Drawn:
        """Draw groupings, or tell how likely those of `options` are."""
        decisions = self.decisions
        if self.fixed is not None:
            return self._drawn(self.fixed[None], torch.zeros(1, 1))
        assert self.grouper is not None
        scores = self.grouper()
        noise = np.zeros((len(scores), 0), dtype=np.float32)
        if shaping.noise and random is not None:
            spread = shaping.noise * float(shaping.logits(scores.detach()).square().mean().sqrt())
            noise = spread * random.standard_normal(tuple(scores.shape), dtype=np.float32)
        shape = self.num_groupings, decisions.num_classes
        uniform = np.zeros(shape, dtype=np.float32)
        if options is None:
            assert random is not None
            uniform = random.random(shape, dtype=np.float32)
            options = np.full(shape, -1)
        log_chance = _Draw.apply(scores, shaping, noise, uniform, options)
        return self._drawn(options, log_chance)

    def _drawn(self, options: IntArray, log_chance: Tensor) -> Drawn:
        """Describe the groups that have units, in the order of their numbers."""
        decisions, units = self.decisions, self.units
        group_of = decisions.base_of + options[:, decisions.class_of]  # [M, U]
        count, most = len(options), decisions.num_groups
        sums = np.zeros((count, most, self.unit_sums.shape[1]), dtype=np.float32)
        _kernels.sum_groups(group_of, self.unit_sums, sums)
        edges = np.zeros((count, most, most), dtype=np.float32)
        weight = np.ones(len(units.edge_from))
        if self.settings.any_edges:
            weight = units.edge_bytes
        _kernels.sum_edges(group_of, units.edge_from, units.edge_to, weight, edges)
        needs = np.zeros((count, most, 1))
        _kernels.sum_groups(group_of, self.needs[:, None], needs)
        table = self._embed(sums, edges)
        allowed = np.ones((count, most, self.allowed.shape[1]), dtype=np.bool_)
        if not self.allowed.all():
            for m in range(count):
                np.logical_and.at(allowed[m], group_of[m], self.allowed)
        is_used = sums[:, :, -1] > 0
        lengths = is_used.sum(axis=1)
        order = np.argsort(~is_used, axis=1, kind="stable")[:, : lengths.max()]
        place_of = np.take_along_axis(np.cumsum(is_used, axis=1) - 1, group_of, axis=1)
        rows = np.arange(count)[:, None]
        groups = Groups(
            lengths,
            torch.from_numpy(table[rows, order]),
            np.ascontiguousarray(allowed[rows, order]),
            np.ascontiguousarray(needs[rows, order, 0]),
            np.ascontiguousarray(self._lean(group_of)[rows, order]),
            self._follow(),
        )
        return Drawn(options, groups, place_of, log_chance)

    def begin_near(self, placement: IntArray) -> None:
        """Make the devices of a placement the likely ones before anything is learned."""
        self.begins_at[self.units.unit_of] = torch.from_numpy(placement)

    def _follow(self) -> float:
        """Give what is added to the score of the device chosen before, where nothing else leads."""
        devices = self.allowed.shape[1]
        if not self.settings.follows or self.begins_at[0] >= 0 or devices == 1:
            return 0.0
        chance = max(0.5, 1 - NUM_CUTS * devices / self.decisions.num_at_first)
        return float(np.log(chance / (1 - chance) * (devices - 1)))

    def _lean(self, group_of: IntArray) -> NDArray[np.float32]:  # [M, G, D]
        """Give what is added to scores: more for the device where a group's units began."""
        count, most = len(group_of), self.decisions.num_groups
        lean = np.zeros((count, most, self.allowed.shape[1]), dtype=np.float32)
        begins_at = self.begins_at.numpy()
        if begins_at[0] < 0:
            return lean
        is_there = np.eye(self.allowed.shape[1])[begins_at] * self.work[:, None]
        work = np.zeros(lean.shape)
        _kernels.sum_groups(group_of, is_there, work)
        chance = max(0.5, 1 - NUM_ELSEWHERE / most)
        others = max(lean.shape[2] - 1, 1)
        np.put_along_axis(
            lean, work.argmax(axis=2)[..., None], np.log(chance / (1 - chance) * others), axis=2
        )
        return lean

    def _embed(
        self, sums: NDArray[np.float32], edges: NDArray[np.float32]
    ) -> NDArray[np.float32]:  # [M, G, E]
        """Embed groups: what is in them, and edges to the others, each part in its own scale."""
        settings = self.settings
        size = sums[..., -1:]
        mean = sums[..., :-1] / np.maximum(size, 1.0)
        if settings.any_edges:
            near = np.log1p(edges) / 25
            parts = [mean, np.log1p(size) / 8, near, near.transpose(0, 2, 1)]
        else:  # the paper's types and shapes are counted, what is beside them is averaged
            width = self.units.types.shape[1] + self.units.shapes.shape[1]
            counts = np.concatenate([sums[..., :width], size], axis=2)
            ways = [edges, edges.transpose(0, 2, 1)] if settings.counts_edges else []
            counts = np.concatenate([counts, *ways], axis=2)
            counts /= counts.max(axis=2, keepdims=True) + 1.0
            parts = [counts, mean[..., width:]]
            parts += [] if settings.counts_edges else [np.sign(edges)]
        if settings.tied_layers:
            own = np.eye(edges.shape[1], dtype=np.float32)[None]
            parts.append(np.broadcast_to(own, edges.shape))
        return np.concatenate(parts, axis=2)

    def _place(
        self,
        drawn: Drawn,
        shaping: Shaping,
        random: np.random.Generator,
        forced: IntArray | None,
    ) -> Sample:
        """Draw placements of the groups, or tell how likely those of `forced` are."""
        each = self.num_samples // self.num_groupings
        choice = self.placer.sample(drawn.groups, each, shaping, self.limits, random, forced)
        place_of = np.repeat(drawn.place_of, each, axis=0)
        by_unit = np.take_along_axis(choice.devices, place_of, axis=1)
        if not self.allowed.all():
            by_unit = np.where(
                self.allowed[np.arange(len(self.allowed)), by_unit], by_unit, self.default
            )
        lengths = torch.from_numpy(np.repeat(drawn.groups.lengths, each))
        entropy = (choice.entropy * lengths).mean()

        def again() -> Sample:
            seen = self._group(shaping, None, drawn.options)
            return self._place(seen, shaping, random, choice.devices)

        return Sample(
            by_unit[:, self.units.unit_of], choice.log_chance, drawn.log_chance, entropy, again
        )


def _by_class(values: NDArray[np.float32], decisions: Decisions) -> NDArray[np.float32]:
    """Give the mean over the units of each class."""
    total = np.zeros((decisions.num_classes, values.shape[1]), dtype=np.float32)
    np.add.at(total, decisions.class_of, values)
    total /= np.bincount(decisions.class_of)[:, None]
    return total


class _Draw(torch.autograd.Function):
    """Draws an option for each class; gives how likely each was."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        shaping: Shaping,
        noise: NDArray[np.float32],
        uniform: NDArray[np.float32],
        options: IntArray,
    ) -> Tensor:
        table = scores.detach().numpy()
        chances = np.empty_like(table)
        log_chances = np.zeros(options.shape, dtype=np.float32)
        shape = np.float32(shaping.temperature), np.float32(shaping.tanh_constant)
        draw: Any = _kernels.draw  # numba's types stop short of so many arguments
        draw(table, *shape, noise, uniform, options, chances, log_chances)
        ctx.kept = table, shape, options, chances
        return torch.from_numpy(log_chances)

    @staticmethod
    def backward(ctx: Any, chance_slopes: Tensor) -> Any:
        table, shape, options, chances = ctx.kept
        slopes = np.empty_like(table)
        by_chance = chance_slopes.contiguous().numpy()
        draw_back: Any = _kernels.draw_back
        draw_back(table, *shape, options, chances, by_chance, slopes)
        return torch.from_numpy(slopes), None, None, None, None


def _needs(problem: Problem, units: UnitFeatures) -> NDArray[np.float64]:  # [U]
    """Estimate what units take of a device's memory: shares of the peak of all on one device."""
    alone = simulate(problem, one_device(problem))
    total = max(float(units.resident_bytes.sum()), 1.0)
    return units.resident_bytes * max(float(alone.peak_bytes.max()) / total, 1.0)
