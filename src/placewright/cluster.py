"""
`Cluster`: the devices of a machine, the links between them, and the channels links share.

This module owns what a cluster file's entries mean (how they are spelled is in
`placewright.cluster_file`), the presets that ship with the package, and what makes a cluster valid.

Letters: ``D`` devices, ``C`` channels.
"""

from __future__ import annotations

import fnmatch
import hashlib
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from itertools import groupby, pairwise, permutations
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from placewright import files
from placewright.arguments import (
    NUMBER,
    WHOLE,
    expect_path,
    expect_type,
    read_array,
    refuse,
    show,
    to_array,
)
from placewright.cluster_file import (
    ClusterFile,
    DeviceEntry,
    LinkEntry,
    PairEntry,
    decode,
    encode,
)
from placewright.errors import InputError
from placewright.units import parse_bytes, parse_rate, parse_time

OP_FAMILIES = (
    "matmul",
    "convolution",
    "attention",
    "reduction",
    "gather",
    "movement",
    "elementwise",
    "other",
)
"""What a device may give an efficiency for; `placewright.costs` sorts ops into them."""

Efficiency: TypeAlias = float | tuple[tuple[float, float], ...]
"""The share of its peak that a device reaches: one number, or (size of the op, share) points."""

MAX_RATE = 1e24
MAX_LATENCY_S = 1e6


@dataclass(frozen=True, eq=False, kw_only=True)
class Cluster:
    """
    Devices and the links between them.

    Link matrices are indexed ``[source, destination]`` and need not be symmetric; the diagonal
    is a device copying to itself, which never happens. A transfer occupies every channel of its
    link; by default those are the source's sending engine and the destination's receiving one.

    Guarantees, checked here: at least one device; names are unique and not empty; an entry for
    each device or pair of them; figures are finite, memory is positive, rates and bandwidths are at
    least 1 a second; every link has at least one channel, of those that there are.

    Raises
    ------
    InputError
        One of the guarantees does not hold.
    """

    name: str
    description: str  # one line for people
    source: str  # where the figures come from
    device_names: tuple[str, ...]  # [D] "cpu", "cuda:0", "host1/cuda:0"
    device_kinds: tuple[str, ...]  # [D] "cpu", "cuda"
    device_models: tuple[str, ...]  # [D] "Tesla K40", or ""
    memory_bytes: NDArray[np.int64]  # [D] what a plan may use
    flops: tuple[Mapping[str, float], ...]  # [D] peak rate per dtype; "float32" is always there
    memory_bytes_per_s: NDArray[np.float64]  # [D]
    launch_s: NDArray[np.float64]  # [D] overhead per op
    efficiency: tuple[Mapping[str, Efficiency], ...]  # [D] by op family; "other" for the rest
    latency_s: NDArray[np.float64]  # [D, D]
    bytes_per_s: NDArray[np.float64]  # [D, D] sustained, not the datasheet's peak
    channel_names: tuple[str, ...]  # [C]
    link_channels: tuple[tuple[int, ...], ...]  # [D * D] channels of each link, row by row

    def __post_init__(self) -> None:
        fields = _read_devices(self)
        names = fields["device_names"]
        _check_links(names, fields)
        fields["link_channels"] = _read_channels(self, names)
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """
        Load a cluster file (TOML).

        Raises
        ------
        InputError
            The file cannot be read, is not TOML, or describes no valid cluster.
        """
        expect_path(path, "path")
        data = files.read(path, "cluster file")
        return _parse(data, f"The cluster file `{path}`")

    def save(self, path: str | Path) -> None:
        """
        Save as a cluster file, whole or not at all.

        Loading it gives back the same cluster, figure for figure; channels that no link uses are
        not kept, and others may be numbered anew.

        Raises
        ------
        InputError
            The file cannot be written.
        """
        expect_path(path, "path")
        files.write(path, self.to_toml().encode())

    def to_toml(self) -> str:
        """Give what `save` writes."""
        return encode(_describe(self))

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """
        Load one of the clusters that ship with placewright (see `presets`).

        Raises
        ------
        InputError
            There is no preset of that name.
        """
        expect_type(name, str, "name", "text")
        if name not in cls.presets():
            raise InputError(
                f"There is no cluster preset `{name}`. The presets are: {', '.join(cls.presets())}."
            )
        data = resources.files("placewright").joinpath("clusters", f"{name}.toml").read_bytes()
        return _parse(data, f"The cluster preset `{name}`")

    @staticmethod
    def presets() -> tuple[str, ...]:
        """List the names of the clusters that ship with placewright."""
        folder = resources.files("placewright").joinpath("clusters")
        names = (Path(entry.name) for entry in folder.iterdir())
        return tuple(sorted(path.stem for path in names if path.suffix == ".toml"))

    @property
    def num_devices(self) -> int:
        """Count the devices."""
        return len(self.device_names)

    @property
    def fingerprint(self) -> str:
        """Name the cluster by its devices' names and kinds; a new probe does not change it."""
        words = repr((self.device_names, self.device_kinds))
        return hashlib.sha256(b"placewright-cluster-1" + words.encode()).hexdigest()

    def with_memory(self, memory_bytes: Sequence[int], name: str) -> Cluster:
        """Give the same cluster with other memory sizes, one for each device, under a name."""
        sizes = to_array(memory_bytes, "memory_bytes", "a number of bytes for each device")
        return replace(self, name=name, memory_bytes=sizes)

    def device_index(self, name: str) -> int:
        """
        Find a device by its name.

        Raises
        ------
        InputError
            There is no such device.
        """
        expect_type(name, str, "name", "text")
        if name not in self.device_names:
            raise InputError(
                f"Cluster `{self.name}` has no device `{name}`. Its devices are:"
                f" {', '.join(self.device_names)}."
            )
        return self.device_names.index(name)

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}: {', '.join(self.device_names)})"


def _read_devices(cluster: Cluster) -> dict[str, Any]:
    """Check what is told of each device, and give the fields as they are kept."""
    for field in ("name", "description", "source"):
        expect_type(getattr(cluster, field), str, field, "text")
    fields: dict[str, Any] = {
        field: _read_words(getattr(cluster, field), field)
        for field in ("device_names", "device_kinds", "device_models", "channel_names")
    }
    names = fields["device_names"]
    if not names:
        raise InputError(
            f"Cluster `{cluster.name}` has no devices. Give it at least one `[[device]]`."
        )
    if not all((*names, *fields["channel_names"])):
        raise InputError("A device or a channel has an empty name. Give it one.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputError(
            f"Two devices are named `{twice[0]}`. Give every device a name of its own."
        )
    fields["flops"] = _read_entries(cluster.flops, "flops")
    fields["efficiency"] = _read_entries(cluster.efficiency, "efficiency")
    for field in ("device_kinds", "device_models", "flops", "efficiency"):
        _check_length(fields[field], field, len(names), "one for each device")
    shapes = {"latency_s": (len(names),) * 2, "bytes_per_s": (len(names),) * 2}
    for field in ("memory_bytes", "memory_bytes_per_s", "launch_s", *shapes):
        dtype = np.int64 if field == "memory_bytes" else np.float64
        shape = shapes.get(field, (len(names),))
        fields[field] = read_array(getattr(cluster, field), field, dtype, shape)
    _check_figures(names, fields)
    fields["efficiency"] = tuple(
        {family: _read_efficiency(name, family, share) for family, share in shares.items()}
        for name, shares in zip(names, fields["efficiency"], strict=True)
    )
    return fields


def _read_words(value: object, field: str) -> tuple[str, ...]:
    expect_type(value, (tuple, list), field, "a tuple of texts")
    words: tuple[str, ...] = tuple(value)  # type: ignore[arg-type]
    for word in words:
        expect_type(word, str, field, "a tuple of texts")
    return words


def _read_entries(value: object, field: str) -> tuple[dict[str, Any], ...]:
    expected = "a tuple with a mapping from names to figures for each device"
    expect_type(value, (tuple, list), field, expected)
    for entry in value:  # type: ignore[attr-defined]
        if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
            refuse(value, field, expected)
    return tuple(dict(entry) for entry in value)  # type: ignore[attr-defined]


def _check_length(value: Sequence[object], field: str, length: int, what: str) -> None:
    if len(value) != length:
        raise InputError(f"`{field}` has {len(value)} entries; expected {length}, {what}.")


def _check_figures(names: tuple[str, ...], fields: Mapping[str, Any]) -> None:
    for field, least, most, unit, expected in (
        ("memory_bytes", 1, 2**62, "bytes of memory", "a positive number"),
        ("memory_bytes_per_s", 1, MAX_RATE, "bytes/s", "a positive number"),
        ("launch_s", 0, MAX_LATENCY_S, "s of launch overhead", f"0 to {MAX_LATENCY_S:g}"),
    ):
        values = fields[field]
        bad = np.flatnonzero(~((values >= least) & (values <= most)))
        if bad.size:
            raise InputError(
                f"Device `{names[bad[0]]}` has {values[bad[0]]:g} {unit}; expected {expected}, in"
                f" `{field}`."
            )
    for name, rates in zip(names, fields["flops"], strict=True):
        if "float32" not in rates:
            raise InputError(
                f"Device `{name}` has no rate for float32, which stands in for dtypes that are"
                " not listed. Add it to `flops`."
            )
        for dtype, rate in rates.items():
            if not _is_number(rate) or not 1 <= rate <= MAX_RATE:
                raise InputError(
                    f"Device `{name}` does {_figure(rate)} {dtype} flops/s; expected a number from"
                    f" 1 to {MAX_RATE:g}."
                )


def _is_number(value: object) -> bool:
    return isinstance(value, NUMBER) and not isinstance(value, bool)


def _figure(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else show(value)


def _read_efficiency(device: str, family: str, efficiency: object) -> Efficiency:
    if family not in OP_FAMILIES:
        raise InputError(
            f"Device `{device}` has an efficiency for `{family}`; the families of ops are:"
            f" {', '.join(OP_FAMILIES)}."
        )
    pairs = ((1.0, efficiency),) if _is_number(efficiency) else efficiency
    table = to_array(pairs, "efficiency", "a number, or pairs (size, share), for each family")
    sizes = table[:, 0].tolist() if table.ndim == 2 and table.shape[1] == 2 else []
    is_rising = all(a < b for a, b in pairwise([0.0, *sizes, np.inf]))
    if not sizes or not is_rising:
        raise InputError(
            f"Device `{device}` has efficiencies for {family} at the sizes {sizes}; expected at"
            " least one [size, share], sizes positive and growing."
        )
    points = tuple((float(size), float(share)) for size, share in table)
    for _, share in points:
        if not 0 < share <= 1:
            raise InputError(
                f"Device `{device}` has efficiency {share:g} for {family}; expected a number above"
                " 0 and at most 1."
            )
    return points[0][1] if _is_number(efficiency) else points


def _check_links(names: tuple[str, ...], fields: Mapping[str, Any]) -> None:
    """Check every link's figures; those of a device to itself need only be numbers."""
    rates, latencies = fields["bytes_per_s"], fields["latency_s"]
    is_link = ~np.eye(len(names), dtype=np.bool_)
    bad = np.argwhere(~((rates >= is_link) & (rates <= MAX_RATE)))
    if bad.size:
        source, target = bad[0]
        raise InputError(
            f"The link from `{names[source]}` to `{names[target]}` carries"
            f" {rates[source, target]:g} bytes/s; expected a positive number. Every"
            " pair of devices needs a `bandwidth`, in `[link]` or in a `[[pair]]`"
            " (`bytes_per_s`)."
        )
    bad = np.argwhere(~((latencies >= 0) & (latencies <= MAX_LATENCY_S)))
    if bad.size:
        source, target = bad[0]
        raise InputError(
            f"The link from `{names[source]}` to `{names[target]}` has a latency of"
            f" {latencies[source, target]:g} s; expected a number from 0 to"
            f" {MAX_LATENCY_S:g}, in `[link]` or in a `[[pair]]` (`latency_s`)."
        )


def _read_channels(cluster: Cluster, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Check the channels of every link: numbers of `channel_names`, none of them twice."""
    expected = "a tuple of channel numbers for each pair of devices, row by row"
    expect_type(cluster.link_channels, (tuple, list), "link_channels", expected)
    _check_length(
        cluster.link_channels, "link_channels", len(names) ** 2, "one for each pair of devices"
    )
    known = len(cluster.channel_names)
    for link, channels in enumerate(cluster.link_channels):
        expect_type(channels, (tuple, list), "link_channels", expected)
        source, target = divmod(link, len(names))
        where = f"The link from `{names[source]}` to `{names[target]}`"
        for channel in channels:
            expect_type(channel, WHOLE, "link_channels", expected)
            if not 0 <= channel < known:
                raise InputError(
                    f"{where} has channel {show(channel)} in `link_channels`; expected numbers of"
                    f" the {known} in `channel_names`, from 0 on."
                )
        if len(set(channels)) < len(channels):
            raise InputError(f"{where} has a channel twice in `link_channels`; name each once.")
        if not channels and source != target:
            raise InputError(f"{where} has no channel. Name at least one.")
    return tuple(tuple(int(c) for c in channels) for channels in cluster.link_channels)


def _parse(data: bytes, what: str) -> Cluster:
    file = decode(data, what)
    try:
        return _build(file)
    except InputError as error:
        raise InputError(f"{what} is wrong: {error}") from None


def _build(file: ClusterFile) -> Cluster:
    devices: list[tuple[str, DeviceEntry]] = []
    for device in file.device:
        if (device.name is None) == (device.names is None):
            raise InputError(
                f"A `[[device]]` of kind `{device.kind}` needs either `name`, or `names` for"
                " several that are alike."
            )
        devices += [(name, device) for name in device.names or [device.name or ""]]
    names = tuple(name for name, _ in devices)
    links = _Links(names)
    links.apply("[link]", file.link, [*range(len(names))], [*range(len(names))])
    for pair in file.pair:
        _apply_pair(links, pair)
    return Cluster(
        name=file.name,
        description=file.description,
        source=file.source,
        device_names=names,
        device_kinds=tuple(device.kind for _, device in devices),
        device_models=tuple(device.model for _, device in devices),
        memory_bytes=np.array(
            [parse_bytes(device.memory, f"`memory` of `{name}`") for name, device in devices],
            dtype=np.int64,
        ),
        flops=tuple(device.flops for _, device in devices),
        memory_bytes_per_s=np.array(
            [
                parse_rate(device.memory_bandwidth, f"`memory_bandwidth` of `{name}`")
                for name, device in devices
            ],
            dtype=np.float64,
        ),
        launch_s=np.array(
            [parse_time(device.launch, f"`launch` of `{name}`") for name, device in devices],
            dtype=np.float64,
        ),
        efficiency=tuple(
            {"other": device.efficiency}
            if isinstance(device.efficiency, float)
            else {
                family: tuple(share) if isinstance(share, list) else share
                for family, share in device.efficiency.items()
            }
            for _, device in devices
        ),
        latency_s=links.latency_s,
        bytes_per_s=links.bytes_per_s,
        channel_names=tuple(links.channel_at),
        link_channels=tuple(links.channels),
    )


class _Links:
    """Link matrices while a file's entries are applied one after the other."""

    def __init__(self, names: tuple[str, ...]) -> None:
        count = len(names)
        self.names = names
        self.latency_s = np.zeros((count, count))
        self.bytes_per_s = np.zeros((count, count))
        self.channel_at = {
            f"{name} {way}": k * count + d
            for k, way in enumerate(("out", "in"))
            for d, name in enumerate(names)
        }
        self.channels: list[tuple[int, ...]] = [
            (source, count + target) for source in range(count) for target in range(count)
        ]

    def apply(self, where: str, link: LinkEntry, sources: list[int], targets: list[int]) -> None:
        """Set what `link` gives on every link from `sources` to `targets`."""
        if isinstance(link, PairEntry) and sources == targets and len(sources) == 1:
            raise InputError(f"There is no link in {where}: it names one device.")
        channels: tuple[int, ...] | None = None
        if link.channels is not None:
            for name in link.channels:
                self.channel_at.setdefault(name, len(self.channel_at))
            channels = tuple(dict.fromkeys(self.channel_at[name] for name in link.channels))
        for source in sources:
            for target in targets:
                if source == target:
                    continue
                if link.latency is not None:
                    self.latency_s[source, target] = parse_time(
                        link.latency, f"`latency` in {where}"
                    )
                if link.bandwidth is not None:
                    self.bytes_per_s[source, target] = parse_rate(
                        link.bandwidth, f"`bandwidth` in {where}"
                    )
                if channels is not None:
                    self.channels[source * len(self.names) + target] = channels

    def match(self, pattern: str) -> list[int]:
        """Find the devices that a name or a glob such as ``"host0/*"`` stands for."""
        if pattern in self.names:
            return [self.names.index(pattern)]
        found = [d for d, name in enumerate(self.names) if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise InputError(
                f"`{pattern}` in a `[[pair]]` matches no device. The devices are:"
                f" {', '.join(self.names)}."
            )
        return found


def _apply_pair(links: _Links, pair: PairEntry) -> None:
    if pair.between is not None and pair.from_ is None and pair.to is None:
        if len(pair.between) != 2:
            raise InputError(
                f"`between` names {len(pair.between)} devices; expected two, as in"
                ' `between = ["cuda:0", "cuda:1"]`.'
            )
        left, right = (links.match(pattern) for pattern in pair.between)
        links.apply(f"the pair {pair.between}", pair, left, right)
        links.apply(f"the pair {pair.between}", pair, right, left)
    elif pair.between is None and pair.from_ is not None and pair.to is not None:
        where = f"the pair from {pair.from_!r} to {pair.to!r}"
        links.apply(where, pair, links.match(pair.from_), links.match(pair.to))
    else:
        raise InputError("A `[[pair]]` needs either `between`, or both `from` and `to`.")


def _describe(cluster: Cluster) -> ClusterFile:
    """Tell a cluster entry by entry, so that `_build` gives it back."""
    devices = []
    entries = [(_describe_device(cluster, d), name) for d, name in enumerate(cluster.device_names)]
    for entry, alike in groupby(entries, key=operator.itemgetter(0)):
        names = [name for _, name in alike]
        entry.name, entry.names = (names[0], None) if len(names) == 1 else (None, names)
        devices.append(entry)
    usual, pairs = _describe_links(cluster)
    return ClusterFile(
        name=cluster.name,
        description=cluster.description,
        source=cluster.source,
        device=devices,
        link=usual,
        pair=pairs,
    )


def _describe_device(cluster: Cluster, device: int) -> DeviceEntry:
    return DeviceEntry(
        kind=cluster.device_kinds[device],
        model=cluster.device_models[device],
        memory=int(cluster.memory_bytes[device]),
        flops={dtype: float(rate) for dtype, rate in cluster.flops[device].items()},
        memory_bandwidth=float(cluster.memory_bytes_per_s[device]),
        launch=float(cluster.launch_s[device]),
        efficiency={
            family: share if isinstance(share, float) else [*share]
            for family, share in cluster.efficiency[device].items()
        },
    )


_Entry = TypeVar("_Entry", bound=LinkEntry)

_Link: TypeAlias = tuple[float, float, tuple[str, ...] | None]
"""Latency, bandwidth, and the channels where they are not the two devices' own engines."""


def _describe_links(cluster: Cluster) -> tuple[LinkEntry, list[PairEntry]]:
    """Tell what most links are like, and the pairs that are not."""
    names, count = cluster.device_names, cluster.num_devices

    def last_channel(link: tuple[int, int]) -> int:  # so that channels keep their order
        return max(0, *(c - 2 * count for c in cluster.link_channels[link[0] * count + link[1]]))

    links: dict[tuple[str, str], _Link] = {}
    for source, target in sorted(permutations(range(count), 2), key=last_channel):
        ends = names[source], names[target]
        channels = cluster.link_channels[source * count + target]
        named = tuple(cluster.channel_names[c] for c in channels)
        latency_s = float(cluster.latency_s[source, target])
        bytes_per_s = float(cluster.bytes_per_s[source, target])
        links[ends] = latency_s, bytes_per_s, None if named == _engines(ends) else named
    if not links:
        return LinkEntry(), []
    usual = Counter(links.values()).most_common(1)[0][0]
    if usual[2] is not None:  # what differs from it has to name its channels, engines too
        links = {ends: (*link[:2], link[2] or _engines(ends)) for ends, link in links.items()}
    pairs: dict[tuple[str, str], PairEntry] = {}
    for ends, link in links.items():
        back = ends[::-1]
        is_both = links[back] == link
        if link == usual or (is_both and back in pairs):
            continue
        pair = PairEntry(between=[*ends]) if is_both else PairEntry(from_=ends[0], to=ends[1])
        pairs[ends] = _fill(pair, link)
    return _fill(LinkEntry(), usual), [*pairs.values()]


def _engines(ends: tuple[str, str]) -> tuple[str, ...]:
    return f"{ends[0]} out", f"{ends[1]} in"


def _fill(entry: _Entry, link: _Link) -> _Entry:
    entry.latency, entry.bandwidth = link[:2]
    entry.channels = None if link[2] is None else [*link[2]]
    return entry
