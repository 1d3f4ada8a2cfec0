"""
What arguments may be: types, numbers, arrays, words and paths, checked where people call.

This module owns the sentences about arguments that cannot be used; past it, code trusts its input.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from placewright.errors import InputError

MAX_SHOWN = 60

WHOLE = (int, np.integer)
NUMBER = (int, float, np.integer, np.floating)


def show(value: object) -> str:
    """Write a value in a few words, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # such as an int of more digits than Python writes
        return f"of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def refuse(value: object, name: str, expected: str) -> NoReturn:
    """Say that an argument is not what was expected."""
    raise InputError(f"`{name}` is {show(value)}; expected {expected}.")


def expect_type(value: object, kinds: type | tuple[type, ...], name: str, expected: str) -> None:
    """Check an argument's type."""
    if not isinstance(value, kinds):
        refuse(value, name, expected)


def expect_path(value: object, name: str) -> None:
    """Check that an argument can be a path."""
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value):
        refuse(value, name, "a path: text, or a `pathlib.Path`")


def expect_word(value: object, known: Iterable[str], name: str) -> None:
    """Check that an argument is one of the known words; if not, tell the one that is meant."""
    words = [*known]
    if isinstance(value, str) and value in words:
        return
    close = difflib.get_close_matches(value, words, 1) if isinstance(value, str) else []
    hint = f" Is it `{close[0]}` that is meant?" if close else ""
    expected = f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    raise InputError(f"`{name}` is {show(value)}; expected {expected}.{hint}")


def expect_flag(value: object, name: str) -> None:
    """Check that an argument is a flag."""
    expect_type(value, (bool, int, np.bool_), name, "True or False")


def expect_function(value: object, name: str, expected: str) -> None:
    """Check that an argument is None or can be called."""
    if value is not None and not callable(value):
        refuse(value, name, expected)


def read_whole(value: object, name: str, least: int, most: int = 2**62) -> int:
    """Read a whole number between bounds."""
    is_whole = isinstance(value, WHOLE) and not isinstance(value, bool)
    if not is_whole or not least <= int(value) <= most:  # type: ignore[call-overload]
        bound = "" if most == 2**62 else f" and at most {most}"
        refuse(value, name, f"a whole number, at least {least}{bound}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def read_number(value: object, name: str, least: float, most: float = 1e300) -> float:
    """Read a finite number between bounds."""
    is_number = isinstance(value, NUMBER) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:  # type: ignore[operator]
        bound = "" if most == 1e300 else f" and at most {most:g}"
        refuse(value, name, f"a finite number, at least {least:g}{bound}")
    return float(value)  # type: ignore[arg-type]


def to_array(value: object, name: str, expected: str) -> NDArray[Any]:
    """Make an array of what was given: not of a ragged list, or of what is no number."""
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        refuse(value, name, expected)
    if array.dtype.kind not in "iuf":
        refuse(value, name, expected)
    return array


def read_vector(value: object, name: str, dtype: type[np.generic]) -> NDArray[Any]:
    """Read a list of numbers or flags of any length and copy it; the copy cannot be written to."""
    expected = f"a list of {np.dtype(dtype).name} values"
    try:
        given = np.asarray(value)
    except (ValueError, TypeError, OverflowError, RuntimeError):
        refuse(value, name, expected)
    if given.ndim != 1 or (given.size and not np.can_cast(given.dtype, dtype, "same_kind")):
        refuse(value, name, expected)
    array = given.astype(dtype)
    if array.dtype.kind == "i" and (array != given).any():
        refuse(value, name, expected)
    array.flags.writeable = False
    return array


def read_array(
    value: object, name: str, dtype: type[np.generic], shape: tuple[int, ...]
) -> NDArray[Any]:
    """Read an array of whole or of any numbers and copy it; the copy cannot be written to."""
    is_whole = np.issubdtype(dtype, np.integer)
    what = "whole numbers" if is_whole else "numbers"
    expected = f"{what} of shape {shape}"
    given = to_array(value, name, expected)
    if given.shape != shape or (is_whole and given.dtype.kind == "f"):
        raise InputError(
            f"`{name}` has shape {given.shape} and type {given.dtype}; expected {expected}."
        )
    if given.dtype.kind == "u" and given.size and given.max() >= 2**63:
        raise InputError(f"`{name}` holds {given.max()}; expected {what} below 2**63.")
    array = np.array(given, dtype=dtype)
    array.flags.writeable = False
    return array
