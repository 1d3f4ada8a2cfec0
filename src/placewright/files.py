"""
The one way in and out of the disk.

This module owns bounded reads, gzip, the check of a JSON file's format and version, and writes that
are never half done.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import tempfile
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from placewright.errors import InputError

Content = TypeVar("Content")

MAX_BYTES = 2**30
"""The largest file that is read, packed or unpacked. A graph of a million ops is under half."""


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
        The file is missing, not a file, not readable, larger than `MAX_BYTES` (before or after
        unpacking), or its gzip data is broken or cut off.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise InputError(f"Expected a {what} at `{path}`, but that is a directory.")
        if size > MAX_BYTES:
            raise InputError(
                f"`{path}` has {size / 2**30:.1f} GiB; a {what} may have {MAX_BYTES / 2**30:g} GiB."
                " Is it the right file?"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"There is no {what} at `{path}`. Check the path.") from None
    except OSError as error:
        raise InputError(f"The {what} `{path}` cannot be read: {error.strerror}.") from None
    if data[:2] == b"\x1f\x8b":
        return _unpack(data, path, what)
    return data


def _unpack(data: bytes, path: Path, what: str) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise InputError(
            f"The {what} `{path}` starts as gzip data but is broken ({error}). Make it again."
        ) from None
    if unpacker.unconsumed_tail:
        raise InputError(
            f"`{path}` unpacks to more than {MAX_BYTES / 2**30:g} GiB, the most a {what} may have."
            " Is it the right file?"
        )
    if not unpacker.eof:
        raise InputError(f"The {what} `{path}` is cut off inside its gzip data. Make it again.")
    return plain


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def read_json(path: str | Path, content: type[Content], what: str) -> Content:
    """
    Read a JSON file of ours: ``format`` and ``version`` first, then everything, typed.

    Parameters
    ----------
    path
        The file, gzipped or not.
    content
        The type to decode to. Its format is ``"placewright-"`` and the first word of `what`.
    what
        What it should hold ("graph file").

    Raises
    ------
    InputError
        The file cannot be read, is not JSON, has another format or version, or does not decode.
    """
    data = read(path, what)
    expected = f"placewright-{what.split(maxsplit=1)[0]}"
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"`{path}` is not a {what}: {_reason(error)}.") from None
    if head.format != expected or head.version != 1:
        raise InputError(
            f"`{path}` has format {head.format!r}, version {head.version!r}; expected"
            f" {expected!r}, version 1."
        )
    try:
        return msgspec.json.decode(data, type=content)
    except msgspec.DecodeError as error:
        raise InputError(f"The {what} `{path}` is wrong: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:].rstrip(".")


def write(path: str | Path, data: bytes) -> None:
    """
    Write a file whole or not at all, gzipped if its name ends in ``.gz``.

    The data goes to a temporary file beside it first, which then takes its name; a reader or a
    killed process never sees half of it. Equal data gives equal bytes.

    Raises
    ------
    InputError
        The directory is missing or cannot be written to.
    """
    path = Path(path)
    if path.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files; these are ordinary ones
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise InputError(f"`{path}` cannot be written: {error.strerror}.") from None
