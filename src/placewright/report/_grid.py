"""
A placement as a grid: lanes of modules, columns of depth, and what of each cell runs where.

This module owns which ops share a cell and how a cell is split among devices. It draws nothing.

Letters: ``N`` ops, ``L`` lanes, ``P`` panels, ``D`` devices, ``S`` slices, ``X`` crossings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placewright.graph import FloatArray, Graph, IntArray
from placewright.grouping.layers import find_layers

MAX_LANES = 30
MAX_COLUMNS = 120
"""Over all panels, which leaves a column about four points."""
RANKS = 12
"""Lanes of a graph that has no modules to tell lanes by."""
FLOPS_PER_BYTE = 15.0
"""What GPUs from the K40 to the H100 can compute while they move a byte; it makes one figure of
flops and bytes."""
MIN_SHARE = 0.08
"""A smaller part of a cell is drawn this large, to be seen at all."""

PHASES = ("forward", "backward", "update")
WEIGHTS = "weights"


@dataclass(frozen=True)
class Panel:
    """The ops of one phase, or the weights, side by side."""

    name: str
    num_columns: int
    num_ops: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Slices:
    """What part of a cell runs on a device, bottom and top from 0 to 1."""

    panel: IntArray  # [S]
    lane: IntArray  # [S]
    column: IntArray  # [S]
    device: IntArray  # [S]
    bottom: FloatArray  # [S]
    top: FloatArray  # [S]


@dataclass(frozen=True, eq=False, kw_only=True)
class Crossings:
    """Tensors that are read on another device than their own: once a reading device."""

    tensor: IntArray  # [X]
    reader: IntArray  # [X] the first op that reads it there
    source: IntArray  # [X] device
    target: IntArray  # [X] device
    num_bytes: IntArray  # [X]


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid:
    """A placement, ready to be drawn. Lanes are numbered from the bottom, inputs first."""

    lane_names: tuple[str, ...]  # [L] empty ones if lanes mean nothing
    panels: tuple[Panel, ...]  # [P]
    op_lane: IntArray  # [N]
    op_panel: IntArray  # [N]
    op_column: IntArray  # [N]
    op_work: FloatArray  # [N] flops, or what bytes amount to
    op_weight_bytes: IntArray  # [N] persistent
    slices: Slices
    crossings: Crossings


def make_grid(graph: Graph, placement: IntArray) -> Grid:
    """
    Sort ops into panels, lanes and columns.

    Panels are the weights and the phases. A column is a stretch of levels of a phase, where an
    op's level is the most ops on a path to it; a lane is a layer (see `find_layers`), or some that
    follow each other if there are many. In a graph of one layer, lanes only spread the ops of a
    column.
    """
    levels = _levels(graph)
    op_panel, panels, op_column = _columns(graph, levels)
    layers = find_layers(graph)
    names, op_lane = _lanes(layers.names, layers.op_layer)
    if len(names) == 1:
        names, op_lane = _ranks(op_panel, op_column)
    work = np.maximum(graph.op_flops, FLOPS_PER_BYTE * graph.op_bytes)
    weights = np.zeros(graph.num_ops, dtype=np.int64)
    kept = graph.tensor_persistent
    np.add.at(weights, graph.tensor_op[kept], graph.tensor_bytes[kept])
    # One more, so that ops without work split the cells in which there is none.
    size = np.where(graph.op_is_resident, weights, work) + 1.0
    return Grid(
        lane_names=names,
        panels=panels,
        op_lane=op_lane,
        op_panel=op_panel,
        op_column=op_column,
        op_work=work,
        op_weight_bytes=weights,
        slices=_slices(op_panel, op_lane, op_column, placement, size),
        crossings=find_crossings(graph, placement),
    )


def find_crossings(graph: Graph, placement: IntArray) -> Crossings:
    """Find what is sent between devices, as the simulator counts it; dependencies left out."""
    makers = graph.tensor_op[graph.use_tensor]
    target = placement[graph.use_op]
    is_sent = (placement[makers] != target) & (graph.tensor_bytes[graph.use_tensor] > 0)
    tensor, reader, target = graph.use_tensor[is_sent], graph.use_op[is_sent], target[is_sent]
    width = int(placement.max()) + 1
    _, first = np.unique(tensor.astype(np.int64) * width + target, return_index=True)
    return Crossings(  # uses are sorted by (tensor, op), so the first is the first reader
        tensor=tensor[first].astype(np.int64),
        reader=reader[first].astype(np.int64),
        source=placement[makers[is_sent][first]],
        target=target[first],
        num_bytes=graph.tensor_bytes[tensor[first]],
    )


def _levels(graph: Graph) -> IntArray:  # [N]
    """Count the ops on the longest path to each op; weights count for nothing."""
    level = [0] * graph.num_ops
    order = graph.input_order
    makers = graph.tensor_op[graph.use_tensor[order]]
    works = ~graph.op_is_resident[makers]
    readers = graph.use_op[order][works].tolist()
    for maker, reader in zip(makers[works].tolist(), readers, strict=True):
        if level[maker] >= level[reader]:
            level[reader] = level[maker] + 1
    return np.array(level, dtype=np.int64)


def _columns(graph: Graph, levels: IntArray) -> tuple[IntArray, tuple[Panel, ...], IntArray]:
    """Give every op its panel and column, and the panels that have ops."""
    phase = np.array([_phase_number(name) for name in graph.op_phases], dtype=np.int64) + 1
    phase[graph.op_is_resident] = 0
    used = np.unique(phase)
    column = np.zeros(graph.num_ops, dtype=np.int64)
    ranks = [np.unique(levels[phase == k], return_inverse=True)[1] for k in used]
    depths = [1 if k == 0 else int(rank.max()) + 1 for k, rank in zip(used, ranks, strict=True)]
    scale = min(1.0, MAX_COLUMNS / sum(depths))
    panels = []
    for k, rank, depth in zip(used, ranks, depths, strict=True):
        count = max(1, int(depth * scale))
        column[phase == k] = 0 if k == 0 else rank * count // depth
        name = WEIGHTS if k == 0 else PHASES[k - 1]
        panels.append(Panel(name, count, int((phase == k).sum())))
    return np.searchsorted(used, phase), tuple(panels), column


def _phase_number(name: str) -> int:
    return PHASES.index(name) if name in PHASES else 0


def _lanes(names: Sequence[str], op_layer: IntArray) -> tuple[tuple[str, ...], IntArray]:
    """Merge layers into parents, or else with their neighbours, until lanes are few."""
    merged = _to_parents(names)
    order = [*dict.fromkeys(merged)]
    size = math.ceil(len(order) / MAX_LANES)
    lane_of = {name: k // size for k, name in enumerate(order)}
    lanes = [order[k : k + size] for k in range(0, len(order), size)]
    lane = np.array([lane_of[name] for name in merged], dtype=np.int64)
    return tuple(_lane_name(lane) for lane in lanes), lane[op_layer]


def _to_parents(names: Sequence[str]) -> list[str]:
    """Cut the longest paths until few enough are left, unless that would leave too few."""
    merged = [*names]
    while len(set(merged)) > MAX_LANES:
        depth = max(name.count(".") for name in merged)
        shorter = [n.rpartition(".")[0] if n.count(".") == depth else n for n in merged]
        if depth == 0 or len(set(shorter)) < MAX_LANES / 3:
            break
        merged = shorter
    return merged


def _lane_name(names: Sequence[str]) -> str:
    first, last = names[0], names[-1]
    parent, _, number = last.rpartition(".")
    if first == last:
        return first
    if first.rpartition(".")[0] == parent and number.isdecimal():
        return f"{first}–{number}"
    return f"{first} … {last}"


def _ranks(op_panel: IntArray, op_column: IntArray) -> tuple[tuple[str, ...], IntArray]:
    """Spread the ops of each column over lanes, in their own order."""
    cell = op_panel * MAX_COLUMNS + op_column
    order = np.argsort(cell, kind="stable")
    counts = np.bincount(cell)
    rank = np.empty(len(cell), dtype=np.int64)
    rank[order] = np.arange(len(cell)) - np.repeat(np.cumsum(counts) - counts, counts)
    num_lanes = min(RANKS, int(counts.max()))
    crowded = counts[cell] > num_lanes
    rank[crowded] = (rank * num_lanes // counts[cell])[crowded]
    return ("",) * num_lanes, rank


def _slices(
    panel: IntArray, lane: IntArray, column: IntArray, device: IntArray, size: FloatArray
) -> Slices:
    """Split every cell among its devices by the sizes of their ops."""
    shape = [int(ids.max()) + 1 for ids in (panel, lane, column, device)]
    key = np.ravel_multi_index((panel, lane, column, device), shape)
    parts, inverse = np.unique(key, return_inverse=True)
    amount: FloatArray = np.bincount(inverse, weights=size).astype(np.float64)
    cell = parts // shape[-1]
    share = np.maximum(amount / _sum_by(cell, amount), MIN_SHARE)
    share /= _sum_by(cell, share)
    top = np.cumsum(share) - np.unique(cell, return_inverse=True)[1]  # every cell before adds 1
    where = np.unravel_index(parts, shape)
    return Slices(
        panel=where[0],
        lane=where[1],
        column=where[2],
        device=where[3],
        bottom=np.clip(top - share, 0, 1),
        top=np.clip(top, 0, 1),
    )


def _sum_by(ids: IntArray, values: FloatArray) -> FloatArray:
    """Give, for each value, the sum over those of its id."""
    _, inverse = np.unique(ids, return_inverse=True)
    return np.bincount(inverse, weights=values)[inverse].astype(np.float64)
