"""
A model, ready to be forked: ``python -m placewright.execute._template FD``, started by `Template`.

It imports PyTorch, builds a model with real weights and captures its step, once. Then it forks one
process for each candidate, in a moment. So that these may use threads and GPUs, the template itself
does neither: it has one thread, runs no parallel region, and never asks CUDA anything.

It ends when the other end of its socket is closed, and kills the processes that it has forked; they
end with it, however it ends (on Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Iterator

import torch

from placewright.errors import InputError
from placewright.execute._candidate import Model, is_memory, obey
from placewright.execute._torch_library import torch_library
from placewright.execute._wire import (
    FORK,
    REQUEST,
    Built,
    Ended,
    Failed,
    Forked,
    Setup,
    Wire,
)
from placewright.frontends._modules import named_tensors
from placewright.frontends._structures import leaves_of
from placewright.frontends.torch import capture
from placewright.load import load_step

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_CUDA = 1  # of c10's DeviceType
_DEVICE_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


def main() -> None:
    """Be a template for the socket whose number is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    setup = wire.receive(Setup)
    with _ends_with_parent(wire.socket):
        try:
            model = _build(setup.model)
        except InputError as error:
            wire.send(Failed("input", str(error)))
            return
        except Exception as error:  # said where it is read: the template's end is not silent
            words = " ".join(f"{type(error).__name__}: {error}".split())
            wire.send(Failed("memory" if is_memory(words) else "crash", words))
            return
    gc.collect()
    gc.freeze()  # so that candidates need not copy what they never touch
    wire.send(Built(model.capture.graph.fingerprint))
    _serve(wire, model)


def _build(name: str) -> Model:
    torch.set_num_threads(1)  # of this thread; lanes have their own, and cores for them only
    _start_autograd()
    arguments = load_step(name)
    module = arguments["module"]
    captured = capture(**arguments)
    fed = leaves_of(arguments["inputs"]) + leaves_of(arguments.get("kwargs") or {})
    fed += leaves_of(arguments.get("targets", ()))
    there = [tensor for kind in ("param", "buffer") for _, tensor in named_tensors(module, kind)]
    elsewhere = next((t.device for t in (*there, *fed) if t.device.type != "cpu"), None)
    if elsewhere is not None or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise InputError(
            f"`{name}` is built with tensors on `{elsewhere or 'cuda'}`; expected all on the CPU."
            " Build the module there: each plan puts its parameters where it wants them."
        )
    return Model(name, captured, arguments, fed)


def _start_autograd() -> None:
    """
    Have autograd start now, seeing no GPU.

    When it first runs it counts GPUs, to have a thread for each, and a process that has asked CUDA
    anything cannot be forked. Capturing needs it; candidates do not.
    """
    library = torch_library("c10")
    if library is None or not hasattr(library, _DEVICE_REGISTRY):
        return
    seen = (ctypes.c_void_p * (_CUDA + 1)).in_dll(library, _DEVICE_REGISTRY)
    cuda, seen[_CUDA] = seen[_CUDA], None
    try:
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        seen[_CUDA] = cuda


def _serve(wire: Wire, model: Model) -> None:
    """Fork and wait as asked."""
    children: set[int] = set()
    while True:
        data, ends, _, _ = socket.recv_fds(wire.socket, 8, 1)
        if not data:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return
        (number,) = struct.unpack(REQUEST, data)
        if number == FORK:
            children.add(_fork(wire, model, ends[0]))
            continue
        if number < 0:
            os.kill(-number, signal.SIGKILL)
        _, status = os.waitpid(abs(number), 0)
        children.discard(abs(number))
        wire.send(Ended(os.waitstatus_to_exitcode(status)))


def _fork(wire: Wire, model: Model, end: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(end)
        wire.send(Forked(pid))
        return pid
    try:
        _end_with(parent)
        wire.close()
        obey(Wire(socket.socket(fileno=end)), model)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def _ends_with_parent(end: socket.socket) -> Iterator[None]:
    """Meanwhile, end this process when the other end is closed, by a thread that is over after."""
    heard, tell = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([end.fileno(), heard], [], [])
        if heard not in ready:  # nothing is ever sent meanwhile
            os._exit(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        os.write(tell, b".")
        watcher.join()
        os.close(heard)
        os.close(tell)


if __name__ == "__main__":
    main()
