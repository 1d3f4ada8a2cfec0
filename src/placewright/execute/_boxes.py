"""
Handing things over from thread to thread.

This module owns how a thread waits for another's: it looks for a while, without Python's lock, then
sleeps. Waking up takes tens of microseconds, more than most ops of a model on a GPU; and a thread
that waits has a core of its own, on which nothing else of the step runs.
"""

from __future__ import annotations

import _thread
from typing import Any

import numpy as np

from placewright.execute._boxes_kernel import look

LOOKS = 20_000
"""Before a thread sleeps: some tenths of a millisecond. Ten times as many made plans of two cores
that hand over much up to 6 % faster on a quiet machine, but links could not be timed on a busy
one."""


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
            look(self._is_full, LOOKS)
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
