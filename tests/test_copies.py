"""Tensors' ways from and to GPUs, with streams and events that are made up."""

from contextlib import nullcontext

import pytest

pytest.importorskip("torch")

import torch

from placewright.execute import _copies
from placewright.execute._copies import (
    KEPT_BYTES,
    MOST_GAPS,
    SMALL_BYTES,
    GpuWay,
    PinnedRooms,
    blank,
    copy_over,
)

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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 12)[:, 4:8],
        torch.arange(24.0).view(2, 12)[:, 8:].t(),
        torch.arange(48.0).view(2, 4, 6)[:, 1:3, ::2].transpose(0, 2),
    ],
)
def test_what_has_gaps_is_copied_in_one_piece(tensor, monkeypatch):
    pieces = []
    real = torch.Tensor.copy_

    def note(made, given, non_blocking):
        pieces.append((made.is_contiguous(), given.is_contiguous(), non_blocking))
        return real(made, given)

    monkeypatch.setattr(torch.Tensor, "copy_", note)
    made = blank(tensor)
    assert copy_over(made, tensor) is made
    assert pieces == [(True, True, True)]
    assert made.stride() == tensor.stride()
    assert torch.equal(made, tensor)


@pytest.mark.parametrize("gaps", [MOST_GAPS - 1, MOST_GAPS + 1])
def test_what_is_mostly_gaps_is_copied_without(gaps):
    tensor = torch.arange(100.0 * (1 + gaps)).view(100, 1 + gaps)[:, 0]
    made = blank(tensor)
    made.untyped_storage().fill_(0)
    copy_over(made, tensor)
    assert torch.equal(made, tensor)
    between = made.as_strided((100 * (1 + gaps) - gaps,), (1,))[1]
    assert between == (1.0 if gaps < MOST_GAPS else 0.0)


def test_one_row_that_stands_for_many_is_no_gap():
    tensor = torch.arange(4.0).expand(3, 4)
    assert torch.equal(copy_over(torch.empty(3, 4), tensor), tensor)


def test_a_parameter_waits_for_nothing_that_is_computed(streams):
    way = GpuWay(streams, PinnedRooms())
    assert (way.fetch(LARGE) == LARGE).all()
    assert way.fetch(LARGE) is way.fetch(LARGE)
    assert set(way.done.asked) == {("record", streams.lend)}
    assert not streams.compute.asked
    assert not streams.lend.asked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_no_thread_waits_for_what_has_gaps():
    away = torch.arange(3.0 * 2**20, device="cuda").view(1024, -1)[:, 1024:2048]
    here = blank(away, pin_memory=True)
    back = blank(away, device="cuda")
    copy_over(here, away)  # whatever is done only once
    torch.cuda.synchronize()
    here.zero_()
    torch.cuda._sleep(10**9)  # about half a second
    copy_over(here, away)
    copy_over(back, here)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    done.synchronize()
    assert torch.equal(here, away.cpu())
    assert torch.equal(back, away)
