"""
A model in someone's Python file: ``file.py:function``.

This module owns what such a function may return, and which files its answer depends on.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placewright import files
from placewright.errors import InputError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MADE_UP = ("/proc/", "/sys/", "/dev/")
"""Where the system makes up what is read: no files, and another content each time."""

_ARGUMENTS = (
    "module",
    "inputs",
    "kwargs",
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
    with _opened_files() as opened, _fresh_modules(path.resolve().parent):
        arguments = _arguments(path, function)
        found = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
        imported = {os.path.abspath(name) for name in found if name and not _is_installed(name)}
    return Built(arguments, _digests({str(path.resolve()), *opened, *imported}))


def _digests(names: set[str]) -> dict[str, str]:
    """Name files by their content; those that are gone or may not be read are left out."""
    found = {}
    for name in sorted(filter(os.path.isfile, names)):
        with suppress(InputError):
            found[name] = files.digest(name, "file")
    return found


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
        except SystemExit:
            raise InputError(
                f"`{function}` of `{path}` ends the program. Let it return a module and inputs."
            ) from None
        except Exception as error:
            raise InputError(_where(error, path, f"`{function}` of `{path}`")) from None
    finally:
        sys.path.remove(folder)


def _where(error: Exception, path: Path, what: str) -> str:
    """Say what was raised, and at which line of the user's file."""
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if os.path.abspath(f.filename) == str(path.resolve())]
    if isinstance(error, SyntaxError) and error.filename is not None:
        place = f" at `{error.filename}`, line {error.lineno}"
    elif mine:
        place = f" at `{path}`, line {mine[-1].lineno}"
    reason = " ".join(str(error).split()).rstrip(".")
    return (
        f"{what} raised {type(error).__name__}{place}: {reason}. Correct it, or try it in Python."
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
        opened -= {name for name in opened if not _is_source(name)}


def _is_source(name: str) -> bool:
    """Tell whether a file that was read is one that a model may be made from."""
    if name.endswith(".pyc") or _is_installed(name):  # sources are found by their modules
        return False
    return not any(path.startswith(_MADE_UP) for path in (name, os.path.realpath(name)))


def _is_installed(name: str) -> bool:
    """Tell files of Python, of installed packages, and of this one."""
    folders = {*sysconfig.get_paths().values(), os.path.dirname(os.__file__), _PACKAGE}
    return os.path.realpath(name).startswith(
        tuple(os.path.realpath(folder) + os.sep for folder in folders)
    )


@contextmanager
def _fresh_modules(folder: Path) -> Iterator[None]:
    """Have the modules of a folder imported anew, in a process that may hold older ones."""
    inside = str(folder) + os.sep
    kept = {
        name: module
        for name, module in sys.modules.items()
        if (getattr(module, "__file__", None) or "").startswith(inside)
        and name != "__main__"
        and not _is_installed(module.__file__ or "")
    }
    for name in kept:
        del sys.modules[name]
    importlib.invalidate_caches()
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(inside):
                del sys.modules[name]
        sys.modules.update(kept)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _listeners:
        name, mode, flags = arguments
        reads = (mode is None or "r" in mode) and not flags & (os.O_WRONLY | os.O_TRUNC | os.O_EXCL)
        if isinstance(name, str) and reads:
            for opened in _listeners:
                opened.add(os.path.abspath(name))
