"""Arguments and options that several commands take."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model's name (see `placewright list models`), a `.graph.json`, `.onnx` or `.pt2`"
        " file, or `file.py:function` that returns a PyTorch module and its inputs (this runs"
        " `file.py`).",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="A cluster's name (see `placewright list clusters`) or a `.toml` file; `NAME-tight`"
        " is `NAME` with `--memory 60%`.",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    Optional[str],
    typer.Option(
        help="Give every device but CPUs this much memory: a size (`8GiB`), or a share of what the"
        " model needs on one of them alone (`60%`).",
        show_default=False,
    ),
]
ProfiledOption = Annotated[
    bool,
    typer.Option(
        "--profiled/--no-profiled",
        help="With a cluster file: use the op times that `placewright profile` has measured on"
        " such devices.",
    ),
]
DimOption = Annotated[
    Optional[list[str]],
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="The size of a dimension that an ONNX file leaves open (may be repeated).",
        show_default=False,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, for other programs to read.")
]
