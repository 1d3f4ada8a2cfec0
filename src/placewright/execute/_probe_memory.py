"""
What a plan may use of a machine's memory, and what its chips are called.

This module owns the headroom: what is left to others, to libraries and to fragmentation.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from placewright.execute._shares import count_multiprocessors
from placewright.execute.devices import RealDevice

CPU_HEADROOM = 0.1
"""Share of the memory available to processes that is left: to Python, PyTorch and fragmentation."""

GPU_HEADROOM_BYTES = 512 * 2**20
"""Left on a GPU beside its context: to the work spaces of libraries, to kernels loaded later."""

GPU_HEADROOM = 0.05
"""Share of a GPU's free memory that is left to fragmentation."""

MIB = 2**20


def memory_of(device: RealDevice, num_sharing: int, root: Path = Path("/")) -> int:
    """
    Find how much memory a plan may use on a device, in whole MiB.

    Parameters
    ----------
    device
        The device. If it is a GPU, its context must be there.
    num_sharing
        How many devices share the processor's memory, each of them equally.
    root
        Where ``proc`` and ``sys`` are.
    """
    if device.kind == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device.torch_device)
        usable = (free * (1 - GPU_HEADROOM) - GPU_HEADROOM_BYTES) * _part(device)
    else:
        usable = available_bytes(root) * (1 - CPU_HEADROOM) / num_sharing
    return max(int(usable) // MIB, 1) * MIB


def _part(device: RealDevice) -> float:
    """Give what a share may have of its GPU's memory; 1 for a whole one."""
    share = device.share
    return 1.0 if share is None else share.size / count_multiprocessors(share.gpu)


def available_bytes(root: Path = Path("/")) -> int:
    """Find how much memory this process could still take: the machine's, or its control group's."""
    found = [*_group_bytes(root)]
    try:
        text = (root / "proc/meminfo").read_text()
        found.append(int(re.findall(r"MemAvailable:\s+(\d+) kB", text)[0]) * 1024)
    except (OSError, IndexError):  # not Linux: half of what there is
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return max(min(found), 0)


def _group_bytes(root: Path) -> list[int]:
    """List what this process's control groups leave it, inner to outer, both versions of them."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / "sys/fs/cgroup" / controllers
        limit, used = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("memory.max", "memory.current")
        )
        folder = base / path.lstrip("/")
        for each in (folder, *folder.parents):
            try:
                left = int((each / limit).read_text()) - int((each / used).read_text())
                stat = (each / "memory.stat").read_text()
            except (OSError, ValueError):  # not there, or "max"
                continue
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
            found.append(left + int(cached[-1] if cached else 0))
    return found


def model_of(device: RealDevice, root: Path = Path("/")) -> str:
    """Find what a device's chip is called."""
    if device.kind == "cuda":
        name = str(torch.cuda.get_device_name(device.torch_device))
        if device.share is None:
            return name
        return f"{name}, {device.share.size} of {count_multiprocessors(device.share.gpu)} SMs"
    try:
        names = re.findall(r"^model name\s*:\s*(.*\S)", (root / "proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def cores_alike(cores: Sequence[int], root: Path = Path("/")) -> list[list[int]]:
    """Sort cores into those that are alike as far as the system tells; gives their places."""
    groups: dict[str, list[int]] = {}
    for k, core in enumerate(cores):
        try:
            path = root / f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq"
            fastest = path.read_text().strip()
        except OSError:
            fastest = ""
        groups.setdefault(fastest, []).append(k)
    return [*groups.values()]
