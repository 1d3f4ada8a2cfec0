"""
A placement told in names, as plans do, turned into numbers without a cluster.

This module owns what a device's name says of its kind, and the order of devices that no cluster
gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from placewright.errors import InputError
from placewright.graph import Graph, IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class NamedPlacement:
    """A placement and the devices it speaks of. ``N`` ops, ``D`` devices."""

    device_names: tuple[str, ...]  # [D]
    device_kinds: tuple[str, ...]  # [D] "cpu" or "accelerator"
    placement: IntArray  # [N]


def read_placement(
    graph: Graph, devices: Mapping[str, str], known: Iterable[str] = ()
) -> NamedPlacement:
    """
    Turn op names and device names into a placement.

    Parameters
    ----------
    graph
        The model.
    devices
        The device of every op.
    known
        All devices in the cluster's order, those without ops too. Others follow by name, CPUs
        first.

    Raises
    ------
    InputError
        An op is missing or unknown.
    """
    for name in devices.keys() ^ graph.op_index.keys():
        where = "placement" if name in devices else "graph"
        raise InputError(
            f"The placement should have a device for every op of graph `{graph.name}` and nothing"
            f" else; op `{name}` is only in the {where}."
        )
    names = (*dict.fromkeys([*known, *sorted(set(devices.values()), key=_order)]),)
    number = {name: d for d, name in enumerate(names)}
    return NamedPlacement(
        device_names=names,
        device_kinds=tuple(kind_of(name) for name in names),
        placement=np.array([number[devices[name]] for name in graph.op_names], dtype=np.int64),
    )


def kind_of(name: str) -> str:
    """Tell a CPU by its name: ``cpu``, ``cpu:0``, ``host0/cpu``. All else is an accelerator."""
    return "cpu" if re.fullmatch(r"(.*/)?cpu(:\d+)?", name) else "accelerator"


def _order(name: str) -> tuple[bool, list[tuple[bool, int, str]]]:
    """Sort CPUs first, and numbers as numbers."""
    parts = re.split(r"(\d+)", name)
    keys = [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
    return kind_of(name) != "cpu", keys
