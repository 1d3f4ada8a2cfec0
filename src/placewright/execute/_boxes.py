"""
Handing things over from thread to thread.

This module owns how a thread waits for another's: it looks for a while, without Python's lock, then
sleeps. Waking up takes tens of microseconds, more than most ops of a model on a GPU; and a thread
that waits has a core of its own, on which nothing else of the step runs.
"""

from __future__ import annotations

import _thread
import platform
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LOOKS = 20_000
"""Before a thread sleeps: some tenths of a millisecond."""

PATIENCE = 40
"""Looks after a flag is set. Who has set it has Python's lock, and will be in an op or wait soon;
asking for that lock before would be to sleep, and to be woken."""

_PAUSE, _YIELD = ("llvm.x86.sse2.pause", ()), ("llvm.aarch64.hint", (1,))
_RESTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": _PAUSE,
    "AMD64": _PAUSE,
    "aarch64": _YIELD,
    "arm64": _YIELD,
}
"""What lets a processor rest for some of its ticks, by its architecture."""


class Box:
    """A place where one thread leaves something for another, again and again."""

    __slots__ = ("_content", "_is_full", "_lock")

    def __init__(self) -> None:
        self._content: Any = None
        self._lock = _thread.allocate_lock()
        self._lock.acquire()
        self._is_full = np.zeros(8, dtype=np.int64)  # a cache line; the first counts

    def put(self, content: Any) -> None:
        """
        Leave something.

        Raises
        ------
        RuntimeError
            It is full, or was opened.
        """
        self._content = content
        self._is_full[0] = 1
        self._lock.release()

    def take(self) -> Any:
        """Wait for what is left here, and take it; None if the box was opened."""
        if not self._lock.acquire(False):
            _look(self._is_full, LOOKS)
            self._lock.acquire()
        self._is_full[0] = 0
        content, self._content = self._content, None
        return content

    def open(self) -> None:
        """Let whoever waits go on without anything."""
        try:
            self._lock.release()
        except RuntimeError:  # nobody has to wait
            return


@intrinsic  # type: ignore[untyped-decorator]
def _read(typing: Any, flag: Any) -> Any:
    """Read a flag that another thread may have just set, and let the processor rest a little."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        rest = _RESTS.get(platform.machine())
        if rest is not None:
            name, values = rest
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(values))
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [ir.Constant(ir.IntType(32), value) for value in values])
        return builder.load_atomic(array.data, ordering="acquire", align=8)

    return types.int64(flag), build


@numba.njit("void(int64[::1], int64)", nogil=True, cache=True)
def _look(flag: Any, count: int) -> None:
    """Look at a flag until it is set and Python's lock likely free, or so many times."""
    for _ in range(count):
        if _read(flag) != 0:
            for _ in range(PATIENCE):
                _read(flag)
            return
