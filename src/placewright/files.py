"""
The one way in and out of the disk.

This module owns bounded reads, gzip, the check of a JSON file's format and version, and writes that
are never half done.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from placewright.errors import InputError

Content = TypeVar("Content")

MAX_BYTES = 2**30
"""The largest file that is read, packed or unpacked. A graph of a million ops is under half."""

LEFTOVER_S = 60.0
"""From what age on a temporary file that nobody writes to is removed."""

_TEMPORARY = ".placewright-"
"""How the names of temporary files begin."""


def read(path: str | Path, what: str) -> bytes:
    """
    Read a file whole, unpacking it if it is gzipped (told by its content, not its name).

    Parameters
    ----------
    path
        The file.
    what
        What it should hold, for the error message ("graph file").

    Raises
    ------
    InputError
        The file is missing, a directory, a pipe that nothing writes to, not readable, larger than
        `MAX_BYTES` (before or after unpacking), or its gzip data is broken or cut off.
    """
    limit = f"a {what} may have {MAX_BYTES / 2**30:g} GiB. Is it the right file?"
    with _opened(path, what) as file:
        state = os.fstat(file.fileno())
        if state.st_size > MAX_BYTES:
            raise InputError(f"`{path}` has {state.st_size / 2**30:.1f} GiB; {limit}")
        start = _await_pipe(file, path, what) if stat.S_ISFIFO(state.st_mode) else b""
        data = start + _read_bounded(file, state.st_size)
    if len(data) > MAX_BYTES:
        raise InputError(f"`{path}` does not end; {limit}")
    return _unpack(data, path, what) if data[:2] == b"\x1f\x8b" else data


def digest(path: str | Path, what: str) -> str:
    """
    Name a file of any size by its content.

    Raises
    ------
    InputError
        The file is missing, not a regular file, or not readable.
    """
    with _opened(path, what) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InputError(
                f"Expected {_article(what)} {what} at `{path}`, but that is a pipe or device. Give"
                " the path of a file."
            )
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_bounded(file: io.BufferedIOBase, expected: int = 0) -> bytes:
    """Read to the end, but no more than a byte over `MAX_BYTES`; memory is taken as it is used."""
    parts, left = [], MAX_BYTES + 1
    while left and (part := file.read(min(left, max(expected + 1, 2**20)))):
        parts.append(part)
        left -= len(part)
        expected = 0
    return b"".join(parts)


def _await_pipe(file: io.BufferedReader, path: str | Path, what: str) -> bytes:
    """Give the first byte of a pipe, if there is one yet; refuse a pipe that nothing writes to."""
    try:
        start = os.read(file.fileno(), 1)
    except BlockingIOError:  # somebody will write to it
        start = b""
    else:
        if not start:
            raise InputError(
                f"Expected {_article(what)} {what} at `{path}`, but that is a pipe that nothing"
                " writes to. Give the path of a file, or start what writes first."
            )
    os.set_blocking(file.fileno(), True)
    return start


def _article(what: str) -> str:
    return "an" if what[0] in "aeiouO" else "a"


def _at_once(path: str, flags: int) -> int:
    """Open a file without waiting for whoever writes to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


@contextlib.contextmanager
def _opened(path: str | Path, what: str) -> Iterator[io.BufferedReader]:
    """Open a file for reading, with a sentence for each way in which that can fail."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            yield file
    except FileNotFoundError:
        raise InputError(f"There is no {what} at `{path}`. Check the path.") from None
    except IsADirectoryError:
        raise InputError(
            f"Expected {_article(what)} {what} at `{path}`, but that is a directory."
        ) from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"The {what} `{path}` cannot be read: {reason}.") from None


def _unpack(data: bytes, path: str | Path, what: str) -> bytes:
    try:
        plain = _read_bounded(gzip.GzipFile(fileobj=io.BytesIO(data)))
    except EOFError:
        raise InputError(
            f"The {what} `{path}` is cut off inside its gzip data. Make it again."
        ) from None
    except (OSError, zlib.error) as error:
        raise InputError(
            f"The {what} `{path}` starts as gzip data but is broken ({error}). Make it again."
        ) from None
    if len(plain) > MAX_BYTES:
        raise InputError(
            f"`{path}` unpacks to more than {MAX_BYTES / 2**30:g} GiB, the most a {what} may have."
            " Is it the right file?"
        )
    return plain


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def read_json(path: str | Path, content: type[Content], what: str) -> Content:
    """Read a JSON file of ours (see `read` and `decode_json`)."""
    return decode_json(read(path, what), path, content, what)


def decode_json(data: bytes, path: str | Path, content: type[Content], what: str) -> Content:
    """
    Decode a JSON file of ours: ``format`` and ``version`` first, then everything, typed.

    Parameters
    ----------
    data, path
        What the file holds, and its name for error messages.
    content
        The type to decode to. Its format is ``"placewright-"`` and the first word of `what`.
    what
        What it should hold ("graph file").

    Raises
    ------
    InputError
        The data is not JSON, has another format or version, or does not decode.
    """
    expected = f"placewright-{what.split(maxsplit=1)[0]}"
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"`{path}` is not a {what}: {reason_of(error)}.") from None
    if head.format != expected or head.version != 1:
        raise InputError(
            f"`{path}` has format {head.format!r}, version {head.version!r}; expected"
            f" {expected!r}, version 1."
        )
    try:
        return msgspec.json.decode(data, type=content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"The {what} `{path}` is wrong: {reason_of(error)}.") from None


def reason_of(error: Exception) -> str:
    """Give a library's error message as the end of a sentence of ours."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error).rstrip(".")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def write(path: str | Path, data: bytes) -> None:
    """
    Write a file whole or not at all, gzipped if its name ends in ``.gz``.

    The data goes to a temporary file beside it first, which then takes its name; a reader or a
    killed process never sees half of it, and what killed processes left beside it is removed. Links
    are followed, and what is no regular file (a pipe, ``/dev/stdout``) is written to as it is.
    Equal data gives equal bytes.

    Raises
    ------
    InputError
        The file or its directory is missing or cannot be written to.
    """
    target = Path(os.path.realpath(path))
    if Path(path).suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    try:
        if target.exists() and not target.is_file():
            with open(path, "wb") as file:
                file.write(data)
        else:
            _replace(target, data)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"`{path}` cannot be written: {reason}.") from None


def check_writable(path: str | Path) -> None:
    """
    Check that `write` would not be refused, before long work whose result goes there.

    Raises
    ------
    InputError
        The file or its directory is missing or cannot be written to.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        reason = "Is a directory"
    elif not target.parent.is_dir():
        reason = "No such file or directory"
    elif not os.access(target if target.exists() else target.parent, os.W_OK):
        reason = "Permission denied"
    else:
        return
    raise InputError(f"`{path}` cannot be written: {reason}.")


def _replace(target: Path, data: bytes) -> None:
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(13, "Permission denied")
    _remove_leftovers(target.parent)
    temporary = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
    try:
        with contextlib.ExitStack() as held:
            with open(temporary, "xb") as file:
                with contextlib.suppress(OSError):
                    held.callback(os.close, _lock(temporary))
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _remove_leftovers(folder: Path) -> None:
    """
    Remove the temporary files of processes that were killed while they wrote.

    Whoever writes one holds a lock on it, which ends with the process. One that has just been made
    may not have its lock yet, so young ones stay.
    """
    young = time.time() - LEFTOVER_S
    for path in folder.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            file = _lock(path)
            held.callback(os.close, file)
            state = os.fstat(file)
            if stat.S_ISREG(state.st_mode) and state.st_mtime < young:
                path.unlink()


def _lock(path: Path) -> int:
    """Open a file and lock it until it is closed, or raise OSError: locked, or no locks here."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        raise OSError("There are no locks.") from None
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def append_line(path: str | Path, line: bytes) -> None:
    """
    Append a line to a file: all of it, or nothing.

    Raises
    ------
    InputError
        The disk is full, or the file cannot be written to.
    """
    line += b"\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(file).st_size
            if os.write(file, line) < len(line):
                os.ftruncate(file, size)
                raise OSError(28, "No space left on device")
        finally:
            os.close(file)
    except OSError as error:
        raise InputError(f"`{path}` cannot be written: {error.strerror}.") from None
