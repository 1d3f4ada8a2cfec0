"""The graph and machine that simulator speed is measured on."""

from __future__ import annotations

import numpy as np

from placewright import Cluster, Costs, Graph, Problem


def layered_problem(num_ops: int, num_devices: int = 4, seed: int = 0) -> Problem:
    """Make `num_ops` ops, each with two inputs drawn from the 100 ops before it."""
    rng = np.random.default_rng(seed)
    op = np.repeat(np.arange(1, num_ops), 2)
    lowest = np.maximum(op - 100, 0)
    tensor = lowest + (rng.random(len(op)) * (op - lowest)).astype(np.int64)
    keys = np.unique(tensor * num_ops + op)
    size = rng.integers(1_000, 1_000_000, num_ops)
    words = ("",) * num_ops
    graph = Graph(
        name=f"layered-{num_ops}",
        op_names=tuple(f"op{i}" for i in range(num_ops)),
        op_kinds=words,
        op_phases=words,
        op_modules=words,
        op_dtypes=words,
        op_flops=np.zeros(num_ops),
        op_bytes=np.zeros(num_ops),
        op_workspace_bytes=np.zeros(num_ops, dtype=np.int64),
        op_colocation=np.full(num_ops, -1, dtype=np.int32),
        op_device_kinds=(None,) * num_ops,
        op_time_s=(None,) * num_ops,
        colocations=(),
        tensor_op=np.arange(num_ops, dtype=np.int32),
        tensor_bytes=size,
        tensor_persistent=np.zeros(num_ops, dtype=np.bool_),
        tensor_keep=np.zeros(num_ops, dtype=np.bool_),
        tensor_base=np.full(num_ops, -1, dtype=np.int32),
        tensor_shapes=(None,) * num_ops,
        use_tensor=(keys // num_ops).astype(np.int32),
        use_op=(keys % num_ops).astype(np.int32),
    )
    op_ps = np.repeat(rng.integers(10**6, 10**8, num_ops)[:, np.newaxis], num_devices, axis=1)
    return Problem(graph, equal_devices(num_devices), Costs(op_ps))


def equal_devices(count: int) -> Cluster:
    """Make a cluster of `count` equal devices with default channels: 10 us and 10 GB/s."""
    return Cluster(
        name=f"equal-{count}",
        description="",
        source="made up",
        device_names=tuple(f"cuda:{d}" for d in range(count)),
        device_kinds=("cuda",) * count,
        device_models=("",) * count,
        memory_bytes=np.full(count, 2**34, dtype=np.int64),
        flops=({"float32": 1e13},) * count,
        memory_bytes_per_s=np.full(count, 1e12),
        launch_s=np.zeros(count),
        efficiency=({},) * count,
        latency_s=np.full((count, count), 1e-5),
        bytes_per_s=np.full((count, count), 1e10),
        channel_names=tuple(f"cuda:{d} {way}" for way in ("out", "in") for d in range(count)),
        link_channels=tuple((a, count + b) for a in range(count) for b in range(count)),
    )


def contiguous(problem: Problem) -> np.ndarray:
    """Give each device one stretch of ops."""
    return np.arange(problem.num_ops) * problem.num_devices // problem.num_ops


def scattered(problem: Problem, seed: int = 1) -> np.ndarray:
    """Give each op any device."""
    return np.random.default_rng(seed).integers(0, problem.num_devices, problem.num_ops)
