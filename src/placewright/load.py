"""Names and paths, as people type them, become graphs and clusters."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.graph import Graph

_SUFFIX = ".graph.json.gz"


def model_names() -> tuple[str, ...]:
    """List the models that ship with placewright."""
    folder = resources.files("placewright").joinpath("models")
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def load_model(model: str | Path) -> Graph:
    """
    Load a model that ships with placewright by its name, or a graph file by its path.

    Raises
    ------
    InputError
        It is neither, or the file is wrong.
    """
    if str(model) in model_names():
        folder = resources.files("placewright").joinpath("models")
        with resources.as_file(folder.joinpath(f"{model}{_SUFFIX}")) as path:
            return Graph.load(path)
    _check_path("model", model, model_names(), ".graph.json")
    return Graph.load(model)


def load_cluster(cluster: str | Path) -> Cluster:
    """
    Load a cluster preset by its name, or a cluster file by its path.

    Raises
    ------
    InputError
        It is neither, or the file is wrong.
    """
    if str(cluster) in Cluster.presets():
        return Cluster.preset(str(cluster))
    _check_path("cluster", cluster, Cluster.presets(), ".toml")
    return Cluster.load(cluster)


def _check_path(what: str, text: str | Path, known: tuple[str, ...], suffix: str) -> None:
    """Refuse what is no known name and does not look like a path either."""
    if "." not in str(text) and "/" not in str(text) and not os.path.exists(text):
        raise InputError(
            f"There is no {what} `{text}`. Those that ship with placewright are:"
            f" {', '.join(known)}; or give the path of a `{suffix}` file."
        )
