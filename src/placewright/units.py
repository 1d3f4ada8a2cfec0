"""Sizes, rates and times as people write them: ``"24GiB"``, ``"60GB/s"``, ``"15us"``."""

from __future__ import annotations

import math
import re

from placewright.errors import InputError

_SIZES = {"B": 1.0} | {
    f"{prefix}{suffix}": float(base**power)
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGTP", start=1)
}
_SIZES["kB"] = 1000.0
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}
_NUMBER = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")


def parse_bytes(value: float | str, where: str) -> int:
    """Read a size: a number of bytes, or text such as ``"24GiB"`` (1024) and ``"24GB"`` (1000)."""
    count = round(_parse(value, _SIZES, '"24GiB"', where))
    if count >= 2**62:
        raise InputError(f"{where} is {value!r}; expected less than 4 EiB.")
    return count


def parse_rate(value: float | str, where: str) -> float:
    """Read a bandwidth: a number of bytes per second, or text such as ``"60GB/s"``."""
    rates = {f"{unit}/s": scale for unit, scale in _SIZES.items()}
    return _parse(value, rates, '"60GB/s"', where)


def parse_time(value: float | str, where: str) -> float:
    """Read a time: a number of seconds, or text such as ``"15us"``."""
    return _parse(value, _TIMES, '"15us"', where)


def _parse(value: float | str, units: dict[str, float], example: str, where: str) -> float:
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        try:
            number = float(match[1]) * units[match[2]] if match else math.nan
        except (ValueError, KeyError):
            number = math.nan
    else:
        number = float(value) if abs(value) < 1e300 else math.inf
    if not (math.isfinite(number) and number >= 0):
        raise InputError(
            f"{where} is {value!r}; expected a number that is not negative, or text such as"
            f" {example} (units: {', '.join(units)})."
        )
    return number


def format_bytes(count: float) -> str:
    """Write a size for people: ``"3.20 GiB"``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_time(seconds: float) -> str:
    """Write a time for people: ``"12.3 ms"``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-9:.2f} ns"


def format_count(count: float) -> str:
    """Write a large number for people: ``"1.25 T"``."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f}"
