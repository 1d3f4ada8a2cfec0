"""
Copies to and from GPUs, beside what these compute.

This module owns a GPU's streams, and the events that keep copies and computing in order. A tensor
leaves for pinned memory on a stream of its own; a parameter on another, since it need not wait for
what is computed. One that is fetched ahead arrives on a third; one that is needed at once is copied
by the stream that computes, which would have to wait for it. A small one that leaves is copied by
that stream, too: the events between two of them would take longer.

A tensor with gaps, such as a part of a product's columns, is copied with them. PyTorch would first
close them in memory that is not pinned, and have the thread wait for that.

Where no two steps are under way at once, tensors have the same pinned memory in every step, up to
`KEPT_BYTES` in all: to ask for some takes a thread that has just computed 50 to 100 microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from placewright.execute._shares import stream_of
from placewright.execute.devices import RealDevice

SMALL_BYTES = 256 * 1024
"""Copied in about ten microseconds."""

MOST_GAPS = 8
"""A tensor with more gaps than so many times itself is left to PyTorch."""

LINE_BYTES = 64
"""A line of a CPU's cache; memory that PyTorch allocates begins at a multiple of it."""

KEPT_BYTES = 256 * 2**20
"""Pinned memory that a step may keep; small tensors have theirs in any case."""


class PinnedRooms:
    """Pinned memory that every step uses again."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._addresses: set[int] = set()

    def keep(self, tensor: Tensor) -> bool:
        """Keep a tensor's memory, if there is room for it."""
        size = tensor.untyped_storage().nbytes()
        if size > SMALL_BYTES and self.num_bytes + size > KEPT_BYTES:
            return False
        self.num_bytes += size
        self._addresses.add(tensor.untyped_storage().data_ptr())
        return True

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in memory that is kept."""
        return tensor.untyped_storage().data_ptr() in self._addresses


class Streams:
    """A GPU's streams: one to compute on, two for copies from it, one for copies to it."""

    def __init__(self, real: RealDevice) -> None:
        make: Any = torch.cuda.Stream  # without types
        device = real.torch_device
        self.compute: torch.cuda.Stream = (
            make(device) if real.share is None else stream_of(real.share)
        )
        self.leave: torch.cuda.Stream = make(device)
        self.lend: torch.cuda.Stream = make(device)
        self.arrive: torch.cuda.Stream = make(device)


class GpuWay:
    """
    One tensor's way from a GPU or to it, with events that every step uses again.

    Who waits for one of them waits for the copy of this step, or, if that is over, of a later one.
    `rooms` is None if no pinned memory may be kept.
    """

    def __init__(self, streams: Streams, rooms: PinnedRooms | None) -> None:
        self._streams, self._rooms = streams, rooms
        make: Any = torch.cuda.Event  # without types
        self._ready, self.done = make(), make()
        self._room: Tensor | None = None

    def leave(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """
        Begin to copy a tensor to pinned memory, after what the GPU was given to compute.

        Tells whether that is beside what it computes next, or before.
        """
        made = self._find_room(tensor)
        if tensor.nbytes > SMALL_BYTES:
            self._copy_beside(made, tensor, self._streams.leave)
            return made, True
        copy_over(made, tensor)
        self.done.record(self._streams.compute)
        return made, False

    def pin(self, tensor: Tensor) -> Tensor:
        """Give a CPU's tensor in pinned memory."""
        if tensor.nbytes > SMALL_BYTES and tensor.is_pinned():
            return tensor
        return copy_over(self._find_room(tensor), tensor)

    def _find_room(self, tensor: Tensor) -> Tensor:
        if self._room is not None:
            return self._room
        made = blank(tensor, pin_memory=True)
        if self._rooms is not None and self._rooms.keep(made):
            self._room = made
        return made

    def arrive(self, made: Tensor, tensor: Tensor) -> None:
        """Begin to copy a tensor to its room on the GPU, beside what is computed next."""
        self._copy_beside(made, tensor, self._streams.arrive)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Begin to copy what nobody is computing from the GPU, in whichever thread asks for it."""
        made = self._find_room(tensor)
        with torch.cuda.stream(self._streams.lend):
            copy_over(made, tensor)
        self.done.record(self._streams.lend)
        return made

    def _copy_beside(self, made: Tensor, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        compute = self._streams.compute
        self._ready.record(compute)
        stream.wait_event(self._ready)
        torch.cuda.set_stream(stream)
        try:
            copy_over(made, tensor)
        finally:
            torch.cuda.set_stream(compute)
        self.done.record(stream)


def copy_over(made: Tensor, tensor: Tensor) -> Tensor:
    """Copy a tensor to its `blank` on another device, without waiting for it."""
    mine, theirs = once(made), once(tensor)
    span = span_of(theirs)
    is_dense = span == theirs.numel()
    if not theirs.is_contiguous() and not is_dense and span <= (1 + MOST_GAPS) * theirs.numel():
        mine = mine.as_strided((span,), (1,))
        theirs = theirs.as_strided((span,), (1,))
    mine.copy_(theirs, non_blocking=True)
    return made


def blank(tensor: Tensor, device: torch.device | str = "cpu", **options: Any) -> Tensor:
    """
    Make room for a copy, with the same strides: some kernels round otherwise on other strides.

    So a copy of a slice takes as much memory as the rows that it is a part of, and one of a tensor
    whose rows are all the same memory takes one row. From CPU to CPU it begins as far behind a
    multiple of a cache line as the tensor does, since some kernels round by that, too.
    """
    rows = once(tensor)
    is_on_cpu = tensor.is_cpu and torch.device(device).type == "cpu"
    ahead = tensor.data_ptr() % LINE_BYTES // tensor.itemsize if is_on_cpu else 0
    if ahead:
        memory = torch.empty(ahead + span_of(rows), dtype=tensor.dtype, device=device, **options)
        return memory.as_strided(tensor.size(), tensor.stride(), ahead)
    made = torch.empty_strided(
        rows.size(), rows.stride(), dtype=tensor.dtype, device=device, **options
    )
    return made if rows is tensor else made.as_strided(tensor.size(), tensor.stride())


def span_of(tensor: Tensor) -> int:
    """Count the elements of memory from a tensor's first to its last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in steps)


def once(tensor: Tensor) -> Tensor:
    """Look at what an expanded tensor repeats only once."""
    if 0 not in tensor.stride():
        return tensor
    sizes = [
        n if step or not n else 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(sizes, tensor.stride())
