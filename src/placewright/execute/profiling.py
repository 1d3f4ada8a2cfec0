"""
Profiles: every distinct op of a model timed once on each kind of device of this machine.

This module owns which ops are timed, which devices are alike, and how times get to the disk; how
an op is timed is `placewright.execute.op_bench`.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from placewright.cluster import Cluster
from placewright.costs import PS_PER_S, Costs
from placewright.errors import InputError
from placewright.execute._probe_memory import model_of
from placewright.execute.devices import RealDevice
from placewright.execute.op_bench import Effort, OpBench
from placewright.execute.op_times import (
    Say,
    Times,
    Timing,
    add_times,
    device_keys,
    look_up,
    op_signatures,
    read_times,
    say_to_people,
    torch_version,
)
from placewright.execute.solo import Solos
from placewright.frontends.torch import Capture
from placewright.graph import FloatArray, Graph

EFFORT = Effort()
_SAVE_EVERY_S = 10.0
_TELL_EVERY_S = 5.0


@dataclass(frozen=True, eq=False)
class DeviceProfile:
    """What came of timing a model's ops on a device, or on several that are alike."""

    key: str
    device_names: tuple[str, ...]
    num_distinct: int
    num_known: int  # of these, from before
    failures: Mapping[str, str]  # why ops could not be timed, by name
    wall_s: float
    issue_s: float
    op_time_s: FloatArray  # [N] nan: no work, or not timed
    op_spread_s: FloatArray  # [N]

    @property
    def num_new(self) -> int:
        """Count the ops that were timed now."""
        return self.num_distinct - self.num_known - len(self.failures)

    @property
    def step_s(self) -> float:
        """Add up the times of all ops of a step."""
        return float(np.nansum(self.op_time_s))


def profile(
    capture: Capture,
    devices: Sequence[RealDevice],
    *,
    again: bool = False,
    effort: Effort | None = None,
    say: Say = say_to_people,
    progress: Say | None = None,
) -> tuple[DeviceProfile, ...]:
    """
    Time every distinct op of a captured step, once on each kind of device.

    Times that are on disk are not taken again, unless `again`; new ones are added there as they
    come, so that little is lost if this is stopped. Tensors are made op by op: a model need not
    fit memory, only each of its ops. Devices that are alike are timed as one, with the others busy.
    On a device of several cores, one of which may be held up at any moment and the others with it,
    ops are timed in two rounds, and the lesser time counts.

    Parameters
    ----------
    capture
        The step.
    devices
        Those of this machine to time on.
    again
        Also time what is known.
    effort
        How long to time each op.
    say
        Told what should be known of the times.
    progress
        Told before each op how many are timed; without it `say` is, now and then.

    Raises
    ------
    InputError
        Times cannot be written.
    """
    solos = Solos(capture)
    distinct = solos.distinct()
    tell = progress or _now_and_then(say)
    return tuple(
        _profile_alike(solos, distinct, key, group, again, effort or EFFORT, say, tell)
        for key, group in group_alike(devices).items()
    )


def _now_and_then(say: Say) -> Say:
    """Pass words on, but not too often."""
    said_at = time.monotonic()

    def tell(words: str) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > _TELL_EVERY_S:
            said_at = time.monotonic()
            say(words)

    return tell


def group_alike(devices: Sequence[RealDevice]) -> dict[str, list[RealDevice]]:
    """Put those together whose times are kept under one key."""
    models = [model_of(device) for device in devices]
    names, kinds = [d.name for d in devices], [d.kind for d in devices]
    alike: dict[str, list[RealDevice]] = defaultdict(list)
    for device, key in zip(devices, device_keys(names, kinds, models), strict=True):
        assert key is not None
        alike[key].append(device)
    return alike


@dataclass(frozen=True)
class RooflineError:
    """How the roofline compares with measured times: estimated by measured, 1 if they agree."""

    median_ratio: float  # over distinct ops
    total_ratio: float  # of all ops' times


def compare_roofline(graph: Graph, found: DeviceProfile, cluster: Cluster) -> RooflineError | None:
    """Compare the roofline with what was measured; None if nothing was."""
    d = cluster.device_index(found.device_names[0])
    estimated_s = Costs.estimate(graph, cluster).op_ps[:, d] / PS_PER_S
    is_timed = np.nan_to_num(found.op_time_s) > 0
    if not is_timed.any():
        return None
    distinct = {words: i for i, words in enumerate(op_signatures(graph)) if is_timed[i]}
    ops = [*distinct.values()]
    return RooflineError(
        float(np.median(estimated_s[ops] / found.op_time_s[ops])),
        float(estimated_s[is_timed].sum() / found.op_time_s[is_timed].sum()),
    )


def _profile_alike(
    solos: Solos,
    distinct: Mapping[str, int],
    key: str,
    devices: Sequence[RealDevice],
    again: bool,
    effort: Effort,
    say: Say,
    tell: Say,
) -> DeviceProfile:
    begin = time.monotonic()
    before = read_times(key, say)
    known = {} if again or before is None else before.ops
    missing = {words: op for words, op in distinct.items() if words not in known}
    graph = solos.capture.graph
    failures: dict[str, str] = {}
    if before is None or missing:
        num_rounds = 2 if devices[0].kind == "cpu" and len(devices[0].cores) > 1 else 1
        found: dict[str, Timing] = {}
        with OpBench(devices, effort, None if before is None else before.pace_s) as bench:
            book = _Book(key, bench.time_issue(), devices[0].kind == "cuda", say)
            with contextlib.closing(book):
                for k, (words, op) in enumerate([*missing.items()] * num_rounds):
                    tell(f"{key}: {k // num_rounds:,} of {len(missing):,} ops timed")
                    try:
                        timing = bench.time_op(solos, op)
                    except Exception as error:  # whatever one op raises, others are still timed
                        if words not in found:
                            failures[graph.op_names[op]] = _reason(error)
                        continue
                    if words not in found or timing.time_s < found[words].time_s:
                        found[words] = timing
                        book.pace_s = bench.pace_s
                        book.add(words, timing)
            if bench.num_slow:
                say(
                    f"{key}: the machine was slower than usual while {bench.num_slow:,} of"
                    f" {len(missing):,} ops were timed; `placewright profile --again` times them"
                    " anew."
                )
        times = book.times
    else:
        times = before
    timings = [times.ops.get(words) if words else None for words in op_signatures(graph)]
    return DeviceProfile(
        key=key,
        device_names=tuple(device.name for device in devices),
        num_distinct=len(distinct),
        num_known=len(distinct) - len(missing),
        failures=failures,
        wall_s=time.monotonic() - begin,
        issue_s=times.issue_s,
        op_time_s=look_up(op_signatures(graph), times),
        op_spread_s=np.array([np.nan if t is None else t.spread_s for t in timings]),
    )


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split())
    return (
        words[:200] if isinstance(error, InputError) else f"{type(error).__name__}: {words[:200]}"
    )


class _Book:
    """New times on their way to the disk."""

    def __init__(self, key: str, issue_s: float, is_replayed: bool, say: Say) -> None:
        self._blank = Times(
            device=key,
            torch=torch_version() or "",
            issue_s=issue_s,
            is_replayed=is_replayed,
            ops={},
        )
        self._say = say
        self.pace_s: float | None = None
        self._new: dict[str, Timing] = {}
        self.close()  # so that what cannot be written is known now

    def add(self, words: str, timing: Timing) -> None:
        """Add an op's time; now and then all new ones are saved."""
        self._new[words] = timing
        if time.monotonic() - self._saved_at > _SAVE_EVERY_S:
            self.close()

    def close(self) -> None:
        """Save what is new."""
        new = msgspec.structs.replace(self._blank, pace_s=self.pace_s, ops=self._new)
        self.times = add_times(new, self._say)
        self._new = {}
        self._saved_at = time.monotonic()
