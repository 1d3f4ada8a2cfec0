"""
Timing one op on a real device.

This module owns how an op is timed, so that its time is what it takes inside a step:

* It runs in its device's `Lane`, on made-up tensors with the captured sizes and strides. What is
  timed is a straight line of calls as the executor makes them; views are made beforehand.
* What a step would find in the caches is there, what it would not is not (see `use_distances`). Of
  what is near, there is one copy; of what is off, as many as fill `OFF_BYTES`; of what is far, as
  many as fill the last cache twice; each call takes the next. Results go to the memory of earlier
  ones, which by then is off, too.
* Several cores as devices share that cache and the memory behind it, so while one core is timed the
  others do the same op. Ops of less than `SHORT_S` live in a core's own cache, and doing them
  elsewhere would only take turns at Python's lock; meanwhile the others do small matrix products.
  In turns with that, it is timed while the others idle: what it gains then is noted. So is what an
  op of a processor beside a GPU gains with all cores, which it has in a plan without the GPU
  (a GPT-2 whose ops take 59 ms on 15 cores took 35 to 38 on 16).
* A core's time is that of its thread: what other processes take of the core does not count.
* Warm-up ends when a call is no longer a tenth faster than all before; a sample is as many calls as
  last a fifth of a millisecond; the time is the median of the samples, the spread their median
  distance from it.
* An op that is called again and again finds its own code in the caches, one in a step does not. The
  difference is about the same for every op and is kept once for the device (`issue_s`).
* On a GPU, events time a batch of calls that was recorded and is replayed (a CUDA graph), as the
  executor does it, so that it never waits for the host. Where that cannot be, they are queued
  behind a pause. `issue_s` is what the host takes to issue a call.
* Memory that the op takes while it runs, as convolutions do, is noted.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from placewright.errors import InputError
from placewright.execute._cores import own_cores
from placewright.execute._probe_memory import memory_of
from placewright.execute.devices import Lane, RealDevice, settle
from placewright.execute.graphs import may_be_empty
from placewright.execute.issuing import below_autograd, time_issue
from placewright.execute.op_times import Timing
from placewright.execute.solo import Solo, Solos
from placewright.units import format_bytes

SHORT_S = 50e-6
OFF_BYTES = 4 * 2**20
MAX_KEPT = 256
SLOW = 1.2
"""How much slower than at its best a core may be."""

MAX_MORE_TRIES, PAUSE_S = 40, 0.25
"""How often ops are timed again, all together, if the core was slow; and a pause before."""
_REFRESH_EVERY = 50
"""Calls of a copy after which what is overwritten is filled anew: it may halve with each call."""


@dataclass(frozen=True)
class Effort:
    """How much time goes into an op's time."""

    min_samples: int = 5
    max_samples: int = 100
    sample_s: float = 200e-6  # a sample is as many calls as take so long
    total_s: float = 0.02  # samples are taken for so long at least,
    limit_s: float = 2.0  # and at most, but for three of them
    max_warm_up: int = 10
    max_copies: int = 2048  # of a tensor, so that it comes from a slower cache or from memory
    has_company: bool = True  # other cores work meanwhile
    max_tries: int = 4  # more of them, if the core was slow


class OpBench:
    """
    Lanes on which ops are timed: the first device's, with the others as company.

    A machine may be slow for a second or two, as when others share its processor. Between ops a
    core therefore does the same small piece of work. If that takes much longer than its best
    (`pace_s`, which may be known from before), what was timed meanwhile is timed again, a few times
    at most.
    """

    def __init__(
        self, devices: Sequence[RealDevice], effort: Effort, pace_s: float | None = None
    ) -> None:
        self._device, self._effort = devices[0], effort
        self.pace_s = pace_s
        self.num_slow = 0  # ops whose last try was slow, too
        self._last_pace_s = 0.0
        self._num_tries = MAX_MORE_TRIES
        self._is_stopping = False
        others = devices[1:] if effort.has_company and self._device.kind == "cpu" else ()
        self._lane = Lane(self._device)
        self._others = [Lane(device) for device in others]
        self._cache_bytes = cache_bytes(self._device)
        is_processor = self._device.kind == "cpu" and len(self._device.cores) > 1
        every = own_cores() if is_processor else ()
        self._more_cores = every if len(every) > len(self._device.cores) else ()
        self._sample_s = effort.sample_s
        if self._device.kind == "cuda":
            self._sample: Callable[[Callable[[int], None], int], float] = _GpuClock(self._device)
            self._sample_s *= 5  # starting a replay takes some microseconds of it
        else:
            # What other processes take of a core is no part of an op's time.
            clock = time.thread_time if len(self._device.cores) == 1 else time.perf_counter
            self._sample = functools.partial(_sample_cpu, clock)

    def __enter__(self) -> OpBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        for lane in (self._lane, *self._others):
            lane.close()

    def time_issue(self) -> float:
        """Time what issuing an op takes: see `Times`."""
        issue_s: float = self._lane.submit(lambda: time_issue(self._device)).result()
        return issue_s

    def time_op(self, solos: Solos, op: int) -> Timing:
        """Time an op; raises what it raises."""
        solo = solos.build(op, self._device)
        num_copies = self._num_copies(solo)
        each = self._needed_bytes(solos, op, solo, num_copies)
        room = memory_of(self._device, num_sharing=1)
        if each > room:
            raise InputError(
                f"It needs {format_bytes(each)} and {format_bytes(room)} of memory are free."
            )
        company = self._others[: room // max(each, 1) - 1]

        def work() -> Timing:
            with below_autograd():
                return self._time(solo, num_copies, company)

        found: list[tuple[float, Timing]] = []  # by how slow the core was
        while True:
            timing: Timing = self._lane.submit(work).result()
            slowness = self._look_at_pace()
            found.append((slowness, timing))
            if slowness <= SLOW:
                return timing
            if len(found) > self._effort.max_tries or self._num_tries == 0:
                self.num_slow += 1
                return min(found, key=lambda each: each[0])[1]
            self._num_tries -= 1
            time.sleep(PAUSE_S)

    def _look_at_pace(self) -> float:
        """Tell how much slower than at its best the core was since this was last asked."""
        if self._device.kind != "cpu" or len(self._device.cores) != 1:
            return 1.0
        before_s, self._last_pace_s = self._last_pace_s, self._lane.submit(_pace_s).result()
        self.pace_s = min(self.pace_s or math.inf, self._last_pace_s)
        return max(before_s, self._last_pace_s) / self.pace_s

    def _num_copies(self, solo: Solo) -> list[int]:
        """Choose how many copies are taken in turn of what is near, off and far."""
        counts = [1]
        for distance, turn_bytes in ((1, OFF_BYTES), (2, 2 * self._cache_bytes)):
            count = math.ceil(turn_bytes / max(solo.bytes_at(distance), 1))
            counts.append(min(count, self._effort.max_copies) if solo.bytes_at(distance) else 1)
        return counts

    def _needed_bytes(self, solos: Solos, op: int, solo: Solo, num_copies: list[int]) -> int:
        graph = solos.capture.graph
        made = graph.tensor_bytes[graph.op_outputs[op] : graph.op_outputs[op + 1]].sum()
        needed = sum(count * solo.bytes_at(k) for k, count in enumerate(num_copies))
        return int(needed + 2 * made + graph.op_workspace_bytes[op])

    def _time(self, solo: Solo, num_copies: list[int], company: list[Lane]) -> Timing:
        arguments = solo.make(num_copies)
        turn = _Turn(solo.call, arguments.copies)
        scratch_bytes = self._scratch_bytes(solo, arguments.copies[0])
        last_s = self._warm_up(turn)
        busy_with = None if last_s < SHORT_S else solo
        samples: list[float] = []
        alone: list[float] = []
        since = 0

        def take(samples: list[float], part: float) -> None:
            nonlocal since
            while not self._is_enough(samples, num_calls, part):
                samples.append(self._sample(turn, num_calls))
                since += num_calls
                if since >= _REFRESH_EVERY * max(num_copies):
                    arguments.refresh()
                    since = 0

        may_gain = bool(company or self._more_cores)
        for part in (0.25, 0.5, 0.75, 1.0) if may_gain else (1.0,):
            with _in_company(company, busy_with, num_copies):
                if may_gain:
                    last_s = self._warm_up(turn)
                num_calls = max(1, min(1000, round(self._sample_s / max(last_s, 1e-9))))
                take(samples, part)
            if self._more_cores:
                with self._on_all_cores():
                    self._warm_up(turn)
                    take(alone, part)
            elif company:
                take(alone, part)
        middle = statistics.median(samples)
        spread = statistics.median(abs(sample - middle) for sample in samples)
        gain_s = max(0.0, middle - statistics.median(alone)) if may_gain else 0.0
        return Timing(middle, spread, len(samples), scratch_bytes, gain_s)

    @contextlib.contextmanager
    def _on_all_cores(self) -> Iterator[None]:
        """Let this thread, a lane's, compute as it would where nothing is on a GPU."""
        settle(replace(self._device, cores=self._more_cores))
        try:
            yield
        finally:
            settle(self._device)

    def _scratch_bytes(self, solo: Solo, arguments: tuple[Any, ...]) -> int:
        """
        Give what an op that has run before holds beside what it is given and makes.

        Of several calls, what one makes for the next has its room: what they are given is let go
        of in turn.
        """
        if solo.num_calls > 1:
            return 0
        if self._device.kind == "cpu":
            return _scratch_on_cpu(functools.partial(solo.call, *arguments))
        gpu = self._device.torch_device
        torch.cuda.reset_peak_memory_stats(gpu)
        made = solo.call(*arguments)  # kept: its memory is the step's
        after = torch.cuda.memory_allocated(gpu)
        del made
        return int(torch.cuda.max_memory_allocated(gpu) - after)

    def _warm_up(self, turn: _Turn) -> float:
        best_s = math.inf
        for _ in range(max(1, self._effort.max_warm_up)):
            last_s = self._sample(turn, 1)
            if last_s > 0.9 * best_s or last_s > self._effort.limit_s:
                return last_s
            best_s = min(best_s, last_s)
        return best_s

    def _is_enough(self, samples: list[float], num_calls: int, part: float) -> bool:
        """Tell whether so much of all samples has been taken."""
        effort = self._effort
        total_s, count = sum(samples) * num_calls / part, len(samples) / part
        if samples and self._is_stopping:
            return True
        if count >= max(effort.max_samples, effort.min_samples):
            return True
        if count >= effort.min_samples:
            return total_s >= effort.total_s
        return count >= min(3, effort.min_samples) and total_s >= effort.limit_s


def _pace_s() -> float:
    """Time a small piece of work: the best of a few, since short moments do not matter."""
    matrix = torch.ones(192, 192)
    with below_autograd():
        times = []
        for _ in range(5):
            begin = time.thread_time()
            torch.mm(matrix, matrix)
            times.append(time.thread_time() - begin)
    return max(min(times), 1e-9)


def _scratch_on_cpu(call: Callable[[], Any]) -> int:
    """Give the most that a call holds beside what is left of it; 0 if this PyTorch cannot tell."""
    profiler: Any = torch.autograd  # of PyTorch's two, the one that says nothing on standard error
    if not hasattr(profiler, "_enable_profiler_legacy"):
        return 0
    others = torch._C._profiler._ExperimentalConfig()
    state = profiler.ProfilerState.CPU
    tells = profiler.ProfilerConfig(state, False, True, False, False, False, others)
    profiler._enable_profiler_legacy(tells)  # every allocation
    try:
        made = call()  # kept: its memory is the step's
    finally:
        events = profiler._disable_profiler_legacy()
    del made
    sizes = [e.cpu_memory_usage() for of in events for e in of if e.kind() == "memory_alloc"]
    held = [*itertools.accumulate(sizes, initial=0)]
    return int(max(held) - held[-1])


class _Turn:
    """Calls an op, each time on the next arguments, and keeps what it has made for a while."""

    def __init__(self, call: Callable[..., Any], copies: list[tuple[Any, ...]]) -> None:
        self._call, self._copies = call, itertools.cycle(copies)
        made = [tensor for tensor in call(*next(self._copies)) if isinstance(tensor, torch.Tensor)]
        count = OFF_BYTES // max(sum(tensor.nbytes for tensor in made), 1)
        count = max(1, min(count, MAX_KEPT))
        room = [[tensor.clone() for tensor in made] for _ in range(count)]
        self._kept: deque[Any] = deque(room, maxlen=count)

    def __call__(self, num_calls: int) -> None:
        call, keep, copies = self._call, self._kept.append, self._copies
        for _ in range(num_calls):
            keep(call(*next(copies)))


def _sample_cpu(clock: Callable[[], float], turn: Callable[[int], None], num_calls: int) -> float:
    begin = clock()
    turn(num_calls)
    return (clock() - begin) / num_calls


class _GpuClock:
    """Times calls on a GPU, recorded once and replayed for every sample."""

    def __init__(self, device: RealDevice) -> None:
        self._is_share = device.share is not None
        self._recorded: tuple[Any, int, Any] = (None, 0, None)  # of what, how many, and how

    def __call__(self, turn: Callable[[int], None], num_calls: int) -> float:
        num_calls = min(num_calls, 200)  # a GPU's queue is finite
        if self._recorded[:2] != (turn, num_calls):
            self._recorded = (None, 0, None)  # its memory, first
            self._recorded = (turn, num_calls, self._record(turn, num_calls))
        graph = self._recorded[2]
        make: Any = torch.cuda.Event  # without types
        begin, end = make(enable_timing=True), make(enable_timing=True)
        if graph is None:
            sleep: Any = torch.cuda._sleep
            sleep(200_000 * num_calls)  # longer than issuing the calls takes
        begin.record()
        if graph is None:
            turn(num_calls)
        else:
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / num_calls

    def _record(self, turn: Callable[[int], None], num_calls: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        # What is recorded on a share's stream runs on that share.
        stream = torch.cuda.current_stream() if self._is_share else None
        try:
            with (
                may_be_empty(),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                turn(num_calls)
        except RuntimeError:  # it asks the GPU something in between
            return None
        return graph


@contextlib.contextmanager
def _in_company(lanes: list[Lane], solo: Solo | None, num_copies: list[int]) -> Iterator[None]:
    """Keep other cores busy: with the same op, or with small matrix products."""
    stop = threading.Event()
    started = [threading.Event() for _ in lanes]

    def work(begun: threading.Event) -> None:
        try:
            with below_autograd():
                if solo is None:
                    matrix = torch.ones(192, 192)
                    turn = _Turn(lambda: (torch.mm(matrix, matrix),), [()])
                else:
                    turn = _Turn(solo.call, solo.make(num_copies).copies)
                while not stop.is_set():
                    turn(1)
                    begun.set()
        finally:
            begun.set()

    asked = [
        lane.submit(functools.partial(work, begun))
        for lane, begun in zip(lanes, started, strict=True)
    ]
    try:
        for begun in started:
            begun.wait()
        yield
    finally:
        stop.set()
        for future in asked:
            future.result()


def cache_bytes(device: RealDevice) -> int:
    """Tell the size of a device's last cache; 32 MiB where that is not known."""
    if device.kind == "cuda":
        return int(torch.cuda.get_device_properties(device.torch_device).L2_cache_size)
    folder = Path(f"/sys/devices/system/cpu/cpu{device.cores[0]}/cache")
    try:
        words = [file.read_text().strip() for file in folder.glob("index*/size")]
        sizes = [int(word.removesuffix("K")) * 1024 for word in words]
    except (OSError, ValueError):
        sizes = []
    return min(max(sizes, default=32 * 2**20), 256 * 2**20)
