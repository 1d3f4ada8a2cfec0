"""
A model in someone's Python file: ``file.py:function``.

This module owns what such a function may return, and which files its answer depends on.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placewright import files
from placewright.errors import InputError

_ARGUMENTS = (
    "module",
    "inputs",
    "train",
    "loss",
    "targets",
    "optimizer",
    "sums_at_end",
    "name",
)


@dataclass(frozen=True)
class Built:
    """What the function returned, and the files that were read for it."""

    arguments: dict[str, Any]  # of `placewright.capture`
    sources: dict[str, str]  # sha256 of each file, by path


def build_from_file(path: Path, function: str) -> Built:
    """
    Run ``path`` and call its `function`, without arguments.

    It returns ``(module, inputs)``, or a dict of arguments for `placewright.capture`.

    Raises
    ------
    InputError
        There is no such file or function, the file or function raises (the message says where),
        or it returns something else.
    """
    files.digest(path, "Python file")
    with _opened_files() as opened:
        arguments = _arguments(path, function)
    names = sorted({str(path.resolve()), *opened})
    return Built(arguments, {name: files.digest(name, "file") for name in names})


def _arguments(path: Path, function: str) -> dict[str, Any]:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as `python file.py` would
    try:
        try:
            namespace = runpy.run_path(str(path), run_name="__placewright__")
        except SystemExit:
            raise InputError(
                f"`{path}` ends the program when it is run. Put that behind"
                ' `if __name__ == "__main__":`.'
            ) from None
        except Exception as error:
            raise InputError(_where(error, path, f"`{path}`")) from None
        found = namespace.get(function)
        if not callable(found):
            known = [k for k, v in namespace.items() if callable(v) and not k.startswith("_")]
            raise InputError(
                f"`{path}` has no function `{function}`. It has: {', '.join(known) or 'none'}."
            )
        try:
            return _read_result(found(), f"`{function}` of `{path}`")
        except InputError:
            raise
        except Exception as error:
            raise InputError(_where(error, path, f"`{function}` of `{path}`")) from None
    finally:
        sys.path.remove(folder)


def _where(error: Exception, path: Path, what: str) -> str:
    """Say what was raised, and at which line of the user's file."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f"`{error.filename}`, line {error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [f for f in frames if os.path.abspath(f.filename) == str(path.resolve())]
        place = f"`{path}`, line {(mine or frames)[-1].lineno}"
    return (
        f"{what} raised {type(error).__name__} at {place}: {files.reason_of(error)}. Correct it, or"
        " try it in Python first."
    )


def _read_result(result: Any, what: str) -> dict[str, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return {"module": result[0], "inputs": result[1]}
    if isinstance(result, Mapping) and {"module", "inputs"} <= set(result):
        unknown = [key for key in result if key not in _ARGUMENTS]
        if not unknown:
            return dict(result)
        raise InputError(
            f"{what} returned an unknown `{unknown[0]}`; the arguments are {', '.join(_ARGUMENTS)}."
        )
    raise InputError(
        f"{what} returned a {type(result).__name__}; expected `(module, inputs)`, or a dict with"
        " `module`, `inputs` and other arguments of `placewright.capture`."
    )


_listeners: list[set[str]] = []
_is_hooked = False


@contextmanager
def _opened_files() -> Iterator[set[str]]:
    """Note the files that are opened, but for those of Python itself and installed packages."""
    global _is_hooked  # noqa: PLW0603
    if not _is_hooked:
        sys.addaudithook(_hear)  # there is no way to take one away again
        _is_hooked = True
    opened: set[str] = set()
    _listeners.append(opened)
    try:
        yield opened
    finally:
        _listeners.remove(opened)
        installed = tuple(
            os.path.realpath(folder) + os.sep
            for folder in {*sysconfig.get_paths().values(), os.path.dirname(os.__file__)}
        )
        for name in [*opened]:
            if os.path.realpath(name).startswith(installed) or not os.path.isfile(name):
                opened.discard(name)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _listeners:
        name, mode = arguments[0], arguments[1]
        if isinstance(name, str) and (mode is None or "r" in mode):
            for opened in _listeners:
                opened.add(os.path.abspath(name))
