"""
Timing ops on real devices.

This module owns how an op is timed and in which company: a core is measured while the others
compute and copy, as they would in a plan. Which ops is in `placewright.execute._probe_cases`.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from placewright.errors import InputError
from placewright.execute._probe_cases import LADDERS, Inputs, Ladder, Shape, work_of
from placewright.execute._probe_fit import Sample
from placewright.execute._probe_memory import memory_of
from placewright.execute.devices import Lane, RealDevice
from placewright.execute.kernels import kernel_for
from placewright.units import format_bytes

Run = Callable[[int], None]
"""Calls an op as often as it is told to."""

Clock = Callable[[Run, int], float]
"""Gives the seconds that some calls take."""

Case = tuple[int, str, int]
"""An op at one size: its ladder, dtype and rung."""

TELL_EVERY_S = 1.0
"""How often it is told how far the timing is."""

LEAST_BYTES = 256 * 2**20
"""A device with less free memory cannot be measured."""


@dataclass(frozen=True)
class Settings:
    """How thoroughly a machine is measured."""

    num_passes: int = 3  # through all ops, each on the next of the cores that are alike
    device_s: float = 15.0  # nothing but the first pass goes on after this
    num_rungs: int = 99  # sizes of an op, at most
    case_s: float = 0.01  # for one size of an op in one pass, unless its samples take longer
    sample_s: float = 0.0005  # calls are timed together until they take as long
    num_samples: int = 3  # at least, in one pass
    longest_s: float = 0.005  # no larger size is tried of an op that takes longer
    largest_bytes: int = 2**30  # nor of one that would move more
    pool_bytes: int = 2**27  # to be read until an input is no longer in any cache
    num_variants: int = 64  # inputs that a call takes in turn, at most
    quick_s: float = 0.005  # a small product in bfloat16 takes no longer where a CPU computes it
    copy_bytes: tuple[int, ...] = (2**12, 2**15, 2**18, 2**20, 2**22, 2**24)
    num_copies: int = 20  # of each size over each link, fewer where there are many
    links_s: float = 15.0  # for all links, at 20 ms for one copy of each size both ways
    few_links: int = 30  # where there are more, every third size


@dataclass(frozen=True)
class _Limits:
    end: float  # on the monotonic clock
    bytes: int


@dataclass(frozen=True)
class Timing:
    """How ops are timed on the devices of one machine."""

    settings: Settings
    cores: Sequence[Lane]  # of devices that are cores: all work while one of them is measured
    halt: threading.Event  # ends it early

    def time_ops(
        self, chosen: Sequence[tuple[RealDevice, Lane]], tell: Callable[[str], None]
    ) -> list[Sample]:
        """
        Time all ops in several passes, each on the next of some devices that are alike.

        `tell` is called with how far this is, once a second.

        Raises
        ------
        InputError
            A device has too little free memory.
        """
        found: dict[Case, list[Sample]] = defaultdict(list)
        end = time.monotonic() + self.settings.device_s
        for k in range(self.settings.num_passes):
            device, lane = chosen[k % len(chosen)]
            others = [other for other in self.cores if other is not lane]
            done: dict[Case, Sample] = {}
            one_pass = functools.partial(self._pass, device, end if k > 0 else math.inf, done)
            with _busy(others if lane in self.cores else []):
                running = lane.submit(one_pass)
                while not wait([running], TELL_EVERY_S).done:
                    tell(f"{len(done):,} ops timed, pass {k + 1} of {self.settings.num_passes}")
                running.result()
            for case, sample in done.items():
                found[case].append(sample)
        return [
            replace(passes[0], time_s=statistics.median(sample.time_s for sample in passes))
            for passes in found.values()
        ]

    def _pass(self, device: RealDevice, end: float, found: dict[Case, Sample]) -> None:
        """Time every op at every size that a device can take, on the thread that calls."""
        free = memory_of(device, max(len(self.cores), 1))
        if free < LEAST_BYTES:
            raise InputError(
                f"`{device.name}` has {format_bytes(free)} of free memory; measuring it takes"
                f" {format_bytes(LEAST_BYTES)}. Free some."
            )
        limits = _Limits(end, min(self.settings.largest_bytes, free // 4))
        with torch.no_grad():
            for dtype in ("float32", *self._other_dtypes(device)):
                pool_bytes = min(self.settings.pool_bytes, free // 8)
                inputs = Inputs(device.torch_device, dtype, pool_bytes)
                for k, ladder in enumerate(LADDERS):
                    if dtype in ladder.dtypes:
                        for rung, sample in enumerate(self._climb(ladder, device, inputs, limits)):
                            found[k, dtype, rung] = sample

    def _other_dtypes(self, device: RealDevice) -> tuple[str, ...]:
        """List the dtypes besides float32 that a device has a rate of its own for."""
        if device.kind == "cuda":
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
            return ("float16", "bfloat16") if has_bfloat16 else ("float16",)
        matrix = torch.ones(128, 128, dtype=torch.bfloat16)
        run = _repeat(torch.mm, [(matrix, matrix)])
        run(1)
        return ("bfloat16",) if _clock_of(device)(run, 1) <= self.settings.quick_s else ()

    def _climb(
        self, ladder: Ladder, device: RealDevice, inputs: Inputs, limits: _Limits
    ) -> Iterator[Sample]:
        """Time an op at growing sizes, until it takes long or much memory."""
        inputs.forget()
        for shape in ladder.shapes[: self.settings.num_rungs]:
            if self.halt.is_set() or time.monotonic() > limits.end:
                return
            sample = self._time(ladder, shape, device, inputs)
            yield sample
            if sample.time_s > self.settings.longest_s or 4 * sample.bytes > limits.bytes:
                return

    def _time(self, ladder: Ladder, shape: Shape, device: RealDevice, inputs: Inputs) -> Sample:
        """Time an op at one size."""
        kernel = kernel_for(ladder.target, device.kind)
        if ladder.keywords:
            kernel = functools.partial(kernel, **ladder.keywords)
        first = ladder.arguments(inputs, shape)
        flops, num_bytes = work_of(ladder, first, kernel(*first))
        count = min(self.settings.num_variants, int(inputs.pool_bytes / num_bytes))
        others = (ladder.arguments(inputs, shape) for _ in range(count - 1))
        run = _repeat(kernel, [first, *others])
        time_s = self._median_s(run, _clock_of(device))
        return Sample(ladder.kind, inputs.dtype, flops, num_bytes, time_s)

    def _median_s(self, run: Run, clock: Clock) -> float:
        """Time a call: warm-up, then samples of as many calls as a clock can tell from none."""
        count = min(math.ceil(self.settings.sample_s / max(clock(run, 1), 1e-7)), 1000)
        if count > 1:
            run(count)
        end = time.monotonic() + self.settings.case_s
        times: list[float] = []
        while len(times) < self.settings.num_samples or time.monotonic() < end:
            times.append(clock(run, count) / count)
        return statistics.median(times)


@contextmanager
def _busy(lanes: Sequence[Lane]) -> Iterator[None]:
    """Keep lanes busy meanwhile, about half of the time computing and half of it copying."""
    stop = threading.Event()

    def work() -> None:
        matrix, memory = torch.rand(192, 192), torch.rand(2**24)
        for part in itertools.cycle(memory.split(2**20)):
            if stop.is_set():
                return
            for _ in range(4):
                torch.mm(matrix, matrix)
            part.clone()

    futures = [lane.submit(work) for lane in lanes]
    try:
        yield
    finally:
        stop.set()
        for future in futures:
            future.result()


def _repeat(kernel: Callable[..., object], variants: Sequence[tuple[object, ...]]) -> Run:
    """Make what calls a kernel, with one list of arguments after the other."""
    turns = itertools.cycle(variants)

    def run(count: int) -> None:
        for arguments in itertools.islice(turns, count):
            kernel(*arguments)

    return run


def _clock_of(device: RealDevice) -> Clock:
    if device.kind == "cuda":
        return _time_on_gpu
    return _time_on_core if len(device.cores) == 1 else _time_on_cpu


def _time_on_core(run: Run, count: int) -> float:
    """Time calls by this thread alone: what other processes take of the core does not count."""
    begun = time.thread_time()
    run(count)
    return time.thread_time() - begun


def _time_on_cpu(run: Run, count: int) -> float:
    begun = time.perf_counter()
    run(count)
    return time.perf_counter() - begun


def _time_on_gpu(run: Run, count: int) -> float:
    """Time calls that are issued back to back, to the end of the last one."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run(count)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def time_kernel(count: int = 200) -> float:
    """Time a tiny op on the current GPU itself: it waits until all of them are issued."""
    tiny = torch.zeros(64, device="cuda")
    run = _repeat(torch.add, [(tiny, tiny)])
    run(count)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(20_000_000)  # ticks of its clock, about 10 ms
    begin.record()
    run(count)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count
