"""Handing things over from thread to thread."""

import math
import threading
import time

import numpy as np
import pytest

from placewright.execute import _boxes
from placewright.execute._boxes import LOOKS, Box


def run(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    return thread, found


@pytest.mark.parametrize("looks", [0, LOOKS])
def test_everything_arrives_in_order(looks, monkeypatch):
    monkeypatch.setattr(_boxes, "LOOKS", looks)
    monkeypatch.setattr(_boxes, "_shortest_s", math.inf)  # none at all take no time
    there, back = Box(), Box()

    def echo():
        for _ in range(500):
            back.put(there.take() + 1)

    thread, _ = run(echo)
    for k in range(500):
        there.put(k)
        assert back.take() == k + 1
    thread.join()


def test_what_is_put_later_is_waited_for():
    box = Box()
    thread, found = run(box.take)
    time.sleep(0.05)  # longer than anyone looks
    assert not found
    box.put("late")
    thread.join(10)
    assert found == ["late"]


def test_a_full_box_takes_nothing_more():
    box = Box()
    box.put(1)
    with pytest.raises(RuntimeError):
        box.put(2)


def test_an_open_box_lets_whoever_waits_go_on():
    box = Box()
    thread, found = run(box.take)
    box.open()
    thread.join(10)
    assert found == [None]
    full = Box()
    full.put(1)
    full.open()
    assert full.take() == 1


def test_who_looks_sees_what_another_thread_sets():
    flag = np.zeros(8, dtype=np.int64)
    thread, _ = run(lambda: _boxes.look(flag, 10**12))  # for hours, if it does not see it
    time.sleep(0.01)
    assert thread.is_alive()
    flag[0] = 1
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(("took_s", "times"), [((1.0, 1.1, 1.4), 10), ((1.0, 1.2, 1.6, 1.0), 3)])
def test_who_looks_sleeps_early_if_something_else_uses_the_core(took_s, times, monkeypatch):
    clock, turns = [0.0], []

    def look(flag, count):
        clock[0] += took_s[min(len(turns), len(took_s) - 1)]
        turns.append(count)
        return False

    monkeypatch.setattr(_boxes, "look", look)
    monkeypatch.setattr(_boxes, "_shortest_s", math.inf)
    monkeypatch.setattr(_boxes.time, "perf_counter", lambda: clock[0])
    _boxes._look(np.zeros(8, dtype=np.int64))
    assert turns == [LOOKS] * times
