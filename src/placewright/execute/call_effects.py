"""
What a call of a placed module leaves behind beside its result.

This module owns how inputs that `forward` overwrites, and attributes that it sets, get there, and
which calls cannot be run because what they overwrite is also seen under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from placewright.errors import InputError
from placewright.frontends._structures import Passed, Real, build
from placewright.frontends.torch import Effect


def check_overlaps(
    leaves: Sequence[Tensor],
    written: Collection[int],
    residents: Mapping[str, Tensor],
    overwritten: Collection[str],
) -> None:
    """
    Check that what a call overwrites is seen under one name only.

    Parameters
    ----------
    leaves
        The tensors that the call was passed.
    written
        Those that it overwrites, by number.
    residents
        The module's own tensors, by node.
    overwritten
        The nodes of those that it overwrites.

    Raises
    ------
    InputError
        An input shares memory with another one, or with the module.
    """
    if not written and not overwritten:
        return
    places = {
        residents[node].untyped_storage().data_ptr()
        for node in (residents if written else overwritten)
        if node in residents
    }
    mine = [leaf.untyped_storage().data_ptr() for leaf in leaves]
    for k, place in enumerate(mine):
        if place and (place in places or (k in written and mine.count(place) > 1)):
            raise InputError(
                f"Input {k} shares memory with another input or with the module, and the call"
                " overwrites some of that. Pass a copy (`.clone()`)."
            )


def write_back(leaf: Tensor, value: Tensor) -> None:
    """Leave in an input what was written there, unless it was written in place."""
    if leaf.data_ptr() != value.data_ptr():
        leaf.detach().copy_(value)


def set_attributes(
    effects: Collection[Effect], real: Real, part_of: Callable[[str], torch.nn.Module]
) -> None:
    """Set the attributes that `forward` sets, of objects that were passed and of modules."""
    for effect in effects:
        value = build(effect.template, real)
        passed = isinstance(effect.owner, Passed)
        owner = real.objects[effect.owner.number] if passed else part_of(effect.owner)
        setattr(owner, effect.name, value)


def without_values(leaf: Tensor) -> Tensor:
    """Make what a program can be captured with in place of a tensor."""
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return made.requires_grad_(leaf.requires_grad)
