"""Ctrl-C between two updates, so that what was learned is saved first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class HeldInterrupt:
    """
    Holds the first Ctrl-C back, and tells that it came; a second one stops at once.

    Only Python's own way to be interrupted is changed, and only in the main thread, which alone may
    do so. Elsewhere, or if told not to hold anything, nothing is.
    """

    def __init__(self, holds: bool = True) -> None:
        self.has_come = False
        is_main = threading.current_thread() is threading.main_thread()
        self._holds = holds and is_main

    def __enter__(self) -> HeldInterrupt:
        self._holds = self._holds and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def _hold(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.has_come = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._holds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
