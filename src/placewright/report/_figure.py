"""
Figures in points, and files of them that are the same every time.

This module owns how matplotlib is loaded (never through pyplot and its global state), the colours
of devices, and the bytes of a picture: no date, no version, ids that depend on nothing but content.
"""

from __future__ import annotations

import colorsys
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from placewright import files
from placewright.errors import InputError
from placewright.graph import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS_PER_INCH = 72
PIXELS_PER_POINT = 2
INK = "#222222"
FAINT = "#767676"
CPU_FILL, CPU_EDGE = "#ffffff", "#8a8a8a"

PALETTE = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#444444"),
    *("#882255", "#44aa99", "#999933", "#332288", "#cc6677", "#117733", "#ddcc77", "#aa4499"),
)
"""Okabe and Ito's colours, told apart by the colour-blind; then Tol's muted ones."""

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "placewright",
    "svg.fonttype": "none",
}


def colour(number: int) -> str:
    """Give the colour of the accelerator or run of a number; no two below 64 are equal."""
    if number < len(PALETTE):
        return PALETTE[number]
    hue = 0.618034 * number % 1  # the golden ratio spreads hues evenly, however many there are
    red, green, blue = colorsys.hsv_to_rgb(
        hue, 0.55 + 0.15 * (number % 3), 0.6 + 0.2 * (number % 2)
    )
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def device_colours(kinds: Sequence[str]) -> tuple[str, ...]:
    """Give every device a colour of its own; CPUs are white."""
    numbers = iter(range(len(kinds)))
    return tuple(CPU_FILL if kind == "cpu" else colour(next(numbers)) for kind in kinds)


def ink_on(colour: str) -> str:
    """Give the colour of words that are read on another: dark ones on light, light on dark."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 115 else "#ffffff"


def check_picture_path(path: str | Path) -> None:
    """
    Refuse a name that is no picture's.

    Raises
    ------
    InputError
        `path` ends neither in ``.svg`` nor in ``.png``.
    """
    if Path(path).suffix not in (".svg", ".png"):
        raise InputError(
            f"`{path}` is no name for a picture; expected one that ends in `.svg` or `.png`."
        )


@contextmanager
def plain_style() -> Iterator[None]:
    """
    Draw as matplotlib does by itself, whatever the user's settings are, and give those back.

    Raises
    ------
    InputError
        matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise InputError(
            'Pictures need matplotlib: `pip install "placewright[pictures]"`.'
        ) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def new_figure(width_pt: float, height_pt: float) -> Figure:
    """Make an empty figure."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_pt / POINTS_PER_INCH, height_pt / POINTS_PER_INCH))


def sheet(figure: Figure) -> Axes:
    """Give axes over the whole figure, in points from its bottom left corner, with no frame."""
    width, height = figure.get_size_inches() * POINTS_PER_INCH
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return axes


def write(axes: Axes, x: float, y: float, words: str, **style: Any) -> None:
    """Write words as they are (a ``$`` begins no formula), with their foot at a point."""
    settings: dict[str, Any] = {"fontsize": 8, "color": INK, "va": "baseline"} | style
    axes.text(x, y, printable(words), parse_math=False, **settings)


def printable(words: str) -> str:
    """Replace what cannot be written in a picture, such as the letters XML forbids."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def shorten(words: str, length: int) -> str:
    """Cut words to a length, their beginning first: the end of a module's path tells more."""
    return words if len(words) <= length else "…" + words[1 - length :]


def boxes_at(
    x: FloatArray, y: FloatArray, width: FloatArray | float, height: FloatArray | float
) -> FloatArray:  # [n, 5, 2]
    """Give the corners of boxes, in twentieths of a point to keep files small."""
    left, right, foot, top = np.broadcast_arrays(x, x + width, y, y + height)
    corners = [(left, foot), (right, foot), (right, top), (left, top), (left, foot)]
    return np.round(20 * np.array(corners).transpose(2, 0, 1)) / 20


def fill(axes: Axes, boxes: FloatArray, colour: str, zorder: float = 1.0) -> None:
    """Fill boxes of one colour, as one path; white ones get an outline, so that they are seen."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    if len(boxes) == 0:
        return
    codes = [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    outline = Outline(boxes.reshape(-1, 2), np.tile(codes, len(boxes)))
    is_white = colour == CPU_FILL
    edge = {"edgecolor": CPU_EDGE if is_white else "none", "linewidth": 0.4 if is_white else 0.0}
    axes.add_patch(PathPatch(outline, facecolor=colour, clip_on=False, zorder=zorder, **edge))


def draw_line(axes: Axes, begin: float, end: float, y: float) -> None:
    """Draw a thin level line."""
    from matplotlib.lines import Line2D

    axes.add_line(Line2D([begin, end], [y, y], color="#c8c8c8", linewidth=0.6))


def draw_dot(axes: Axes, x: float, y: float, radius: float) -> None:
    """Draw a dot."""
    from matplotlib.patches import Circle

    axes.add_patch(Circle((x, y), radius, facecolor=INK, linewidth=0, zorder=2))


def draw_curve(
    axes: Axes, points: Sequence[tuple[float, float]], thickness: float, **style: Any
) -> None:
    """Draw a Bézier curve through the first and last of four points."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    settings = {"facecolor": "none", "edgecolor": INK, "capstyle": "butt"} | style
    axes.add_patch(PathPatch(curve, linewidth=thickness, **settings))


def save_figure(figure: Figure, path: str | Path, title: str) -> None:
    """
    Write a figure as SVG or PNG, told by the name. Equal figures give equal bytes.

    Raises
    ------
    InputError
        The name is no picture's, or the file cannot be written.
    """
    check_picture_path(path)
    kind = Path(path).suffix[1:]
    metadata: dict[str, str | None] = {"Title": printable(title)}
    metadata |= {"Creator": "placewright", "Date": None} if kind == "svg" else {"Software": None}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script the font lacks
        figure.savefig(
            buffer, format=kind, dpi=POINTS_PER_INCH * PIXELS_PER_POINT, metadata=metadata
        )
    files.write(path, buffer.getvalue())
