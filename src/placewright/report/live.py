"""How long work goes, while it goes: one line rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time

from rich.console import Console

from placewright.placers.run import Run
from placewright.units import format_bytes, format_time

EVERY_S = {True: 0.1, False: 5.0}  # on a terminal, elsewhere


class LiveLine:
    """
    Shows where work is that times something, on standard error.

    It does nothing of its own accord: what draws beside the work would take time that is measured.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, markup=False)
        self._shown_s = -math.inf

    def __call__(self, words: str) -> None:
        """Show where the work is, if it is time to."""
        now, is_terminal = time.perf_counter(), self._console.is_terminal
        if now - self._shown_s < EVERY_S[is_terminal]:
            return
        self._shown_s = now
        if is_terminal:
            self._write(words[: self._console.width - 1])
        else:
            self.say(words)

    def say(self, words: str) -> None:
        """Say something that stays."""
        self.close()
        self._console.print(words, soft_wrap=True)

    def close(self) -> None:
        """Take the line away."""
        if self._console.is_terminal:
            self._write("")

    def _write(self, words: str) -> None:
        self._console.file.write(f"\r{words}\x1b[K")
        self._console.file.flush()


class Live:
    """Shows the best so far, its gap to the bound, and samples a second, on standard error."""

    def __init__(self, bound_s: float, console: Console | None = None) -> None:
        self._bound_s = bound_s
        self._console = console or Console(stderr=True, highlight=False, markup=False)
        self._status = self._console.status("placing...")
        self._said_s = time.perf_counter()
        if self._console.is_terminal:
            self._status.start()

    def __call__(self, run: Run) -> None:
        """Show where the run is, if it is time to."""
        now = time.perf_counter()
        if now - self._said_s < EVERY_S[self._console.is_terminal]:
            return
        self._said_s = now
        words = self.describe(run)
        if self._console.is_terminal:
            self._status.update(words)
        else:
            self._console.print(words, soft_wrap=True)

    def describe(self, run: Run) -> str:
        """Tell where a run is in one line."""
        over, objective_s = run.key
        gap = ""
        if run.evaluator.basis == "simulated":  # the bound is of such times
            gap = f"  gap {objective_s / self._bound_s - 1 if self._bound_s else 0.0:.1%}"
        words = (
            f"{run.wall_s:6.1f} s  best {format_time(objective_s)}{gap}"
            f"  {run.num_samples / max(run.wall_s, 1e-9):,.0f} samples/s  {run.placer}"
        )
        return words + (f"  ({format_bytes(over)} too much)" if over else "")

    def close(self) -> None:
        """Take the line away."""
        self._status.stop()
