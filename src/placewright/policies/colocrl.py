"""
ColocRL: Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning" (2017).

Ops are first put into co-located groups by rule. An LSTM reads the groups' embeddings (op types,
output shapes, adjacency); another, with attention, chooses a device for each group in turn.

Letters: ``N`` ops, ``G`` groups, ``D`` devices.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from placewright.grouping import layer_chunks, sole_consumer
from placewright.placers.groups import Units
from placewright.placers.run import Run
from placewright.policies import _kernels
from placewright.policies.features import Room, UnitFeatures
from placewright.policies.seq2seq import Groups, Limits, Placer, Shaping, glorot
from placewright.policies.settings import ColocRL, describe
from placewright.policies.training import Sample, train
from placewright.problem import Problem


def place_colocrl(run: Run, settings: ColocRL) -> None:
    """Train ColocRL on the run's problem until the run is over."""
    grouping = run.grouping
    if grouping is None:
        grouping = colocated_groups(run.problem, settings.max_groups)
    units = Units.of(run.problem, grouping)
    train(
        run,
        lambda _: SequencePolicy(run.problem, settings, units),
        settings.training,
        describe(settings),
    )


def colocated_groups(problem: Problem, max_groups: int) -> NDArray[np.int64]:  # [N]
    """
    Group ops by the paper's rules: what is read by one op only goes with it, gradients with ops.

    The paper then merges by hand what belongs together in each model (each step of an LSTM layer,
    each block of convolutions). Here whole groups are merged that begin in the same stretch of the
    same layer, with about `max_groups` stretches in all.
    """
    groups = sole_consumer(problem, with_gradients=True)
    stretches = layer_chunks(problem, 2 * max_groups)  # half of them are backward passes
    _, first = np.unique(groups, return_index=True)
    _, merged = np.unique(stretches[first], return_inverse=True)
    return np.asarray(merged[groups], dtype=np.int64)


class SequencePolicy:
    """Places given groups one after the other: the policy that is trained."""

    def __init__(self, problem: Problem, settings: ColocRL, units: Units) -> None:
        self.settings, self.units = settings, units
        self.num_samples = settings.num_placements
        seen = UnitFeatures.of(problem, units.group_of, Room())
        count = units.num_groups
        near = np.zeros((1, count, count), dtype=np.float32)
        own = np.arange(count)[None]
        ones = np.ones(len(seen.edge_from))
        _kernels.sum_edges(own, seen.edge_from, seen.edge_to, ones, near)
        self.fixed = torch.from_numpy(
            np.concatenate([seen.shapes, np.sign(near[0]), np.sign(near[0].T)], axis=1)
        )
        self.type_shares = torch.from_numpy(seen.types)
        placer = Placer(
            TYPE_SIZE + self.fixed.shape[1],
            settings.hidden,
            problem.num_devices,
            is_bidirectional=False,
        )
        self.types = glorot(seen.types.shape[1], TYPE_SIZE)
        placer.register_parameter("types", self.types)
        self.networks: nn.Module = placer
        self.limits = Limits.none(problem.num_devices)

    def sample(self, random: np.random.Generator, shaping: Shaping) -> Sample:
        """Draw placements."""
        return self._place(shaping, random, None)

    def _place(
        self, shaping: Shaping, random: np.random.Generator, forced: NDArray[np.int64] | None
    ) -> Sample:
        units = self.units
        groups = Groups(
            np.array([units.num_groups]),
            torch.cat([self.type_shares @ self.types, self.fixed], dim=1)[None],
            units.allowed[None],
            np.zeros((1, units.num_groups)),
        )
        assert isinstance(self.networks, Placer)
        choice = self.networks.sample(
            groups, self.num_samples, shaping, self.limits, random, forced
        )
        return Sample(
            np.stack([units.expand(row) for row in choice.devices]),
            choice.log_chance,
            torch.zeros(1, 1),
            choice.entropy.mean() * units.num_groups,
            lambda: self._place(shaping, random, choice.devices),
        )


TYPE_SIZE = 20
"""How long an op type's embedding is."""
