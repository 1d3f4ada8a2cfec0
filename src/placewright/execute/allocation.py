"""
Memory that this process has had once, it keeps.

By default the C library hands large tensors' memory back to the system when they are freed, and
touching new memory costs more than many ops do: a step that makes and frees the same tensors again
and again pays for it every time.

So does Python with the memory of calls. A function's frame goes to the end of a chunk; where that
leaves no room, each call that the function makes maps a chunk and unmaps it again, which the cores
that its other threads compute on have to be told.
"""

from __future__ import annotations

import ctypes
import functools
from types import FunctionType

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # of <malloc.h>

_CHUNK_SLOTS = 2048
"""Room for values in a chunk of Python's; one that is made for a larger frame has more."""


@functools.cache
def keep_memory() -> bool:
    """
    Keep freed memory in this process, for its next tensors; tell whether that is possible.

    It is with the GNU C library. What threads that are already there have freed may still go back.
    """
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 - only the GNU C library has it
    except (OSError, AttributeError):
        return False
    # Nothing is trimmed, nothing is mapped for itself, and new threads share the heap that grows.
    settings = ((_TRIM_THRESHOLD, -1), (_MMAP_MAX, 0), (_ARENA_MAX, 1))
    done = [library.mallopt(name, value) == 1 for name, value in settings]
    return all(done)


def leave_room(function: FunctionType) -> None:
    """Let a function have a chunk of its own when it runs, with room for what it calls."""
    code = function.__code__
    slots = code.co_nlocals + code.co_stacksize
    if slots < _CHUNK_SLOTS:
        more = _CHUNK_SLOTS - slots  # on its stack, where they are never touched
        function.__code__ = code.replace(co_stacksize=code.co_stacksize + more)
