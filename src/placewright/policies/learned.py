"""
Learned placers as placers: by name, changed by options, run like any other.

PyTorch is imported when one runs, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from placewright.errors import InputError
from placewright.evaluate import SimulatedEvaluator
from placewright.placers.run import Budget, Run
from placewright.policies.memory import check_memory
from placewright.policies.rehearsal import shrink, tiny_problem
from placewright.policies.settings import PRESETS, ColocRL, Settings, change
from placewright.problem import Problem


@dataclass(frozen=True)
class Learned:
    """A placer that trains a policy on the run's problem until the budget is spent."""

    settings: Settings

    def __call__(self, run: Run) -> None:
        """Train and place."""
        try:
            import torch  # noqa: F401
        except ImportError:
            raise InputError(
                'Learned placers need PyTorch: `pip install "placewright[torch]"`.'
            ) from None
        if isinstance(self.settings, ColocRL):
            from placewright.policies.colocrl import place_colocrl

            place_colocrl(run, self.settings)
        else:
            from placewright.policies.hierarchical import place_hierarchical

            place_hierarchical(run, self.settings)

    def prepare(self, problem: Problem) -> None:
        """
        Refuse what takes too much memory; have all loops compiled by training on a tiny problem.

        Raises
        ------
        InputError
            It would take more memory than this machine has, or PyTorch is missing.
        """
        check_memory(problem, self.settings)
        _rehearse(*shrink(self.settings))

    @property
    def advice(self) -> str:
        """Say what to try when nothing that the policy sampled fits."""
        if self.settings.training.failure == "penalty":
            return ""
        return (
            " All samples failed alike, which teaches a policy nothing; try `failure=penalty`"
            " (`--set`), or the placer `hierarchical-plus`."
        )


@functools.cache
def _rehearse(settings: Settings, num_samples: int) -> None:
    """Train on a tiny problem, once in this process."""
    problem = tiny_problem()
    budget = Budget(samples=num_samples)
    Learned(settings)(Run(problem, SimulatedEvaluator(problem), budget=budget))


POLICIES: dict[str, Learned] = {name: Learned(settings) for name, settings in PRESETS.items()}
"""The learned placers, by name."""


def with_options(placer: Learned, options: Mapping[str, Any]) -> Learned:
    """
    Change settings of a learned placer by name, those of its training too.

    Raises
    ------
    InputError
        It has no such setting, or the value is none that it can have.
    """
    return Learned(change(placer.settings, options))
