"""
Measured op times on disk, shared between models: one file for each device and version of PyTorch.

This module owns what makes two ops equal (`op_signatures`), the file of times and how several
processes add to it, and costs made of it (`measured_costs`). How ops are timed is
`placewright.execute.profiling`; nothing here needs PyTorch.

Letters: ``N`` ops, ``T`` tensors, ``U`` uses, ``D`` devices.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from placewright import files
from placewright.cluster import Cluster
from placewright.costs import PS_PER_S, Costs
from placewright.errors import InputError
from placewright.execute._cores import share_cores
from placewright.execute._lanes import count_gpu_lanes
from placewright.frontends._cache import cache_folder
from placewright.graph import BoolArray, Graph, IdArray, IntArray

DISTANCES = {"near": 0, "off": 2**20, "far": 16 * 2**20}
"""How many bytes were touched since a tensor last was, at least: what caches it is in."""

FOLDER = "op-times"

Say: TypeAlias = Callable[[str], None]


def say_to_people(words: str) -> None:
    """Say something on standard error."""
    print(f"placewright: {words}", file=sys.stderr, flush=True)


# --- Which ops are equal. ---


def op_signatures(graph: Graph) -> tuple[str | None, ...]:  # [N]
    """
    Write down all that a graph knows of how long each op takes; None for ops without work.

    Equal words, equal op: kind, whether it is an update, dtype, shapes and bytes of the tensors
    that it reads and makes, flops, bytes moved, workspace, and how far away inputs are (see
    `use_distances`). The order of inputs and views of what is made do not count.
    """
    away = ["", *(f" {name}" for name in [*DISTANCES][1:])]
    distances = use_distances(graph)
    tensors = [_tensor_words(graph, t) for t in range(graph.num_tensors)]
    reads: list[list[str]] = [[] for _ in range(graph.num_ops)]
    for use, (tensor, op) in enumerate(zip(graph.use_tensor, graph.use_op, strict=True)):
        if tensors[tensor]:
            reads[op].append(tensors[tensor] + away[distances[use]])
    makes: list[list[str]] = [[] for _ in range(graph.num_ops)]
    for tensor, op in enumerate(graph.tensor_op):
        if tensors[tensor] and graph.tensor_base[tensor] < 0:
            makes[op].append(tensors[tensor])
    works = (graph.op_flops > 0) | (graph.op_bytes > 0)
    return tuple(
        f"{graph.op_kinds[i]} {graph.op_dtypes[i]}{' update' * (graph.op_phases[i] == 'update')}:"
        f" {_list(reads[i])} -> {_list(makes[i])}; {graph.op_flops[i]:.0f} flops,"
        f" {graph.op_bytes[i]:.0f} bytes, {graph.op_workspace_bytes[i]} workspace"
        if works[i]
        else None
        for i in range(graph.num_ops)
    )


def _tensor_words(graph: Graph, tensor: int) -> str:
    """Describe a tensor by shape and bytes; a control tensor not at all."""
    shape, size = graph.tensor_shapes[tensor], int(graph.tensor_bytes[tensor])
    if shape is None:
        return f"{size} B" if size else ""
    return f"({'x'.join(map(str, shape))}) {size} B"


def _list(words: Sequence[str]) -> str:
    counted = sorted(Counter(words).items())
    return ", ".join(f"{count} * {each}" if count > 1 else each for each, count in counted)


def use_distances(graph: Graph) -> IdArray:  # [U]
    """
    Tell how far away tensors are when they are read, with the ops in their order.

    It is the number of the last of `DISTANCES` that ops have touched since the tensor (or what it
    is a view of) was made, read or overwritten; what the op that did so has touched counts, too.
    Whatever is touched several times counts once, as it takes its place in a cache once; but it is
    never more than ops have moved: of a table that is looked up, most is not touched. A parameter's
    first reader comes after its last one in the step before, so that all of a small model stays
    near.
    """
    root = graph.tensor_root
    count = graph.num_ops
    made = np.flatnonzero(~graph.tensor_is_resident)
    touched = np.concatenate([graph.use_op, graph.tensor_op[made]]).astype(np.int64)
    touched = touched * graph.num_tensors + np.concatenate([root[graph.use_tensor], root[made]])
    touches = np.unique(touched)  # in the order of ops
    op, tensor = touches // graph.num_tensors, touches % graph.num_tensors
    before = _touched_before(op, tensor, count)
    at_op = np.searchsorted(op, np.arange(count + 1))
    levels = np.zeros(len(touches), dtype=np.int32)
    for limit in [*DISTANCES.values()][1:]:
        starts = _first_within(limit, graph, at_op, tensor)
        levels += before < starts[op]
    key = graph.use_op.astype(np.int64) * graph.num_tensors + root[graph.use_tensor]
    return levels[np.searchsorted(touches, key)]


def _touched_before(op: IntArray, tensor: IntArray, num_ops: int) -> IntArray:
    """Find the op that touched the same before; those of the step before are negative."""
    order = np.lexsort((op, tensor))
    ops, firsts = op[order], np.flatnonzero(np.diff(tensor[order], prepend=-1))
    lasts = np.append(firsts[1:], len(order)) - 1
    before = np.roll(ops, 1)
    before[firsts] = ops[lasts] - num_ops
    found = np.empty_like(before)
    found[order] = before
    return found


def _first_within(limit: int, graph: Graph, at_op: IntArray, tensor: IntArray) -> IntArray:  # [N]
    """
    Find for each op the first one since which less than `limit` bytes were touched before it.

    Ops of the step before are negative.
    """
    count = graph.num_ops
    sizes = graph.tensor_bytes.tolist()
    touched = [tensor[at_op[i] : at_op[i + 1]].tolist() for i in range(count)]
    last = dict.fromkeys(range(graph.num_tensors), -1)
    starts: list[int] = []
    start, held = 0, 0
    for i in range(2 * count):  # the step before, and this one
        while held >= limit:
            held -= sum(sizes[t] for t in touched[start % count] if last[t] == start)
            start += 1
        starts.append(start - count)
        for t in touched[i % count]:
            if last[t] < start:
                held += sizes[t]
            last[t] = i
    moved = np.concatenate([[0.0], np.cumsum(np.tile(graph.op_bytes, 2))])
    by_moved = np.searchsorted(moved, moved[count:-1] - limit, "right") - count
    return np.minimum(starts[count:], by_moved)


# --- Which devices are equal. ---


@functools.cache
def processor_model() -> str:
    """Name this machine's processor as its maker does."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def device_keys(
    names: Sequence[str], kinds: Sequence[str], models: Sequence[str]
) -> tuple[str | None, ...]:  # [D]
    """
    Name what devices' times are kept under, one for all that are alike; None for those not known.

    A GPU is its model, wherever it is. ``cpu`` is this machine's processor with as many threads as
    it has cores beside these devices; ``cpu:0``, ``cpu:1``, ... are one thread each, of as many at
    a time as there are here, since they share caches and memory. A CPU of another model than this
    machine's is not known.
    """
    cores, _ = share_cores(count_gpu_lanes(names, kinds))
    at_a_time = sum(_is_core(name) for name in names)
    keys: list[str | None] = []
    for name, kind, model in zip(names, kinds, models, strict=True):
        if kind != "cpu":
            keys.append(model or None)
        elif model != processor_model():
            keys.append(None)
        elif _is_core(name):
            keys.append(f"{model}, 1 thread, {at_a_time} at a time")
        else:
            keys.append(f"{model}, {len(cores)} threads")
    return tuple(keys)


def _is_core(name: str) -> bool:
    return re.fullmatch(r"cpu:\d+", name) is not None


# --- The files. ---

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e6)]  # eleven days


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long an op took."""

    time_s: _Seconds  # the median of the samples
    spread_s: _Seconds  # the median of their distances from it
    num_samples: int
    scratch_bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] = 0  # held meanwhile, see `Costs`
    idle_gain_s: _Seconds = 0.0  # less, while other cores idle, see `Costs`


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """
    A device's times.

    `issue_s` is what the executor takes to issue an op. A CPU takes it beside the op's own time; a
    GPU does not, since what it runs is recorded and replayed (`placewright.execute.graphs`).
    `pace_s` is what a core takes for a small piece of work when nothing disturbs it.
    """

    format: str = "placewright-op-times"
    version: int = 1
    device: str
    torch: str
    issue_s: _Seconds
    is_replayed: bool  # as by GPUs
    pace_s: _Seconds | None = None  # of a core
    ops: Mapping[str, Timing]  # by signature


def torch_version() -> str | None:
    """Tell PyTorch's version without loading it; None if it is not installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def times_path(key: str) -> Path | None:
    """
    Tell where the times of a device are, for the PyTorch that is installed.

    None if there can be none: there is no PyTorch, or caching is off.
    """
    folder, version = cache_folder(), torch_version()
    if folder is None or version is None:
        return None
    words = f"{key}, torch {version}"
    label = re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-")[:80]
    return folder / FOLDER / f"{label}-{hashlib.sha256(words.encode()).hexdigest()[:8]}.json"


def read_times(key: str, say: Say = say_to_people) -> Times | None:
    """
    Read a device's times; None if there are none, or none of this version of PyTorch.

    A file that cannot be read is renamed, `say` says so, and it counts as none.
    """
    path = times_path(key)
    if path is None or not path.exists():
        return None
    try:
        times = files.read_json(path, Times, "op-times file")
        if times.device == key and times.torch == torch_version():
            return times
        wrong = f"`{path}` has the times of `{times.device}` with torch {times.torch}."
    except InputError as error:
        wrong = str(error)
    aside = _free_name(path)
    try:
        path.rename(aside)
    except OSError as error:
        say(f"{wrong} It is not used. ({aside.name} cannot be written: {error.strerror}.)")
        return None
    say(f"{wrong} It is now `{aside}` and not used; `placewright profile` makes a new one.")
    return None


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.broken-{k}") for k in range(1, 10**6))
    return next(name for name in names if not name.exists())


def add_times(new: Times, say: Say = say_to_people) -> Times:
    """
    Add to the times of a device that are on disk, and give all of them back.

    Several processes may do so at once: what another one has added meanwhile stays.

    Raises
    ------
    InputError
        Caching is off, or the file cannot be written.
    """
    path = times_path(new.device)
    if path is None:
        raise InputError(
            "Op times are kept in the cache folder, and `PLACEWRIGHT_CACHE` is empty, which"
            " switches it off. Name a folder there, or unset it."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`{path.parent}` cannot be made: {error.strerror}.") from None
    with _locked(path):
        known = read_times(new.device, say)
        both = {**(known.ops if known else {}), **new.ops}
        paces = [t.pace_s for t in (known, new) if t is not None and t.pace_s is not None]
        every = msgspec.structs.replace(
            new, pace_s=min(paces, default=None), ops=dict(sorted(both.items()))
        )
        files.write(path, msgspec.json.format(msgspec.json.encode(every), indent=1))
    return every


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold off other processes that would change a file; where there are no locks, go on."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context(open(path.with_suffix(".lock"), "ab"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- Costs. ---


@dataclass(frozen=True, eq=False)
class Measured:
    """Costs, and which of them were measured; the others come from the roofline."""

    costs: Costs
    works: BoolArray  # [N] ops with work; parameters and inputs have none
    is_measured: BoolArray  # [N, D]

    @property
    def share_of_ops(self) -> float:
        """Tell the share of op times, over all devices, that are measured."""
        every = self.is_measured[self.works]
        return float(every.mean()) if every.size else 0.0

    @property
    def share_of_time(self) -> float:
        """Tell the share of the op times' sum, over all devices, that is measured."""
        total = self.costs.op_ps.sum(dtype=np.float64)
        measured = self.costs.op_ps[self.is_measured].sum(dtype=np.float64)
        return float(measured / total) if total else 0.0

    def describe(self) -> str:
        """Say in a sentence how much is measured."""
        count, total = int(self.is_measured.sum()), self.is_measured[self.works].size
        if count == total:
            return f"All {total:,} op times are measured."
        return (
            f"{count:,} of {total:,} op times are measured ({self.share_of_time:.0%} of the time),"
            " the others estimated."
        )


def measured_costs(
    graph: Graph,
    cluster: Cluster,
    tables: Mapping[str, Times] | None = None,
    say: Say = say_to_people,
) -> Measured:
    """
    Price ops by measured times where there are some, else as `Costs.estimate` does.

    A time in the graph itself (`Op.time_s`) wins over both.

    Parameters
    ----------
    graph, cluster
        What to run, and where. A device's times are found by `device_keys`.
    tables
        Times by device name, instead of those on disk.
    say
        Told about files that cannot be read.
    """
    found = _read_tables(cluster, say) if tables is None else _named(cluster, tables)
    measured_s = np.full((graph.num_ops, cluster.num_devices), np.nan)
    scratch_bytes = np.zeros(measured_s.shape, dtype=np.int64)
    gain_s = np.zeros(measured_s.shape)
    signatures = op_signatures(graph) if any(found) else ()
    for d, times in enumerate(found):
        if times is not None:
            measured_s[:, d] = look_up(signatures, times)
            timings = [times.ops.get(words) if words else None for words in signatures]
            scratch_bytes[:, d] = [t.scratch_bytes if t else 0 for t in timings]
            gain_s[:, d] = [t.idle_gain_s if t else 0.0 for t in timings]
    costs = Costs.estimate(graph, cluster, measured_s)
    gain_ps = np.minimum(np.rint(gain_s * PS_PER_S).astype(np.int64), costs.op_ps)
    return Measured(
        replace(costs, scratch_bytes=scratch_bytes, idle_gain_ps=gain_ps),
        (graph.op_flops > 0) | (graph.op_bytes > 0),
        ~np.isnan(measured_s),
    )


def look_up(signatures: Sequence[str | None], times: Times) -> NDArray[np.float64]:  # [N]
    """Find ops' times; nan for those that are not there."""
    found = (times.ops.get(words) if words else None for words in signatures)
    alone_s = np.array([np.nan if timing is None else timing.time_s for timing in found])
    return alone_s if times.is_replayed else alone_s + times.issue_s


def _read_tables(cluster: Cluster, say: Say) -> list[Times | None]:
    keys = device_keys(cluster.device_names, cluster.device_kinds, cluster.device_models)
    read = {key: read_times(key, say) for key in dict.fromkeys(keys) if key is not None}
    return [None if key is None else read[key] for key in keys]


def _named(cluster: Cluster, tables: Mapping[str, Times]) -> list[Times | None]:
    for name in tables:
        cluster.device_index(name)
    return [tables.get(name) for name in cluster.device_names]
