"""
A model that two CPU cores share better than PyTorch's own threads do.

Two recurrent towers read a few sequences from either end. A product with four rows is not split
over cores by PyTorch, and a tower waits for its own last step; but nothing that one tower does
waits for the other.

``placewright measure examples/towers.py:build --plan mine/plan.json`` says what that brings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Tower(nn.Module):
    """Reads a sequence, one step after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, steps: Tensor) -> Tensor:
        """Return what is left of a sequence ([steps, batch, width]) in the end."""
        state = torch.zeros_like(steps[0])
        for step in steps:
            state = self.cell(step, state)
        return state


class Towers(nn.Module):
    """Reads a sequence from its beginning and from its end."""

    def __init__(self, width: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.from_begin, self.from_end = Tower(width), Tower(width)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, steps: Tensor) -> Tensor:
        """Return scores of classes."""
        both = self.from_begin(steps), self.from_end(steps.flip(0))
        scores: Tensor = self.head(torch.cat(both, dim=-1))
        return scores


def build() -> dict[str, Any]:
    """Give one forward pass."""
    return {"module": Towers(), "inputs": torch.randn(24, 4, 512)}
