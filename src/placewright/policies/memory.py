"""
How much memory training a policy takes, before any of it is taken.

This module owns the estimate: the arrays that grow with a setting, as many of each as there are at
once. Measured on `nmt-2` it is between two thirds and four thirds of what is taken.

Letters: ``N`` ops, ``D`` devices, ``G`` groups, ``M`` groupings, ``B`` samples, ``H`` hidden size,
``E`` size of a group's embedding.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any

from placewright.errors import TooLargeError
from placewright.grouping import sole_consumer
from placewright.policies.settings import ColocRL, Hierarchical, Settings
from placewright.problem import Problem
from placewright.units import format_bytes

LEAST: dict[str, Any] = {
    "max_groups": 1,
    "grouping": "learned",
    "num_groups": 1,
    "num_groupings": 1,
    "num_placements": 1,
    "hidden": 2,
    "grouper_hidden": 1,
    "type_size": 1,
    "num_outputs": 0,
    "num_dims": 0,
    "num_neighbours": 0,
}
"""The settings that sizes depend on, each at its least."""


def check_memory(problem: Problem, settings: Settings) -> None:
    """
    Refuse to train what takes more memory than this machine has.

    Raises
    ------
    TooLargeError
        It does; the message names the settings that make it so large.
    """
    needs, has = estimate_bytes(problem, settings), _machine_bytes()
    if needs <= has:
        return
    about = f"about {format_bytes(needs)}" if needs < 2**50 else "more than 1,000 TiB"
    raise TooLargeError(
        f"Training this policy would take {about} of memory, and this machine has"
        f" {format_bytes(has)}. What makes it so large: {_large(problem, settings, needs)}. Make"
        " that smaller."
    )


def estimate_bytes(problem: Problem, settings: Settings) -> int:
    """Estimate the memory that training takes, beside the problem and the simulator."""
    num_ops, num_devices = problem.num_ops, problem.num_devices
    hidden, each = settings.hidden, settings.num_placements
    if isinstance(settings, ColocRL):
        groups, groupings, ways = _num_colocated(problem, settings), 1, 2
        seen, grouper = 0, 0
    else:
        groups, groupings, ways = _num_groups(problem, settings), settings.num_groupings, 1
        seen = settings.num_outputs * settings.num_dims + 2 * settings.num_neighbours
        inner = settings.grouper_hidden
        weights = inner * (settings.type_size + seen + groups)
        # Scores, chances and their gradient; what is between the layers and its gradient.
        grouper = 4 * weights + num_ops * (3 * groups + 3 * inner)
    samples = groupings * each
    size = ways * groups + seen
    # Weights, gradients and Adam's two means: the encoder reads E, the rest is square.
    placer = 4 * (4 * hidden * size + 12 * hidden * hidden)
    # The decoder's states, queries and gates and their gradients; attention and its gradient.
    decoder = samples * groups * (16 * hidden + 2 * groups + 4 * num_devices)
    embedded = groupings * groups * (2 * size + 12 * hidden)
    placements = 4 * samples * num_ops  # int64, by unit and by op
    return 4 * (grouper + placer + decoder + embedded + placements + 4 * num_ops * seen)


def _num_colocated(problem: Problem, settings: ColocRL) -> int:
    most = int(sole_consumer(problem, with_gradients=True).max()) + 1
    return min(settings.max_groups, most)


def _num_groups(problem: Problem, settings: Hierarchical) -> int:
    if settings.grouping == "none":
        return problem.num_ops
    most = settings.num_groups
    if settings.groups_per_device is not None:
        most = min(most, settings.groups_per_device * problem.num_devices)
    return min(most, problem.num_ops)


def _large(problem: Problem, settings: Settings, needs: int) -> str:
    """Name the settings without which it would take less than half, the largest part first."""
    left = {}
    for name in (field.name for field in fields(settings)):
        if name in LEAST:
            smaller = replace(settings, **{name: LEAST[name]})
            left[name] = estimate_bytes(problem, smaller)
    names = sorted((name for name in left if left[name] < needs / 2), key=lambda name: left[name])
    words = [f"`{name}={getattr(settings, name)}`" for name in names]
    return ", ".join(words) or f"a model of {problem.num_ops:,} ops"


def _machine_bytes() -> int:
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**40  # where it is not told, what no such machine has
