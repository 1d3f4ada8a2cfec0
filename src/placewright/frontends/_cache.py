"""
Captures on disk, by content.

A capture is named by everything that it was made from: the model's own bytes, this package's
front ends and zoo, and the versions of the libraries that they use. What a Python file's function
reads is only known after it was run, so for those a list of files and their content stands beside
the graph. The folder is ``$PLACEWRIGHT_CACHE``, else ``placewright`` in the user's cache folder;
an empty ``$PLACEWRIGHT_CACHE`` switches caching off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

from placewright import files
from placewright.errors import InputError
from placewright.graph import Graph


def cache_folder() -> Path | None:
    """Give the folder of captures; None if caching is off."""
    chosen = os.environ.get("PLACEWRIGHT_CACHE")
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "placewright"


@cache
def _tools() -> str:
    """Name everything that turns a model into a graph: our sources, and libraries' versions."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for source in sorted([*package.glob("frontends/*.py"), *package.glob("zoo/*.py")]):
        digest.update(source.read_bytes())
    for library in ("torch", "onnx"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{library} {metadata.version(library)}".encode())
    return digest.hexdigest()


def _path(*words: str) -> Path | None:
    folder = cache_folder()
    name = hashlib.sha256(repr((_tools(), *words)).encode()).hexdigest()[:32]
    return None if folder is None else folder / f"{name}.graph.json.gz"


def cached(words: tuple[str, ...], capture: Callable[[], Graph]) -> Graph:
    """Load the capture that `words` name, or make and keep it."""
    path = _path(*words)
    found = _load(path)
    if found is not None:
        return found
    graph = capture()
    _save(path, graph)
    return graph


def cached_with_sources(
    words: tuple[str, ...], capture: Callable[[], tuple[Graph, dict[str, str]]]
) -> Graph:
    """
    Load the capture that `words` name, if the files it was made from are as they were.

    `capture` gives a graph, and the files that it was made from with their content's names.
    """
    path = _path(*words)
    listed = None if path is None else path.with_suffix("").with_suffix(".sources.json")
    with contextlib.suppress(OSError, ValueError, AttributeError, InputError):
        if listed is not None:
            known = json.loads(listed.read_bytes())
            if all(files.digest(name, "file") == content for name, content in known.items()):
                found = _load(path)
                if found is not None:
                    return found
    graph, sources = capture()
    if listed is not None and _save(path, graph):
        files.write(listed, json.dumps(sources).encode())
    return graph


def _load(path: Path | None) -> Graph | None:
    """Load a capture; one that is damaged is as good as none."""
    if path is not None and path.exists():
        with contextlib.suppress(InputError):
            return Graph.load(path)
    return None


def _save(path: Path | None, graph: Graph) -> bool:
    """Keep a capture; where that is not possible, go on without."""
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        graph.save(path)
    except (OSError, InputError):
        return False
    return True
