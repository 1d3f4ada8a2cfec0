"""
How long each op takes on each device: measured times where a graph has them, else a roofline.

This module owns the op families and the formula. Transfers need no table: a link's latency and
bandwidth are the cluster's, and the simulator adds them up.

Letters: ``N`` ops, ``D`` devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.graph import Graph

PS_PER_S = 1e12
MAX_TOTAL_PS = 2**62

_FAMILIES = {
    "matmul": ("mm", "matmul", "gemm", "linear", "einsum", "dot"),
    "convolution": ("conv",),
    "attention": ("attention",),
    "reduction": ("sum", "mean", "softmax", "norm", "max", "pool", "loss"),
    "gather": ("embedding", "gather", "scatter", "index", "slice", "select"),
    "movement": ("copy", "cat", "concat", "transpose", "clone", "stack", "split", "pad"),
}


def family_of(kind: str) -> str:
    """
    Sort an op kind such as ``"aten.mm"`` or ``"onnx.Conv"`` into a family.

    Families are ``matmul``, ``convolution``, ``attention``, ``reduction``, ``gather`` and
    ``movement``; everything else is ``elementwise``. ``attention`` wins over the parts of its
    name, and the part before the first dot (the framework) does not count.
    """
    word = kind.rpartition(".")[2].lower()
    for family in ("attention", "convolution", "matmul", "gather", "reduction", "movement"):
        if any(part in word for part in _FAMILIES[family]):
            return family
    return "elementwise"


@dataclass(frozen=True, eq=False)
class Costs:
    """
    The time of every op on every device, in whole picoseconds.

    Raises
    ------
    InputError
        A time is negative, or the times of all ops together pass 53 days (int64 picoseconds).
    """

    op_ps: NDArray[np.int64]  # [N, D]

    def __post_init__(self) -> None:
        if self.op_ps.size and self.op_ps.min() < 0:
            raise InputError(f"An op takes {self.op_ps.min()} ps; expected no negative time.")
        slowest = self.op_ps.max(axis=1).astype(np.float64).sum()
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
        dtypes, dtype_at = np.unique(graph.op_dtypes, return_inverse=True)
        kinds, kind_at = np.unique(graph.op_kinds, return_inverse=True)
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
