"""Op times measured on this machine: `profile`."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from placewright.cli._options import JsonOption
from placewright.cli._shared import (
    TimedWork,
    print_json,
    print_out,
    say_unless,
    says_after,
    split_words,
    user_errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from placewright.cluster import Cluster


def profile(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model's name (see `placewright list models`), `file.py:function` that returns a"
            " PyTorch module and its inputs (this runs `file.py`), or a `.pt2` file.",
            show_default=False,
        ),
    ],
    devices: Annotated[
        Optional[str],
        typer.Option(
            metavar="DEVICE,...",
            help="Where to time: `cpu,cuda:0`, or CPU cores as devices of their own,"
            " `cpu:0,cpu:1`.  [default: cpu and all GPUs; without a GPU, all cores]",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        Optional[str],
        typer.Option(
            metavar="FILE.toml",
            help="Time on this cluster's devices, and compare with what it would estimate.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also time ops whose times are known.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """
    Time each distinct op of a model on this machine's devices.

    Times are kept on disk, for this and other models; commands that take a cluster file with such
    devices use them instead of estimates. Let nothing else run meanwhile.

    `placewright profile gpt2-small --cluster box.toml`
    """
    with user_errors():
        from placewright.errors import InputError
        from placewright.execute.devices import default_devices, find_devices
        from placewright.execute.profiling import compare_roofline
        from placewright.execute.profiling import profile as time_ops
        from placewright.load import load_capture, load_cluster
        from placewright.report.profiles import describe_profile, show_profile

        if devices is not None and cluster is not None:
            raise InputError("`--devices` and `--cluster` both say where to time; give one.")
        say = say_unless(as_json)
        machine = None if cluster is None else load_cluster(cluster)
        names = split_words(devices) if machine is None else machine.device_names
        chosen = find_devices(tuple(dict.fromkeys(names))) if names else default_devices()
        with says_after(1.0, f"Capturing {model}..."):
            captured = load_capture(model)
        try:
            with closing(TimedWork(as_json)) as work:
                found = time_ops(captured, chosen, again=again, say=work.say, progress=work)
        except KeyboardInterrupt:
            typer.echo("Stopped. What was timed is kept.", err=True)
            raise typer.Exit(130) from None
        pairs = [
            (each, None if machine is None else compare_roofline(captured.graph, each, machine))
            for each in found
        ]
        if machine is not None:
            _warn(machine, say)
        if as_json:
            load = work.describe_load()
            print_json([describe_profile(captured.graph, *pair) | load for pair in pairs])
        else:
            for pair in pairs:
                print_out(show_profile(captured.graph, *pair))
            if work.disturbance:
                print_out(work.disturbance)


def _warn(cluster: Cluster, say: Callable[[str], None]) -> None:
    """Say which devices' times will not be found, since the cluster names another model."""
    from placewright.execute.op_times import device_keys, processor_model

    keys = device_keys(cluster.device_names, cluster.device_kinds, cluster.device_models)
    lost = [name for name, key in zip(cluster.device_names, keys, strict=True) if key is None]
    if lost:
        say(
            f"Cluster `{cluster.name}` will not use the times of {', '.join(lost)}: it says another"
            f' `model` than this machine\'s. For its CPUs that is "{processor_model()}".'
        )
