"""
Segments of a GPU's lane as CUDA graphs: run at first, then recorded, then replayed.

This module owns the memory of what is replayed. A recorded kernel reads and writes fixed addresses,
so everything that a segment reads or makes has its own from the recording on, in one pool of
memory: what one segment makes for the next, and room for what arrives from elsewhere. Memory is
given back in that pool after the last use, as in any step, and what comes later in the step may
have the same; every replay goes through the same segments in the same order, so that is safe.

What is being copied away must not be overwritten meanwhile. Such a tensor is held until the second
segment after, and the GPU waits there until the copy is done.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

WARM_UP = 2
"""Steps that run as they are: libraries choose kernels and make room for themselves."""

_RECORDING = threading.Lock()
"""Taken by the lane that records: PyTorch records for one thread at a time, and nobody may wait for
all that a GPU does meanwhile, or give back pinned memory that the recorded stream has used."""


class Recorded(Protocol):
    """A recorded segment."""

    def replay(self) -> None:
        """Compute it once more."""


class Recorder(Protocol):
    """What records segments."""

    def begin(self) -> None:
        """Record what is computed from now on, instead of computing it."""

    def end(self) -> Recorded:
        """Stop recording; nothing has been computed yet."""

    def abort(self) -> None:
        """Stop recording, if that is going on; nothing comes of it."""

    def room(self) -> AbstractContextManager[Any]:
        """Have tensors made in the memory of recordings."""

    def alias(self, tensor: Tensor) -> Tensor:
        """Make a tensor of the same memory that does not keep it from being used again."""

    def wait_for(self, event: Any) -> None:
        """Have what is computed next wait for an event."""

    def clear(self) -> None:
        """Give back memory that nobody uses, before recording."""


class Segments:
    """
    A lane's segments, and where they are in their life.

    The first steps run as they are; the next is recorded, each segment being computed right after;
    all others are replayed.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._mode: Literal["run", "record", "replay"] = "run"
        self._num_steps = 0
        self._recorded: dict[int, tuple[Recorded, list[Any]]] = {}
        self._rooms: dict[Hashable, Tensor] = {}
        self._leaving: list[tuple[Tensor, Any]] = []  # since the last segment began
        self._left: list[tuple[Tensor, Any]] = []  # in the one before
        self._sources: list[Tensor] = []  # of what has arrived while recording

    @property
    def is_fixed(self) -> bool:
        """Tell whether tensors have their places already."""
        return self._mode != "run"

    def begin_step(self) -> None:
        """Get ready for a step."""
        if self._num_steps == WARM_UP:
            self._recorder.clear()
            self._mode = "record"
        elif self._num_steps > WARM_UP:
            self._mode = "replay"

    def end_step(self) -> None:
        """Have the next step wait for what this one still copies."""
        self._pass_on()
        self._pass_on()
        self._sources.clear()
        self._num_steps += 1

    def abort(self, error: BaseException) -> None:
        """End a step that has failed; if recording it may be why, say so."""
        self._recorder.abort()
        if self._mode == "record" and isinstance(error, RuntimeError):
            error.add_note(
                "This was while the step was recorded as a CUDA graph; `graphs=False` leaves that"
                " out."
            )

    def begin_anew(self) -> None:
        """Forget what was recorded: the next steps run as they are, and are recorded again."""
        self.close()
        self._mode, self._num_steps = "run", 0

    def close(self) -> None:
        """Give everything back; its memory follows when nobody has the step any more."""
        for mine in (self._rooms, self._recorded, self._leaving, self._left, self._sources):
            mine.clear()

    # What the lane's function calls.

    def begin(self, _: int) -> bool:
        """Begin a segment; tell whether its calls are to be made."""
        if self._mode == "run":
            return True
        self._pass_on()
        if self._mode == "replay":
            return False
        self._recorder.begin()
        return True

    def end(self, number: int, *made: Any) -> None:
        """End a segment that has made these tensors, or lists of them, for others."""
        if self._mode == "record":
            found = self._recorder.end()
            self._recorded[number] = found, [self._alias(each) for each in made]
            found.replay()

    def replay(self, number: int) -> list[Any]:
        """Compute a segment once more and give what it makes for others."""
        found, made = self._recorded[number]
        found.replay()
        return made

    def _alias(self, made: Any) -> Any:
        if isinstance(made, (list, tuple)):  # views, or what one call makes together
            return [self._alias(each) for each in made]
        return self._recorder.alias(made)

    # What the runner calls.

    def room(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Give the place of what arrives."""
        if self._mode == "run":
            return make()
        if self._mode == "replay":
            return self._rooms[key]
        with self._recorder.room():
            made = make()
        self._rooms[key] = self._recorder.alias(made)
        return made

    def keep(self, source: Tensor) -> None:
        """
        Keep what is copied to a room as long as segments are recorded.

        Pinned memory that is let go of has an event recorded on every stream that has used it,
        which must not be one that is being recorded.
        """
        if self._mode == "record":
            self._sources.append(source)

    def hold(self, tensor: Tensor, event: Any) -> None:
        """Hold what is being copied away until an event."""
        self._leaving.append((tensor, event))

    def _pass_on(self) -> None:
        for _, event in self._left:
            self._recorder.wait_for(event)
        self._left, self._leaving = self._leaving, []


class CudaRecorder:
    """Records what a GPU computes on a stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        with torch.cuda.device(device):
            self._pool = torch.cuda.MemPool()
        self._graph: Any = None

    def begin(self) -> None:
        """Record what is computed from now on, instead of computing it."""
        graph: Any = torch.cuda.CUDAGraph()
        _RECORDING.acquire()
        self._graph = graph
        # Other lanes go on meanwhile: what only their threads do is no error.
        graph.capture_begin(pool=self._pool.id, capture_error_mode="thread_local")

    def end(self) -> Recorded:
        """Stop recording; nothing has been computed yet."""
        graph, self._graph = self._graph, None
        try:
            with may_be_empty():
                graph.capture_end()
        except RuntimeError:
            self._end_allocation()
            raise
        finally:
            _RECORDING.release()
        found: Recorded = graph
        return found

    def abort(self) -> None:
        """Stop recording, if that is going on; nothing comes of it."""
        graph, self._graph = self._graph, None
        if graph is not None:
            try:
                graph.capture_end()
            except RuntimeError:  # what has failed may have ended it
                self._end_allocation()
            finally:
                _RECORDING.release()

    def _end_allocation(self) -> None:
        """Have the allocator leave the pool, which a recording that was cut short does not."""
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool.id)

    def room(self) -> AbstractContextManager[Any]:
        """Have tensors made in the memory of recordings."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def alias(self, tensor: Tensor) -> Tensor:
        """Make a tensor of the same memory that does not keep it from being used again."""
        if not tensor.numel():
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)

    def wait_for(self, event: Any) -> None:
        """Have what is computed next wait for an event."""
        self._stream.wait_event(event)

    def clear(self) -> None:
        """Give back memory that nobody uses, before recording."""
        with _RECORDING:
            gc.collect()  # steps that nobody needs: their memory cannot be given back meanwhile
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


@contextmanager
def may_be_empty() -> Iterator[None]:
    """Meanwhile, have PyTorch not warn of recordings in which nothing is computed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


class _Address:
    """Where a tensor is, in the form that array libraries exchange."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": f"<{_INTEGERS[size]}",  # bits only: not all types have a name there
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


_INTEGERS: dict[int, str] = {1: "i1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}
