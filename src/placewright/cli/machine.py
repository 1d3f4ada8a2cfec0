"""The machine that this runs on: `probe`."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Optional

import typer

from placewright.cli._options import JsonOption
from placewright.cli._shared import TimedWork, print_aside, print_json, split_words, user_errors


def probe(
    devices: Annotated[
        Optional[str],
        typer.Option(
            metavar="DEVICE,...",
            help="What to measure: `cpu,cuda:0`, or CPU cores as devices of their own,"
            " `cpu:0,cpu:1`.  [default: cpu and all GPUs; without a GPU, all cores]",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.toml",
            help="The cluster file to write.  [default: standard output]",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        Optional[str],
        typer.Option(help="The cluster's name.  [default: this-machine]", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """
    Measure this machine, and write it as a cluster file.

    Rates, memory, links between all devices: half a minute on two CPU cores, less on a GPU. Let
    nothing else run meanwhile; what others used of the cores is said, and noted in the file.

    `placewright probe -o box.toml`
    """
    with user_errors():
        from placewright.errors import InputError
        from placewright.execute.probing import probe as measure
        from placewright.files import check_writable
        from placewright.report.facts import describe_cluster
        from placewright.report.terminal import show_cluster

        if output is not None:
            if output.suffix != ".toml":
                raise InputError(
                    f"`{output}` is no name for a cluster file; expected one that ends in `.toml`."
                )
            check_writable(output)
        with closing(TimedWork(as_json)) as work:
            cluster = measure(split_words(devices), name=name, progress=work)
        if work.disturbance:
            cluster = replace(cluster, source=f"{cluster.source}\n{work.disturbance}")
        if output is not None:
            cluster.save(output)
        if as_json:
            print_json(describe_cluster(cluster) | work.describe_load())
            return
        print_aside(show_cluster(cluster))
        if output is None:
            print(cluster.to_toml(), end="", flush=True)
        else:
            print_aside(f"The cluster is in {output}.")
