"""
Timing copies between devices.

This module owns what a copy between two devices is. From core to core: the sender makes a tensor
and releases a lock, the receiver waits for that lock and copies the tensor to memory of its own.
To and from a GPU: from its issue, out of pinned memory (or not), until it has arrived.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from threading import Lock

import torch
from torch import Tensor

from placewright.execute._probe_fit import fit_link
from placewright.execute.devices import Lane, RealDevice

WARM_UPS = 2
PATIENCE_S = 60.0
"""How long either side of a hand-over waits for the other, which may have failed."""


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
        if source.kind == target.kind == "cpu":
            links[ends] = _hand_over(lanes[ends[0]], lanes[ends[1]], sizes, num_repeats)
            continue
        lane = lanes[ends[1] if target.kind == "cuda" else ends[0]]
        links[ends] = _copy(lane, source, target, sizes, num_repeats, is_pinned=True)
        if source.kind != target.kind:
            pageable[ends] = _copy(lane, source, target, sizes, num_repeats, is_pinned=False)
    return Links(links, pageable)


def _hand_over(sender: Lane, receiver: Lane, sizes: Sequence[int], num_repeats: int) -> LinkFigures:
    times = {}
    for size in sizes:
        relay = _Relay(size, num_repeats + WARM_UPS)
        futures = sender.submit(relay.send), receiver.submit(relay.receive)
        for future in futures:
            future.result()
        times[size] = statistics.median(relay.times[WARM_UPS:])
    return LinkFigures(*fit_link(times))


class _Relay:
    """One tensor after the other from one thread to another."""

    def __init__(self, size: int, count: int) -> None:
        self.times: list[float] = []
        self._size, self._count = size, count
        self._made, self._taken = Lock(), Lock()
        self._made.acquire()
        self._taken.acquire()
        self._tensor = torch.empty(0)
        self._sent = 0.0

    def send(self) -> None:
        for k in range(self._count):
            # Making it leaves it in the sender's cache, where a reader on another core finds it.
            self._tensor = torch.full((self._size // 4,), float(k))
            self._sent = time.perf_counter()
            self._made.release()
            _take(self._taken)

    def receive(self) -> None:
        for _ in range(self._count):
            _take(self._made)
            theirs = self._tensor
            ours = torch.empty_strided(theirs.shape, theirs.stride())
            ours.copy_(theirs)
            self.times.append(time.perf_counter() - self._sent)
            self._taken.release()


def _take(lock: Lock) -> None:
    if not lock.acquire(timeout=PATIENCE_S):
        raise TimeoutError("The other side of a hand-over did not answer.")


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
