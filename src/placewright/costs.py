"""
How long each op takes on each device: measured times where a graph has them, else a roofline.

This module owns the op families and the formula. Transfers need no table: a link's latency and
bandwidth are the cluster's, and the simulator adds them up.

Letters: ``N`` ops, ``D`` devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.arguments import expect_type, read_array, to_array
from placewright.cluster import Cluster, Efficiency
from placewright.errors import InputError
from placewright.graph import Graph

PS_PER_S = 1e12
MAX_TOTAL_PS = 2**62

_PARTS = (  # the first that stands anywhere in the name decides
    ("attention", "attention"),
    ("matmul", "matmul"),
    ("conv", "convolution"),
    ("pool", "reduction"),
    ("norm", "reduction"),
    ("loss", "reduction"),
)
_WORDS = {
    "matmul": "mm addmm bmm baddbmm mv addmv dot matmul gemm linear einsum lstm gru rnn",
    "gather": "embedding gather scatter index select take topk sort bucketize nonzero",
    "reduction": "sum mean softmax amax amin argmax argmin max min any all var std cumsum prod"
    " reduce logsumexp",
    "movement": "copy cat concat transpose clone stack split pad slice repeat expand tile roll flip"
    " fill full zeros ones empty arange eye cast unfold permute",
}
_FAMILY_OF_WORD = {word: family for family, words in _WORDS.items() for word in words.split()}
_COMPUTING = ("matmul", "convolution", "attention")


def family_of(kind: str) -> str:
    """
    Sort an op kind such as ``"aten.mm"``, ``"aten.add.Tensor"`` or ``"onnx.Conv"`` into a family.

    The name behind ``aten.`` or ``onnx.`` (an overload may follow it), else behind the last dot,
    is taken apart at underscores and capitals. ``attention`` anywhere in it wins, then ``matmul``,
    ``conv``, ``pool``, ``norm`` and ``loss`` (the last three reductions); then whole words decide,
    matrix products first. What is none of ``matmul``, ``convolution``, ``attention``,
    ``reduction``, ``gather`` and ``movement`` is ``elementwise``.
    """
    parts = kind.split(".")
    name = parts[1] if parts[0] in ("aten", "onnx") and len(parts) > 1 else parts[-1]
    text = name.lower()
    found = next((family for part, family in _PARTS if part in text), None)
    if found is not None:
        return found
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_")
    families = {_FAMILY_OF_WORD[word] for word in words if word in _FAMILY_OF_WORD}
    return next((family for family in _WORDS if family in families), "elementwise")


def _number(words: tuple[str, ...]) -> tuple[list[str], NDArray[np.int64]]:
    """List the different words, and give each entry its number among them."""
    number = {word: k for k, word in enumerate(dict.fromkeys(words))}
    return list(number), np.fromiter((number[word] for word in words), np.int64, len(words))


def _reached(
    shares: Mapping[str, Efficiency],
    graph: Graph,
    families: Sequence[str],
    kind_at: NDArray[np.int64],
) -> NDArray[np.float64]:  # [N]
    """Look up the share of its peak that a device reaches on each op, by family and size."""
    default = shares.get("other", 1.0)
    reached = np.ones(graph.num_ops)
    for family in dict.fromkeys(families):
        ours = np.array([other == family for other in families])[kind_at]
        share = shares.get(family, default)
        points = ((1.0, share),) if isinstance(share, float) else share
        sizes = (graph.op_flops if family in _COMPUTING else graph.op_bytes)[ours]
        known = np.log([size for size, _ in points])
        reached[ours] = np.interp(
            np.log(np.maximum(sizes, 1.0)), known, [share for _, share in points]
        )
    return reached


@dataclass(frozen=True, eq=False)
class Costs:
    """
    The time of every op on every device, in whole picoseconds. Arrays are copied.

    `scratch_bytes` is memory that an op was seen to take on a device while it ran, beside what it
    reads and makes. How well a step that is run follows the simulator is judged with it
    (`replayed_peaks`); the simulator itself knows only what the graph tells of an op.
    `idle_gain_ps` is by how much an op is faster on a core while the others idle, which leave it
    caches and memory, or on a processor if nothing is on the GPUs beside it, so that it has all
    cores: a replay (`placewright.execute.replay`) takes it off, the simulator does not.

    Raises
    ------
    InputError
        A time is negative, or the times of all ops together pass 53 days (int64 picoseconds).
    """

    op_ps: NDArray[np.int64]  # [N, D]
    scratch_bytes: NDArray[np.int64] | None = None  # [N, D]
    idle_gain_ps: NDArray[np.int64] | None = None  # [N, D]

    def __post_init__(self) -> None:
        shape = np.shape(to_array(self.op_ps, "op_ps", "whole picoseconds by (op, device)"))
        if len(shape) != 2 or not np.issubdtype(np.asarray(self.op_ps).dtype, np.integer):
            raise InputError(
                f"`op_ps` has shape {shape} and type {np.asarray(self.op_ps).dtype}; expected whole"
                " picoseconds by (op, device)."
            )
        for field in ("op_ps", "scratch_bytes", "idle_gain_ps"):
            given = getattr(self, field)
            if given is not None:
                object.__setattr__(self, field, read_array(given, field, np.int64, shape))
        if self.op_ps.size and self.op_ps.min() < 0:
            raise InputError(f"An op takes {self.op_ps.min()} ps; expected no negative time.")
        for field in ("scratch_bytes", "idle_gain_ps"):
            values = getattr(self, field)
            if values is not None and values.size and not 0 <= values.min() <= values.max() < 2**62:
                raise InputError(
                    f"`{field}` holds {values.min()} to {values.max()}; expected numbers from 0 to"
                    " 2**62."
                )
        slowest = self.op_ps.max(axis=1, initial=0).astype(np.float64).sum()
        if slowest >= MAX_TOTAL_PS:
            raise InputError(
                f"The ops take up to {slowest / PS_PER_S:.3g} s in all; expected at most"
                f" {MAX_TOTAL_PS / PS_PER_S:.3g} s. Check flops, bytes and rates."
            )

    @classmethod
    def estimate(
        cls,
        graph: Graph,
        cluster: Cluster,
        measured_s: NDArray[np.float64] | None = None,  # [N, D] nan: not measured
    ) -> Costs:
        """
        Price every op on every device.

        A time in the graph (`Op.time_s`) wins, looked up by device name, then model, then kind;
        then `measured_s`, if given.
        Otherwise ``launch + max(flops / (peak rate * e), bytes / (memory bandwidth * m))``, with
        the peak rate of the op's dtype (float32's if the device lists no other). ``e`` is the
        efficiency of its family (that of ``other``, or 1, if the device lists none) at its size:
        flops for matrix products, convolutions and attention, bytes for the rest; between the
        listed sizes it is interpolated over the logarithm. ``m`` is that of ``movement`` for the
        three that compute, else ``e``. An op with neither flops nor bytes nor a measured time
        takes none: it is an input or a parameter.
        """
        expect_type(graph, Graph, "graph", "a `Graph`")
        expect_type(cluster, Cluster, "cluster", "a `Cluster`")
        dtypes, dtype_at = _number(graph.op_dtypes)
        kinds, kind_at = _number(graph.op_kinds)
        families = [family_of(kind) for kind in kinds]
        works = (graph.op_flops > 0) | (graph.op_bytes > 0)
        time_s = np.zeros((graph.num_ops, cluster.num_devices))
        for d in range(cluster.num_devices):
            rates, shares = cluster.flops[d], cluster.efficiency[d]
            rate = np.array([rates.get(dtype, rates["float32"]) for dtype in dtypes])[dtype_at]
            rate *= _reached(shares, graph, families, kind_at)
            moving = ["movement" if family in _COMPUTING else family for family in families]
            speed = cluster.memory_bytes_per_s[d] * _reached(shares, graph, moving, kind_at)
            busy_s = np.maximum(graph.op_flops / rate, graph.op_bytes / speed)
            time_s[:, d] = np.where(works, cluster.launch_s[d] + busy_s, 0.0)
        if measured_s is not None:
            measured_s = read_array(measured_s, "measured_s", np.float64, time_s.shape)
            time_s = np.where(np.isnan(measured_s), time_s, measured_s)
        for i, times in enumerate(graph.op_time_s):
            for d in range(cluster.num_devices) if times else ():
                names = cluster.device_names[d], cluster.device_models[d], cluster.device_kinds[d]
                measured = [times[name] for name in names if times and name in times]
                if measured:
                    time_s[i, d] = measured[0]
        too_long = np.flatnonzero(time_s.max(axis=1) >= MAX_TOTAL_PS / PS_PER_S)
        if too_long.size:
            raise InputError(
                f"Op `{graph.op_names[too_long[0]]}` takes {time_s[too_long[0]].max():.3g} s;"
                f" expected less than {MAX_TOTAL_PS / PS_PER_S:.3g} s. Check flops and rates."
            )
        return cls(np.rint(time_s * PS_PER_S).astype(np.int64))
