"""
The cores of this machine, and who has them.

This module owns that a thread which works for GPUs has a core of its own: where the processor is a
device beside GPUs, it has the cores that are left, of many an even number. It also owns what
threads of libraries do that have nothing to do: where several libraries share the cores they sleep
at once; where a plan runs they may spin for the next op, as in any other program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

FEW = 8
"""Of so many cores or fewer, one more is worth more than an even number of them."""

_POLICY, _IS_OURS = "OMP_WAIT_POLICY", "PLACEWRIGHT_SET_OMP_WAIT_POLICY"


def sleep_at_once() -> None:
    """Have idle threads of PyTorch and numba, not loaded yet, leave their cores to others."""
    if _POLICY not in os.environ:
        os.environ[_POLICY], os.environ[_IS_OURS] = "passive", "1"


def where_plans_run(environment: Mapping[str, str]) -> dict[str, str]:
    """Give the environment of a process that runs plans: without what `sleep_at_once` has set."""
    ours = {_POLICY, _IS_OURS} if _IS_OURS in environment else set()
    return {name: value for name, value in environment.items() if name not in ours}


def own_cores() -> tuple[int, ...]:
    """List the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def share_cores(num_gpu_lanes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """
    Give the processor's cores, and those of the GPUs' threads: none, if there are but a few.

    With 13 or 15 threads, products of matrices took 1.5 times as long as with 14 on a Xeon of 16
    cores, some of them five times; other ops lost less by the core than these gained.
    """
    cores = own_cores()
    kept = num_gpu_lanes if len(cores) > num_gpu_lanes + 1 else 0
    left = len(cores) - kept
    if kept and left > FEW:
        left -= left % 2
    return cores[:left], cores[len(cores) - kept :]
