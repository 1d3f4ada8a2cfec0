"""
Which thread works for which device.

This module owns that rule, for the executor and for who predicts what it does: each CPU device has
a thread, all GPUs share one; a share of a GPU (``cuda:0/0-87``) has one of its own, since what a
thread tells a GPU goes to one share at a time. Nothing here needs PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_SHARE = re.compile(r"(cuda:\d+)/(\d+)-(\d+)")


@dataclass(frozen=True)
class Share:
    """Some of a GPU's multiprocessors."""

    gpu: str
    first: int
    last: int

    @property
    def size(self) -> int:
        """Count them."""
        return self.last - self.first + 1


def share_of(name: str) -> Share | None:
    """Read the name of a share; None if it is none."""
    found = _SHARE.fullmatch(name)
    return None if found is None else Share(found[1], int(found[2]), int(found[3]))


def whole_gpu(name: str) -> str:
    """Name the GPU that a device is, or is a share of."""
    share = share_of(name)
    return name if share is None else share.gpu


def count_gpu_lanes(names: Sequence[str], kinds: Sequence[str]) -> int:
    """Count the threads that work for GPUs."""
    lanes = zip(lane_numbers(names, kinds), kinds, strict=True)
    return len({lane for lane, kind in lanes if kind == "cuda"})


def lane_numbers(names: Sequence[str], kinds: Sequence[str]) -> list[int]:
    """Give each device its lane: the number of the device whose thread works for it."""
    whole = [kind == "cuda" and share_of(n) is None for n, kind in zip(names, kinds, strict=True)]
    first = whole.index(True) if True in whole else -1
    return [first if is_whole else k for k, is_whole in enumerate(whole)]
