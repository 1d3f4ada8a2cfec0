"""
`probe`: this machine, measured, as a cluster.

This module owns which devices are measured together and what the cluster says of itself. How ops
are timed is in `placewright.execute._probe_timing`, copies in `placewright.execute._probe_links`,
what is made of both in `placewright.execute._probe_fit`.
"""

from __future__ import annotations

# First, since without PyTorch it says so in a sentence.
from placewright.execute.devices import Lane, RealDevice, default_devices, find_devices

# isort: split
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from placewright import __version__
from placewright.arguments import expect_function, expect_type
from placewright.cluster import Cluster
from placewright.costs import PS_PER_S, Costs
from placewright.errors import InputError
from placewright.execute._probe_fit import Figures, Sample, fit_device
from placewright.execute._probe_links import Links, time_links
from placewright.execute._probe_memory import (
    CPU_HEADROOM,
    GPU_HEADROOM,
    GPU_HEADROOM_BYTES,
    cores_alike,
    memory_of,
    model_of,
)
from placewright.execute._probe_timing import Settings, Timing, time_kernel
from placewright.graph import Graph
from placewright.graph_file import Op
from placewright.units import format_bytes, format_time

SETTINGS = Settings()


def probe(
    devices: Sequence[str] | None = None,
    *,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Cluster:
    """
    Measure this machine.

    Peak rates, memory bandwidth, launch overhead and efficiencies by op family and size are fitted
    to the times of aten ops, so that `Costs.estimate` gives those back. Memory is what is free,
    less headroom. Links are timed copies between every pair of devices, both ways. It takes ten to
    twenty seconds for each kind of device.

    Parameters
    ----------
    devices
        Names such as ``("cpu", "cuda:0")`` or ``("cpu:0", "cpu:1")``. By default the processor and
        all GPUs; where there is no GPU, the cores as devices of their own.
    name
        What to call the cluster.
    progress
        Called with a few words before each part, and once a second in it.

    Raises
    ------
    InputError
        A device is not there or is named twice, or has too little free memory to be measured.
    """
    if devices is not None:
        expect_type(devices, (tuple, list), "devices", _NAMES)
        for device in devices:
            expect_type(device, str, "devices", _NAMES)
    if name is not None:
        expect_type(name, str, "name", "text")
    expect_function(progress, "progress", "a function of text")
    found = _find(devices)
    say = progress or (lambda _: None)
    lanes = [Lane(device) for device in found]
    cores = [lane for lane, device in zip(lanes, found, strict=True) if _is_core(device)]
    timing = Timing(SETTINGS, cores, threading.Event())
    measured: dict[int, _Measured] = {}
    try:
        for group in _groups(found):
            names = ", ".join(found[d].name for d in group)
            say(f"Measuring {names}...")
            tell = _telling(say, names)
            result = _measure(timing, [(found[d], lanes[d]) for d in group], tell)
            measured |= dict.fromkeys(group, result)
        num_links = len(found) * (len(found) - 1)
        say(f"Measuring {num_links} links...")
        num_copies = min(SETTINGS.num_copies, int(SETTINGS.links_s / 0.01 / max(num_links, 1)))
        sizes = SETTINGS.copy_bytes[:: 1 if num_links <= SETTINGS.few_links else 3]
        tell = _telling(say, f"{num_links} links")
        links = time_links(found, lanes, sizes, max(num_copies, 3), tell)
    finally:
        timing.halt.set()
        for lane in lanes:
            lane.close()
    return _build(name or "this-machine", found, [measured[d] for d in range(len(found))], links)


_NAMES = "names of devices, such as `('cpu', 'cuda:0')`"


def _find(names: Sequence[str] | None) -> tuple[RealDevice, ...]:
    if names is None:
        return default_devices()
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated or not names:
        what = f"names `{repeated[0]}` more than once" if repeated else "is empty"
        raise InputError(f"`devices` {what}; expected every device to be measured, once.")
    return find_devices(tuple(names))


def _is_core(device: RealDevice) -> bool:
    return device.name.startswith("cpu:")


def _groups(devices: tuple[RealDevice, ...]) -> list[list[int]]:
    """Sort devices into those that are alike and share their figures, by their numbers."""
    cores = [d for d, device in enumerate(devices) if _is_core(device)]
    alike = cores_alike([devices[d].cores[0] for d in cores])
    others = [[d] for d in range(len(devices)) if d not in cores]
    return sorted([*others, *([cores[k] for k in group] for group in alike)])


@dataclass(frozen=True)
class _Measured:
    figures: Figures
    samples: list[Sample]
    kernel_s: float | None  # of a tiny op on the GPU itself, however long issuing it takes


def _telling(say: Callable[[str], None], what: str) -> Callable[[str], None]:
    """Say what is measured before how far that is."""
    return lambda words: say(f"Measuring {what}: {words}")


def _measure(
    timing: Timing, chosen: Sequence[tuple[RealDevice, Lane]], tell: Callable[[str], None]
) -> _Measured:
    """Measure devices that are alike."""
    samples = timing.time_ops(chosen, tell)
    device, lane = chosen[0]
    kernel_s = lane.submit(time_kernel).result() if device.kind == "cuda" else None
    return _Measured(fit_device(samples), samples, kernel_s)


def _build(
    name: str, devices: tuple[RealDevice, ...], measured: Sequence[_Measured], links: Links
) -> Cluster:
    count = len(devices)
    latency_s, bytes_per_s = np.zeros((count, count)), np.zeros((count, count))
    for ends, link in links.links.items():
        latency_s[ends], bytes_per_s[ends] = link.latency_s, link.bytes_per_s
    names = tuple(device.name for device in devices)
    cluster = Cluster(
        name=name,
        description=_description(devices),
        source="",
        device_names=names,
        device_kinds=tuple(device.kind for device in devices),
        device_models=tuple(model_of(device) for device in devices),
        memory_bytes=np.array(_memory(devices)),
        flops=tuple(each.figures.flops for each in measured),
        memory_bytes_per_s=np.array([each.figures.memory_bytes_per_s for each in measured]),
        launch_s=np.array([each.figures.launch_s for each in measured]),
        efficiency=tuple(each.figures.efficiency for each in measured),
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        channel_names=(*(f"{name} out" for name in names), *(f"{name} in" for name in names)),
        link_channels=tuple((s, count + t) for s in range(count) for t in range(count)),
    )
    return replace(cluster, source="\n".join(_source(cluster, measured, links)))


def _memory(devices: Sequence[RealDevice]) -> list[int]:
    """Find every device's memory; CPU devices, cores or not, have an equal share each."""
    hosts = [device for device in devices if device.kind == "cpu"]
    share = memory_of(hosts[0], len(hosts)) if hosts else 0
    return [share if d.kind == "cpu" else memory_of(d, 1) for d in devices]


def _description(devices: Sequence[RealDevice]) -> str:
    """Say what was measured, in a line."""
    counts: Counter[str] = Counter()
    for device in devices:
        model = model_of(device)
        if device.name == "cpu":
            model = f"{model} ({len(device.cores)} cores)"
        counts[f"{model}, a core a device" if _is_core(device) else model] += 1
    return "; ".join(f"{count} x {what}" for what, count in counts.items())


def _source(cluster: Cluster, measured: Sequence[_Measured], links: Links) -> list[str]:
    """Say where the figures come from, a line each."""
    names, kinds = cluster.device_names, cluster.device_kinds
    lines = [
        f"Measured by placewright {__version__} with PyTorch {torch.__version__}.",
        "Rates and memory bandwidth are the most that ops reach (a CPU's in its caches),"
        " efficiencies what is left of that at each size.",
    ]
    if any(name.startswith("cpu:") for name in names):
        lines.append("Each core was measured while the others computed and copied.")
    if "cpu" in kinds:
        lines.append(f"Memory of a CPU: what is available, less {CPU_HEADROOM:.0%}.")
    if "cuda" in kinds:
        left = f"{GPU_HEADROOM:.0%} and {format_bytes(GPU_HEADROOM_BYTES)}"
        lines.append(f"Memory of a GPU: what is free beside a context, less {left}.")
    for d, (name, found) in enumerate(zip(names, measured, strict=True)):
        if found not in measured[:d]:
            error = _error(cluster, d, found.samples)
            lines.append(
                f"Times of {len(found.samples)} ops measured on {name} and predicted by this file"
                f" differ by {error:.0%} (median)."
            )
        if found.kernel_s is not None:
            lines.append(
                f"A tiny op takes {format_time(found.kernel_s)} on {name} itself; `launch` is what"
                " it takes when such ops are issued one after the other."
            )
    for (source, target), link in links.pageable.items():
        lines.append(
            f"From {names[source]} to {names[target]}, memory not pinned:"
            f" {format_time(link.latency_s)}, {link.bytes_per_s / 1e9:.3g} GB/s."
        )
    return lines


def _error(cluster: Cluster, device: int, samples: Sequence[Sample]) -> float:
    """Find by how much the times that the cluster predicts are off, in the median."""
    ops = [
        Op(name=f"op {k}", kind=s.kind, dtype=s.dtype, flops=s.flops, bytes=s.bytes)
        for k, s in enumerate(samples)
    ]
    predicted = Costs.estimate(Graph.build("probe", ops), cluster).op_ps[:, device] / PS_PER_S
    return float(np.median(np.abs(predicted / [sample.time_s for sample in samples] - 1)))
