"""Pictures: `draw` and `curves`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from placewright.cli._options import DimOption, JsonOption
from placewright.cli._shared import load_graph, print_json, print_out, user_errors

if TYPE_CHECKING:
    from placewright.graph import Graph

PictureOption = Annotated[
    Optional[Path],
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="The picture to write, `.svg` or `.png`; by default one of each.",
        show_default=False,
    ),
]


def draw(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN",
            help="A plan, a folder that `placewright place -o` wrote, or a placement: a JSON object"
            " from op names to device names.",
            show_default=False,
        ),
    ],
    model: Annotated[
        Optional[str],
        typer.Option(
            help="The model, if its name in the plan is none of `placewright list models`.",
            show_default=False,
        ),
    ] = None,
    output: PictureOption = None,
    dim: DimOption = None,
    as_json: JsonOption = False,
) -> None:
    """
    Draw which device runs what, as `placement.svg` and `placement.png` beside the plan.

    `placewright draw run/`
    """
    with user_errors():
        from placewright.report._figure import check_picture_path
        from placewright.report.drawing import draw_placement
        from placewright.report.named import read_placement

        file = plan / "plan.json" if plan.is_dir() else plan
        paths = _pictures(output, file.with_name("placement"))
        for path in paths:
            check_picture_path(path)
        title, graph, devices, known = _drawn(file, model, dim)
        named = read_placement(graph, devices, known)
        where = named.device_names, named.device_kinds, named.placement
        for path in paths:
            draw_placement(graph, *where, path, title)
        _tell_pictures(paths, as_json)


def _drawn(
    file: Path, model: str | None, dim: list[str] | None
) -> tuple[str, Graph, dict[str, str], list[str]]:
    """Load what a picture shows: its title, the graph, each op's device, and all devices known."""
    from placewright.errors import InputError
    from placewright.plan import Plan, load_plan_or_placement
    from placewright.units import format_time
    from placewright.zoo import RECIPES

    loaded = load_plan_or_placement(file)
    if not isinstance(loaded, Plan):
        if model is None:
            raise InputError(f"`{file}` is a placement, which names no model; add `--model`.")
        return f"{model} by {file.name}", load_graph(model, dim), loaded, []
    if model is None and loaded.graph.name not in RECIPES:
        raise InputError(
            f"Plan `{loaded.name}` is for graph `{loaded.graph.name}`, which is no model that ships"
            " with placewright. Say where it comes from with `--model`."
        )
    graph = load_graph(model or loaded.graph.name, dim)
    if graph.fingerprint != loaded.graph.fingerprint:
        raise InputError(
            f"Plan `{loaded.name}` was made for graph `{loaded.graph.name}` (fingerprint"
            f" {loaded.graph.fingerprint[:12]}), not for `{graph.name}`"
            f" ({graph.fingerprint[:12]}). Give that one with `--model`."
        )
    verdict = "" if loaded.predicted.is_feasible else ", does not fit memory"
    time = format_time(loaded.predicted.makespan_s)
    title = f"{loaded.name}, simulated step {time}{verdict}"
    return title, graph, loaded.devices, [*loaded.predicted.peak_bytes]


def curves(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Folders that `placewright place -o` wrote, each as `DIR` or `LABEL=DIR`; those of"
            " one label (by default the placer) are drawn as one curve.",
            show_default=False,
        ),
    ],
    output: PictureOption = None,
    reference: Annotated[
        Optional[list[str]],
        typer.Option(
            metavar="NAME=TIME",
            help="A time to compare with, such as `expert-strong=570ms` (may be repeated).",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """
    Draw what runs had found, by samples and by time, as `curves.svg` and `curves.png`.

    `placewright curves runs/annealing-* mine=runs/mine --reference expert-strong=570ms`
    """
    with user_errors():
        from placewright.report._figure import check_picture_path
        from placewright.report.curves import draw_curves, load_run
        from placewright.units import parse_time

        paths = _pictures(output, Path("curves"))
        for path in paths:
            check_picture_path(path)
        times = {
            name: parse_time(text, f"`--reference {name}`")
            for name, text in (_name_and_value(text, "--reference") for text in reference or [])
        }
        histories = []
        for text in runs:
            label, equals, folder = text.partition("=")
            is_plain = not equals or Path(text).exists()
            histories.append(load_run(text) if is_plain else load_run(folder, label))
        for path in paths:
            draw_curves(histories, path, references=times)
        _tell_pictures(paths, as_json)


def _name_and_value(text: str, option: str) -> tuple[str, str]:
    from placewright.errors import InputError

    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"`{option} {text}` cannot be used; expected `{option} NAME=VALUE`.")
    return name, value


def _pictures(output: Path | None, default: Path) -> list[Path]:
    """Give the picture that was asked for, or one of each kind."""
    both = [default.with_suffix(".svg"), default.with_suffix(".png")]
    return both if output is None else [output]


def _tell_pictures(paths: list[Path], as_json: bool) -> None:
    if as_json:
        print_json({"paths": [str(path) for path in paths]})
    else:
        print_out(f"The picture is in {' and '.join(str(path) for path in paths)}.")
