"""
The cores of this machine, and who has them.

This module owns that the thread which works for a GPU has a core of its own: where the processor is
a device beside GPUs, it has the cores that are left.
"""

from __future__ import annotations

import os


def own_cores() -> tuple[int, ...]:
    """List the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def share_cores(num_gpus: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Give the processor's cores, and those of the GPUs' thread: none, if there are but a few."""
    cores = own_cores()
    kept = 1 if num_gpus and len(cores) > 2 else 0
    return cores[: len(cores) - kept], cores[len(cores) - kept :]
