"""
Running compiled steps: lanes at work, tensors from one to the other, and what happens on failure.

This module owns how a tensor gets from device to device. Between CPU devices the receiver copies
what the sender made. From a GPU it is copied to pinned memory on a stream of its own, from a CPU
through pinned memory to the GPU; computing goes on meanwhile, and events keep the order. Copies
from a GPU are begun by the thread that works for it: to call CUDA takes a thread several times as
long if it has just computed something large itself.

A step that fails, or is interrupted, in one lane is stopped in all; the next one begins anew.
"""

from __future__ import annotations

import itertools
import linecache
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from placewright.execute._boxes import Box
from placewright.execute._copies import GpuWay, PinnedRooms, Streams, blank, copy_over
from placewright.execute.allocation import leave_room
from placewright.execute.devices import Lanes, RealDevice
from placewright.execute.graphs import CudaRecorder, Segments
from placewright.execute.program import Channel, Program, lanes_of

_NUMBERS = itertools.count()
"""Of sources that were compiled."""


class StoppedError(Exception):
    """Another lane failed; this one stops too."""


class Runner:
    """
    Runs a program, step after step.

    Parameters
    ----------
    program
        What to run.
    devices
        What it was compiled for.
    residents
        The tensors that stay, by node, each on its device.
    lanes
        The threads; by default its own.
    """

    def __init__(
        self,
        program: Program,
        devices: Sequence[RealDevice],
        residents: dict[str, Tensor],
        lanes: Lanes | None = None,
    ) -> None:
        self.program, self.devices = program, devices
        self._owns_lanes = lanes is None
        self._all_lanes = Lanes() if lanes is None else lanes
        self.lane_of = lanes_of(devices)
        self.residents = [residents[name] for name in program.residents]
        self.seed = 0  # of the step
        self.copies_arrivals = False  # out of pinned memory, so that they are seen
        self.is_stopping = False
        self._process = os.getpid()
        self.boxes = [Box() for _ in program.channels]
        self.streams = {
            k: Streams(device) for k, device in enumerate(devices) if device.kind == "cuda"
        }
        self.through_host = {  # from a GPU to one that has another thread: one of them is a share
            number
            for number, channel in enumerate(program.channels)
            if channel.source in self.streams
            and channel.target in self.streams
            and self.lane_of[channel.source] != self.lane_of[channel.target]
        }
        # What the first of two parts has sent may be needed after it has run again.
        self.pinned = PinnedRooms() if len(program.sources) == 1 else None
        self.kinds = [
            (channel, devices[channel.source].kind, devices[channel.target].kind)
            for channel in program.channels
        ]
        self.ways = {
            number: GpuWay(self.streams[d], self.pinned)
            for number, channel in enumerate(program.channels)
            if (d := self._gpu_of(number, channel)) is not None
        }
        self.arrivals = {
            number: GpuWay(self.streams[program.channels[number].target], None)
            for number in self.through_host
        }
        self.segments = {lane: self._segments(lane) for lane in program.recorded}
        used = sorted({lane for part in program.sources for lane in part})
        self.lanes = {lane: self._all_lanes.of(devices[lane]) for lane in used}
        self._end = weakref.finalize(self, _close, [*self.segments.values()])
        self.functions = [
            {lane: self._compile(lane, source) for lane, source in part.items()}
            for part in program.sources
        ]

    def _compile(self, lane: int, source: str) -> Any:
        names = self.program.names | {"P": self.residents, "compiled": _compiled}
        calls = "feed send receive hold accept fetch lend arrive signal wait give generator".split()
        names |= {name: getattr(self, f"_{name}") for name in calls}
        if lane in self.segments:
            mine = self.segments[lane]
            names |= {"begin": mine.begin, "end": mine.end, "replay": mine.replay}
        with torch.no_grad():
            exec(compile(self.program.views, "<views>", "exec"), names)
        file = f"<{self.devices[lane].name}, {next(_NUMBERS)}>"
        if self.program.compiles:  # only what has a source is compiled as a function of its own
            linecache.cache[file] = len(source), None, source.splitlines(True), file
            weakref.finalize(self, linecache.cache.pop, file, None)
        exec(compile(source, file, "exec"), names)
        leave_room(names["run"])
        return names["run"]

    def _gpu_of(self, number: int, channel: Channel) -> int | None:
        """Find the GPU whose streams copy what goes this way; None between CPUs."""
        ends = [channel.target, channel.source]
        if number in self.through_host:
            return channel.source  # from there on it is in pinned memory
        return next((d for d in ends if d in self.streams), None)

    def _segments(self, lane: int) -> Segments:
        device = self.devices[lane].torch_device
        return Segments(CudaRecorder(device, self.streams[lane].compute))

    def run(
        self,
        part: int,
        fed: Sequence[Tensor],
        num_wanted: int,
        kept: list[Any] | None = None,
        seed: int | None = None,
    ) -> list[Tensor]:
        """
        Run a part of the step.

        `kept` is what the parts leave to each other, empty at first; `seed` is that of the step's
        random numbers, by default one that PyTorch draws.

        Raises
        ------
        RuntimeError
            The step was closed, or it has a GPU and this process was forked.
        """
        with self._all_lanes.turn:  # of several threads, one after the other
            if not (self._end.alive and self._all_lanes.is_open):
                raise RuntimeError("This step is closed; make a new one.")
            if self._process != os.getpid():
                self._begin_in_fork()
            self.seed = self.draw_seed() if seed is None else seed
            return self._run(part, fed, num_wanted, self.make_kept() if kept is None else kept)

    def draw_seed(self) -> int:
        """Draw the seed of a step as `torch.manual_seed` wants it, if the step draws anything."""
        return int(torch.randint(2**31, ())) if self.program.draws else 0

    def _begin_in_fork(self) -> None:
        if self.streams:
            raise RuntimeError(
                "A forked process cannot use the GPUs of the one that it was forked from. Place"
                " the module there, or start processes with `spawn`."
            )
        self._process = os.getpid()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget a step that did not end, and what was recorded of steps that did."""
        self.is_stopping = False
        self.boxes = [Box() for _ in self.program.channels]
        for segments in self.segments.values():
            segments.begin_anew()

    def _run(
        self, part: int, fed: Sequence[Tensor], num_wanted: int, kept: list[Any]
    ) -> list[Tensor]:
        found: list[Any] = [None] * num_wanted
        self._wait_for_caller()
        lists = kept, fed, found
        futures: list[Future[Any]] = []
        try:
            for lane, function in self.functions[part].items():
                futures.append(self.lanes[lane].submit(partial(self._work, function, lane, lists)))
            wait(futures)
        except BaseException:
            self._release()
            wait(futures)
            self.begin_anew()
            raise
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self.begin_anew()
            errors.sort(key=lambda error: isinstance(error, StoppedError))
            raise errors[0]
        return found

    def _wait_for_caller(self) -> None:
        """Have GPUs begin after what the caller's streams are doing now."""
        for k, streams in self.streams.items():
            now = torch.cuda.current_stream(self.devices[k].torch_device)
            streams.compute.wait_stream(now)
            streams.lend.wait_stream(now)

    def make_kept(self) -> list[Any]:
        """Make room for what the first part leaves to the next."""
        return [None] * self.program.num_kept

    def _work(self, function: Any, lane: int, lists: tuple[Any, ...]) -> None:
        """Run a lane's part, with what PyTorch does for gradients left out."""
        try:
            # What PyTorch compiles has to see everything.
            below = torch._C._AutoDispatchBelowAutograd
            with torch.no_grad(), nullcontext() if self.program.compiles else below():
                if self.devices[lane].kind == "cuda":
                    self._work_on_gpus(function, lane, lists)
                else:
                    self._call(function, lane, lists)
        except BaseException:
            self._release()
            raise

    def _work_on_gpus(self, function: Any, lane: int, lists: tuple[Any, ...]) -> None:
        mine = [streams for k, streams in self.streams.items() if self.lane_of[k] == lane]
        for streams in mine:
            torch.cuda.set_stream(streams.compute)
        try:
            self._call(function, lane, lists)
        finally:
            for streams in mine:
                streams.compute.synchronize()

    def _call(self, function: Any, lane: int, lists: tuple[Any, ...]) -> None:
        segments = self.segments.get(lane)
        if segments is None:
            function(self.residents, *lists)
            return
        segments.begin_step()
        try:
            function(self.residents, *lists)
        except BaseException as error:
            segments.abort(error)
            raise
        segments.end_step()

    def _release(self) -> None:
        self.is_stopping = True
        for box in self.boxes:
            box.open()

    def keeps_rooms(self, device: int) -> bool:
        """Tell whether what is fed and what arrives has a fixed place on a device by now."""
        return self._fixed(device) is not None

    def close(self) -> None:
        """Give everything back; done in any case when nobody needs the runner any more."""
        self._end()
        if self._owns_lanes:
            self._all_lanes.close()

    # What lanes call.

    def _put(self, number: int, content: Any) -> None:
        try:
            self.boxes[number].put(content)
        except RuntimeError:
            if self.is_stopping:  # all were released to wake their lanes
                raise StoppedError from None
            raise

    def _take(self, number: int) -> Any:
        content = self.boxes[number].take()
        if self.is_stopping:
            raise StoppedError
        return content

    def _feed(self, device: int, number: int, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        is_there = tensor.device == self.devices[device].torch_device
        if is_there and self._fixed(device) is None:
            return tensor
        return copy_over(self._room(device, ("feed", number), tensor), tensor)

    def _give(self, device: int, tensor: Tensor) -> Tensor:
        """Give a tensor to the caller: one that the next step does not write to."""
        is_kept = self.pinned is not None and self.pinned.has(tensor)
        return tensor.clone() if is_kept or self._fixed(device) is not None else tensor

    def _fixed(self, device: int) -> Segments | None:
        """Find the segments of a device's lane, if tensors have fixed places there by now."""
        segments = self.segments.get(self.lane_of[device])
        return None if segments is None or not segments.is_fixed else segments

    def _room(self, device: int, key: tuple[str, int], tensor: Tensor) -> Tensor:
        """Make room on a device for a copy, or find what there is."""
        make = partial(blank, tensor, device=self.devices[device].torch_device)
        return self._fixed_room(device, key, make)

    def _fixed_room(self, device: int, key: tuple[str, int], make: Callable[[], Tensor]) -> Tensor:
        segments = self._fixed(device)
        return make() if segments is None else segments.room(key, make)

    def _generator(self, number: int, device: torch.device) -> torch.Generator:
        """Make the random numbers of an op in this step."""
        mixed = (self.seed ^ (number * 0x9E3779B1)) % 2**32  # CPU generators take 32 bits
        return torch.Generator(device).manual_seed(mixed)

    def _send(self, number: int, tensor: Tensor) -> None:
        channel, source, target = self.kinds[number]
        if source == "cpu":
            self._put(number, self.ways[number].pin(tensor) if target == "cuda" else tensor)
        elif target == "cuda" and number not in self.through_host:
            self.ways[number].done.record(self.streams[channel.source].compute)
            self._put(number, tensor)
        else:
            way = self.ways[number]
            made, is_beside = way.leave(tensor)
            segments = self._fixed(channel.source) if is_beside else None
            if segments is not None:
                segments.hold(tensor, way.done)
            elif is_beside:
                tensor.record_stream(self.streams[channel.source].leave)
            self._put(number, made)

    def _receive(self, number: int) -> Tensor:
        return self._accept(number, self._take(number))

    def _hold(self, number: int) -> Any:
        return self._take(number)

    def _accept(self, number: int, content: Any) -> Tensor:
        channel, source, target = self.kinds[number]
        if source == "cuda" and target == "cpu":
            self.ways[number].done.synchronize()
            made: Tensor = content
            return made.clone() if self.copies_arrivals else made
        if source == "cuda":
            self.streams[channel.target].compute.wait_event(self.ways[number].done)
        segments = self._fixed(channel.target)
        if segments is not None:
            segments.keep(content)
        made = self._room(channel.target, ("box", number), content)
        return copy_over(made, content)

    def _fetch(self, number: int, tensor: Tensor) -> Tensor:
        channel, _, target = self.kinds[number]
        made = self._room(channel.target, ("box", number), tensor)
        if target == "cpu":
            return copy_over(made, tensor)
        way = self.ways[number]
        if number in self.through_host:
            tensor = way.fetch(tensor)
            self.streams[channel.target].arrive.wait_event(way.done)
            way = self.arrivals[number]
        way.arrive(made, tensor)
        return made

    def _lend(self, number: int, tensor: Tensor) -> None:
        """Begin to copy a GPU's parameter for a CPU device, which waits for it when it reads it."""
        self._put(number, self.ways[number].fetch(tensor))

    def _arrive(self, number: int) -> None:
        """Let a GPU wait for what it has begun to fetch."""
        target = self.program.channels[number].target
        way = self.arrivals.get(number, self.ways[number])
        self.streams[target].compute.wait_event(way.done)

    def _signal(self, number: int) -> None:
        channel, source, _ = self.kinds[number]
        event = self.streams[channel.source].compute.record_event() if source == "cuda" else None
        self._put(number, event)

    def _wait(self, number: int) -> None:
        channel, _, target = self.kinds[number]
        event = self._take(number)
        if event is not None and target == "cuda":
            self.streams[channel.target].compute.wait_event(event)
        elif event is not None:
            event.synchronize()


def _close(segments: Sequence[Segments]) -> None:
    for each in segments:
        each.close()


def _compiled(function: Any) -> Any:
    """Have PyTorch compile a segment, when it is first called."""
    return torch.compile(function, fullgraph=True, dynamic=False)
