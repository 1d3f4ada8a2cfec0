"""
What else keeps the cores busy while something is timed on them, and what the times are worth then.

This module owns how that is found: ``/proc/stat`` says how long each core was busy, whoever it
worked for; what this process and all that it has started took is subtracted. Where there is no
``/proc``, nothing is known and nothing is said. Nothing here needs PyTorch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from placewright.execute._cores import own_cores

BEFORE_S = 0.4
"""How long to look before anything is timed."""

WINDOW_S = 2.0
"""The least time between two looks meanwhile: the system counts in hundredths of a second."""

NOTABLE = 0.1
"""A quiet machine's own work takes no more than so much of one core."""

NOTABLE_S = 0.1
"""A control group may hold a process up for so long before that is told."""

_BUSY, _STOLEN = (0, 1, 2, 5, 6), 7
"""Columns of a core in /proc/stat: user, nice, system, irq, softirq; and other machines' time."""

_OWN = (11, 12, 13, 14)
"""Columns of a process after its name: what it took, and what those took that it waited for."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How many of the cores that this process may use others kept busy, on average."""

    num_cores: int
    quota_cores: float | None  # what its control group may use of them; None: all
    before: float  # cores that others used before anything was timed
    during: float  # and meanwhile
    at_most: float  # in the busiest moment of that
    stolen: float  # cores that a virtual machine had to wait for, meanwhile
    held_up_s: float  # for which the control group had used up what it may use

    @property
    def is_shared(self) -> bool:
        """Tell whether others used the cores: all the time, or a lot of them for a while."""
        return self.during > NOTABLE or self.at_most > 2 * NOTABLE

    @property
    def is_disturbed(self) -> bool:
        """Tell whether figures are worth less than a quiet machine's."""
        return self.is_shared or self.stolen > NOTABLE or self.held_up_s > NOTABLE_S

    def describe(self) -> dict[str, Any]:
        """Tell it in plain values."""
        return {**asdict(self), "is_disturbed": self.is_disturbed}

    def words(self) -> str:
        """Say how the machine was disturbed, if it was; empty if not."""
        said = []
        if self.is_shared:
            said.append(
                f"Others used {self.during:.1f} of {_cores(self.num_cores)} meanwhile (at most"
                f" {self.at_most:.1f}): {_worth(self.at_most)}."
            )
        if self.stolen > NOTABLE:
            said.append(
                f"Other virtual machines took {self.stolen:.1f} of {_cores(self.num_cores)}"
                f" meanwhile: {_worth(self.stolen)}."
            )
        if self.held_up_s > NOTABLE_S:
            said.append(
                f"The control group had used up its {self.quota_cores or 0.0:.1f} cores for"
                f" {self.held_up_s:.1f} s: times are too long."
            )
        return " ".join(said)


def _cores(count: int) -> str:
    return f"{count} cores" if count > 1 else "the one core"


def _worth(used: float) -> str:
    """Say how much longer work takes that shares a core with others: half of it is theirs."""
    factor = 1 / (1 - min(used, 0.5))
    longer = "twice as long" if factor == 2 else f"{factor:.1f} times as long"
    return f"times may be up to {longer} as on a quiet machine"


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """What the system has counted so far."""

    at_s: float
    busy_s: float  # of all cores that this process may use
    stolen_s: float
    own_s: float  # of this process and those that it has started
    held_up_s: float


class LoadWatch:
    """
    Looks at who uses the cores: before something is timed, meanwhile (`look`), and after (`end`).

    Parameters
    ----------
    root
        Where ``proc`` and ``sys`` are.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root, self._cores = root, own_cores()
        first = self._read()
        if first is not None:
            time.sleep(BEFORE_S)
        self._begin = self._last = self._read()
        self._before = 0.0 if first is None else self._used(first, self._begin)
        self._at_most = 0.0

    @property
    def before(self) -> str:
        """Say how much others use now, if that matters; empty if not."""
        if self._before <= NOTABLE:
            return ""
        return (
            f"Others use {self._before:.1f} of {_cores(len(self._cores))}: {_worth(self._before)}."
        )

    def look(self) -> None:
        """Look again, if the last time was long enough ago."""
        if self._last is None or time.monotonic() - self._last.at_s < WINDOW_S:
            return
        now = self._read()
        self._at_most = max(self._at_most, self._used(self._last, now))
        self._last = now

    def end(self) -> Load | None:
        """Say how it was from the beginning to now; None where that is not known."""
        now = self._read()
        if self._begin is None or now is None:
            return None
        during = self._used(self._begin, now)
        return Load(
            num_cores=len(self._cores),
            quota_cores=min((quota for quota, _ in self._quotas()), default=None),
            before=round(self._before, 3),
            during=round(during, 3),
            at_most=round(max(during, self._at_most), 3),
            stolen=round((now.stolen_s - self._begin.stolen_s) / (now.at_s - self._begin.at_s), 3),
            held_up_s=round(now.held_up_s - self._begin.held_up_s, 3),
        )

    def _used(self, begin: _Counts | None, end: _Counts | None) -> float:
        """Count the cores that others kept busy between two moments."""
        if begin is None or end is None:
            return 0.0
        used_s = (end.busy_s - begin.busy_s) - (end.own_s - begin.own_s)
        return max(used_s / (end.at_s - begin.at_s), 0.0)

    def _read(self) -> _Counts | None:
        try:
            lines = (self._root / "proc/stat").read_text().splitlines()
            columns = [line.split() for line in lines]
            names = {f"cpu{core}" for core in self._cores}
            cores = [[int(word) for word in words[1:]] for words in columns if words[0] in names]
            return _Counts(
                at_s=time.monotonic(),
                busy_s=sum(core[k] for core in cores for k in _BUSY) / _ticks(),
                stolen_s=sum(core[_STOLEN] for core in cores) / _ticks(),
                own_s=self._own_ticks() / _ticks(),
                held_up_s=max((held_up_s for _, held_up_s in self._quotas()), default=0.0),
            )
        except (OSError, ValueError, IndexError):
            return None

    def _own_ticks(self) -> int:
        """Add up what this process took, all that it has started, and all that these have."""
        children: dict[int, list[int]] = {}
        took: dict[int, int] = {}
        for path in (self._root / "proc").glob("[0-9]*/stat"):
            try:
                columns = path.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            pid = int(path.parent.name)
            children.setdefault(int(columns[1]), []).append(pid)
            took[pid] = sum(int(columns[k]) for k in _OWN)
        ours = [os.getpid()]
        for pid in ours:
            ours += children.get(pid, [])
        return sum(took.get(pid, 0) for pid in ours)

    def _quotas(self) -> Iterator[tuple[float, float]]:
        """Find each limit on this process's cores, and for how long it held the process up."""
        try:
            groups = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return
        for line in groups:
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            base = self._root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            folder = base / path.lstrip("/")
            for each in (folder, *folder.parents):
                found = _quota_of(each)
                if found is not None:
                    yield found


def _quota_of(group: Path) -> tuple[float, float] | None:
    """Read a control group's limit in cores and the seconds it held up, of either version."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        if quota in ("max", "-1"):
            return None
        counts = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        held_up_s = int(counts.get("throttled_usec", 0)) / 1e6
        return int(quota) / int(period), held_up_s + int(counts.get("throttled_time", 0)) / 1e9
    except (OSError, ValueError):
        return None


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK")
