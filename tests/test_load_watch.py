"""Who else uses the cores while something is timed: on a made-up /proc, and a real busy process."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from placewright.cli import _shared
from placewright.cli._shared import TimedWork
from placewright.execute import load_watch
from placewright.execute._cores import own_cores
from placewright.execute.load_watch import Load, LoadWatch

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """A made-up machine whose clock is turned by hand."""

    def __init__(self, root, monkeypatch, cores=(0, 1)):
        self.root, self.now_s = root, 100.0
        self.busy = dict.fromkeys((*cores, 7), 0.0)  # core 7 is not ours
        self.stolen = self.own = self.child = self.held_up_s = 0.0
        self.quota = ""
        monkeypatch.setattr(load_watch, "own_cores", lambda: cores)
        monkeypatch.setattr(load_watch.time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(load_watch.time, "sleep", self.sleep)
        self.while_asleep = {}
        self.put("proc/self/cgroup", "0::/a/b\n")
        self.write()

    def sleep(self, seconds):
        self.spend(seconds, **self.while_asleep)

    def spend(self, seconds, *, others=0.0, own=0.0, child=0.0, stolen=0.0, held_up=0.0):
        """Let time pass, in which so many cores' worth of work is done."""
        self.now_s += seconds
        self.busy[0] += seconds * (others + own + child)
        self.busy[7] += seconds
        self.own += seconds * own
        self.child += seconds * child
        self.stolen += seconds * stolen
        self.held_up_s += held_up
        self.write()

    def write(self):
        lines = ["cpu  1 2 3 4 5 6 7 8 0 0"]
        for core, busy_s in self.busy.items():
            user, stolen = round(busy_s * TICKS), round(self.stolen * TICKS) if core == 0 else 0
            lines.append(f"cpu{core} {user} 0 0 {10**6} 0 0 0 {stolen} 0 0")
        self.put("proc/stat", "\n".join([*lines, "intr 1 2 3"]))
        mine, parts = os.getpid(), (self.own, self.child)
        for pid, parent, took_s in zip((mine, mine + 1), (1, mine), parts, strict=True):
            columns = ["S", str(parent), *["0"] * 9, str(round(took_s * TICKS)), "0", "0", "0"]
            self.put(f"proc/{pid}/stat", f"{pid} (a (b) c) {' '.join(columns)} 0 0")
        if self.quota:
            self.put("sys/fs/cgroup/a/cpu.max", self.quota)
            throttled = f"usage_usec 1\nthrottled_usec {round(self.held_up_s * 1e6)}\n"
            self.put("sys/fs/cgroup/a/cpu.stat", throttled)

    def put(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_a_quiet_machine_is_not_disturbed_by_its_own_work(machine):
    watch = LoadWatch(machine.root)
    assert watch.before == ""
    machine.spend(10.0, own=0.7, child=1.1, others=0.03)
    load = watch.end()
    assert (load.num_cores, load.quota_cores) == (2, None)
    assert load.during == pytest.approx(0.03, abs=0.01)
    assert not load.is_disturbed
    assert load.words() == ""
    assert load.describe()["is_disturbed"] is False


def test_others_are_told_before_and_after(machine):
    machine.while_asleep = {"others": 1.0}
    watch = LoadWatch(machine.root)
    words = "Others use 1.0 of 2 cores: times may be up to twice as long as on a quiet machine."
    assert watch.before == words
    machine.spend(10.0, own=1.0, others=0.25)
    load = watch.end()
    assert (load.before, load.during) == (1.0, pytest.approx(0.25))
    assert load.words() == (
        "Others used 0.2 of 2 cores meanwhile (at most 0.2): times may be up to 1.3 times as long"
        " as on a quiet machine."
    )


def test_the_busiest_moment_counts(machine):
    watch = LoadWatch(machine.root)
    for others in (0.0, 0.0, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0):
        machine.spend(3.0, own=0.5, others=others)
        watch.look()
        machine.spend(1.0, own=0.5)
        watch.look()  # too soon
    load = watch.end()
    assert load.during < load_watch.NOTABLE
    assert 0.5 < load.at_most <= 0.9
    assert load.is_disturbed


def test_other_virtual_machines_are_told(machine):
    watch = LoadWatch(machine.root)
    machine.spend(4.0, own=0.5, stolen=0.5)
    words = "Other virtual machines took 0.5 of 2 cores meanwhile: times may be up to twice as long"
    assert watch.end().words() == f"{words} as on a quiet machine."


def test_a_control_group_that_holds_up_is_told(machine):
    machine.quota = "150000 100000"
    machine.write()
    watch = LoadWatch(machine.root)
    machine.spend(5.0, own=1.5, held_up=0.8)
    load = watch.end()
    assert (load.quota_cores, load.held_up_s) == (1.5, pytest.approx(0.8))
    assert load.words() == (
        "The control group had used up its 1.5 cores for 0.8 s: times are too long."
    )


def test_an_older_control_group_is_read(machine):
    machine.put("proc/self/cgroup", "4:cpu,cpuacct:/a\n3:memory:/b\n")
    machine.put("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "50000")
    machine.put("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000")
    machine.put("sys/fs/cgroup/cpu/a/cpu.stat", "nr_periods 3\nthrottled_time 2000000000\n")
    (found,) = LoadWatch(machine.root)._quotas()
    assert found == (0.5, 2.0)


def test_where_nothing_is_known_nothing_is_said(tmp_path):
    watch = LoadWatch(tmp_path)
    watch.look()
    assert watch.before == ""
    assert watch.end() is None


def spin(seconds):
    """Keep a core busy; its parent has ended meanwhile, so that it is nobody's of ours."""
    if os.fork() == 0:
        os.sched_setaffinity(0, {own_cores()[-1]})
        until_s = time.process_time() + seconds
        while time.process_time() < until_s:
            pass
        os._exit(0)
    os._exit(0)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="there is no /proc")
def test_a_busy_process_is_found():
    starter = multiprocessing.get_context("spawn").Process(target=spin, args=(1.5,))
    starter.start()
    starter.join()
    watch = LoadWatch()
    time.sleep(0.5)
    load = watch.end()
    assert load.before > 0.3
    assert load.during > 0.3
    assert load.is_disturbed


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="there is no /proc")
def test_what_this_process_does_is_not_others():
    watch = LoadWatch()
    until_s = time.process_time() + 0.4
    while time.process_time() < until_s:
        pass
    mine, other = watch.end(), watch._begin
    now = watch._read()
    assert now.own_s - other.own_s > 0.3
    assert mine.during < 2 * (now.busy_s - other.busy_s) / 0.4


# In commands.


class Loaded:
    """A load watch of a machine that others use."""

    before = "Others use 1.0 of 2 cores."

    def __init__(self):
        self.num_looks = 0

    def look(self):
        self.num_looks += 1

    def end(self):
        return Load(
            num_cores=2, quota_cores=None, before=1, during=1, at_most=1, stolen=0, held_up_s=0
        )


def test_a_command_says_what_figures_are_worth(monkeypatch, capsys):
    monkeypatch.setattr(load_watch, "LoadWatch", Loaded)
    with closing(TimedWork(is_quiet=False)) as work:
        work("begins")
    assert capsys.readouterr().err.splitlines() == ["Others use 1.0 of 2 cores.", "begins"]
    assert work.disturbance.startswith("Others used 1.0 of 2 cores meanwhile")
    assert work.describe_load()["load"]["is_disturbed"] is True
    with closing(TimedWork(is_quiet=True)) as work:
        work("begins")
    assert capsys.readouterr().err == ""
    assert work.describe_load()["load"]["during"] == 1


def test_long_work_elsewhere_is_said_to_go_on(monkeypatch, capsys):
    from placewright.report import live

    monkeypatch.setattr(load_watch, "LoadWatch", Loaded)
    monkeypatch.setattr(_shared, "TICK_S", 0.05)
    monkeypatch.setattr(live, "EVERY_S", {True: 0.0, False: 0.0})
    with closing(TimedWork(is_quiet=False, ticks=True)) as work:
        work("a.json warms up")
        time.sleep(0.5)
    assert not work._ticker.is_alive()
    assert work._watch.num_looks > 2
    said = capsys.readouterr().err.splitlines()[1:]
    assert said[:2] == ["a.json warms up", "a.json warms up (0 s so far)"]
