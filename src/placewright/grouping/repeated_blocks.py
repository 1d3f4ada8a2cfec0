"""
Repeated blocks: layers that are equal op by op.

This module owns when two layers are equal. The idea of treating equal parts of a model as one is
CFP's (2025), which profiles each but once.

Letters: ``N`` ops, ``B`` blocks, ``P`` patterns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placewright.graph import Graph
from placewright.grouping.layers import find_layers
from placewright.problem import Problem


@dataclass(frozen=True, eq=False, kw_only=True)
class Blocks:
    """
    The repeated blocks of a model.

    A block is what one layer does in one phase; blocks of one pattern are equal. Two ops do the
    same in their blocks if the blocks' patterns and the ops' roles are equal.
    """

    block_of: NDArray[np.int64]  # [N] -1 for an op of no repeated block
    role_of: NDArray[np.int64]  # [N] the op's place in its pattern; -1 for none
    pattern_of_block: NDArray[np.int64]  # [B]
    block_layers: tuple[str, ...]  # [B] "layers.3"
    block_phases: tuple[str, ...]  # [B] "forward", "backward" or "update"
    num_patterns: int

    @property
    def num_blocks(self) -> int:
        """Count the blocks."""
        return len(self.block_layers)

    def same_layers(self, left: str, right: str) -> bool:
        """Tell whether two layers are equal in every phase."""
        patterns: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for layer, phase, pattern in zip(
            self.block_layers, self.block_phases, self.pattern_of_block.tolist(), strict=True
        ):
            patterns[layer].add((phase, pattern))
        return left in patterns and patterns[left] == patterns[right]


def repeated_blocks(problem: Problem) -> Blocks:
    """
    Find the layers that are equal, phase by phase.

    Layers are those of `find_layers`, without the ops that lie in no module of the layer. Two
    layers are equal in a phase if their ops, in program order, agree one by one in kind, dtype,
    flops, bytes, workspace, device kinds, outputs, and inputs. An input from the same phase of the
    layer is the same output of the same op; one from another phase agrees in its maker's kind and
    in size; one from outside the layer in size alone. Blocks are numbered by their first op and
    patterns by their first block; a layer's phase that no other one equals is no block.
    """
    graph = problem.graph
    members = _members(graph)
    place: dict[int, tuple[str, str, int]] = {
        op: (layer, phase, role)
        for (layer, phase), ops in members.items()
        for role, op in enumerate(ops)
    }
    alike: dict[Hashable, list[tuple[str, str]]] = defaultdict(list)
    for key, ops in members.items():
        alike[key[1], tuple(_signature(graph, place, i) for i in ops)].append(key)
    pattern_of = {
        key: pattern
        for pattern, keys in enumerate(keys for keys in alike.values() if len(keys) > 1)
        for key in keys
    }
    keys = [key for key in members if key in pattern_of]
    block_of = np.full(graph.num_ops, -1, dtype=np.int64)
    role_of = np.full(graph.num_ops, -1, dtype=np.int64)
    for block, key in enumerate(keys):
        block_of[members[key]] = block
        role_of[members[key]] = np.arange(len(members[key]))
    return Blocks(
        block_of=block_of,
        role_of=role_of,
        pattern_of_block=np.array([pattern_of[key] for key in keys], dtype=np.int64),
        block_layers=tuple(layer for layer, _ in keys),
        block_phases=tuple(phase for _, phase in keys),
        num_patterns=len(set(pattern_of.values())),
    )


def _members(graph: Graph) -> dict[tuple[str, str], list[int]]:
    """List the ops of each layer and phase, by first op."""
    layers = find_layers(graph)
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, (module, phase) in enumerate(zip(graph.op_modules, graph.op_phases, strict=True)):
        layer = layers.names[layers.op_layer[i]]
        if layer and (module == layer or module.startswith(f"{layer}.")):
            members[layer, phase].append(i)
    return members


def _signature(graph: Graph, place: dict[int, tuple[str, str, int]], op: int) -> Hashable:
    """Say all that equal ops of equal layers have in common."""
    outputs = range(int(graph.op_outputs[op]), int(graph.op_outputs[op + 1]))
    uses = graph.input_order[graph.op_inputs[op] : graph.op_inputs[op + 1]]
    return (
        graph.op_kinds[op],
        graph.op_dtypes[op],
        float(graph.op_flops[op]),
        float(graph.op_bytes[op]),
        int(graph.op_workspace_bytes[op]),
        graph.op_device_kinds[op],
        tuple(_output(graph, t) for t in outputs),
        tuple(sorted(_input(graph, place, op, int(t)) for t in graph.use_tensor[uses])),
    )


def _output(graph: Graph, tensor: int) -> Hashable:
    base = int(graph.tensor_base[tensor])
    own = base >= 0 and graph.tensor_op[base] == graph.tensor_op[tensor]
    return (
        int(graph.tensor_bytes[tensor]),
        bool(graph.tensor_persistent[tensor]),
        bool(graph.tensor_keep[tensor]),
        "new" if base < 0 else tensor - base if own else "view",
    )


def _input(
    graph: Graph, place: dict[int, tuple[str, str, int]], op: int, tensor: int
) -> tuple[str, str, int, int]:
    """Tell where an input comes from, as far as equal layers agree in it."""
    maker = int(graph.tensor_op[tensor])
    layer, phase, _ = place[op]
    home, home_phase, role = place.get(maker, ("", "", -1))
    if home != layer:
        return "", "", -1, int(graph.tensor_bytes[tensor])
    if home_phase != phase:
        return home_phase, graph.op_kinds[maker], -1, int(graph.tensor_bytes[tensor])
    return phase, "", role, tensor - int(graph.op_outputs[maker])
