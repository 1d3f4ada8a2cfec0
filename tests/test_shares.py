"""Shares of a GPU as devices."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

import placewright as pw
from placewright.errors import InputError
from placewright.execute import _shares, devices
from placewright.execute._lanes import Share, lane_numbers, share_of
from placewright.execute.devices import RealDevice, find_devices

from .test_execute import BOX, GPU, check_on_gpus, on_gpu

FIRST, SECOND = "cuda:0/0-87", "cuda:0/88-131"


@pytest.fixture
def one_gpu(monkeypatch):
    """Have a machine with a core and a GPU of 132 multiprocessors."""
    there = RealDevice("cpu:0", "cpu", (0,)), RealDevice("cuda:0", "cuda", ())
    monkeypatch.setattr(devices, "list_devices", lambda: there)
    monkeypatch.setattr(devices, "count_multiprocessors", lambda gpu: 132)


def test_a_share_is_named_by_its_multiprocessors():
    assert share_of(FIRST) == Share("cuda:0", 0, 87)
    assert share_of(SECOND).size == 44
    assert share_of("cuda:0") is None
    assert share_of("cpu:0") is None


def test_a_share_has_a_thread_of_its_own():
    names = ("cpu:0", "cuda:0", "cuda:1", FIRST, SECOND)
    assert lane_numbers(names, ("cpu", *["cuda"] * 4)) == [0, 1, 1, 3, 4]


def test_shares_are_found_on_their_gpu(one_gpu):
    found = find_devices(("cpu:0", FIRST, SECOND))
    assert [device.name for device in found] == ["cpu:0", FIRST, SECOND]
    assert [str(device.torch_device) for device in found] == ["cpu", "cuda:0", "cuda:0"]
    assert found[0].share is None
    assert found[2].share == Share("cuda:0", 88, 131)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("cuda:0/0-132",), "has the multiprocessors 0 to 131; `cuda:0/0-132` is no part"),
        (("cuda:0/9-8",), "is no part"),
        (("cuda:1/0-7",), "no device `cuda:1/0-7`"),
        ((FIRST, "cuda:0/80-131"), f"`{FIRST}` and `cuda:0/80-131` have multiprocessors in common"),
        ((FIRST, "cuda:0"), "in common"),
    ],
)
def test_wrong_shares_are_refused(names, words, one_gpu):
    with pytest.raises(InputError, match=words):
        find_devices(names)


def test_a_gpu_that_cannot_be_divided_there_says_where_it_can():
    def sms(count):
        return SimpleNamespace(sm=SimpleNamespace(smCount=count))

    def split(_, resource, flags, size):
        found = -(-size // 8) * 8
        return 0, [sms(found)], 1, sms(resource.sm.smCount - found)

    driver = SimpleNamespace(cuDevSmResourceSplitByCount=split)
    mine, left = _shares._divide(driver, sms(132), 88, Share("cuda:0", 0, 87))
    assert (mine.sm.smCount, left.sm.smCount) == (88, 44)
    with pytest.raises(InputError, match="divided after 96 multiprocessors, not after 90"):
        _shares._divide(driver, sms(132), 90, Share("cuda:0", 0, 89))
    with pytest.raises(InputError, match="cannot be divided: 801"):
        _shares._made((801, None))


# --- On a GPU. ---


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-resnet", "tiny-nmt"])
def test_any_placement_on_shares_and_a_core_gives_the_same_up_to_rounding(name, tmp_path):
    last = _shares.count_multiprocessors("cuda:0") - 1
    shares = GPU.replace('name = "cuda:0"', f'names = ["cuda:0/0-31", "cuda:0/32-{last}"]')
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu:0"], more=shares))
    box = pw.Cluster.load(tmp_path / "box.toml")
    check_on_gpus(name, box, [1, 2])


@pytest.mark.gpu
@on_gpu
def test_a_share_computes_with_its_part_of_the_gpu():
    last = _shares.count_multiprocessors("cuda:0") - 1
    matrix = torch.randn(4096, 4096, device="cuda:0")
    times = {}
    for first, to in ((0, last), (0, 31)):
        stream = _shares.stream_of(Share("cuda:0", first, to))
        with torch.cuda.stream(stream):
            for _ in range(3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                matrix @ matrix
                end.record()
            end.synchronize()
        times[to] = begin.elapsed_time(end)
    assert times[31] > 2 * times[last]
