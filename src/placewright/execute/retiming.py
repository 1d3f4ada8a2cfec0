"""
A model's ops timed again and again beside something else that is measured.

This module owns how times are kept up with a machine that is quick at one moment and slow at the
next: ops take turns with whatever they are to be compared with, a while at a time, and the median
of all their times counts. Which ops there are and how one is timed is `profiling` and `op_bench`.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from placewright.execute.devices import RealDevice
from placewright.execute.op_bench import OpBench
from placewright.execute.op_times import Times, Timing, look_up, op_signatures, read_times
from placewright.execute.profiling import EFFORT, group_alike
from placewright.execute.solo import Solos
from placewright.frontends.torch import Capture

MOST = 0.97
"""Of a device's time in a step: ops are timed again, the longest first, until they make up this."""

EFFORT_AGAIN = replace(EFFORT, total_s=0.01, max_tries=0)
"""Less than at first, and as it comes: a step takes the moment as it is, too."""


class Retiming:
    """
    Ops of a step that has been profiled, timed anew in turns.

    Parameters
    ----------
    capture
        The step.
    devices
        Those that it was profiled on.
    """

    def __init__(self, capture: Capture, devices: Sequence[RealDevice]) -> None:
        self._solos = Solos(capture)
        self._groups = group_alike(devices)
        tables = {key: read_times(key) for key in self._groups}
        self._before = {key: table for key, table in tables.items() if table is not None}
        self._again: dict[tuple[str, str], list[Timing]] = defaultdict(list)
        self._ops = self._solos.distinct()
        self._turns = [
            (key, words)
            for key, table in self._before.items()
            for words in _longest(op_signatures(capture.graph), table)
        ]
        self._next = 0

    def go_on(self, for_s: float) -> None:
        """Time the next ops for so long, one at least; after the last comes the first."""
        until_s = time.monotonic() + for_s
        num_left = len(self._turns)
        while num_left and (num_left == len(self._turns) or time.monotonic() < until_s):
            key = self._turns[self._next][0]
            # Its threads end with it: nothing of it disturbs what is measured next.
            with OpBench(self._groups[key], EFFORT_AGAIN, self._before[key].pace_s) as bench:
                while num_left and self._turns[self._next][0] == key:
                    self._time_next(bench)
                    num_left -= 1
                    if time.monotonic() >= until_s:
                        break

    def _time_next(self, bench: OpBench) -> None:
        turn = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        with contextlib.suppress(Exception):  # whatever it raises now, it was timed before
            self._again[turn].append(bench.time_op(self._solos, self._ops[turn[1]]))

    def tables(self) -> dict[str, Times]:
        """Give all times by device name: medians of the one before and those since."""
        found: dict[str, Times] = {}
        for key, table in self._before.items():
            ops = {
                words: _median([timing, *self._again.get((key, words), ())])
                for words, timing in table.ops.items()
            }
            every = msgspec.structs.replace(table, ops=ops)
            found |= {device.name: every for device in self._groups[key]}
        return found


def _longest(signatures: Sequence[str | None], table: Times) -> list[str]:
    """List ops by the time that all that are alike take in a step, up to `MOST` of it."""
    time_s: dict[str, float] = defaultdict(float)
    for words, each_s in zip(signatures, look_up(signatures, table), strict=True):
        if words is not None and not np.isnan(each_s):
            time_s[words] += each_s
    ordered = sorted(time_s, key=lambda words: -time_s[words])
    total_s = np.cumsum([time_s[words] for words in ordered])
    num_longest = int(np.searchsorted(total_s, MOST * total_s[-1])) + 1 if ordered else 0
    return ordered[:num_longest]


def _median(timings: Sequence[Timing]) -> Timing:
    """Take the median of what was timed; memory and counts as at first."""
    return msgspec.structs.replace(
        timings[0],
        time_s=statistics.median(timing.time_s for timing in timings),
        idle_gain_s=statistics.median(timing.idle_gain_s for timing in timings),
    )
