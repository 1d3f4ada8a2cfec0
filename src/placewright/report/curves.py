"""
Learning curves: what several runs had found, by samples and by time.

This module owns reading histories, how seeds become one curve, and how curves look.

Letters: ``R`` runs of a label, ``X`` places on an axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np

from placewright import files
from placewright.arguments import read_number
from placewright.errors import InputError
from placewright.graph import BoolArray, FloatArray
from placewright.report._figure import (
    FAINT,
    INK,
    check_picture_path,
    colour,
    new_figure,
    plain_style,
    printable,
    save_figure,
    write,
)
from placewright.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, PLOT_HEIGHT = 720.0, 250.0
LEFT, RIGHT, NAMES, GAP, FOOT = 58.0, 20.0, 76.0, 22.0, 52.0
LEGEND_COLUMNS, LEGEND_ROW = 4, 14.0
LOG_FROM = 4.0
"""The y axis is logarithmic if the largest value is so many times the smallest."""
LABEL_GAP = 10.0
AXES = (("samples", "samples"), ("wall_s", "seconds"))
CAPTION = (
    "Thick: best so far, dashed while it does not fit memory. Thin: mean of recent"
    " samples. Bands: lowest to highest of several runs."
)


MAX_S, MAX_SAMPLES = 1e12, 2**53
"""What a history's figures may be; past these no axis can show them."""

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_S)]


class Point(msgspec.Struct, frozen=True):
    """One entry of a history: the best so far, or the mean of recent samples too."""

    wall_s: _Seconds
    samples: Annotated[int, msgspec.Meta(ge=0, le=MAX_SAMPLES)]
    objective_s: _Seconds
    overflow_bytes: int = 0
    placer: str = ""
    mean_s: _Seconds | None = None
    measured: bool = False  # on real devices, not simulated
    expected: bool = False  # on this machine, by simulation

    @property
    def basis(self) -> str:
        """Tell what its times are."""
        return "measured" if self.measured else "expected" if self.expected else "simulated"


@dataclass(frozen=True)
class RunHistory:
    """A run to draw. Runs of the same label are seeds of one curve."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, eq=False)
class _Steps:
    """What the runs of one label had found at places on an axis; NaN where one knew nothing."""

    x: FloatArray  # [X]
    values: FloatArray  # [R, X]
    fits: BoolArray  # [X] for more than half of the runs


def load_run(path: str | Path, label: str | None = None) -> RunHistory:
    """
    Load a run's history.

    Parameters
    ----------
    path
        A folder that `placewright place -o` wrote, or its ``history.jsonl``.
    label
        What to call it; by default the name of its placer.

    Raises
    ------
    InputError
        There is no history, or it cannot be read.
    """
    file = Path(path) / "history.jsonl" if Path(path).is_dir() else Path(path)
    data = files.read(file, "history file")
    try:
        points = tuple(msgspec.json.decode(line, type=Point) for line in data.splitlines() if line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"`{file}` is not a history file: {files.reason_of(error)}.") from None
    if not points:
        raise InputError(f"The history file `{file}` is empty; nothing was found in that run.")
    return RunHistory(points[-1].placer.partition(":")[0] if label is None else label, points)


@plain_style()
def draw_curves(
    runs: Sequence[RunHistory],
    path: str | Path,
    *,
    references: Mapping[str, float] | None = None,
    title: str | None = None,
) -> None:
    """
    Draw what runs had found, over samples and over time, as SVG or PNG.

    The best so far is a thick line, dashed while it does not fit memory, and the mean of late
    samples a thin one. Runs of the same label are drawn as their median, with a band from the
    lowest to the highest.

    Guarantees: equal arguments give equal bytes.

    Parameters
    ----------
    runs
        What to draw; at least one.
    path
        The file, ``.svg`` or ``.png``.
    references
        Times to compare with, in seconds, by name: level lines.
    title
        The line above the picture; by default it says whether times are simulated, expected or
        measured.

    Raises
    ------
    InputError
        There is no run, a time cannot be shown, matplotlib is missing, or the file cannot be
        written.
    """
    check_picture_path(path)
    for name, time_s in (references or {}).items():
        read_number(time_s, name, 0, MAX_S)
    if not runs or not all(run.points for run in runs):
        raise InputError("There is nothing to draw; expected runs with at least one point each.")
    if title is None:
        how = {run.points[-1].basis for run in runs}
        title = f"Best {' or '.join(sorted(how))} step time so far"
    labels = [*dict.fromkeys(run.label for run in runs)]
    by_label = [[run.points for run in runs if run.label == label] for label in labels]
    rows = -(-len(labels) // LEGEND_COLUMNS)
    height = FOOT + PLOT_HEIGHT + LEGEND_ROW * rows + 42.0
    figure = new_figure(WIDTH, height)
    plots = _make_plots(figure, height, NAMES if references else 0.0)
    for axes, (field, _) in zip(plots, AXES, strict=True):
        for k, histories in enumerate(by_label):
            _draw_label(axes, histories, field, colour(k))
    _scale(plots, runs, references or {})
    _draw_references(plots, references or {})
    _draw_legend(figure, labels, [len(histories) for histories in by_label], height, title)
    save_figure(figure, path, title)


def _make_plots(figure: Figure, height: float, room: float) -> list[Axes]:
    width = (WIDTH - LEFT - RIGHT - room - GAP) / 2
    plots: list[Axes] = []
    for k, (_, name) in enumerate(AXES):
        x = LEFT + k * (width + GAP)
        box = (x / WIDTH, FOOT / height, width / WIDTH, PLOT_HEIGHT / height)
        axes = figure.add_axes(box)
        axes.set_xlabel(name, fontsize=8, color=INK)
        axes.tick_params(labelsize=8, color=FAINT, labelcolor=INK, labelleft=k == 0)
        axes.grid(color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color("#c8c8c8")
        plots.append(axes)
    return plots


def _draw_label(
    axes: Axes, histories: Sequence[tuple[Point, ...]], field: str, colour: str
) -> None:
    """Draw the runs of one label."""
    best = _steps(histories, field, "objective_s")
    middle = np.nanmedian(best.values, axis=0)
    line: dict[str, Any] = {"color": colour, "drawstyle": "steps-post"}
    if len(histories) > 1:
        lowest, highest = np.nanmin(best.values, axis=0), np.nanmax(best.values, axis=0)
        axes.fill_between(
            best.x, lowest, highest, step="post", color=colour, alpha=0.18, linewidth=0
        )
    until = _continued(best.fits)
    axes.plot(best.x, np.where(until, middle, np.nan), linewidth=1.8, **line)
    before = _continued(~best.fits)
    if before.any():
        dashes = (0, (2.2, 1.4))
        axes.plot(best.x, np.where(before, middle, np.nan), lw=1.4, linestyle=dashes, **line)
    axes.plot(best.x[-1:], middle[-1:], marker="o", markersize=3.2, color=colour)
    learned = [tuple(p for p in points if p.mean_s is not None) for points in histories]
    learned = [points for points in learned if points]
    if learned:
        mean = _steps(learned, field, "mean_s")
        middle = np.nanmedian(mean.values, axis=0)
        axes.plot(mean.x, middle, linewidth=0.8, alpha=0.55, color=colour)


def _steps(histories: Sequence[tuple[Point, ...]], field: str, value: str) -> _Steps:
    """Carry what each run had found on to every place where some run found something."""
    places = [np.array([getattr(p, field) for p in points], float) for points in histories]
    x = np.unique(np.concatenate(places))
    values = np.full((len(histories), len(x)), np.nan)
    fits = np.zeros((len(histories), len(x)), dtype=np.bool_)
    for r, (points, place) in enumerate(zip(histories, places, strict=True)):
        last = np.searchsorted(place, x, side="right") - 1
        known = last >= 0
        found = np.array([getattr(p, value) for p in points], float)
        values[r, known] = found[last[known]]
        fits[r, known] = np.array([p.overflow_bytes == 0 for p in points])[last[known]]
    num_known = (~np.isnan(values)).sum(axis=0)
    return _Steps(x, values, 2 * fits.sum(axis=0) > num_known)


def _continued(chosen: BoolArray) -> BoolArray:
    """Add the place after each chosen one: a step lasts until there."""
    longer = chosen.copy()
    longer[1:] |= chosen[:-1]
    return longer


def _scale(plots: Sequence[Axes], runs: Sequence[RunHistory], names: Mapping[str, float]) -> None:
    """Give all plots the same y axis, logarithmic if values are far apart."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    points = [point for run in runs for point in run.points]
    shown = [p.objective_s for p in points] + [p.mean_s for p in points if p.mean_s is not None]
    values = np.array([*shown, *names.values()])
    low, high = float(values.min()), float(values.max())
    is_log = low > 0 and high / low > LOG_FROM
    ends = (
        (low / 1.15, high * 1.15) if is_log else (max(0.0, low - 0.08 * high), 1.04 * high or 1.0)
    )
    for axes in plots:
        axes.set_xlim(left=0)
        if is_log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(FixedLocator(_ticks(*ends)))
            axes.yaxis.set_minor_locator(FixedLocator([]))
        axes.set_ylim(*ends)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _tick_name(y)))
    plots[0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    for axes in plots:
        axes.locator_params(axis="x", nbins=5)


def _ticks(low: float, high: float) -> list[float]:
    """Give round numbers in a range, the fewer to each power of ten the wider it is."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    steps = (1, 1.5, 2, 3, 4, 6, 8) if high / low < 20 else (1, 2, 5) if high / low < 1e3 else (1,)
    found = [step * 10.0**power for power in powers for step in steps]
    return [tick for tick in found if low <= tick <= high]


def _tick_name(time_s: float) -> str:
    """Write a time without the zeros that `format_time` leaves."""
    number, _, unit = format_time(max(time_s, 0.0)).partition(" ")
    return f"{number.rstrip('0').rstrip('.')} {unit}" if time_s > 0 else "0"


def _draw_references(plots: Sequence[Axes], references: Mapping[str, float]) -> None:
    """Draw level lines, and their names beside them, moved up where they would overlap."""
    to_scale = np.log if plots[0].get_yscale() == "log" else np.asarray
    low, high = to_scale(plots[0].get_ylim())
    y = -np.inf
    for name in sorted(references, key=lambda name: (references[name], name)):
        for axes in plots:
            line = (0, (1, 1.5))
            axes.axhline(references[name], color=FAINT, linewidth=0.8, linestyle=line)
        share = (to_scale(references[name]) - low) / (high - low)
        y = max(share, y + LABEL_GAP / PLOT_HEIGHT)
        place: dict[str, Any] = {"transform": plots[-1].transAxes, "va": "center"}
        write(plots[-1], 1.02, y, printable(name)[:15], color=FAINT, **place)


def _draw_legend(
    figure: Figure, labels: Sequence[str], counts: Sequence[int], height: float, title: str
) -> None:
    from matplotlib.lines import Line2D

    top = 1 - 20.0 / height
    style: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "color": INK}
    figure.text(14 / WIDTH, top, printable(title), parse_math=False, **style)
    handles = [Line2D([], [], color=colour(k), linewidth=1.8) for k in range(len(labels))]
    names = [
        printable(label)[:32] + (f" ({count} runs)" if count > 1 else "")
        for label, count in zip(labels, counts, strict=True)
    ]
    place = (8 / WIDTH, 1 - 26.0 / height)
    legend = figure.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=place,
        ncols=LEGEND_COLUMNS,
        fontsize=8,
        frameon=False,
        labelcolor=INK,
        borderpad=0.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.text(14 / WIDTH, 10 / height, CAPTION, fontsize=7, color=FAINT)
