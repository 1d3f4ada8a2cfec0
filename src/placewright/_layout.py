"""
A problem as the compiled kernel wants it.

This module owns the arrays that the kernel reads, made once a problem, and the work space that it
overwrites, which is lent to one thread at a time and used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewright import _kernel
from placewright.costs import PS_PER_S
from placewright.graph import Graph, IdArray
from placewright.problem import Problem


class Layout:
    """A problem as the kernel wants it, and work space that is used again."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        link, link_channel, num_queues = _links(problem)
        self.sizes = graph.num_ops, graph.num_tensors, graph.num_uses, problem.num_devices
        self.num_queues = num_queues
        self.num_channels = len(problem.cluster.channel_names)
        self.fixed = _fixed(problem, link, link_channel)
        self._spare: list[_kernel.Work] = []

    @contextmanager
    def work(self) -> Iterator[_kernel.Work]:
        """Lend work space to one thread."""
        try:
            work = self._spare.pop()
        except IndexError:
            work = self._new_work()
        yield work
        self._spare.append(work)

    def _new_work(self) -> _kernel.Work:
        num_ops, num_tensors, num_uses, num_devices = self.sizes
        num_residents = int((self.fixed.resident >= 0).sum())
        num_fetches = len(self.fixed.resident_use)
        return _kernel.Work(
            op=np.empty(num_ops, dtype=_kernel.OP),
            device=np.empty(num_devices, dtype=_kernel.DEVICE),
            queue=np.empty(self.num_queues, dtype=_kernel.QUEUE),
            channel=np.empty(self.num_channels, dtype=_kernel.CHANNEL),
            transfer=np.empty(num_uses, dtype=_kernel.TRANSFER),
            ready=np.empty(num_ops + num_devices, dtype=np.int32),
            readers=np.empty(num_tensors * num_devices, dtype=np.int32),
            owner=np.empty(num_tensors, dtype=np.int32),
            fetch=np.empty(num_fetches, dtype=_kernel.FETCH),
            fetch_at=np.empty(num_residents * num_devices, dtype=np.int32),
            first_fetch=np.empty(num_ops, dtype=np.int32),
            stream=np.empty(num_devices, dtype=_kernel.STREAM),
            stream_heap=np.empty(num_fetches, dtype=np.int64),
            clock=np.zeros(1, dtype=_kernel.CLOCK),
        )

    def log(self) -> _kernel.Log:
        """Make room for a recorded run."""
        num_ops, _, num_uses, num_devices = self.sizes
        return _kernel.Log(
            op_start=np.zeros(num_ops, dtype=np.int64),
            op_round=np.zeros(num_ops, dtype=np.int64),
            level=np.empty(2 * num_ops + 3 * num_uses + num_devices, dtype=_kernel.LEVEL),
        )


_layouts: weakref.WeakKeyDictionary[Problem, Layout] = weakref.WeakKeyDictionary()


def layout_of(problem: Problem) -> Layout:
    """Give the layout of a problem, made when first asked for."""
    layout = _layouts.get(problem)
    if layout is None:
        layout = _layouts[problem] = Layout(problem)
    return layout


def _fixed(problem: Problem, link: NDArray[Any], link_channel: IdArray) -> _kernel.Fixed:
    graph = problem.graph
    op_ps = problem.costs.op_ps
    alike: dict[bytes, int] = {}  # most machines have few different devices
    device_class = [alike.setdefault(column.tobytes(), len(alike)) for column in op_ps.T]
    first = [device_class.index(k) for k in range(len(alike))]
    edges = np.zeros(graph.num_ops + 1, dtype=_kernel.EDGES)
    edges["outputs"] = graph.op_outputs
    edges["inputs"] = graph.op_inputs
    edges["workspace"][:-1] = graph.op_workspace_bytes
    input_of = np.ascontiguousarray(graph.use_tensor[graph.input_order])
    resident = np.where(graph.tensor_is_resident, np.cumsum(graph.tensor_is_resident) - 1, -1)
    reads_resident = graph.tensor_is_resident[input_of]
    num_inputs = np.diff(graph.op_inputs)
    num_inputs[graph.op_is_resident] = -1  # never queues
    is_taken = ~graph.tensor_is_resident & (graph.tensor_base < 0)
    taken = graph.op_workspace_bytes.copy()
    np.add.at(taken, graph.tensor_op[is_taken], graph.tensor_bytes[is_taken])
    edges["take"][:-1] = taken
    return _kernel.Fixed(
        edges=edges,
        tensor=_tensors(graph),
        use=np.ascontiguousarray(graph.use_op),
        input_of=input_of,
        resident=resident.astype(np.int32),
        op_ps=np.ascontiguousarray(op_ps[:, first]).reshape(-1),
        device_class=np.array(device_class, dtype=np.int32),
        num_inputs=num_inputs.astype(np.int32),
        resident_op=np.flatnonzero(graph.op_is_resident).astype(np.int32),
        alias=np.flatnonzero(graph.tensor_base >= 0).astype(np.int32),
        resident_use=np.ascontiguousarray(graph.use_op[graph.input_order][reads_resident]),
        resident_tensor=np.ascontiguousarray(input_of[reads_resident]),
        link=link,
        link_channel=link_channel,
    )


def _tensors(graph: Graph) -> NDArray[Any]:
    tensor = np.zeros(graph.num_tensors + 1, dtype=_kernel.TENSOR)
    tensor["uses"] = graph.tensor_uses
    tensor["bytes"][:-1] = graph.tensor_bytes
    tensor["maker"][:-1] = graph.tensor_op
    tensor["base"][:-1] = graph.tensor_base
    tensor["keep"][:-1] = graph.tensor_keep
    return tensor


def _links(problem: Problem) -> tuple[NDArray[Any], IdArray, int]:
    """Lay the links out: their times, channels, and the queue in which their transfers wait."""
    cluster = problem.cluster
    count = problem.num_devices**2
    rate = np.where(cluster.bytes_per_s > 0, cluster.bytes_per_s, 1.0).reshape(-1)
    link = np.zeros(count + 1, dtype=_kernel.LINK)
    link["latency_ps"][:-1] = cluster.latency_s.reshape(-1) * PS_PER_S
    link["ps_per_byte"][:-1] = PS_PER_S / rate
    link["control_ps"][:-1] = np.rint(link["latency_ps"][:-1])
    link["channels"] = np.cumsum([0, *(len(channels) for channels in cluster.link_channels)])
    channels = np.array([c for cs in cluster.link_channels for c in cs], dtype=np.int32)
    # A queue's transfers end in the order in which they were requested: so it is with those that
    # share a first channel, and with zero-byte ones that take equally long.
    first = [channels[0] for channels in cluster.link_channels]
    firsts, link["queue"][:-1] = np.unique(first, return_inverse=True)
    delays, at = np.unique(link["control_ps"][:-1], return_inverse=True)
    link["control_queue"][:-1] = len(firsts) + at
    return link, channels, len(firsts) + len(delays)
