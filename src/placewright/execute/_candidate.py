"""
A candidate at work: what the process that a template has forked for it does.

This module owns how a candidate is kept within its memory, what of repeating a step must not show
in its time, how it leaves the cores to the next, and what its failures are called. It ends when it
is told to, when whoever asked has gone, or after its first failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import torch
from torch import Tensor

from placewright.children import python_command
from placewright.errors import InputError
from placewright.execute._eager import EagerStep
from placewright.execute._peaks import measure_peaks
from placewright.execute._wire import Failed, Job, Peaks, Ready, Run, Times, Weigh, Wire
from placewright.execute.devices import torch_device_of
from placewright.execute.placed import PlacedStep, free_bytes
from placewright.frontends._structures import leaves_of
from placewright.frontends.torch import Capture
from placewright.load import load_step

LOOK_S, MAX_REST_S = 0.01, 0.2
"""How long to look whether threads are at work (the system counts in steps of 4 ms), and in all."""

_FED = ("inputs", "kwargs", "targets")

_SIGNS = (
    "MemoryError",
    "OutOfMemoryError",
    "bad_alloc",
    "allocate memory",
    "Unable to allocate",
    "out of memory",
    "can't start new thread",  # whose stack is memory too
)


@dataclass(frozen=True, eq=False)
class Model:
    """What a template has made: a step with real weights and inputs, on the CPU."""

    name: str
    capture: Capture
    arguments: Mapping[str, Any]  # of `placewright.capture`
    fed: list[Tensor]

    @property
    def module(self) -> torch.nn.Module:
        """Return the module."""
        module: torch.nn.Module = self.arguments["module"]
        return module


class Work(Protocol):
    """A step that is ready to run."""

    @property
    def num_cores(self) -> int:
        """Count the cores of the device that has most of them."""

    def run(self) -> None:
        """Run it once."""

    def peaks(self) -> dict[str, int | None]:
        """Run it and return the most that each device holds, in bytes; None: unknown."""


class PlacedWork:
    """A step as planned; inputs are where the plan has them, which is no part of the step."""

    def __init__(self, model: Model, job: Job) -> None:
        self._step = _place(model, job)
        flush_denormals(self._step)
        self._homes = _fed_devices(model, job)
        where = {device.name: device.torch_device for device in self._step.runner.devices}
        pairs = zip(model.fed, self._homes, strict=True)
        self._fed = [tensor.to(where[home]) for tensor, home in pairs]

    @property
    def num_cores(self) -> int:
        """Count the cores of the device that has most of them."""
        return max(len(device.cores) for device in self._step.runner.devices)

    def run(self) -> None:
        """Run the step once."""
        self._step.run(self._fed)

    def peaks(self) -> dict[str, int | None]:
        """Run the step, and end with it."""
        return measure_peaks(self._step, self._fed, self._homes)


def is_memory(words: str) -> bool:
    """Tell by an error's words whether memory ran out."""
    # oneDNN's kernels are machine code that it makes; of others it says what they would be for.
    return words.endswith("could not create a primitive") or any(sign in words for sign in _SIGNS)


def shorten(words: str) -> str:
    """Make one sentence of what PyTorch says when a GPU's memory ran out; leave others alone."""
    lacks = re.search(r"CUDA out of memory\. Tried to allocate (\S+ \S+)\. GPU (\d+)", words)
    if lacks is None:
        return words
    allowed = re.search(r"(\S+ \S+) allowed", words)
    within = f" within the {allowed[1]} that it may use" if allowed else ""
    return f"GPU {lacks[2]} has no room for another {lacks[1]}{within}."


def obey(wire: Wire, model: Model) -> None:
    """Place the step as the first message says, then do what is asked until the other end goes."""
    with _told(wire):
        job = wire.receive(Job)
        if job.eager.startswith("cuda"):
            _begin_anew(wire, model.name, job)
        with _within_memory(job, _size_of(model.fed)):
            eager = job.eager
            _obey(wire, EagerStep(model.arguments, eager) if eager else PlacedWork(model, job))


def obey_eager(wire: Wire, name: str, job: Job) -> None:
    """Build a model and run its step in plain PyTorch, as asked, until the other end goes."""
    with _told(wire):
        arguments = load_step(name)
        fed = [leaf for key in _FED for leaf in leaves_of(arguments.get(key))]
        with _within_memory(job, _size_of(fed)):
            _obey(wire, EagerStep(arguments, job.eager))


@contextlib.contextmanager
def _told(wire: Wire) -> Iterator[None]:
    """Meanwhile, tell the other end what fails, and go when it does."""
    try:
        with contextlib.suppress(EOFError):
            yield
    except InputError as error:
        _give_up(wire, Failed("input", str(error)))
    except Exception as error:  # whatever it is: the candidate's result
        words = " ".join(f"{type(error).__name__}: {error}".split())
        _give_up(wire, Failed("memory" if is_memory(words) else "crash", shorten(words)))


def _obey(wire: Wire, work: Work) -> NoReturn:
    wire.send(Ready())
    while True:
        asked = wire.receive(Run | Weigh)  # type: ignore[arg-type]
        if isinstance(asked, Run):
            times_s = _run(work, asked)
            if work.num_cores > 1:
                rest()
            wire.send(Times(times_s))
        else:
            wire.send(Peaks(work.peaks()))


def _begin_anew(wire: Wire, name: str, job: Job) -> NoReturn:
    """Make this process, that was forked, a fresh one that does the job."""
    end = wire.socket.fileno()
    os.set_inheritable(end, True)
    words = [str(end), name, msgspec.json.encode(job).decode()]
    command = python_command("placewright.execute._eager_process", *words)
    os.execv(sys.executable, command)


def _size_of(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _give_up(wire: Wire, failed: Failed) -> None:
    with contextlib.suppress(EOFError):
        wire.send(failed)


def _place(model: Model, job: Job) -> PlacedStep:
    if job.plan is not None:
        return PlacedStep.of_plan(model.capture, model.module, job.plan)
    return PlacedStep(model.capture, model.module, job.placement, job.sequence, job.device_names)


def flush_denormals(step: PlacedStep) -> None:
    """
    Have CPUs take numbers that are too small for full precision as zero.

    Steps that run again and again on the same inputs learn these by heart, until gradients are all
    but zero, and some processors take much longer for such numbers. Training on data hardly meets
    them.
    """
    for lane in step.runner.lanes.values():
        lane.submit(lambda: torch.set_flush_denormal(True)).result()


def _run(work: Work, asked: Run) -> list[float]:
    times_s: list[float] = []
    now_s = time.perf_counter()
    until_s = now_s + asked.limit_s
    while len(times_s) < asked.num_steps and now_s < until_s:
        begin_s = time.perf_counter()
        work.run()
        now_s = time.perf_counter()
        times_s.append(now_s - begin_s)
    return times_s


def rest() -> None:
    """
    Wait until no thread of this process is at work any more.

    PyTorch's helpers wait awake for the next op, for some milliseconds (8 on an AMD EPYC), on the
    cores that the next candidate is about to use.
    """
    until_s = time.monotonic() + MAX_REST_S
    while time.monotonic() < until_s:
        before_s = time.process_time()
        time.sleep(LOOK_S)
        if time.process_time() - before_s < LOOK_S / 10:
            return


def _fed_devices(model: Model, job: Job) -> list[str]:
    """Name the device that each input is on."""
    capture = model.capture
    if job.plan is not None:
        devices = [job.plan.devices[name] for name in capture.graph.op_names]
    else:
        devices = [job.device_names[d] for d in job.placement]
    ops = capture.graph.tensor_op.tolist()
    homes = {label: devices[ops[t]] for t, label in enumerate(capture.tensor_nodes)}
    return [homes[e.value.node.name] for e in capture.entries if e.kind == "input"]


@contextlib.contextmanager
def _within_memory(job: Job, fed_bytes: int) -> Iterator[None]:
    """
    Cap this process: on CPUs at what it has now and what their devices have together.

    What each of several CPU devices holds the system cannot limit: that is measured. A GPU may have
    inputs once more than the plan says, since steps that are replayed copy them.
    """
    caps: Counter[torch.device] = Counter()  # shares of a GPU have theirs together
    for name, size in job.gpu_bytes.items():
        caps[torch_device_of(name)] += size
    for gpu, size in caps.items():
        total = torch.cuda.get_device_properties(gpu).total_memory
        torch.cuda.set_per_process_memory_fraction(min((size + fed_bytes) / total, 1.0), gpu)
    now = _data_bytes()
    if now is None:
        yield
        return
    room = free_bytes("cpu") if job.cpu_bytes is None else job.cpu_bytes
    before: Any = resource.getrlimit(resource.RLIMIT_DATA)
    highest = before[1] if before[1] != resource.RLIM_INFINITY else 2**62
    resource.setrlimit(resource.RLIMIT_DATA, (min(now + room, highest), before[1]))
    try:
        yield
    finally:  # there must be room to say what went wrong
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _data_bytes() -> int | None:
    """Give what counts as this process's data; None where that is not known."""
    facts = Path("/proc/self/status")
    if not facts.exists():
        return None
    for line in facts.read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return None
