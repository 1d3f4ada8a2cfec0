"""
Handing things over from thread to thread.

This module owns how a thread waits for another's: it looks for a while, without Python's lock, then
sleeps. Waking up takes tens of microseconds, more than most ops of a model on a GPU; and a thread
that waits has a core of its own, on which nothing else of the step runs. Where something else does
use that core, which shows as looks that take longer than they should, it sleeps early.
"""

from __future__ import annotations

import _thread
import math
import time
from typing import Any

import numpy as np

from placewright.execute._boxes_kernel import look

LOOKS = 20_000
"""At a time: half a millisecond."""

MOST_TIMES = 10
"""With the core to itself. PyTorch's own threads wait as long for their next op."""

DISTURBED = 1.5
"""Looks that take so much longer than ever before were interrupted."""


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
            _look(self._is_full)
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


_shortest_s = math.inf  # that `LOOKS` took


def _look(flag: Any) -> None:
    """Look at a flag until it is set, or something else uses the core, or it takes too long."""
    global _shortest_s  # noqa: PLW0603 - all threads' looks are alike
    for _ in range(MOST_TIMES):
        begin_s = time.perf_counter()
        if look(flag, LOOKS):
            return
        took_s = time.perf_counter() - begin_s
        _shortest_s = min(_shortest_s, took_s)
        if took_s > DISTURBED * _shortest_s:
            return
