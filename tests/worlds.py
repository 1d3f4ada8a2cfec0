"""Random small worlds, with every feature that the rules speak of and many ties."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from placewright.cluster import Cluster
from placewright.costs import Costs
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.problem import Problem

SIZES = (0, 1, 2, 3, 8, 50)
TIMES = (0, 0, 1, 1, 2, 3, 10)


@st.composite
def clusters(draw, max_devices=4):
    count = draw(st.integers(1, max_devices))
    kinds = [draw(st.sampled_from(("cpu", "cuda"))) for _ in range(count)]
    latency = [[draw(st.sampled_from((0, 1, 1, 2, 5))) for _ in range(count)] for _ in range(count)]
    rate = [[draw(st.sampled_from((1, 1, 2, 0.5, 8))) for _ in range(count)] for _ in range(count)]
    return make_cluster(
        kinds,
        latency_ps=latency,
        bytes_per_ps=rate,
        link_channels=[
            draw(
                st.sampled_from(
                    [(a, count + b), (a, count + b), (2 * count,), (2 * count, 2 * count + 1), (a,)]
                )
            )
            for a in range(count)
            for b in range(count)
        ],
        memory=draw(st.sampled_from((10, 60, 1000))),
    )


def make_cluster(
    kinds=("cuda", "cuda"), latency_ps=1, bytes_per_ps=1, link_channels=None, memory=1000
):
    """A cluster in which a byte takes a picosecond, unless said otherwise."""
    count = len(kinds)
    if link_channels is None:
        link_channels = [(a, count + b) for a in range(count) for b in range(count)]
    num_channels = 1 + max(c for channels in link_channels for c in channels)
    return Cluster(
        name="world",
        description="",
        source="",
        device_names=tuple(f"{kind}:{d}" for d, kind in enumerate(kinds)),
        device_kinds=tuple(kinds),
        device_models=("",) * count,
        memory_bytes=np.full(count, memory, dtype=np.int64),
        flops=({"float32": 1e12},) * count,
        memory_bytes_per_s=np.full(count, 1e12),
        launch_s=np.zeros(count),
        efficiency=({},) * count,
        latency_s=np.broadcast_to(np.asarray(latency_ps, float) * 1e-12, (count, count)).copy(),
        bytes_per_s=np.broadcast_to(np.asarray(bytes_per_ps, float) * 1e12, (count, count)).copy(),
        channel_names=tuple(f"channel {c}" for c in range(num_channels)),
        link_channels=tuple(link_channels),
    )


@st.composite
def graphs(draw, max_ops=12):
    ops: list[Op] = []
    tensors: list[tuple[str, bool]] = []  # name, whether resident
    for i in range(draw(st.integers(1, max_ops))):
        name = f"op{i}"
        is_param = draw(st.integers(0, 3)) == 0
        ops.append(draw(_param(name) if is_param else _op(name, ops, tensors)))
        made = len(ops[-1].outputs)
        tensors += [(name if k == 0 else f"{name}:{k}", is_param) for k in range(made)]
    return Graph.build("world", ops)


@st.composite
def _param(draw, name):
    outputs = [Output(draw(st.sampled_from(SIZES)), persistent=True, shape=draw(_shape))]
    for k in range(draw(st.integers(0, 3))):
        size = draw(st.sampled_from(SIZES))
        if draw(st.booleans()):
            base = draw(st.integers(0, k))
            outputs.append(Output(size, alias_of=f"{name}:{base}", keep=draw(st.booleans())))
        else:
            outputs.append(Output(size, persistent=True))
    return Op(name=name, kind="param", outputs=outputs, colocate=draw(_colocation))


_shape = st.sampled_from((None, None, (), (0,), (2, 3)))
_colocation = st.sampled_from((None, None, None, None, "a", "b"))


@st.composite
def _op(draw, name, ops, tensors):
    names = [tensor for tensor, _ in tensors]
    inputs = draw(st.lists(st.sampled_from(names), max_size=4, unique=True)) if names else []
    # Mostly recent ones, so that chains form.
    inputs = list(dict.fromkeys(inputs + [t for t in names[-2:] if draw(st.booleans())]))
    after = [op.name for op in ops if draw(st.integers(0, 9)) == 0]
    outputs: list[Output] = []
    for _ in range(draw(st.integers(0, 3))):
        bases = inputs + [f"{name}:{k}" for k in range(len(outputs))]
        alias = draw(st.sampled_from(bases)) if bases and draw(st.integers(0, 3)) == 0 else None
        size = draw(st.sampled_from(SIZES))
        keep = draw(st.integers(0, 4)) == 0
        outputs.append(Output(size, keep=keep, alias_of=alias, shape=draw(_shape)))
    return Op(
        name=name,
        inputs=inputs,
        after=after,
        outputs=outputs,
        workspace=draw(st.sampled_from((0, 0, 4, 20))),
        colocate=draw(_colocation),
        devices=draw(st.sampled_from((None, None, None, ("cpu", "cuda")))),
    )


@st.composite
def problems(draw, max_ops=12, max_devices=4):
    graph = draw(graphs(max_ops))
    cluster = draw(clusters(max_devices))
    op_ps = np.array(
        [
            [0 if resident else draw(st.sampled_from(TIMES)) for _ in range(cluster.num_devices)]
            for resident in graph.op_is_resident
        ],
        dtype=np.int64,
    )
    return Problem(graph, cluster, Costs(op_ps))


@st.composite
def placements(draw, problem):
    count = problem.num_devices
    groups = [draw(st.integers(0, count - 1)) for _ in problem.graph.colocations]
    return np.array(
        [
            groups[group] if group >= 0 else draw(st.integers(0, count - 1))
            for group in problem.graph.op_colocation
        ]
    )
