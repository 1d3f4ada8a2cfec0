"""
Which calls draw the same random numbers.

This module owns the generator that a traced module sees. `torch.utils.checkpoint` puts PyTorch's
generator back to where it was, so that a layer that is computed again drops out what it did before;
that is seen here, and both calls draw alike in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from placewright.errors import InputError

_SEED = 0x5EED_0F_A_7ACE
"""What PyTorch's generator is seeded with meanwhile: nothing that a module would choose."""


class Draws:
    """The draws of one trace, by where PyTorch's generator was before them."""

    def __init__(self) -> None:
        self._first: dict[bytes, str] = {}

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Have a generator that only tells draws apart; put PyTorch's back in the end."""
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(_SEED)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """
        Check that a call draws from PyTorch's generator, and that nobody has seeded that.

        Raises
        ------
        InputError
            It does not, or somebody has: a plan would draw something else.
        """
        generator = kwargs.get("generator")
        if generator is not None and generator is not torch.default_generator:
            raise InputError(
                "`forward` draws random numbers from a generator of its own, and a plan seeds one"
                " for each op. Draw them without `generator=`, or pass them in."
            )
        if torch.default_generator.initial_seed() != _SEED:
            raise InputError(
                "`forward` seeds PyTorch's random numbers before it draws some, and a plan draws"
                " others in each call. Seed before the call, or pass the numbers in."
            )

    def note(self, name: str) -> str:
        """Note a call that draws, by its node; give the first one that drew the same numbers."""
        with _disable_current_modes():
            state = torch.default_generator.get_state().numpy().tobytes()
            torch.rand((), generator=torch.default_generator, device="cpu")
        return self._first.setdefault(state, name)
