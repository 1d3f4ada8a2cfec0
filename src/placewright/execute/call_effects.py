"""
What a call of a placed module leaves behind beside its result.

This module owns how inputs that `forward` overwrites, and attributes that it sets, get there, and
which calls cannot be run because what they overwrite is also seen under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from placewright.errors import InputError
from placewright.execute._copies import blank, copy_over, once
from placewright.frontends._modules import set_attribute
from placewright.frontends._recorder import empty_twin
from placewright.frontends._structures import Passed, Real, build
from placewright.frontends.torch import Effect, overlaps_itself


def check_overlaps(
    leaves: Sequence[Tensor],
    written: Collection[int],
    places_of: Callable[[tuple[str, ...] | None], Collection[int]],
    overwritten: tuple[str, ...],
) -> None:
    """
    Check that what a call overwrites is seen under one name only.

    Parameters
    ----------
    leaves
        The tensors that the call was passed.
    written
        Those that it overwrites, by number.
    places_of
        Tells where the memory of the module's own tensors begins, by node, or of all of them.
    overwritten
        The nodes of those that it overwrites.

    Raises
    ------
    InputError
        An input shares memory with another one, with itself, or with the module.
    """
    if not written and not overwritten:
        return
    places = places_of(None if written else overwritten)
    mine = [leaf.untyped_storage().data_ptr() for leaf in leaves]
    for k in written:
        if leaves[k].requires_grad and leaves[k].is_leaf and leaves[k]._is_view():
            raise InputError(
                f"Input {k} is a view that requires a gradient, and the call overwrites it, after"
                " which PyTorch gives it none. Pass a copy (`.detach().clone()`)."
            )
        if overlaps_itself(once(leaves[k])):
            raise InputError(
                f"Several elements of input {k} are in one place in memory, and the call overwrites"
                " them. Pass a copy (`.contiguous()`)."
            )
    for k, place in enumerate(mine):
        if place and (place in places or (k in written and mine.count(place) > 1)):
            raise InputError(
                f"Input {k} shares memory with another input or with the module, and the call"
                " overwrites some of that. Pass a copy (`.clone()`)."
            )


def check_offsets(leaves: Sequence[Tensor], absolute: Collection[int]) -> None:
    """
    Check inputs that `forward` looks at from where their memory begins, by number.

    Raises
    ------
    InputError
        One of them begins somewhere inside its memory, so that more than the input is looked at.
    """
    for number in absolute:
        if leaves[number].storage_offset():
            raise InputError(
                f"Input {number} begins inside of its memory, and `forward` calls `as_strided` on"
                " it with an offset from where that begins. Pass a copy (`.clone()`)."
            )


def write_back(leaf: Tensor, value: Tensor) -> None:
    """Leave in an input what was written there, unless it was written in place."""
    if leaf.data_ptr() != value.data_ptr():
        once(leaf.detach()).copy_(once(value))


def as_is(leaf: Tensor) -> Tensor:
    """Copy what a call is about to overwrite, with its strides."""
    leaf = leaf.detach()
    return copy_over(blank(leaf, leaf.device), leaf)


def apart(made: Sequence[Tensor], beside: Sequence[Tensor]) -> list[Tensor]:
    """
    Give tensors memory of their own, as gradients have it that are scaled in place one by one.

    A backward pass may end with several looks at one place: what is added to another parameter,
    say, has the gradient of the sum. What shares memory with others, or with tensors `beside`, is
    copied.
    """
    seen = {_place_of(tensor) for tensor in beside}
    found = []
    for tensor in made:
        place = _place_of(tensor)
        found.append(tensor.clone() if place and place in seen else tensor)
        seen.add(place)
    return found


def _place_of(tensor: Tensor) -> int:
    """Find where a tensor's memory begins; 0 for one without, as some gradients of zeros are."""
    return 0 if tensor._is_zerotensor() else tensor.untyped_storage().data_ptr()


def set_attributes(
    effects: Collection[Effect], real: Real, part_of: Callable[[str], torch.nn.Module]
) -> None:
    """Set the attributes that `forward` sets, of objects that were passed and of modules."""
    for effect in effects:
        value = build(effect.template, real)
        match effect.owner:
            case Passed(number):
                setattr(real.objects[number], effect.name, value)
            case str(name):
                set_attribute(part_of(name), effect.name, value)


def without_base(tensor: Tensor) -> Tensor:
    """Look at a tensor's memory without being a view of it."""
    if tensor.is_conj() or tensor.is_neg():  # which only a view can be
        return tensor
    memory, begin = tensor.untyped_storage(), tensor.storage_offset()
    return tensor.new_empty(0).set_(memory, begin, tensor.size(), tensor.stride())


def without_values(leaf: Tensor) -> Tensor:
    """Make what a program can be captured with in place of a tensor."""
    return empty_twin(leaf, "meta").requires_grad_(leaf.requires_grad)
