"""
Timing links between devices.

This module owns what a link takes: what a step takes longer when a tensor goes over it, so that all
that the executor does for it counts, and what becomes of memory's caches meanwhile. A chain of
small ops runs on one device, on the other, and on both in turn. Between a CPU and a GPU that is the
latency, of a tensor of few bytes; the bandwidth is that of copies out of pinned memory (or not).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations

import torch
from torch import Tensor, nn

from placewright.execute._probe_fit import fit_link, round_time
from placewright.execute.devices import Lane, RealDevice
from placewright.execute.placed import PlacedStep
from placewright.frontends.torch import Capture, capture

WARM_UPS = 2

CHAIN = 12
"""Ops in a chain."""

STEP_WARM_UPS = 5
"""Steps of a chain that do not count: segments of a GPU are recorded in the third."""


@dataclass(frozen=True)
class LinkFigures:
    """What a link takes."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """The links between devices, by the numbers of both ends."""

    links: dict[tuple[int, int], LinkFigures]
    pageable: dict[tuple[int, int], LinkFigures]  # between a CPU and a GPU, memory not pinned


def time_links(
    devices: Sequence[RealDevice],
    lanes: Sequence[Lane],
    sizes: Sequence[int],
    num_repeats: int,
    tell: Callable[[str], None],
) -> Links:
    """
    Time copies of several sizes between every two devices.

    Both directions are equal, but for the bandwidth to and from a GPU. `tell` is called between two
    pairs.
    """
    links: dict[tuple[int, int], LinkFigures] = {}
    pageable: dict[tuple[int, int], LinkFigures] = {}
    chain = _Chain(num_repeats)
    pairs = [*combinations(range(len(devices)), 2)]
    for number, (a, b) in enumerate(pairs):
        both = devices[a].name, devices[b].name
        if number:
            tell(f"{number} of {len(pairs)} pairs of devices timed")
        ways = (a, b), (b, a)
        num_gpus = sum(devices[d].kind == "cuda" for d in (a, b))
        has_share = any(devices[d].share is not None for d in (a, b))
        if num_gpus == 0 or (num_gpus == 2 and has_share):
            times = {size: chain.crossing_s(both, size) for size in sizes}
            links |= dict.fromkeys(ways, LinkFigures(*fit_link(times)))
            continue
        for source, target in ways:
            lane = lanes[target if devices[target].kind == "cuda" else source]
            copy = partial(_copy, lane, devices[source], devices[target], sizes, num_repeats)
            links[source, target] = copy(is_pinned=True)
            if num_gpus == 1:
                pageable[source, target] = copy(is_pinned=False)
        if num_gpus == 1:
            crossing_s = chain.crossing_s(both, sizes[0])
            for way in ways:
                latency_s = max(crossing_s - sizes[0] / links[way].bytes_per_s, 0.0)
                links[way] = replace(links[way], latency_s=round_time(latency_s))
    return Links(links, pageable)


class _Chain:
    """Ops one after the other, on one device or on two in turn."""

    def __init__(self, num_repeats: int) -> None:
        self._num_repeats = num_repeats
        self._alone_s, self._captured = cache(self._time_alone), cache(_capture)

    def crossing_s(self, names: tuple[str, str], size: int) -> float:
        """Give what a step takes longer for every tensor that goes from one to the other."""
        by_turns_s = self._time(size, names, [k % 2 for k in range(CHAIN)])
        alone_s = statistics.mean(self._alone_s(name, size) for name in names)
        return max(by_turns_s - alone_s, 1e-7) / (CHAIN - 1)

    def _time_alone(self, name: str, size: int) -> float:
        return self._time(size, (name,), [0] * CHAIN)

    def _time(self, size: int, names: tuple[str, ...], placement: list[int]) -> float:
        captured, module, fed = self._captured(size)
        order = range(captured.graph.num_ops)
        step = PlacedStep(captured, module, [placement[0], *placement], order, names)
        times_s = []
        try:
            for _ in range(STEP_WARM_UPS + self._num_repeats):
                begin_s = time.perf_counter()
                step.run([fed])
                times_s.append(time.perf_counter() - begin_s)
        finally:
            step.close()
        return statistics.median(times_s[STEP_WARM_UPS:])


def _capture(size: int) -> tuple[Capture, nn.Module, Tensor]:
    """Capture a chain, and what it is fed."""
    module, fed = nn.Sequential(*(nn.ReLU() for _ in range(CHAIN))), torch.rand(size // 4)
    return capture(module, (fed,), train=False), module, fed


def _copy(
    lane: Lane,
    source: RealDevice,
    target: RealDevice,
    sizes: Sequence[int],
    num_repeats: int,
    is_pinned: bool,
) -> LinkFigures:
    """Time copies to or from a GPU, issued by its lane."""
    gpus = [device.torch_device for device in (source, target) if device.kind == "cuda"]

    def make(device: RealDevice, size: int) -> Tensor:
        made = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        return made.pin_memory() if is_pinned and device.kind == "cpu" else made

    def wait() -> None:
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    def time_size(size: int) -> float:
        theirs, ours = make(source, size), make(target, size)
        times = []
        for _ in range(num_repeats + WARM_UPS):
            wait()
            begun = time.perf_counter()
            ours.copy_(theirs, non_blocking=is_pinned)
            wait()
            times.append(time.perf_counter() - begun)
        return statistics.median(times[WARM_UPS:])

    times = {size: lane.submit(partial(time_size, size)).result() for size in sizes}
    return LinkFigures(*fit_link(times))
