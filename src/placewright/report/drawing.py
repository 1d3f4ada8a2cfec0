"""
A placement as a picture, in the manner of Figure 2 of *A Hierarchical Model for Device Placement*.

This module owns how a placement looks: where lanes, panels, arcs and the table of devices go, in
points, and what they are drawn with. What is drawn is in `placewright.report._grid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from placewright.errors import InputError
from placewright.graph import FloatArray, Graph, IntArray
from placewright.report._figure import (
    FAINT,
    boxes_at,
    check_picture_path,
    device_colours,
    draw_curve,
    draw_dot,
    draw_line,
    fill,
    ink_on,
    new_figure,
    plain_style,
    save_figure,
    sheet,
    shorten,
    write,
)
from placewright.report._grid import WEIGHTS, Grid, make_grid
from placewright.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 720.0
MARGIN = 14.0
LANE_FILL = "#f1f1f1"
LABEL_LETTERS = 22
LETTER = 4.9  # the width of a letter at 8 points, on average
PANEL_GAP = 7.0
MIN_PANEL = 40.0  # so that its heading fits
MAX_COLUMN = 72.0
LANES_HEIGHT = 330.0
STRIP = 34.0
STRIP_LABEL = 72.0
ARCS = 92.0
MAX_ARCS = 40
MAX_THICKNESS = 5.0
MAX_DOT = 11.0
MAX_LABELLED_OPS = 60
ROW = 13.0
TABLE_ROWS = 9
TABLE_COLUMNS = ((0, "device"), (118, "ops"), (172, "compute"), (240, "weights"), (310, "receives"))
TABLE_WIDTH = 345.0
CAPTION = "{} Columns: depth in the graph. Boxes: split by compute (flops, or 15 a byte moved)."
LANES_CAPTION = "Rows: layers, inputs at the bottom."
RANKS_CAPTION = "Rows: ops of the same depth."


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layout:
    """Where things are, in points from the bottom left corner."""

    height: float
    panel_x: FloatArray  # [P] left edges
    column_width: FloatArray  # [P]
    gap: FloatArray  # [P] between the boxes of neighbouring columns
    panel_end: FloatArray  # [P] right edges
    lanes_y: float
    lane_height: float
    strip_y: float
    arcs_x: float
    table_y: float
    is_small: bool  # has room for the names of ops, and lines between them

    def lane_y(self, lane: IntArray) -> FloatArray:
        """Give the foot of a lane's boxes."""
        foot: FloatArray = self.lanes_y + lane * np.float64(self.lane_height)
        return foot

    def column_x(self, panel: IntArray, column: IntArray) -> FloatArray:
        """Give the left edge of a column's boxes."""
        begin: FloatArray = self.panel_x[panel] + column * self.column_width[panel]
        return begin + self.gap[panel] / 2

    def box_width(self, panel: IntArray) -> FloatArray:
        """Give the width of a panel's boxes."""
        width: FloatArray = self.column_width[panel] - self.gap[panel]
        return width

    @property
    def box_height(self) -> float:
        """Give the height of a lane's boxes, less than that of the lane."""
        return self.lane_height - 2.0


@plain_style()
def draw_placement(
    graph: Graph,
    device_names: Sequence[str],
    device_kinds: Sequence[str],
    placement: Sequence[int] | NDArray[np.integer],
    path: str | Path,
    title: str = "",
) -> None:
    """
    Draw which device runs what, as SVG or PNG.

    A row is a layer of the model, inputs at the bottom; from left to right are the weights and the
    forward, backward and update ops, each by depth in the graph. A box is split among devices by
    compute: flops, or 15 a byte moved where that is more. Below is what each device receives from
    others, and to the right between which layers. Each device has its colour; CPUs are white.

    Guarantees: equal arguments give equal bytes.

    Parameters
    ----------
    graph
        The model.
    device_names, device_kinds
        The cluster's.
    placement
        The device of every op.
    path
        The file, ``.svg`` or ``.png``.
    title
        The line above the picture; the graph's name if it is empty.

    Raises
    ------
    InputError
        matplotlib is missing, the placement is not one of this graph on these devices, or the file
        cannot be written.
    """
    check_picture_path(path)
    where = _check_placement(graph, device_names, device_kinds, placement)
    grid = make_grid(graph, where)
    layout = _lay_out(grid, len(np.unique(where)))
    figure = new_figure(WIDTH, layout.height)
    axes = sheet(figure)
    colours = device_colours(device_kinds)
    words = title or graph.name
    _draw_heading(axes, layout, graph, grid, words)
    _draw_lanes(axes, layout, grid)
    _draw_boxes(axes, layout, grid, colours)
    if layout.is_small:
        _draw_edges(axes, layout, graph, grid)
        _draw_ops(axes, layout, graph, grid, [colours[d] for d in where])
    if len(grid.crossings.tensor):
        _draw_strip(axes, layout, grid, colours)
    if len(grid.crossings.tensor) and any(grid.lane_names):
        _draw_arcs(axes, layout, graph, grid)
    _draw_table(axes, layout, grid, where, device_names, colours)
    save_figure(figure, path, words)


def _check_placement(
    graph: Graph,
    names: Sequence[str],
    kinds: Sequence[str],
    placement: Sequence[int] | NDArray[np.integer],
) -> IntArray:
    where = np.asarray(placement, dtype=np.int64)
    if len(names) != len(kinds):
        raise InputError(f"There are {len(names)} device names and {len(kinds)} kinds.")
    if where.shape != (graph.num_ops,):
        raise InputError(
            f"`placement` has shape {where.shape}; expected one device for each of the"
            f" {graph.num_ops} ops of graph `{graph.name}`."
        )
    if where.min() < 0 or where.max() >= len(names):
        raise InputError(f"`placement` names a device outside 0 ... {len(names) - 1}.")
    return where


def _lay_out(grid: Grid, num_used: int) -> _Layout:
    """Share the width among panels, and the height among what is above one another."""
    longest = max(len(shorten(name, LABEL_LETTERS)) for name in grid.lane_names)
    has_weights = grid.panels[0].name == WEIGHTS
    left = MARGIN + max(longest * LETTER + 6.0, STRIP_LABEL - MIN_PANEL * has_weights)
    right = WIDTH - MARGIN - (ARCS if any(grid.lane_names) else 0.0)
    counts = np.array([panel.num_columns for panel in grid.panels])
    widths = _column_widths(counts, right - left - PANEL_GAP * (len(counts) - 1))
    lengths = widths * counts
    begins = left + np.cumsum(lengths + PANEL_GAP) - lengths - PANEL_GAP
    is_small = len(grid.op_lane) <= MAX_LABELLED_OPS
    lane_height = np.clip(np.floor(LANES_HEIGHT / len(grid.lane_names)), 12.0, 30.0)
    rows = min(num_used, TABLE_ROWS) if num_used <= 2 * TABLE_ROWS else -(-num_used // 2)
    table_y = MARGIN + 16.0 + rows * ROW
    strip_y = table_y + 38.0
    lanes_y = strip_y + STRIP + 8.0
    return _Layout(
        height=lanes_y + lane_height * len(grid.lane_names) + 74.0,
        panel_x=begins,
        column_width=widths,
        gap=widths * 0.25 if is_small else np.minimum(0.12 * widths, 1.0),
        panel_end=begins + lengths,
        lanes_y=lanes_y,
        lane_height=float(lane_height),
        strip_y=strip_y,
        arcs_x=float(begins[-1] + lengths[-1]) + 8.0,
        table_y=table_y,
        is_small=is_small,
    )


def _column_widths(counts: IntArray, room: float) -> FloatArray:
    """Make columns equally wide, in half points to stay sharp, unless a panel gets too narrow."""
    is_narrow = counts * (room / counts.sum()) < MIN_PANEL
    width = 0.0
    if not is_narrow.all():
        width = (room - MIN_PANEL * is_narrow.sum()) / counts[~is_narrow].sum()
    even = np.full(len(counts), min(np.floor(2 * width) / 2, MAX_COLUMN))
    return np.maximum(np.where(is_narrow, 0.0, even), MIN_PANEL / counts)


def _draw_heading(axes: Axes, layout: _Layout, graph: Graph, grid: Grid, title: str) -> None:
    top = layout.height - MARGIN
    sent = int(grid.crossings.num_bytes.sum())
    kept = format_bytes(grid.op_weight_bytes.sum())
    facts = f"{graph.name}: {graph.num_ops:,} ops, {kept} of weights and state"
    moved = f"{format_bytes(sent)} crosses devices" if sent else "nothing crosses devices"
    write(axes, MARGIN, top - 12, shorten(title, 88), fontsize=12, fontweight="bold")
    write(axes, MARGIN, top - 26, f"{facts}; {moved}", color=FAINT)
    for panel, begin, end in zip(grid.panels, layout.panel_x, layout.panel_end, strict=True):
        middle = (begin + end) / 2
        foot = layout.lanes_y + layout.lane_height * len(grid.lane_names) + 5
        write(axes, middle, foot + 9, panel.name, ha="center", fontweight="bold")
        _write_faint(axes, middle, foot, f"{panel.num_ops:,}", ha="center")
    _write_faint(
        axes,
        MARGIN,
        layout.strip_y - 13,
        CAPTION.format(LANES_CAPTION if any(grid.lane_names) else RANKS_CAPTION),
    )


def _draw_lanes(axes: Axes, layout: _Layout, grid: Grid) -> None:
    lanes = np.arange(len(grid.lane_names))
    feet = layout.lane_y(lanes)
    for begin, end in zip(layout.panel_x, layout.panel_end, strict=True):
        boxes = boxes_at(np.full(len(lanes), begin), feet, end - begin, layout.box_height)
        fill(axes, boxes, LANE_FILL, zorder=0.5)
    for name, foot in zip(grid.lane_names, feet, strict=True):
        middle = foot + layout.box_height / 2
        end = layout.panel_x[0] - 5
        write(axes, end, middle, shorten(name, LABEL_LETTERS), ha="right", va="center")


def _draw_boxes(axes: Axes, layout: _Layout, grid: Grid, colours: Sequence[str]) -> None:
    """Draw all boxes of a device as one path: a hundredth of the file that many would make."""
    slices = grid.slices
    x = layout.column_x(slices.panel, slices.column)
    y = layout.lane_y(slices.lane) + slices.bottom * layout.box_height
    height = (slices.top - slices.bottom) * layout.box_height
    boxes = boxes_at(x, y, layout.box_width(slices.panel), height)
    for device, colour in enumerate(colours):
        fill(axes, boxes[slices.device == device], colour)


def _draw_edges(axes: Axes, layout: _Layout, graph: Graph, grid: Grid) -> None:
    """Draw a line from every op to those that read what it makes."""
    makers, readers = graph.tensor_op[graph.use_tensor], graph.use_op
    panel, column = grid.op_panel, grid.op_column
    begins = (layout.column_x(panel, column) + layout.box_width(panel))[makers]
    ends = layout.column_x(panel, column)[readers]
    middle = layout.lane_y(grid.op_lane) + layout.box_height / 2
    for x0, x1, y0, y1 in zip(begins, ends, middle[makers], middle[readers], strict=True):
        bend = max(8.0, 0.4 * (x1 - x0))
        points = [(x0, y0), (x0 + bend, y0), (x1 - bend, y1), (x1, y1)]
        draw_curve(axes, points, 0.7, zorder=0.9)


def _draw_ops(
    axes: Axes, layout: _Layout, graph: Graph, grid: Grid, op_colours: Sequence[str]
) -> None:
    """Name the ops that have a cell to themselves, where there is room."""
    cells = list(zip(grid.op_panel, grid.op_lane, grid.op_column, strict=True))
    width = layout.box_width(grid.op_panel)
    x = layout.column_x(grid.op_panel, grid.op_column) + width / 2
    y = layout.lane_y(grid.op_lane) + layout.box_height / 2
    for i, name in enumerate(graph.op_names):
        letters = int(width[i] / (LETTER * 7 / 8))
        if cells.count(cells[i]) == 1 and letters >= min(len(name), 3):
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": ink_on(op_colours[i])}
            write(axes, x[i], y[i], shorten(name, letters), **style)


def _draw_strip(axes: Axes, layout: _Layout, grid: Grid, colours: Sequence[str]) -> None:
    """Draw how much each device receives, at the column of the first op that reads it."""
    moved = grid.crossings
    panel, column = grid.op_panel[moved.reader], grid.op_column[moved.reader]
    count = max(p.num_columns for p in grid.panels)
    amounts = np.zeros((len(grid.panels), count, len(colours)))
    np.add.at(amounts, (panel, column, moved.target), moved.num_bytes)
    highest = amounts.sum(axis=2).max()
    tops = np.cumsum(amounts, axis=2) * (STRIP / highest)
    for begin, end, part in zip(layout.panel_x, layout.panel_end, grid.panels, strict=True):
        if part.name != WEIGHTS:
            draw_line(axes, begin, end, layout.strip_y)
    for device, colour in enumerate(colours):
        where = np.nonzero(amounts[:, :, device])
        height = amounts[*where, device] * (STRIP / highest)
        y = layout.strip_y + tops[*where, device] - height
        boxes = boxes_at(layout.column_x(*where), y, layout.box_width(where[0]), height)
        fill(axes, boxes, colour)
    end = layout.panel_x[0] + (MIN_PANEL if grid.panels[0].name == WEIGHTS else -5)
    _write_faint(axes, end, layout.strip_y + 12, "received", ha="right")
    _write_faint(axes, end, layout.strip_y + 3, f"up to {format_bytes(highest)}", ha="right")


def _draw_arcs(axes: Axes, layout: _Layout, graph: Graph, grid: Grid) -> None:
    """Draw what crosses devices: dots within a lane, by area; arcs between two, by thickness."""
    moved = grid.crossings
    lanes = len(grid.lane_names)
    makers = graph.tensor_op[moved.tensor]
    ends = np.sort([grid.op_lane[makers], grid.op_lane[moved.reader]], axis=0)
    amount = np.bincount(ends[0] * lanes + ends[1], weights=moved.num_bytes)
    low, high = np.divmod(np.argsort(-amount, kind="stable")[:MAX_ARCS], lanes)
    shown = amount[low * lanes + high]
    is_within = low == high
    middle = layout.lane_y(np.arange(lanes)) + layout.box_height / 2
    x = layout.arcs_x + MAX_DOT / 2
    for k in np.flatnonzero(is_within & (shown > 0)).tolist():
        share = shown[k] / shown[is_within].max()
        draw_dot(axes, x, middle[low[k]], max(0.8, MAX_DOT / 2 * np.sqrt(share)))
    room = 4 / 3 * (WIDTH - MARGIN - MAX_DOT - x)  # a curve bends three quarters as far
    for k in np.flatnonzero(~is_within & (shown > 0)).tolist():
        reach = x + room * np.sqrt((high[k] - low[k]) / max(4, (high - low).max()))
        points = [(x, middle[low[k]]), (reach, middle[low[k]]), (reach, middle[high[k]])]
        thickness = max(0.5, MAX_THICKNESS * shown[k] / shown[~is_within].max())
        draw_curve(axes, [*points, (x, middle[high[k]])], thickness, alpha=0.5)
    top = layout.lanes_y + layout.lane_height * lanes + 14
    write(axes, layout.arcs_x, top, "crossings", fontweight="bold")
    notes = [("arcs: between two", shown[~is_within]), ("dots: within a row", shown[is_within])]
    for k, (words, amounts) in enumerate(notes):
        foot = layout.strip_y + 1 + 18 * k
        _write_faint(axes, layout.arcs_x, foot + 9, words)
        _write_faint(axes, layout.arcs_x, foot, f"up to {format_bytes(amounts.max(initial=0))}")


def _draw_table(
    axes: Axes,
    layout: _Layout,
    grid: Grid,
    placement: IntArray,
    names: Sequence[str],
    colours: Sequence[str],
) -> None:
    """List the devices that run something: ops, share of compute, weights, bytes received."""
    count = len(names)
    ops = np.bincount(placement, minlength=count)
    work = np.bincount(placement, weights=grid.op_work, minlength=count)
    weights = np.bincount(placement, weights=grid.op_weight_bytes, minlength=count)
    moved = grid.crossings
    received = np.bincount(moved.target, weights=moved.num_bytes, minlength=count)
    used = np.flatnonzero(ops).tolist()
    rows = int((layout.table_y - MARGIN - 16.0) / ROW)
    for k in range(-(-len(used) // rows)):
        _draw_table_head(axes, MARGIN + k * TABLE_WIDTH, layout.table_y)
    for k, d in enumerate(used):
        x = MARGIN + k // rows * TABLE_WIDTH
        y = layout.table_y - (1 + k % rows) * ROW
        fill(axes, boxes_at(np.array([x]), np.array([y - 1.0]), 9.0, 8.5), colours[d])
        write(axes, x + 14, y, shorten(names[d], 16))
        share = f"{work[d] / work.sum():.1%}" if work.any() else "–"
        words = (f"{ops[d]:,}", share, format_bytes(weights[d]), format_bytes(received[d]))
        for (offset, _), word in zip(TABLE_COLUMNS[1:], words, strict=True):
            write(axes, x + offset, y, word, ha="right")
    idle = [name for name, num_ops in zip(names, ops, strict=True) if num_ops == 0]
    if idle:
        write(axes, MARGIN, MARGIN, shorten(f"Without ops: {', '.join(idle)}.", 140), color=FAINT)


def _draw_table_head(axes: Axes, x: float, y: float) -> None:
    for offset, word in TABLE_COLUMNS:
        side = "right" if offset else "left"
        write(axes, x + offset, y, word, ha=side, color=FAINT)
    draw_line(axes, x, x + TABLE_COLUMNS[-1][0], y - 3.5)


def _write_faint(axes: Axes, x: float, y: float, words: str, ha: str = "left") -> None:
    write(axes, x, y, words, ha=ha, fontsize=7, color=FAINT)
