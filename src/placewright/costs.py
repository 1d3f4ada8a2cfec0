"""
How long each op takes on each device: measured times where a graph has them, else a roofline.

This module owns the op families and the formula. Transfers need no table: a link's latency and
bandwidth are the cluster's, and the simulator adds them up.

Letters: ``N`` ops, ``D`` devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.graph import Graph

PS_PER_S = 1e12
MAX_TOTAL_PS = 2**62

_WORDS = {
    "matmul": {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "mv",
        "addmv",
        "matmul",
        "gemm",
        "linear",
        "einsum",
    },
    "gather": {"embedding", "gather", "scatter", "index", "slice", "select"},
    "reduction": {"sum", "mean", "softmax", "norm", "normalization", "amax", "argmax", "loss"},
    "movement": {"copy", "cat", "concat", "transpose", "clone", "stack", "split", "pad"},
}


def family_of(kind: str) -> str:
    """
    Sort an op kind such as ``"aten.mm"``, ``"aten.add.Tensor"`` or ``"onnx.Conv"`` into a family.

    What stands before the first dot is the framework, what stands after a second one an overload;
    the name between them is taken apart at underscores and capitals. ``attention`` anywhere in it
    wins, then ``conv``, then ``pool`` (a reduction); then whole words decide. What is none of
    ``matmul``, ``convolution``, ``attention``, ``reduction``, ``gather`` and ``movement`` is
    ``elementwise``.
    """
    name = kind.split(".")[1] if "." in kind else kind
    words = set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))
    text = name.lower()
    for part, family in (
        ("attention", "attention"),
        ("conv", "convolution"),
        ("pool", "reduction"),
    ):
        if part in text:
            return family
    return next((family for family, known in _WORDS.items() if words & known), "elementwise")


def _number(words: tuple[str, ...]) -> tuple[list[str], NDArray[np.int64]]:
    """List the different words, and give each entry its number among them."""
    number = {word: k for k, word in enumerate(dict.fromkeys(words))}
    return list(number), np.fromiter((number[word] for word in words), np.int64, len(words))


@dataclass(frozen=True, eq=False)
class Costs:
    """
    The time of every op on every device, in whole picoseconds. The array is copied.

    Raises
    ------
    InputError
        A time is negative, or the times of all ops together pass 53 days (int64 picoseconds).
    """

    op_ps: NDArray[np.int64]  # [N, D]

    def __post_init__(self) -> None:
        op_ps = np.array(self.op_ps)
        if op_ps.ndim != 2 or not np.issubdtype(op_ps.dtype, np.integer):
            raise InputError(
                f"`op_ps` has shape {op_ps.shape} and type {op_ps.dtype}; expected whole"
                " picoseconds by (op, device)."
            )
        object.__setattr__(self, "op_ps", op_ps.astype(np.int64))
        if self.op_ps.size and self.op_ps.min() < 0:
            raise InputError(f"An op takes {self.op_ps.min()} ps; expected no negative time.")
        slowest = self.op_ps.max(axis=1, initial=0).astype(np.float64).sum()
        if slowest >= MAX_TOTAL_PS:
            raise InputError(
                f"The ops take up to {slowest / PS_PER_S:.3g} s in all; expected at most"
                f" {MAX_TOTAL_PS / PS_PER_S:.3g} s. Check flops, bytes and rates."
            )
        self.op_ps.flags.writeable = False

    @classmethod
    def estimate(cls, graph: Graph, cluster: Cluster) -> Costs:
        """
        Price every op on every device.

        A measured time (`Op.time_s`) wins, looked up by device name, then model, then kind.
        Otherwise ``launch + max(flops / peak rate, bytes / memory bandwidth) / efficiency``, with
        the peak rate of the op's dtype (float32's if the device lists no other) and the
        efficiency of its family (that of ``other``, or 1, if the device lists none). An op with
        neither flops nor bytes nor a measured time takes none: it is an input or a parameter.
        """
        dtypes, dtype_at = _number(graph.op_dtypes)
        kinds, kind_at = _number(graph.op_kinds)
        families = [family_of(kind) for kind in kinds]
        works = (graph.op_flops > 0) | (graph.op_bytes > 0)
        time_s = np.zeros((graph.num_ops, cluster.num_devices))
        for d in range(cluster.num_devices):
            rates, shares = cluster.flops[d], cluster.efficiency[d]
            rate = np.array([rates.get(dtype, rates["float32"]) for dtype in dtypes])[dtype_at]
            default = shares.get("other", 1.0)
            share = np.array([shares.get(family, default) for family in families])[kind_at]
            busy_s = np.maximum(
                graph.op_flops / rate, graph.op_bytes / cluster.memory_bytes_per_s[d]
            )
            time_s[:, d] = np.where(works, cluster.launch_s[d] + busy_s / share, 0.0)
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
