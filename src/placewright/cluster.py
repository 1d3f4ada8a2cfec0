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
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from placewright import files
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

    Guarantees, checked here: at least one device; names are unique and not empty; memory is
    positive; rates and bandwidths are at least 1 a second; every link has at least one channel.

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
        _check(self)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                object.__setattr__(self, name, value.copy())
                getattr(self, name).flags.writeable = False

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """
        Load a cluster file (TOML).

        Raises
        ------
        InputError
            The file cannot be read, is not TOML, or describes no valid cluster.
        """
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
        return replace(self, name=name, memory_bytes=np.array(memory_bytes, dtype=np.int64))

    def device_index(self, name: str) -> int:
        """
        Find a device by its name.

        Raises
        ------
        InputError
            There is no such device.
        """
        if name not in self.device_names:
            raise InputError(
                f"Cluster `{self.name}` has no device `{name}`. Its devices are:"
                f" {', '.join(self.device_names)}."
            )
        return self.device_names.index(name)

    def __repr__(self) -> str:
        return f"Cluster({self.name!r}: {', '.join(self.device_names)})"


def _check(cluster: Cluster) -> None:
    if not cluster.device_names:
        raise InputError(
            f"Cluster `{cluster.name}` has no devices. Give it at least one `[[device]]`."
        )
    for name in (*cluster.device_names, *cluster.channel_names):
        if not name:
            raise InputError("A device or a channel has an empty name. Give it one.")
    for name in cluster.device_names:
        if cluster.device_names.count(name) > 1:
            raise InputError(
                f"Two devices are named `{name}`. Give every device a name of its own."
            )
    for field, unit in (("memory_bytes", "bytes of memory"), ("memory_bytes_per_s", "bytes/s")):
        values = getattr(cluster, field)
        bad = np.flatnonzero(~((values >= 1) & (values <= MAX_RATE)))
        if bad.size:
            raise InputError(
                f"Device `{cluster.device_names[bad[0]]}` has {values[bad[0]]:g} {unit};"
                " expected a positive number."
            )
    for name, rates, shares in zip(
        cluster.device_names, cluster.flops, cluster.efficiency, strict=True
    ):
        if "float32" not in rates:
            raise InputError(
                f"Device `{name}` has no rate for float32, which stands in for dtypes that are"
                " not listed. Add it to `flops`."
            )
        for dtype, rate in rates.items():
            if not 1 <= rate <= MAX_RATE:
                raise InputError(
                    f"Device `{name}` does {rate:g} {dtype} flops/s; expected a number from 1 to"
                    f" {MAX_RATE:g}."
                )
        for family, share in shares.items():
            if family not in OP_FAMILIES:
                raise InputError(
                    f"Device `{name}` has an efficiency for `{family}`; the families of ops are:"
                    f" {', '.join(OP_FAMILIES)}."
                )
            _check_efficiency(f"Device `{name}` has", family, share)
    _check_links(cluster)


def _check_efficiency(what: str, family: str, efficiency: Efficiency) -> None:
    points = ((1.0, efficiency),) if isinstance(efficiency, float) else efficiency
    sizes = [size for size, _ in points]
    if not sizes or not sizes[0] > 0 or any(a >= b for a, b in pairwise(sizes)):
        raise InputError(
            f"{what} efficiencies for {family} at the sizes {sizes}; expected at least one"
            " [size, share], sizes positive and growing."
        )
    for _, share in points:
        if not 0 < share <= 1:
            raise InputError(
                f"{what} efficiency {share:g} for {family}; expected a number above 0 and at"
                " most 1."
            )


def _check_links(cluster: Cluster) -> None:
    count = cluster.num_devices
    for source in range(count):
        for target in range(count):
            if source == target:
                continue
            link = f"from `{cluster.device_names[source]}` to `{cluster.device_names[target]}`"
            rate, latency = cluster.bytes_per_s[source, target], cluster.latency_s[source, target]
            if not 1 <= rate <= MAX_RATE:
                raise InputError(
                    f"The link {link} carries {rate:g} bytes/s; expected a positive number. Every"
                    " pair of devices needs a `bandwidth`, in `[link]` or in a `[[pair]]`."
                )
            if not 0 <= latency <= MAX_LATENCY_S:
                raise InputError(
                    f"The link {link} has a latency of {latency:g} s; expected a number from 0 to"
                    f" {MAX_LATENCY_S:g}, in `[link]` or in a `[[pair]]`."
                )
            if not cluster.link_channels[source * count + target]:
                raise InputError(f"The link {link} has no channel. Name at least one.")


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
