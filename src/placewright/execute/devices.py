"""
The devices of this machine, and the threads that work for them.

This module owns what a device's name means here: ``cuda:0`` is a GPU; ``cpu`` is the processor with
all cores that this process may use, but for what works for GPUs beside it; ``cpu:0``,
``cpu:1``, ... are its cores, one a device, each with one thread that stays on it; ``cuda:0/0-87``
is a GPU's multiprocessors 0 to 87 (`placewright.execute._shares`).
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import combinations
from queue import SimpleQueue
from typing import Any

from placewright.errors import InputError
from placewright.execute._cores import own_cores, share_cores
from placewright.execute._lanes import Share, count_gpu_lanes, share_of, whole_gpu
from placewright.execute.allocation import keep_memory

try:
    import torch
except ImportError:
    raise InputError(
        "PyTorch is not installed, and running on real devices needs it. Install it with"
        " `pip install 'placewright[torch]'`."
    ) from None

from placewright.execute._shares import count_multiprocessors, stream_of


@dataclass(frozen=True)
class RealDevice:
    """A device of this machine."""

    name: str
    kind: str  # "cpu" or "cuda"
    cores: tuple[int, ...]  # that its thread may use; empty: any

    @property
    def share(self) -> Share | None:
        """Tell which share of a GPU it is; None: no share."""
        return share_of(self.name)

    @property
    def torch_device(self) -> torch.device:
        """Give PyTorch's device that its tensors are on."""
        return torch_device_of(self.name) if self.kind == "cuda" else torch.device("cpu")


def torch_device_of(name: str) -> torch.device:
    """Give PyTorch's device by the name of a GPU or of a share of one."""
    return torch.device(whole_gpu(name))


def list_devices() -> tuple[RealDevice, ...]:
    """List the devices of this machine: its processor, its GPUs, and its cores one by one."""
    cores = own_cores()
    gpus = [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    return (
        RealDevice("cpu", "cpu", cores),
        *(RealDevice(name, "cuda", ()) for name in gpus),
        *(RealDevice(f"cpu:{k}", "cpu", (core,)) for k, core in enumerate(cores)),
    )


def find_device(name: str) -> RealDevice:
    """
    Find a device of this machine by its name.

    Raises
    ------
    InputError
        It has none of this name.
    """
    there = list_devices()
    share = share_of(name)
    found = next((device for device in there if device.name == whole_gpu(name)), None)
    if found is not None:
        return found if share is None else _divided(found, name, share)
    gpus = [device.name for device in there if device.kind == "cuda"]
    cores = len(own_cores())
    words = f"cpu (or its cores, cpu:0 to cpu:{cores - 1}, as devices of their own)"
    hint = "" if re.fullmatch(r"(cpu|cuda)(:\d+)?", name) else " Its name should be PyTorch's."
    raise InputError(
        f"This machine has no device `{name}`. It has: {', '.join([words, *gpus])}.{hint}"
    )


def _divided(gpu: RealDevice, name: str, share: Share) -> RealDevice:
    count = count_multiprocessors(gpu.name)
    if not share.first <= share.last < count:
        raise InputError(
            f"`{gpu.name}` has the multiprocessors 0 to {count - 1}; `{name}` is no part of them."
        )
    return replace(gpu, name=name)


def find_devices(names: tuple[str, ...]) -> tuple[RealDevice, ...]:
    """
    Find several devices, which must not share cores or multiprocessors.

    Raises
    ------
    InputError
        One is not there, ``cpu`` stands beside its own cores, or a GPU beside its own shares; or
        shares overlap.
    """
    found = tuple(find_device(name) for name in names)
    whole = [d.name for d in found if d.name == "cpu"]
    parts = [d.name for d in found if d.name.startswith("cpu:")]
    if whole and parts:
        raise InputError(
            f"`cpu` is all cores, `{parts[0]}` one of them: a machine is one or the other."
        )
    _check_shares([device for device in found if device.kind == "cuda"])
    if not whole:
        return found
    theirs, ours = share_cores(count_gpu_lanes(names, [device.kind for device in found]))
    return tuple(replace(d, cores=theirs if d.kind == "cpu" else ours) for d in found)


def _check_shares(gpus: Sequence[RealDevice]) -> None:
    for one, other in combinations(gpus, 2):
        a, b = one.share, other.share
        if one.torch_device == other.torch_device and (
            a is None or b is None or (a.first <= b.last and b.first <= a.last)
        ):
            raise InputError(f"`{one.name}` and `{other.name}` have multiprocessors in common.")


def default_devices() -> tuple[RealDevice, ...]:
    """Choose the devices that a plan for this machine would use: GPUs and ``cpu``, or cores."""
    there = list_devices()
    has_gpu = any(device.kind == "cuda" for device in there)
    return find_devices(tuple(d.name for d in there if d.name.startswith("cpu:") != has_gpu))


class Lane:
    """
    A thread that does one thing after the other for a device, on that device's cores only.

    Ops of a core's own device use one thread each, those of ``cpu`` as many as it has cores. The
    setting is this thread's own; that of others stays. What tensors on the CPU leave behind is kept
    by the process, for the next ones (`placewright.execute.allocation`).
    """

    def __init__(self, device: RealDevice) -> None:
        if device.kind == "cpu":
            keep_memory()
        self._device = device
        before = torch.get_num_threads()
        if len(device.cores) > 1 and before > 2:
            _dismiss_threads()
        self._start()
        torch.set_num_threads(before)  # a thread's setting is also that of threads to come

    def _start(self) -> None:
        self._process = os.getpid()
        self._settled: Future[None] = Future()
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._device,),
            name=f"placewright {self._device.name}",
            daemon=True,
        )
        self._thread.start()
        self._settled.result()

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        """Have something done after all that was asked for before."""
        if self._process != os.getpid():  # threads do not come along when a process is forked
            before = torch.get_num_threads()
            self._start()
            torch.set_num_threads(before)
        future: Future[Any] = Future()
        self._work.put((task, future))
        return future

    def close(self) -> None:
        """End the thread after what it was asked to do."""
        if self._process == os.getpid():
            self._work.put(None)
            self._thread.join()

    def _run(self, device: RealDevice) -> None:
        try:
            settle(device)
        except BaseException as error:
            self._settled.set_exception(error)
            raise
        self._settled.set_result(None)
        while (item := self._work.get()) is not None:
            task, future = item
            try:
                future.set_result(task())
            except BaseException as error:  # whoever asked gets it
                future.set_exception(error)
            del item, task, future


class Lanes:
    """
    The lanes of several devices, for one step or for several that run one after the other.

    They end when nobody needs them any more, or are closed.
    """

    def __init__(self) -> None:
        self._lanes: dict[RealDevice, Lane] = {}
        self._process = os.getpid()
        self._turn = threading.Lock()
        self._end = weakref.finalize(self, _close_all, self._lanes)

    @property
    def turn(self) -> threading.Lock:
        """Give the lock of whoever has these lanes at work; after a fork nobody has."""
        if self._process != os.getpid():
            self._process, self._turn = os.getpid(), threading.Lock()
        return self._turn

    @property
    def is_open(self) -> bool:
        """Tell whether they have not been closed."""
        return self._end.alive

    def of(self, device: RealDevice) -> Lane:
        """Give a device's lane; make it if there is none."""
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        return self._lanes[device]

    def close(self) -> None:
        """End the threads."""
        self._end()


def _close_all(lanes: dict[RealDevice, Lane]) -> None:
    for lane in lanes.values():
        lane.close()


def _dismiss_threads() -> None:
    """
    Have the calling thread keep one helper of those with which PyTorch computes for it.

    They come back when it computes something large. Where OpenMP has more threads than there are
    cores, none of them waits awake for the next op, and those of a lane take longer for each.
    """
    torch.set_num_threads(2)
    torch.ones(2**16).sin_()  # computed by two: the others end


def settle(device: RealDevice) -> None:
    """Make the calling thread one that works for a device."""
    if device.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, device.cores)  # of this thread
    if device.kind != "cpu":
        torch.cuda.set_device(device.torch_device)
        if device.share is not None:
            torch.cuda.set_stream(stream_of(device.share))
        return
    # A thread's first look at the number of threads sets it to everyone's: look, then set.
    torch.get_num_threads()
    torch.set_num_threads(len(device.cores))
