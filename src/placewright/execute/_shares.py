"""
Shares of a GPU as devices: some of its multiprocessors, in a green context of their own.

This module owns how a GPU is divided. A share's work runs on its own multiprocessors only; memory,
caches and their bandwidth are the whole GPU's. Dividing goes from the first multiprocessor on, so
that shares which do not overlap by name do not overlap.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from placewright.errors import InputError
from placewright.execute._lanes import Share


def count_multiprocessors(gpu: str) -> int:
    """Count a GPU's multiprocessors."""
    return int(torch.cuda.get_device_properties(torch.device(gpu)).multi_processor_count)


@functools.cache
def stream_of(share: Share) -> torch.cuda.Stream:
    """
    Give the stream that computes on a share, one for the process.

    Raises
    ------
    InputError
        The GPU cannot be divided there, or the package for that is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise InputError(
            f"`{share.gpu}/{share.first}-{share.last}` is a share of a GPU, which needs the package"
            " `cuda-bindings`. Install it with `pip install cuda-bindings`."
        ) from None
    gpu = torch.device(share.gpu)
    with torch.cuda.device(gpu):
        torch.zeros(1, device=gpu)  # its context
        device = _made(driver.cuDeviceGet(gpu.index))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        left = _made(driver.cuDeviceGetDevResource(device, kind))
        if share.first > 0:
            _, left = _divide(driver, left, share.first, share)
        mine = left
        if share.size < left.sm.smCount:
            mine, _ = _divide(driver, left, share.size, share)
        described = _made(driver.cuDevResourceGenerateDesc([mine], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = _made(driver.cuGreenCtxCreate(described, device, flags))
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = _made(driver.cuGreenCtxStreamCreate(context, flag, 0))
        external: Any = torch.cuda.ExternalStream  # without types
        stream: torch.cuda.Stream = external(int(made), device=gpu)
        return stream


def _divide(driver: Any, resource: Any, size: int, share: Share) -> tuple[Any, Any]:
    """Divide multiprocessors into so many and the others."""
    groups, _, left = _made(driver.cuDevSmResourceSplitByCount(1, resource, 0, size))
    found = groups[0].sm.smCount
    if found != size:
        raise InputError(
            f"`{share.gpu}/{share.first}-{share.last}`: this GPU can be divided after {found}"
            f" multiprocessors, not after {size}."
        )
    return groups[0], left


def _made(answer: tuple[Any, ...]) -> Any:
    """Give what a call of the driver has made."""
    status, *made = answer
    if int(status) != 0:
        raise InputError(f"This GPU cannot be divided: {status}.")
    return made[0] if len(made) == 1 else tuple(made)
