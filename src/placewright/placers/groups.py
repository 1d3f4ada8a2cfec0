"""
What searches move about: groups of ops that are placed together.

This module owns how a device for each group becomes a placement: co-located ops follow the first of
them, and a group's ops that may not run on its device go to the first one they may.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.grouping._numbering import number_groups
from placewright.placers.run import Placement
from placewright.problem import Problem


@dataclass(frozen=True, eq=False)
class Units:
    """
    Groups of ops as a search sees them.

    ``G`` groups; only devices that some op may use, and that can be of use, are considered.
    """

    problem: Problem
    group_of: NDArray[np.int64]  # [N] groups, co-located ops in one
    allowed: NDArray[np.bool_]  # [G, D] every op of the group may run there

    @classmethod
    def of(cls, problem: Problem, grouping: NDArray[np.int64]) -> Units:
        """Make units of a grouping: co-located ops join the group of the first of them."""
        group_of = np.asarray(grouping, dtype=np.int64).copy()
        group_of[problem.colocation_members] = group_of[problem.colocation_leaders]
        group_of = number_groups(group_of)
        allowed = np.ones((int(group_of.max()) + 1, problem.num_devices), dtype=np.bool_)
        np.logical_and.at(allowed, group_of, problem.allowed)
        return cls(problem, group_of, allowed)

    @classmethod
    def around(cls, problem: Problem, grouping: NDArray[np.int64], placement: Placement) -> Units:
        """Make units of a grouping, split where `placement` splits it, so that it can be told."""
        key = np.asarray(grouping, dtype=np.int64) * problem.num_devices + placement
        return cls.of(problem, number_groups(key))

    @property
    def num_groups(self) -> int:
        """Count the groups."""
        return len(self.allowed)

    def expand(self, devices: NDArray[np.int64]) -> Placement:
        """Turn a device for each group into one for each op."""
        problem = self.problem
        placement = devices[self.group_of]
        ops = np.arange(problem.num_ops)
        wrong = ~problem.allowed[ops, placement]
        if wrong.any():
            placement = np.where(wrong, problem.allowed.argmax(axis=1), placement)
            placement[problem.colocation_members] = placement[problem.colocation_leaders]
            allowed = problem.colocation_allowed
            groups = problem.graph.op_colocation
            grouped = groups >= 0
            bad = np.zeros(problem.num_ops, dtype=np.bool_)
            bad[grouped] = ~allowed[groups[grouped], placement[grouped]]
            placement[bad] = allowed.argmax(axis=1)[groups[bad]]
        return placement

    def read(self, placement: Placement) -> NDArray[np.int64]:
        """Turn a placement into a device for each group: that of most of its work."""
        problem = self.problem
        ops = np.arange(problem.num_ops)
        weight = problem.costs.op_ps[ops, placement] + 1.0
        votes = np.zeros((self.num_groups, problem.num_devices))
        np.add.at(votes, (self.group_of, placement), weight)
        most: NDArray[np.int64] = votes.argmax(axis=1)
        return most
