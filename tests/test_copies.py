"""Tensors' ways from and to GPUs, with streams and events that are made up."""

from contextlib import nullcontext

import pytest

pytest.importorskip("torch")

import torch

from placewright.execute import _copies
from placewright.execute._copies import KEPT_BYTES, SMALL_BYTES, GpuWay, PinnedRooms

SMALL, LARGE = torch.arange(6.0).view(2, 3), torch.ones(SMALL_BYTES // 4 + 1)


class Made:
    """A stream or an event: notes what it is asked."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *given: self.asked.append((name, *given))


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Made)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    real = _copies.blank
    monkeypatch.setattr(_copies, "blank", lambda tensor, pin_memory: real(tensor))
    found = type("Streams", (), {})()
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    found.compute, found.leave, found.lend, found.arrive = Made(), Made(), Made(), Made()
    return found


def test_a_small_tensor_has_the_same_pinned_memory_in_every_step(streams):
    rooms = PinnedRooms()
    rooms.num_bytes = KEPT_BYTES
    way = GpuWay(streams, rooms)
    first, is_beside = way.leave(SMALL)
    assert not is_beside
    assert way.done.asked == [("record", streams.compute)]
    assert (first == SMALL).all()
    assert rooms.has(first[1:])
    assert not rooms.has(SMALL)
    second, _ = way.leave(SMALL + 1)
    assert second is first
    assert (first == SMALL + 1).all()
    assert way.pin(SMALL) is first


def test_a_large_tensor_leaves_beside_what_is_computed(streams):
    rooms = PinnedRooms()
    way = GpuWay(streams, rooms)
    made = [way.leave(LARGE) for _ in range(2)]
    assert [is_beside for _, is_beside in made] == [True, True]
    assert made[0][0] is made[1][0]
    assert way.done.asked == [("record", streams.leave)] * 2
    assert [name for name, _ in streams.leave.asked] == ["wait_event"] * 2
    assert rooms.num_bytes == LARGE.nbytes


def test_large_tensors_keep_so_much_pinned_memory_and_no_more(streams):
    rooms = PinnedRooms()
    rooms.num_bytes = KEPT_BYTES - LARGE.nbytes
    first, second = GpuWay(streams, rooms), GpuWay(streams, rooms)
    assert first.pin(LARGE) is first.pin(LARGE)
    assert second.pin(LARGE) is not second.pin(LARGE)
    assert rooms.num_bytes == KEPT_BYTES


def test_where_steps_may_overlap_nothing_is_kept(streams):
    way = GpuWay(streams, None)
    first, _ = way.leave(SMALL)
    second, _ = way.leave(SMALL + 1)
    assert second is not first
    assert (first == SMALL).all()


def test_strides_stay(streams):
    made, _ = GpuWay(streams, PinnedRooms()).leave(SMALL.t())
    assert made.stride() == SMALL.t().stride()
    assert (made == SMALL.t()).all()


def test_a_parameter_waits_for_nothing_that_is_computed(streams):
    way = GpuWay(streams, PinnedRooms())
    assert (way.fetch(LARGE) == LARGE).all()
    assert way.fetch(LARGE) is way.fetch(LARGE)
    assert set(way.done.asked) == {("record", streams.lend)}
    assert not streams.compute.asked
    assert not streams.lend.asked
