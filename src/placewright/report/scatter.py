"""
Predicted against measured times: a panel a model.

This module owns how such a picture looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from placewright.errors import InputError
from placewright.report._figure import (
    FAINT,
    INK,
    check_picture_path,
    colour,
    new_figure,
    plain_style,
    printable,
    save_figure,
)
from placewright.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS, SIDE = 3, 170.0
LEFT, FOOT, GAP_X, GAP_Y, HEAD = 58.0, 62.0, 62.0, 58.0, 52.0
STEPS = (
    (1.0,),
    (1.0, 3.0),
    (1.0, 2.0, 5.0),
    tuple(range(1, 10)),
    tuple(k / 10 for k in range(10, 100, 5)),
    tuple(k / 10 for k in range(10, 100)),
)
"""Digits of the times at ticks, the roundest first."""

MIN_GAP = 0.16
"""Between two ticks, of the axis."""


@dataclass(frozen=True)
class Panel:
    """A model's plans."""

    title: str
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    band: tuple[float, float] | None = None  # measured by predicted, from and to


@plain_style()
def draw_scatter(
    panels: Sequence[Panel],
    path: str | Path,
    *,
    title: str = "Simulated against measured step times",
    axis: str = "simulated",
) -> None:
    """
    Draw predicted against measured times, as SVG or PNG, logarithmic, with the diagonal.

    The band is where measured times are expected. Guarantees: equal arguments give equal bytes.

    Raises
    ------
    InputError
        There is no panel, matplotlib is missing, or the file cannot be written.
    """
    check_picture_path(path)
    if not panels or not all(panel.measured_s for panel in panels):
        raise InputError("There is nothing to draw; expected panels with at least one plan each.")
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width = LEFT + columns * SIDE + (columns - 1) * GAP_X + 20.0
    height = HEAD + rows * SIDE + (rows - 1) * GAP_Y + FOOT
    figure = new_figure(width, height)
    for k, panel in enumerate(panels):
        row, column = divmod(k, columns)
        x = LEFT + column * (SIDE + GAP_X)
        y = height - HEAD - SIDE - row * (SIDE + GAP_Y)
        axes = figure.add_axes((x / width, y / height, SIDE / width, SIDE / height))
        _draw_panel(axes, panel, axis)
    words: dict[str, Any] = {"parse_math": False}
    figure.text(14 / width, 1 - 20 / height, printable(title), fontsize=12, weight="bold", **words)
    caption = "A point is a plan. Line: equal."
    if any(panel.band for panel in panels):
        caption += " Each is predicted with constants fitted to others. Band: 90 % interval."
    figure.text(14 / width, 10 / height, caption, fontsize=7, color=FAINT, **words)
    save_figure(figure, path, title)


def _draw_panel(axes: Axes, panel: Panel, axis: str) -> None:
    predicted, measured = np.array(panel.predicted_s), np.array(panel.measured_s)
    low = min(predicted.min(), measured.min()) / 1.15
    high = max(predicted.max(), measured.max()) * 1.15
    ends = np.array([low, high])
    if panel.band is not None:
        lower, upper = (ends * factor for factor in panel.band)
        axes.fill_between(ends, lower, upper, color=colour(0), alpha=0.12, linewidth=0)
    axes.plot(ends, ends, color=FAINT, linewidth=0.8)
    style: dict[str, Any] = {"marker": "o", "linestyle": "none", "markersize": 4.0}
    axes.plot(predicted, measured, mfc=colour(5), mec="none", **style)
    axes.set_title(printable(panel.title), fontsize=9, color=INK, parse_math=False)
    _scale(axes, low, high)
    axes.set_xlabel(axis, fontsize=8, color=INK)
    axes.set_ylabel("measured", fontsize=8, color=INK)


def _scale(axes: Axes, low: float, high: float) -> None:
    """Give both axes the same logarithmic scale, with times at a few places."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    shown = _ticks(low, high)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for each in (axes.xaxis, axes.yaxis):
        each.set_major_locator(FixedLocator(shown))
        each.set_minor_locator(NullLocator())
        each.set_major_formatter(FuncFormatter(lambda time_s, _: _tick_name(time_s)))
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.tick_params(labelsize=7, color=FAINT, labelcolor=INK)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c8c8c8")


def _ticks(low: float, high: float) -> list[float]:
    """Choose times to show: the roundest of which there are two, as many as there is room for."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for steps in STEPS:
        ticks = [step * 10.0**power for power in powers for step in steps]
        shown = [tick for tick in ticks if low <= tick <= high]
        if len(shown) > 1:
            break
    chosen = shown[:1]
    for tick in shown[1:]:
        if np.log(tick / chosen[-1]) > MIN_GAP * np.log(high / low):
            chosen.append(tick)
    return chosen


def _tick_name(time_s: float) -> str:
    number, _, unit = format_time(time_s).partition(" ")
    short = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{short} {unit}"
