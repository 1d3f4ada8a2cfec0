"""How a run goes, while it goes: one line rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from placewright.placers.run import Run
from placewright.units import format_bytes, format_time

EVERY_S = {True: 0.1, False: 5.0}  # on a terminal, elsewhere


class Live:
    """Shows the best so far, its gap to the bound, and samples a second, on standard error."""

    def __init__(self, bound_s: float, stream: TextIO | None = None) -> None:
        self._bound_s = bound_s
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._said_s = 0.0
        self._began_s = time.perf_counter()
        self._width = 0

    def __call__(self, run: Run) -> None:
        """Show where the run is, if it is time to."""
        now = time.perf_counter()
        if now - max(self._said_s, self._began_s) < EVERY_S[self._is_terminal]:
            return
        self._said_s = now
        over, objective_s = run.key
        gap = objective_s / self._bound_s - 1 if self._bound_s else 0.0
        words = (
            f"{run.wall_s:6.1f} s  best {format_time(objective_s)}  gap {gap:.1%}"
            f"  {run.num_samples / max(run.wall_s, 1e-9):,.0f} samples/s  {run.placer}"
        )
        if over:
            words += f"  ({format_bytes(over)} too much)"
        if self._is_terminal:
            self._stream.write("\r" + words.ljust(self._width))
            self._width = len(words)
        else:
            self._stream.write(words + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Wipe the line."""
        if self._is_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
