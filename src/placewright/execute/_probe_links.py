"""
Timing copies between devices.

This module owns what a copy between two devices is: what the executor does, from when a tensor is
made until the receiver can use it. From core to core the receiver copies what the sender has made.
To and from a GPU that way, of a tensor of few bytes, is the latency; the bandwidth is that of
copies from issue to arrival, out of pinned memory (or not).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, Protocol

import torch
from torch import Tensor

from placewright.execute._boxes import Box
from placewright.execute._copies import GpuWay, Streams, blank, pinned
from placewright.execute._probe_fit import fit_link, round_time
from placewright.execute.devices import Lane, RealDevice

WARM_UPS = 2


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
) -> Links:
    """Time copies of several sizes over every ordered pair of devices."""
    links, pageable = {}, {}
    for ends in permutations(range(len(devices)), 2):
        source, target = (devices[end] for end in ends)
        sender, receiver = (lanes[end] for end in ends)
        if source.kind == target.kind == "cpu":
            times = _hand_over(_FromCore(), sender, receiver, sizes, num_repeats)
            links[ends] = LinkFigures(*fit_link(times))
            continue
        shares = [end.share for end in (source, target) if end.share is not None]
        if source.kind == target.kind and shares:
            times = _hand_over(_FromShare(source, target), sender, receiver, sizes, num_repeats)
            links[ends] = LinkFigures(*fit_link(times))
            continue
        lane = receiver if target.kind == "cuda" else sender
        links[ends] = _copy(lane, source, target, sizes, num_repeats, is_pinned=True)
        if source.kind != target.kind:
            pageable[ends] = _copy(lane, source, target, sizes, num_repeats, is_pinned=False)
            way = _FromGpu(source) if source.kind == "cuda" else _ToGpu(target)
            [(size, time_s)] = _hand_over(way, sender, receiver, sizes[:1], num_repeats).items()
            latency_s = round_time(max(time_s - size / links[ends].bytes_per_s, 0.0))
            links[ends] = replace(links[ends], latency_s=latency_s)
    return Links(links, pageable)


class _Way(Protocol):
    """How a tensor gets from one device to another, as the executor has it."""

    def make(self, size: int, value: float) -> Tensor:
        """Make a tensor on the sender's device."""

    def send(self, tensor: Tensor) -> Any:
        """Do the sender's part, and give what the receiver needs."""

    def receive(self, content: Any, /) -> None:
        """Do the receiver's part."""


class _FromCore:
    def make(self, size: int, value: float) -> Tensor:
        # Making it leaves it in the sender's cache, where a reader on another core finds it.
        return torch.full((size // 4,), value)

    def send(self, tensor: Tensor) -> Any:
        return tensor

    def receive(self, content: Any) -> None:
        blank(content).copy_(content)


class _ToGpu(_FromCore):
    def __init__(self, device: RealDevice) -> None:
        self._device = device.torch_device

    def send(self, tensor: Tensor) -> Any:
        return pinned(tensor)

    def receive(self, content: Any) -> None:
        blank(content, device=self._device).copy_(content, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()


class _FromGpu:
    def __init__(self, device: RealDevice) -> None:
        self._device = device.torch_device
        self._streams = Streams(device)
        self._way = GpuWay(self._streams)

    def make(self, size: int, value: float) -> Tensor:
        torch.cuda.set_stream(self._streams.compute)
        made = torch.full((size // 4,), value, device=self._device)
        self._streams.compute.synchronize()
        return made

    def send(self, tensor: Tensor) -> Any:
        return self._way.leave(tensor)

    def receive(self, _: Any) -> None:
        self._way.done.synchronize()


class _FromShare(_FromGpu):
    """From a share of a GPU, or to one, through pinned memory."""

    def __init__(self, source: RealDevice, target: RealDevice) -> None:
        super().__init__(source)
        self._target, self._to = target.torch_device, Streams(target).compute

    def receive(self, content: Any) -> None:
        torch.cuda.set_stream(self._to)
        self._to.wait_event(self._way.done)
        blank(content, device=self._target).copy_(content, non_blocking=True)
        self._to.synchronize()


def _hand_over(
    way: _Way, sender: Lane, receiver: Lane, sizes: Sequence[int], num_repeats: int
) -> dict[int, float]:
    """Time how tensors of several sizes get from one lane to another."""
    times = {}
    for size in sizes:
        relay = _Relay(way, size, num_repeats + WARM_UPS)
        futures = sender.submit(relay.send), receiver.submit(relay.receive)
        for future in futures:
            future.result()
        times[size] = statistics.median(relay.times[WARM_UPS:])
    return times


class _Relay:
    """One tensor after the other from one thread to another; who fails lets the other go on."""

    def __init__(self, way: _Way, size: int, count: int) -> None:
        self.times: list[float] = []
        self._way, self._size, self._count = way, size, count
        self._made, self._taken = Box(), Box()

    def send(self) -> None:
        try:
            for k in range(self._count):
                tensor = self._way.make(self._size, float(k))
                sent_s = time.perf_counter()
                self._made.put((self._way.send(tensor), sent_s))
                if self._taken.take() is None:
                    return
        finally:
            self._made.open()

    def receive(self) -> None:
        try:
            while len(self.times) < self._count and (found := self._made.take()) is not None:
                content, sent_s = found
                self._way.receive(content)
                self.times.append(time.perf_counter() - sent_s)
                self._taken.put(True)
        finally:
            self._taken.open()


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
