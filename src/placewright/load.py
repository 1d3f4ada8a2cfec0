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
    if not _looks_like_path(model):
        raise InputError(
            f"There is no model `{model}`. The models are: {', '.join(model_names())}; or give the"
            " path of a `.graph.json` file."
        )
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
    if not _looks_like_path(cluster):
        raise InputError(
            f"There is no cluster `{cluster}`. The presets are: {', '.join(Cluster.presets())}; or"
            " give the path of a `.toml` file."
        )
    return Cluster.load(cluster)


def _looks_like_path(text: str | Path) -> bool:
    return "." in str(text) or "/" in str(text) or os.path.exists(text)
