"""
Layers of a model, read off its module paths: what a person who splits a model thinks in.

This module owns which ops are one layer, and the layers' order.

Letters: ``N`` ops, ``L`` layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.costs import family_of
from placewright.graph import Graph

MIN_STEPS = 3
"""A layer that multiplies by one of its weights so often in a forward pass is a recurrent one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Layers:
    """A model's layers, in the order in which its forward pass reaches them."""

    names: tuple[str, ...]  # [L] "decoder.3", "softmax"
    op_layer: NDArray[np.int64]  # [N]
    is_recurrent: NDArray[np.bool_]  # [L]
    multiplies: NDArray[np.bool_]  # [L] has a matrix product, convolution or attention
    flops: NDArray[np.float64]  # [L]

    @property
    def num_layers(self) -> int:
        """Count the layers."""
        return len(self.names)


def find_layers(graph: Graph) -> Layers:
    """
    Find the layers of a graph.

    A layer is a module path up to its first number (``encoder.layer.3``, ``layer1.0``); a path
    without a number is cut where it leaves those that have one (``embeddings``, ``model.norm``).
    A layer with more than half of all work, such as the trunk in a sequence of embedding, trunk
    and head, is taken apart at its next number. Ops of no module, and the loss, go with what they
    read, or if they read nothing, with who reads them.
    """
    opened: set[str] = set()
    while True:
        names = _names(graph, opened)
        order = _forward_order(graph, names)
        number = {name: k for k, name in enumerate(order)}
        op_layer = np.array([number[name] for name in names], dtype=np.int64)
        flops = np.zeros(len(order))
        np.add.at(flops, op_layer, graph.op_flops)
        largest = order[int(np.argmax(flops))]
        is_nested = any(_numbers_below(module, largest) for module in set(graph.op_modules))
        if flops.max() <= flops.sum() / 2 or largest in opened or not is_nested:
            break
        opened.add(largest)
    return Layers(
        names=tuple(order),
        op_layer=op_layer,
        is_recurrent=_recurrent(graph, op_layer, len(order)),
        multiplies=_multiplying(graph, op_layer, len(order)),
        flops=flops,
    )


def _names(graph: Graph, opened: set[str]) -> list[str]:
    """Name every op's layer, given those that are taken apart."""
    modules = set(graph.op_modules)
    numbered = {layer for m in modules if (layer := _numbered(m, opened)) is not None}
    inner = opened | {
        ".".join(layer.split(".")[:k]) for layer in numbered for k in range(layer.count(".") + 1)
    }
    layer_of = {module: _layer(module, inner, opened) for module in modules}
    names = [layer_of[module] for module in graph.op_modules]
    _fill(graph, names)
    return names


def _numbers_below(module: str, layer: str) -> bool:
    """Tell whether a module lies inside a layer, below another number."""
    below = module.removeprefix(f"{layer}.")
    return below != module and any(part.isdecimal() for part in below.split("."))


def _numbered(module: str, opened: set[str]) -> str | None:
    """Cut a path after its first number that does not end an opened layer; None without one."""
    parts = module.split(".")
    for k, part in enumerate(parts):
        cut = ".".join(parts[: k + 1])
        if part.isdecimal() and cut not in opened:
            return cut
    return None


def _layer(module: str, inner: set[str], opened: set[str]) -> str:
    if module in ("", "loss"):
        return ""
    found = _numbered(module, opened)
    if found is not None:
        return found
    parts = module.split(".")
    length = 1
    while length < len(parts) and ".".join(parts[:length]) in inner:
        length += 1
    return "" if module in inner else ".".join(parts[:length])


def _fill(graph: Graph, names: list[str]) -> None:
    """Give a layer to the ops that have none: that of what they read, else of who reads them."""
    makers = graph.tensor_op[graph.use_tensor]
    order = graph.input_order
    for i in range(graph.num_ops):
        if names[i] == "":
            uses = order[graph.op_inputs[i] : graph.op_inputs[i + 1]]
            known = [names[m] for m in makers[uses].tolist() if names[m]]
            names[i] = known[-1] if known else ""
    for i in reversed(range(graph.num_ops)):
        if names[i] == "":
            tensors = range(int(graph.op_outputs[i]), int(graph.op_outputs[i + 1]))
            readers = (
                int(reader)
                for t in tensors
                for reader in graph.use_op[graph.tensor_uses[t] : graph.tensor_uses[t + 1]]
            )
            names[i] = next((names[reader] for reader in readers if names[reader]), "")


def _forward_order(graph: Graph, names: Sequence[str]) -> list[str]:
    """Order layers by their first op that computes something in the forward pass."""
    computes = (graph.op_flops > 0) | (graph.op_bytes > 0)
    is_forward = np.array([phase == "forward" for phase in graph.op_phases])
    first = dict.fromkeys(names[i] for i in np.flatnonzero(computes & is_forward).tolist())
    return [*dict.fromkeys([*first, *names])]


def _multiplying(graph: Graph, op_layer: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    found = np.zeros(count, dtype=np.bool_)
    families = [family_of(kind) for kind in graph.op_kinds]
    found[op_layer[[family in ("matmul", "convolution", "attention") for family in families]]] = (
        True
    )
    return found


def _recurrent(graph: Graph, op_layer: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Tell the layers that read a weight in several matrix products of the forward pass."""
    multiplies = np.array(
        [
            family_of(kind) == "matmul" and phase == "forward"
            for kind, phase in zip(graph.op_kinds, graph.op_phases, strict=True)
        ]
    )
    uses = multiplies[graph.use_op] & graph.tensor_is_resident[graph.use_tensor]
    times = np.bincount(graph.use_tensor[uses], minlength=graph.num_tensors)
    recurrent = np.zeros(count, dtype=np.bool_)
    recurrent[op_layer[graph.tensor_op[times >= MIN_STEPS]]] = True
    return recurrent
