"""Processes of our own run no file that happens to lie in the user's folder."""

from __future__ import annotations

import subprocess

import pytest

from placewright.children import python_command

NAMES = ("random", "json", "msgspec", "numpy", "socket", "torch", "placewright")


@pytest.fixture
def folder(tmp_path):
    """Fill a folder with files that are called like modules and say so when they are run."""
    marker = str(tmp_path / "ran")
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({marker!r}, 'a').write({name!r})")
    return tmp_path


def run(command, folder):
    return subprocess.run(
        command, cwd=folder, input=b"", capture_output=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "module",
    [
        "placewright.bench.worker",
        "placewright.execute._template",
        "placewright.execute._eager_process",
    ],
)
def test_no_file_of_the_folder_is_run(module, folder):
    command = python_command(module)
    done = run(command, folder)
    assert done.returncode != 0  # it was told nothing
    assert b"placewright" in done.stderr  # and began
    assert not (folder / "ran").exists()


def test_without_it_a_file_of_the_folder_is_run(folder):
    command = [word for word in python_command("json.tool") if word != "-P"]
    run(command, folder)
    assert (folder / "ran").exists()
