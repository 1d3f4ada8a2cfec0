"""
How much memory each device holds at most in a step, measured.

A GPU's allocator counts for itself; what a library keeps there from its first call on, whatever the
plan, is not the step's (`probe` leaves room for it). Nor is an input that a step which is replayed
has copied to where it reads it. What a share of a GPU holds is not known.

CPU devices share one process: one more step runs under PyTorch's profiler, which tells every
allocation with its address and thread. What a lane allocates is its device's until it is released,
by whichever thread; parameters, buffers, optimiser state and inputs are added as they are. What
arrives from a GPU is in pinned memory, of which the profiler is not told, so in this step each such
tensor is copied out of it.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from placewright.execute._torch_library import torch_library
from placewright.execute.placed import PlacedStep

_JOIN = "_ZN5torch8autograd8profiler27enableProfilerInChildThreadEv"
_LEAVE = "_ZN5torch8autograd8profiler28disableProfilerInChildThreadEv"
_MARK = "placewright lane "


def measure_peaks(
    step: PlacedStep, fed: Sequence[Tensor], fed_devices: Sequence[str]
) -> dict[str, int | None]:
    """
    Run a step and give the most that each device held in it, or since the process began on GPUs.

    The step ends with that.

    Parameters
    ----------
    step
        The step; it should have run before.
    fed
        Its inputs.
    fed_devices
        The device that each input is on, and that the step has it on.
    """
    devices = step.runner.devices
    homes = step.runner.program.residents.values()
    held: Counter[str] = Counter({device.name: 0 for device in devices})
    for tensor, d in zip(step.runner.residents, homes, strict=True):
        held[devices[d].name] += tensor.untyped_storage().nbytes()
    fed_bytes: Counter[str] = Counter()
    for tensor, name in zip(fed, fed_devices, strict=True):
        fed_bytes[name] += tensor.untyped_storage().nbytes()
    peaks = _allocated_peaks(step, fed)
    step.close()
    kept = _library_bytes([d.torch_device for d in devices if d.kind == "cuda"])
    found: dict[str, int | None] = {}
    for k, device in enumerate(devices):
        if device.share is not None:
            found[device.name] = None  # its GPU counts for all of its shares together
        elif device.kind == "cuda":
            most = torch.cuda.max_memory_allocated(device.torch_device)
            beside = fed_bytes[device.name] if step.runner.keeps_rooms(k) else 0
            found[device.name] = int(most) - kept[device.torch_device] - beside
        else:
            there = held[device.name] + fed_bytes[device.name]
            found[device.name] = None if peaks is None else there + peaks[k]
    return found


def _library_bytes(gpus: Sequence[torch.device]) -> dict[torch.device, int]:
    """Give what matrix products keep for themselves on GPUs, and give it back: nothing may run."""
    before = {gpu: torch.cuda.memory_allocated(gpu) for gpu in gpus}
    if gpus:
        torch._C._cuda_clearCublasWorkspaces()
    return {gpu: before[gpu] - torch.cuda.memory_allocated(gpu) for gpu in gpus}


def _allocated_peaks(step: PlacedStep, fed: Sequence[Tensor]) -> Mapping[int, int] | None:
    """Give the most that each lane had allocated at once; None if this PyTorch cannot tell."""
    library = torch_library("torch_cpu")
    if library is None or not (hasattr(library, _JOIN) and hasattr(library, _LEAVE)):
        return None
    lanes = step.runner.lanes

    def join(lane: int) -> None:
        library[_JOIN]()
        with record_function(f"{_MARK}{lane}"):
            pass

    step.runner.copies_arrivals = True
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        # A profiler hears its own thread only, and those that ask to be heard.
        for k, lane in lanes.items():
            lane.submit(functools.partial(join, k)).result()
        step.run(fed)
        for lane in lanes.values():
            lane.submit(library[_LEAVE]).result()
    return _peaks(_events_of(profiler))


def measure_own_peak(run: Callable[[], None], held_bytes: int, where: torch.device) -> int:
    """
    Run a step that this thread computes; give the most that its device held, as `measure_peaks`.

    `held_bytes` is what the CPU holds before; a GPU counts that itself.
    """
    if where.type == "cuda":
        most = torch.cuda.max_memory_allocated(where)
        return int(most) - _library_bytes([where])[where]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with record_function(f"{_MARK}0"):
            pass
        run()
    return held_bytes + _peaks(_events_of(profiler))[0]


def _events_of(profiler: profile) -> list[Any]:
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    return [*_walk(results.experimental_event_tree())]


def _walk(events: Sequence[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _walk(event.children)


def _peaks(events: Sequence[Any]) -> dict[int, int]:
    """Follow what each lane's thread has allocated."""
    lane_of = {
        event.start_tid: int(event.name.removeprefix(_MARK))
        for event in events
        if event.tag == _EventType.TorchOp and event.name.startswith(_MARK)
    }
    owners: dict[int, tuple[int, int]] = {}  # lane and size, by address
    now: dict[int, int] = defaultdict(int)
    peaks: dict[int, int] = defaultdict(int)
    memory = [event for event in events if event.tag == _EventType.Allocation]
    for event in sorted(memory, key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if event.extra_fields.device.type != "cpu":
            continue
        if size > 0 and event.start_tid in lane_of:
            lane = lane_of[event.start_tid]
            owners[address] = lane, size
            now[lane] += size
            peaks[lane] = max(peaks[lane], now[lane])
        elif size < 0 and address in owners:
            lane, taken = owners.pop(address)
            now[lane] -= taken
    return peaks
