"""Runs a captured step op by op, in any order that its graph allows, on real tensors."""

from __future__ import annotations

import heapq
import operator

import numpy as np
import torch
from torch import fx

from placewright.frontends._work import CREATORS, name_of


def random_order(graph, seed):
    """Give a random topological order of a graph's ops."""
    random = np.random.default_rng(seed)
    makers = graph.tensor_op[graph.use_tensor]
    edges = {*zip(makers.tolist(), graph.use_op.tolist(), strict=True)}
    missing = np.bincount([reader for _, reader in edges], minlength=graph.num_ops)
    after = [[] for _ in range(graph.num_ops)]
    for maker, reader in edges:
        after[maker].append(reader)
    ready = [(random.random(), i) for i in range(graph.num_ops) if missing[i] == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for j in after[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, (random.random(), j))
    return order


def run_in_order(capture, arguments, order):
    """Run the step's ops in the given order; give what its module would return."""
    graph = capture.module.graph
    nodes = {node.name: node for node in graph.nodes}
    places = [node for node in graph.nodes if node.op == "placeholder"]
    known = dict(zip(places, arguments, strict=True))
    owned = {name for names in capture.op_nodes for name in names}

    def find(node):
        """A node's value: computed by an op, or on the spot if it is free or made of nothing."""
        if node in known:
            return known[node]
        assert node.name not in owned, f"{node} is read before its op has run"
        if node.op == "get_attr":
            return getattr(capture.module, node.target)
        return compute(node)

    def compute(node):
        if node.target is not operator.getitem and name_of(node.target) in CREATORS:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), blank)
            return node.target(*args, **kwargs)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), find)
        return node.target(*args, **kwargs)

    def blank(node):
        """Something of a node's shape: what is made out of nothing needs no more."""
        shape, stride, dtype = node.meta["tensor"]
        return torch.empty_strided(shape, stride, dtype=dtype)

    for i in order:
        for name in capture.op_nodes[i]:
            node = nodes[name]
            if node.target._schema.is_mutable:  # made out of nothing here, and overwritten here
                for root in map(_root, node.all_input_nodes):
                    if root.op == "call_function" and root.name not in owned | {
                        n.name for n in known
                    }:
                        known[root] = compute(root)
            known[node] = compute(node)
    return fx.node.map_arg(graph.output_node().args[0], find)


def _root(node):
    """The node whose memory a view looks at, as far as views go."""
    while node.op == "call_function" and (
        node.target is operator.getitem or name_of(node.target) not in CREATORS
    ):
        if node.target is not operator.getitem and not _is_view(node):
            break
        node = node.all_input_nodes[0]
    return node


def _is_view(node):
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in node.target._schema.returns
    )
