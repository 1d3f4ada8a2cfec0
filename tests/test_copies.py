"""Tensors' ways from and to GPUs, with streams and events that are made up."""

from contextlib import nullcontext

import pytest

pytest.importorskip("torch")

import torch

from placewright.execute import _copies
from placewright.execute._copies import SMALL_BYTES, GpuWay

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
    kept = set()
    way = GpuWay(streams, kept)
    first, is_beside = way.leave(SMALL)
    assert not is_beside
    assert way.done.asked == [("record", streams.compute)]
    assert (first == SMALL).all()
    assert kept == {first.untyped_storage().data_ptr()}
    second, _ = way.leave(SMALL + 1)
    assert second is first
    assert (first == SMALL + 1).all()
    assert way.pin(SMALL) is first


def test_a_large_tensor_leaves_beside_what_is_computed(streams):
    kept = set()
    way = GpuWay(streams, kept)
    made = [way.leave(LARGE) for _ in range(2)]
    assert [is_beside for _, is_beside in made] == [True, True]
    assert made[0][0] is not made[1][0]
    assert way.done.asked == [("record", streams.leave)] * 2
    assert [name for name, _ in streams.leave.asked] == ["wait_event"] * 2
    assert kept == set()


def test_where_steps_may_overlap_nothing_is_kept(streams):
    way = GpuWay(streams, None)
    first, _ = way.leave(SMALL)
    second, _ = way.leave(SMALL + 1)
    assert second is not first
    assert (first == SMALL).all()


def test_strides_stay(streams):
    made, _ = GpuWay(streams, set()).leave(SMALL.t())
    assert made.stride() == SMALL.t().stride()
    assert (made == SMALL.t()).all()


def test_a_parameter_waits_for_nothing_that_is_computed(streams):
    way = GpuWay(streams, set())
    assert (way.fetch(LARGE) == LARGE).all()
    assert way.fetch(LARGE) is not way.fetch(LARGE)
    assert set(way.done.asked) == {("record", streams.lend)}
    assert not streams.compute.asked
    assert not streams.lend.asked
    small = GpuWay(streams, set())
    assert small.fetch(SMALL) is small.fetch(SMALL)
