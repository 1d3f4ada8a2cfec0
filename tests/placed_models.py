"""Hugging Face's models placed at random on two cores, beside the same ones unplaced."""

from __future__ import annotations

import copy
from typing import Any

import torch

import placewright as pw
from placewright.frontends._structures import scan
from tests import huggingface_models
from tests.random_module_cases import make_plan


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """Build a model by name, with inputs that include a padded row."""
    torch.manual_seed(0)
    module, given = getattr(huggingface_models, name)()
    return module, given


def place(module: Any, given: dict[str, Any], *, seed: int = 1, train: bool = True) -> Any:
    """Place a copy of a model at random."""
    mine = copy.deepcopy(module)
    plan = make_plan(pw.capture(mine, given, train=train).graph, seed)
    return pw.apply(plan, mine, given, train=train)


def same(ours: Any, theirs: Any) -> bool:
    """Compare structures of one class, their tensors to the bit."""
    if type(ours).__name__ != type(theirs).__name__:
        return False
    mine, others = scan(ours), scan(theirs)
    pairs = zip(mine.leaves, others.leaves, strict=False)
    return len(mine.leaves) == len(others.leaves) and all(
        type(x) is type(y) and x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs
    )


def differences(placed: Any, module: Any) -> list[str]:
    """List parameters whose gradients are not the same, by name."""
    pairs = zip(placed.named_parameters(), module.named_parameters(), strict=True)
    return [
        name
        for (name, p), (_, q) in pairs
        if (p.grad is None) != (q.grad is None)
        or (p.grad is not None and not torch.equal(p.grad, q.grad))
    ]


def same_weights(placed: Any, module: Any) -> bool:
    """Compare all parameters and buffers."""
    ours, theirs = placed.state_dict(), module.state_dict()
    return [*ours] == [*theirs] and all(torch.equal(ours[key], theirs[key]) for key in theirs)
