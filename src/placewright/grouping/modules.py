"""
Modules: ops grouped as the model's author did.

This module owns what a module path means for a group, and where ops of no module go.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placewright.errors import InputError
from placewright.graph import Graph
from placewright.grouping._numbering import number_groups
from placewright.problem import Problem


def by_module(
    problem: Problem, depth: int | None = None, phases_apart: bool = False
) -> NDArray[np.int64]:  # [N]
    """
    Group ops by their module path.

    An op of no module goes with the last of its inputs' makers that has a group, else with its
    first reader that has one, else it stays alone. Co-located ops go where the last of them
    goes, so a parameter with its update.

    Parameters
    ----------
    problem
        The problem whose ops are grouped.
    depth
        How many components of a path count (1: ``encoder.layer.3`` is ``encoder``); all if not
        given.
    phases_apart
        Whether the forward, backward and update ops of a module are groups of their own.

    Raises
    ------
    InputError
        `depth` is less than 1.
    """
    if depth is not None and depth < 1:
        raise InputError(f"`depth` is {depth}; expected at least 1, or None for whole paths.")
    graph = problem.graph
    names = {module: ".".join(module.split(".")[:depth]) for module in set(graph.op_modules)}
    number: dict[tuple[str, str], int] = {}
    labels = [-1] * graph.num_ops
    for i, (module, phase) in enumerate(zip(graph.op_modules, graph.op_phases, strict=True)):
        if names[module]:
            key = names[module], phase if phases_apart else ""
            labels[i] = number.setdefault(key, len(number))
    _fill(graph, labels)
    label = np.array(labels, dtype=np.int64)
    alone = np.flatnonzero(label < 0)
    label[alone] = len(number) + alone
    last = np.zeros(len(graph.colocations), dtype=np.int64)
    member = np.flatnonzero(graph.op_colocation >= 0)
    np.maximum.at(last, graph.op_colocation[member], member)
    label[member] = label[last[graph.op_colocation[member]]]
    return number_groups(label)


def _fill(graph: Graph, label: list[int]) -> None:
    """Give a label to ops that have none: of what they read, else of who reads them."""
    makers = graph.tensor_op[graph.use_tensor[graph.input_order]].tolist()
    first_input = graph.op_inputs.tolist()
    for i in range(graph.num_ops):
        if label[i] < 0:
            read = (label[m] for m in reversed(makers[first_input[i] : first_input[i + 1]]))
            label[i] = next((k for k in read if k >= 0), -1)
    readers = graph.use_op.tolist()
    first_use = graph.tensor_uses[graph.op_outputs].tolist()
    for i in reversed(range(graph.num_ops)):
        if label[i] < 0:
            read_by = (label[r] for r in readers[first_use[i] : first_use[i + 1]])
            label[i] = next((k for k in read_by if k >= 0), -1)
