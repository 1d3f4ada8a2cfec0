"""
What a graph or a cluster amounts to, in figures.

This module owns the words for a graph's memory: parameters, optimiser state, buffers, and
activations, which are what the forward pass makes and the backward pass reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewright.cluster import Cluster
from placewright.graph import Graph


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """A graph in figures."""

    name: str
    num_ops: int
    num_resident_ops: int
    num_tensors: int
    num_uses: int
    flops: float
    moved_bytes: float
    parameter_bytes: int
    state_bytes: int  # of the optimiser
    buffer_bytes: int  # constants included
    activation_bytes: int  # made by the forward pass and read by the backward pass
    other_bytes: int
    chain_ops: int  # in the longest chain of ops
    chain_flops: float  # in the heaviest
    fingerprint: str


def describe_graph(graph: Graph) -> GraphFacts:
    """Sum a graph up."""
    is_parameter = np.array([kind == "param" for kind in graph.op_kinds])
    is_first = np.zeros(graph.num_tensors, dtype=np.bool_)
    makes = graph.op_outputs[1:] > graph.op_outputs[:-1]
    is_first[graph.op_outputs[:-1][makes]] = True
    persistent, sizes = graph.tensor_persistent, graph.tensor_bytes
    of_parameter = is_parameter[graph.tensor_op]
    owns = ~graph.tensor_is_resident & (graph.tensor_base < 0)
    activations = _is_activation(graph) & owns
    length, work = _chains(graph)
    return GraphFacts(
        name=graph.name,
        num_ops=graph.num_ops,
        num_resident_ops=int(graph.op_is_resident.sum()),
        num_tensors=graph.num_tensors,
        num_uses=graph.num_uses,
        flops=float(graph.op_flops.sum()),
        moved_bytes=float(graph.op_bytes.sum()),
        parameter_bytes=int(sizes[persistent & of_parameter & is_first].sum()),
        state_bytes=int(sizes[persistent & of_parameter & ~is_first].sum()),
        buffer_bytes=int(sizes[persistent & ~of_parameter].sum()),
        activation_bytes=int(sizes[activations].sum()),
        other_bytes=int(sizes[owns & ~activations].sum()),
        chain_ops=length,
        chain_flops=work,
        fingerprint=graph.fingerprint,
    )


def _is_activation(graph: Graph) -> NDArray[np.bool_]:  # [T]
    """Tell the tensors that a forward op makes and a backward op reads, itself or as an alias."""
    phases = np.array(graph.op_phases)
    read_later = np.zeros(graph.num_tensors, dtype=np.bool_)
    read_later[graph.use_tensor[phases[graph.use_op] == "backward"]] = True
    for t in np.flatnonzero(graph.tensor_base >= 0)[::-1]:  # aliases come after their bases
        read_later[graph.tensor_base[t]] |= read_later[t]
    made_earlier: NDArray[np.bool_] = phases[graph.tensor_op] == "forward"
    return read_later & made_earlier


def _chains(graph: Graph) -> tuple[int, float]:
    """Give the ops in the longest chain and the flops in the heaviest."""
    flops = graph.op_flops.tolist()
    length, work = [1] * graph.num_ops, [*flops]
    order = graph.input_order
    makers = graph.tensor_op[graph.use_tensor[order]].tolist()
    for maker, reader in zip(makers, graph.use_op[order].tolist(), strict=True):
        length[reader] = max(length[reader], length[maker] + 1)
        work[reader] = max(work[reader], work[maker] + flops[reader])
    return max(length), max(work)


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """Give a cluster's figures, as `--json` prints them."""
    names = cluster.device_names
    devices = [
        {
            "name": name,
            "kind": cluster.device_kinds[d],
            "model": cluster.device_models[d],
            "memory_bytes": int(cluster.memory_bytes[d]),
            "flops": {**cluster.flops[d]},
            "memory_bytes_per_s": float(cluster.memory_bytes_per_s[d]),
            "launch_s": float(cluster.launch_s[d]),
            "efficiency": {**cluster.efficiency[d]},
        }
        for d, name in enumerate(names)
    ]
    links = [
        {
            "from": names[source],
            "to": names[target],
            "latency_s": float(cluster.latency_s[source, target]),
            "bytes_per_s": float(cluster.bytes_per_s[source, target]),
        }
        for source, target in permutations(range(cluster.num_devices), 2)
    ]
    return {
        "name": cluster.name,
        "description": cluster.description,
        "source": cluster.source,
        "devices": devices,
        "links": links,
    }
