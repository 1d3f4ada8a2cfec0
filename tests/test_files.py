from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import tracemalloc

import pytest

from placewright import files
from placewright.errors import InputError
from placewright.units import (
    format_bytes,
    format_count,
    format_time,
    parse_bytes,
    parse_rate,
    parse_time,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    files.write(path, b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match=r"plan\.json` cannot be written: No space left on device"):
        files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "plan.json", b"new")
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path):
    words = (
        "import os, sys; from placewright import files;"
        "os.fsync = lambda _: os.kill(os.getpid(), 9); files.write(sys.argv[1], b'half')"
    )
    path = tmp_path / "plan.json"
    killed = subprocess.run([sys.executable, "-c", words, path], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    files.write(path, b"young ones may be in use")
    assert left.exists()
    os.utime(left, (0, 0))
    files.write(path, b"whole")
    assert os.listdir(tmp_path) == ["plan.json"]
    assert path.read_bytes() == b"whole"


def test_what_others_are_writing_stays(tmp_path, monkeypatch):
    written, replace = [], os.replace

    def write_another(temporary, target):
        os.utime(temporary, (0, 0))
        monkeypatch.setattr(os, "replace", replace)
        files.write(tmp_path / "other.json", b"other")
        written.append(target)
        replace(temporary, target)

    monkeypatch.setattr(os, "replace", write_another)
    (tmp_path / ".placewright-link").symlink_to(tmp_path / "mine")
    (tmp_path / ".placewright-folder").mkdir()
    os.mkfifo(tmp_path / ".placewright-pipe")
    (tmp_path / "mine").write_bytes(b"mine")
    for name in ("mine", ".placewright-folder", ".placewright-pipe"):
        os.utime(tmp_path / name, (0, 0))
    files.write(tmp_path / "plan.json", b"plan")
    assert written == [tmp_path / "plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == b"plan"
    assert len(os.listdir(tmp_path)) == 6


def test_a_name_as_long_as_may_be_is_written(tmp_path):
    files.write(tmp_path / ("é" * 127), b"x")
    assert len(os.listdir(tmp_path)) == 1


def test_links_are_followed_and_pipes_are_written_to(tmp_path):
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(real)
    files.write(link, b"x")
    assert link.is_symlink()
    assert real.read_bytes() == b"x"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


def test_what_could_not_be_written_is_told_before(tmp_path):
    files.check_writable(tmp_path / "new.toml")
    (tmp_path / "old.toml").write_text("")
    files.check_writable(tmp_path / "old.toml")
    assert not (tmp_path / "new.toml").exists()
    with pytest.raises(InputError, match=r"cannot be written: Is a directory\."):
        files.check_writable(tmp_path)
    with pytest.raises(InputError, match=r"cannot be written: No such file or directory\."):
        files.check_writable(tmp_path / "nowhere" / "new.toml")


def test_gzip_files_of_several_members_are_read(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"one ") + gzip.compress(b"two"))
    assert files.read(path, "test file") == b"one two"


def test_a_file_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(InputError, match="`/dev/zero` does not end"):
        files.read("/dev/zero", "test file")


def test_a_pipe_that_nothing_writes_to_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"Expected a test file at .*pipe that nothing writes to"):
        files.read(tmp_path / "pipe", "test file")


def test_a_pipe_that_is_written_to_is_read_to_its_end(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    keeper = os.open(path, os.O_RDWR)  # so that opening it to write does not wait
    writer = os.open(path, os.O_WRONLY)
    timer = threading.Timer(0.2, lambda: (os.write(writer, b"late"), os.close(writer)))
    timer.start()
    os.close(keeper)
    assert files.read(path, "test file") == b"late"
    timer.join()
    reader, writer = os.pipe()
    os.write(writer, gzip.compress(b"before"))
    os.close(writer)
    assert files.read(f"/dev/fd/{reader}", "test file") == b"before"
    os.close(reader)


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_what_is_no_regular_file_is_not_named_by_its_content(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"Expected an ONNX file at .* is a pipe or device\."):
        files.digest(tmp_path / name, "ONNX file")


def test_a_read_takes_no_more_memory_than_the_file_needs(tmp_path):
    (tmp_path / "a").write_bytes(b"small")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"small"))
    tracemalloc.start()
    try:
        assert files.read(tmp_path / "a", "test file") == b"small"
        assert files.read(tmp_path / "a.gz", "test file") == b"small"
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_a_file_that_unpacks_to_more_than_a_file_may_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * 1001))
    with pytest.raises(InputError, match=r"a\.gz` unpacks to more than"):
        files.read(tmp_path / "a.gz", "test file")


def test_files_are_readable_by_others_as_usual(tmp_path):
    path = tmp_path / "plan.json"
    mask = os.umask(0o022)
    try:
        files.write(path, b"x")
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_equal_data_gives_equal_gzip_files(tmp_path):
    for name in ("a.gz", "b.gz"):
        files.write(tmp_path / name, b"data" * 100)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert files.read(tmp_path / "a.gz", "test file") == b"data" * 100


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        ("1.5 KiB", 1536),
        ("2kB", 2000),
        ("3 B", 3),
        (17, 17),
        ("1e3MB", 10**9),
    ],
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text, "x") == count


def test_rates_and_times_are_read():
    assert parse_rate("60GB/s", "x") == 60e9
    assert parse_rate(5, "x") == 5
    assert parse_time("15us", "x") == pytest.approx(15e-6)
    assert parse_time("2 µs", "x") == pytest.approx(2e-6)


@pytest.mark.parametrize("text", ["", "GiB", "24", "24GB/s", "1.2.3GiB", "-1GiB", float("nan"), -3])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InputError, match=r"`memory` is .*; expected a number that is not negative"):
        parse_bytes(text, "`memory`")


def test_figures_are_written_for_people():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3.2 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "3.20 GiB",
    ]
    assert [format_time(s) for s in (0, 3e-9, 1.5e-6, 0.25, 90)] == [
        "0.00 ns", "3.00 ns", "1.50 us", "250.00 ms", "90.00 s",
    ]  # fmt: skip
    assert [format_count(n) for n in (12, 1234, 7.16e12)] == ["12", "1.23 k", "7.16 T"]
