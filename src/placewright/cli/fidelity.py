"""Simulated against measured: `bench fidelity`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from placewright.cli._shared import print_out, say_unless, user_errors

if TYPE_CHECKING:
    from placewright.cluster import Cluster
    from placewright.execute.calibration import Calibration

WIDE = 140
"""Columns that the tables need."""

PICTURES = {"raw": False, "calibrated": True}
"""The pictures, and whether they show calibrated times."""


def fidelity(
    quick: bool,
    out: Path | None,
    models: Sequence[str] | None,
    cluster: str | None,
    plans: int | None,
    render_only: bool,
    markdown: Path | None,
    refused: Sequence[str],
) -> None:
    """Measure plans on this machine, compare with the simulator, and keep the calibration."""
    with user_errors():
        from placewright.bench.fidelity import FidelityChoice, run_fidelity
        from placewright.bench.fidelity_book import FidelityBook
        from placewright.bench.fidelity_tables import make_panels, make_tables, read_fidelity
        from placewright.bench.tables import show, write_markdown
        from placewright.cluster import Cluster
        from placewright.errors import InputError
        from placewright.report.scatter import draw_scatter

        if refused:
            raise InputError(f"`bench fidelity` has no `{refused[0]}`.")
        say = say_unless(False)
        book = FidelityBook(out or Path("bench-fidelity"))
        if not render_only:
            choice = FidelityChoice(is_quick=quick, models=models, num_plans=plans, cluster=cluster)
            try:
                run_fidelity(book, choice, say)
            except KeyboardInterrupt:
                typer.echo(f"Stopped. What is done is in {book.path}.", err=True)
                raise typer.Exit(130) from None
        say("Fitting to halves of the plans, and testing with the others...")
        found = read_fidelity(book, models)
        tables = make_tables(found)
        for each in tables:
            print_out(show(each), WIDE)
        if not render_only:
            say(_keep(found.calibration, Cluster.load(book.cluster_path)))
        if markdown is not None:
            write_markdown(markdown, "fidelity", tables)
        places = [book.folder / "fidelity"]
        if markdown is not None and (markdown.parent / "images").is_dir():
            places.append(markdown.parent / "images" / markdown.stem)
        for name, is_calibrated in PICTURES.items():
            axis = "calibrated" if is_calibrated else "simulated"
            panels = make_panels(found, is_calibrated)
            title = f"{axis.capitalize()} against measured step times"
            for place in places:
                path = place.with_name(f"{place.name}-{name}.svg")
                draw_scatter(panels, path, title=title, axis=axis)


def _keep(calibration: Calibration, cluster: Cluster) -> str:
    """Keep a calibration, unless one of more plans is there; say so."""
    from placewright.execute.calibration import read_calibration, save_calibration

    before, count = read_calibration(cluster), len(calibration.residuals)
    if before is not None and len(before.residuals) > count:
        return f"The calibration of {len(before.residuals)} plans stays; this one is of {count}."
    path = save_calibration(calibration, cluster)
    return f"The calibration is kept in {path}." if path else "The calibration is not kept."
