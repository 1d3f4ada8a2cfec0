"""What every benchmark returns: named figures, with targets where there are some."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measured number. A target is met from below (``at_most``) or from above."""

    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = False

    @property
    def is_met(self) -> bool | None:
        """Tell whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Time `work` several times and give the median in seconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
