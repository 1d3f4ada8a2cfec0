"""
A cluster told entry by entry, as its TOML file has it.

This module owns the file's keys, and reading and writing TOML. What the entries mean, and what
makes a cluster valid, is in `placewright.cluster`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from placewright import files
from placewright.errors import InputError
from placewright.units import parse_bytes, parse_rate, parse_time

MAX_BYTES = 2**26
"""The largest cluster file: every link between 800 devices told one by one."""

MAX_KEY_PARTS = 100
"""The longest dotted key. Parsing one takes a time that grows with the square of its parts."""

_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(
    rf"(?:^|(?<=[\s\[{{,])){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_KEY_PARTS}}}"
)


class DeviceEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A ``[[device]]``, or several that are alike."""

    kind: str
    memory: float | str
    flops: dict[str, float]
    memory_bandwidth: float | str
    name: str | None = None
    names: list[str] | None = None
    model: str = ""
    launch: float | str = 0.0
    efficiency: float | dict[str, float | list[tuple[float, float]]] = 1.0


class LinkEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The ``[link]`` of all pairs."""

    latency: float | str | None = None
    bandwidth: float | str | None = None
    channels: list[str] | None = None


class PairEntry(LinkEntry, rename={"from_": "from"}, kw_only=True):
    """A ``[[pair]]`` of devices."""

    between: list[str] | None = None
    from_: str | None = None
    to: str | None = None


class ClusterFile(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All that a cluster file holds."""

    name: str
    description: str = ""
    source: str = ""
    device: list[DeviceEntry] = []
    link: LinkEntry = msgspec.field(default_factory=LinkEntry)
    pair: list[PairEntry] = []


def decode(data: bytes, what: str) -> ClusterFile:
    """
    Read a cluster file.

    Raises
    ------
    InputError
        It is not TOML, too large, or a key is missing, unknown, too long or of the wrong type.
    """
    if len(data) > MAX_BYTES:
        raise InputError(
            f"{what} has {len(data) / 2**20:.1f} MiB; a cluster file may have"
            f" {MAX_BYTES / 2**20:g} MiB. Is it the right file?"
        )
    try:
        text = data.decode()
        if (long := _LONG_KEY.search(text)) is not None:
            raise InputError(
                f"{what} has a dotted key of more than {MAX_KEY_PARTS} parts, which begins"
                f" `{long[0][:20]}`; expected no more than three. Is it the right file?"
            )
        return msgspec.convert(tomllib.loads(text), type=ClusterFile)
    except InputError:
        raise
    except msgspec.ValidationError as error:
        raise InputError(f"{what} is wrong: {files.reason_of(error)}.") from None
    except (ValueError, RecursionError) as error:  # tomllib raises both, and its own
        raise InputError(f"{what} is not TOML: {files.reason_of(error)}.") from None


def encode(file: ClusterFile) -> str:
    """Write a cluster file; `decode` gives back what means the same, figure for figure."""
    lines = [f"name = {_text(file.name)}"]
    lines += [f"description = {_text(file.description)}"] if file.description else []
    lines += [f"source = {_text(file.source)}"] if file.source else []
    for device in file.device:
        lines += ["", "[[device]]", *_device(device)]
    link = _link(file.link)
    lines += ["", "[link]", *link] if link else []
    for pair in file.pair:
        lines += ["", "[[pair]]"]
        lines += [f"between = {_texts(pair.between)}"] if pair.between is not None else []
        lines += [f"from = {_text(pair.from_)}"] if pair.from_ is not None else []
        lines += [f"to = {_text(pair.to)}"] if pair.to is not None else []
        lines += _link(pair)
    return "\n".join(lines) + "\n"


def _device(device: DeviceEntry) -> list[str]:
    lines = [f"name = {_text(device.name)}"] if device.name is not None else []
    lines += [f"names = {_texts(device.names)}"] if device.names is not None else []
    lines += [f"kind = {_text(device.kind)}"]
    lines += [f"model = {_text(device.model)}"] if device.model else []
    rates = ", ".join(f"{_key(dtype)} = {_number(rate)}" for dtype, rate in device.flops.items())
    lines += [
        f"memory = {_figure(device.memory, _SIZES, parse_bytes)}",
        f"flops = {{ {rates} }}",
        f"memory_bandwidth = {_figure(device.memory_bandwidth, _RATES, parse_rate)}",
        f"launch = {_figure(device.launch, _TIMES, parse_time)}",
    ]
    if not isinstance(device.efficiency, dict):
        return [*lines, f"efficiency = {_number(device.efficiency)}"]
    lines += ["[device.efficiency]"]
    for family, share in device.efficiency.items():
        lines.append(f"{_key(family)} = {_share(share)}")
    return lines


def _link(link: LinkEntry) -> list[str]:
    lines = []
    if link.latency is not None:
        lines.append(f"latency = {_figure(link.latency, _TIMES, parse_time)}")
    if link.bandwidth is not None:
        lines.append(f"bandwidth = {_figure(link.bandwidth, _RATES, parse_rate)}")
    if link.channels is not None:
        lines.append(f"channels = {_texts(link.channels)}")
    return lines


_SIZES = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}
_RATES = {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def _figure(
    value: float | str, units: Mapping[str, float], parse: Callable[[float | str, str], float]
) -> str:
    """Write a figure in the largest unit that suits, if that loses nothing, else as it is."""
    if isinstance(value, str):
        return _text(value)
    texts = (f"{value / size:.6g}{unit}" for unit, size in units.items() if value >= size)
    found = next((text for text in texts if parse(text, "it") == value), None)
    return _number(value) if found is None else _text(found)


def _number(value: float) -> str:
    """Write a number in as few digits as give it back."""
    found = next(text for p in range(18) if float(text := f"{value:.{p}e}") == value)
    digits, _, power = found.partition("e")
    return min(repr(value), f"{digits}e{int(power)}", key=len)


def _share(share: float | Sequence[tuple[float, float]]) -> str:
    if isinstance(share, (float, int)):
        return _number(share)
    points = (f"[{_number(size)}, {_number(reached)}]" for size, reached in share)
    return f"[{', '.join(points)}]"


def _texts(words: Sequence[str]) -> str:
    return f"[{', '.join(_text(word) for word in words)}]"


def _key(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_-]+", word) else _text(word)


def _text(text: str) -> str:
    """Quote text, on lines of its own where it has several."""
    quoted = [json.dumps(line, ensure_ascii=False)[1:-1] for line in text.split("\n")]
    plain = [line.replace("\x7f", "\\u007f") for line in quoted]
    return f'"{plain[0]}"' if len(plain) == 1 else '"""\n' + "\n".join(plain) + '"""'
