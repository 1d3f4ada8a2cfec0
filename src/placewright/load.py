"""
Names and paths, as people type them, become graphs, clusters and problems.

This module owns how a model is told apart (a name of the zoo, a graph file, an ONNX file, an
exported program, a function in a Python file) and what ``60%`` of memory means.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewright import files
from placewright.arguments import expect_flag, expect_function, expect_path, expect_type
from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.execute.op_times import measured_costs
from placewright.frontends._cache import cached, cached_with_sources
from placewright.graph import Graph
from placewright.problem import Problem
from placewright.units import parse_bytes
from placewright.zoo import RECIPES

if TYPE_CHECKING:
    from placewright.frontends.torch import Capture

TIGHT = "-tight"
TIGHT_MEMORY = "60%"
"""What ``k40x4-tight`` stands for: k40x4, with so much of what the model needs on one GPU."""


def model_names() -> tuple[str, ...]:
    """List the models of the zoo."""
    return tuple(RECIPES)


def load_model(model: str | Path, *, dims: Mapping[str, int] | None = None) -> Graph:
    """
    Load a model as a graph.

    A name of the zoo (`model_names`), a ``.graph.json`` file, an ``.onnx`` file, a ``.pt2``
    program, or ``file.py:function``, where the function returns ``(module, inputs)`` or a dict of
    arguments for `capture`. What has to be captured is kept on disk and loaded from there as long
    as nothing that it was made from has changed.

    Parameters
    ----------
    model
        The name or path.
    dims
        Sizes of named dimensions that an ONNX file leaves open, such as ``{"batch": 8}``.

    Raises
    ------
    InputError
        It is none of these, or it cannot be captured.
    """
    expect_path(model, "model")
    if dims is not None:
        expect_type(dims, Mapping, "dims", "a mapping from names to sizes")
    text = str(model)
    if dims and not text.endswith(".onnx"):
        raise InputError(f"`{text}` has no open dimensions; only ONNX files do.")
    if text in RECIPES:
        return cached(("zoo", text), lambda: _capture_zoo(text).graph)
    if text.endswith(".onnx"):
        chosen = sorted((dims or {}).items())
        words = ("onnx", files.digest(text, "ONNX file"), Path(text).name, repr(chosen))
        return cached(words, lambda: _capture_onnx(text, dims))
    if text.endswith(".pt2"):
        content = files.digest(text, "exported program")
        return cached(("pt2", content, Path(text).name), lambda: _capture_exported(text))
    if ".py:" in text:
        return _load_python(text)
    if text.endswith(".py"):
        raise InputError(f"`{text}` is a Python file; name a function in it: `{text}:function`.")
    _check_path(
        "model",
        text,
        model_names(),
        "a `.graph.json`, `.onnx` or `.pt2` file, or `file.py:function`",
    )
    return Graph.load(text)


def load_step(model: str | Path) -> dict[str, Any]:
    """
    Build a model that can be run, its weights on the CPU: give the arguments of `capture`.

    A name of the zoo, whose weights are random; ``file.py:function``; or a ``.pt2`` program.

    Raises
    ------
    InputError
        It is none of these, or it cannot be built.
    """
    text = str(model)
    check_runnable(text)
    if text in RECIPES:
        from placewright import zoo

        return zoo.build(text, "cpu").arguments()
    if text.endswith(".pt2"):
        from placewright.frontends.exported import build_exported

        return build_exported(text)
    from placewright.frontends.python_file import build_from_file

    path, _, function = text.rpartition(":")
    with contextlib.redirect_stdout(sys.stderr):
        return {"name": function, **build_from_file(Path(path), function).arguments}


def check_runnable(model: str) -> None:
    """
    Check that a model is one that can be run, without building it.

    Raises
    ------
    InputError
        It has a form that `load_step` does not know.
    """
    if model in RECIPES or model.endswith(".pt2") or ".py:" in model:
        return
    if not model.endswith((".onnx", ".json", ".json.gz")):
        load_model(model)  # it says what is wrong with it
    what = "an ONNX file" if model.endswith(".onnx") else "a graph file"
    raise InputError(
        f"`{model}` is {what}, which says what a model costs and not how to run it in PyTorch."
        " Give a name of the zoo, `file.py:function` or a `.pt2` program."
    )


def load_capture(model: str | Path) -> Capture:
    """
    Capture a model that can be run: see `load_step`. Weights of the zoo's are not made.

    Raises
    ------
    InputError
        It cannot be run, or not be captured.
    """
    from placewright.frontends.torch import capture

    return _capture_zoo(str(model)) if str(model) in RECIPES else capture(**load_step(model))


def _capture_zoo(name: str) -> Capture:
    from placewright import zoo
    from placewright.frontends.torch import capture

    return capture(**zoo.build(name).arguments())


def _capture_onnx(path: str, dims: Mapping[str, int] | None) -> Graph:
    from placewright.frontends.onnx import read_onnx

    return read_onnx(path, dims).graph


def _capture_exported(path: str) -> Graph:
    from placewright.frontends.exported import read_exported

    return read_exported(path).graph


def _load_python(text: str) -> Graph:
    from placewright.frontends.python_file import build_from_file

    path, _, function = text.rpartition(":")

    def capture_it() -> tuple[Graph, dict[str, str]]:
        from placewright.frontends.torch import capture

        with contextlib.redirect_stdout(sys.stderr):  # what the model prints is not our answer
            built = build_from_file(Path(path), function)
            graph = capture(**{"name": function, **built.arguments}).graph
        return graph, built.sources

    return cached_with_sources(("python", os.path.abspath(path), function), capture_it)


def load_cluster(cluster: str | Path) -> Cluster:
    """
    Load a cluster preset by its name, or a cluster file by its path.

    Raises
    ------
    InputError
        It is neither, or the file is wrong.
    """
    expect_path(cluster, "cluster")
    if str(cluster) in Cluster.presets():
        return Cluster.preset(str(cluster))
    _check_path("cluster", cluster, Cluster.presets(), "the path of a `.toml` file")
    return Cluster.load(cluster)


def load_problem(
    graph: Graph,
    cluster: str | Path,
    memory: str | None = None,
    *,
    is_profiled: bool = True,
    say: Callable[[str], None] | None = None,
) -> Problem:
    """
    Put a graph on a cluster.

    Parameters
    ----------
    graph
        The model's graph.
    cluster
        A cluster's name or file; ``NAME-tight`` is ``NAME`` with `memory` ``"60%"``.
    memory
        What every device but CPUs has, instead of what the cluster says: a size (``"8GiB"``), or a
        share of what the model needs with everything on one of them (``"60%"``), so that one
        alone cannot hold it.
    is_profiled
        Use the op times that `placewright profile` has measured on such devices, where there are
        some. Only for cluster files: what ships with the package is the same everywhere.
    say
        Told how many op times are measured.

    Raises
    ------
    InputError
        The cluster cannot be loaded, or `memory` cannot be read.
    """
    expect_type(graph, Graph, "graph", "a `Graph`, such as `load_model` gives")
    expect_path(cluster, "cluster")
    if memory is not None:
        expect_type(memory, str, "memory", "text such as `8GiB` or `60%`")
    expect_flag(is_profiled, "is_profiled")
    expect_function(say, "say", "a function of text")
    name = str(cluster)
    if name.endswith(TIGHT) and not os.path.exists(name):
        if memory is not None:
            raise InputError(f"`{name}` already says how much memory there is; drop `memory`.")
        name, memory = name.removesuffix(TIGHT), TIGHT_MEMORY
    found = load_cluster(name)
    if is_profiled and name not in Cluster.presets():
        measured = measured_costs(graph, found)
        problem = Problem(graph, found, measured.costs)
        if say is not None and measured.is_measured.any():
            say(measured.describe())
    else:
        problem = Problem(graph, found)
    return problem if memory is None else with_memory(problem, memory)


def with_memory(problem: Problem, memory: str) -> Problem:
    """
    Give every device but CPUs the same memory: see `load_problem`.

    Raises
    ------
    InputError
        `memory` cannot be read, or there are only CPUs.
    """
    from placewright.placers.experts import accelerators, one_gpu
    from placewright.simulator import simulate

    if set(problem.cluster.device_kinds) == {"cpu"}:
        raise InputError(
            f"Cluster `{problem.cluster.name}` has only CPUs, and `memory` is about other devices."
        )
    devices = accelerators(problem)
    if memory.strip().isdecimal():
        raise InputError(f"`memory` is {memory} without a unit; expected `8GiB` or `60%`.")
    if memory.strip().endswith("%"):
        try:
            share = float(memory.strip()[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share < 1e6:
            raise InputError(f"`{memory}` is no share of memory; expected something like `60%`.")
        size = int(share * simulate(problem, one_gpu(problem)).peak_bytes[devices[0]])
    else:
        size = parse_bytes(memory, "`memory`")
    sizes = [*problem.cluster.memory_bytes.tolist()]
    for d in devices:
        sizes[d] = max(size, 1)
    name = f"{problem.cluster.name} with {memory.strip()} of memory"
    return Problem(problem.graph, problem.cluster.with_memory(sizes, name), problem.costs)


def _check_path(what: str, text: str | Path, known: tuple[str, ...], others: str) -> None:
    """Refuse what is no known name and does not look like a path either."""
    if "." not in str(text) and "/" not in str(text) and not os.path.exists(text):
        raise InputError(
            f"There is no {what} `{text}`. Those that ship with placewright are:"
            f" {', '.join(known)}; or give {others}."
        )
