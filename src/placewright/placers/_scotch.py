"""
The few calls of Scotch that mapping a graph onto unequal devices needs, through ctypes.

The library is the one inside the `pyscotch` wheel (64-bit numbers; pyscotch itself is not
imported, as that prints), else the system's. Every call runs in a Scotch context of its own with
one thread and its own random numbers, so that a seed decides the result and threads do not meet.

Scotch reports errors through a function that the program provides. `libscotcherr`, or the wheel's
own one that collects messages, returns; `libscotcherrexit` would end the process and is never
loaded.

Letters: ``V`` vertices, ``E`` edges, ``P`` parts.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

MAX_TOTAL = 2**29
"""What vertex weights, or edge weights times the longest distance, may add up to: beyond about
2**32 Scotch's balance silently breaks, and a build with 32-bit numbers must not overflow."""

_IMBALANCE = 0.05
_STRATEGY = 1 | 4  # quality and balance; the default cuts up to 1.7 times as much of real models


class Scotch:
    """
    The loaded library.

    Raises
    ------
    OSError
        It is not there.
    """

    def __init__(self) -> None:
        self._library, self._messages = _load_wheel() or _load_system()
        wide = hasattr(self._library, "SCOTCH_graphInit_64")
        self._suffix = "_64" if wide else ""
        self.num: Any = ctypes.c_int64 if self("numSizeof") == 8 else ctypes.c_int32

    def __call__(self, name: str, *arguments: object) -> int:
        """Call a function that gives a number, or nothing."""
        return int(self._function(name)(*arguments))

    def check(self, name: str, *arguments: object) -> None:
        """Call a function whose number tells of success."""
        if self._messages is not None:
            self._messages.pyscotch_err_clear()
        status = self(name, *arguments)
        if status != 0:
            told = self._messages.pyscotch_err_get().decode() if self._messages else ""
            raise RuntimeError(f"Scotch failed in `{name}` with status {status}. {told}".strip())

    @contextmanager
    def made(self, kind: str) -> Iterator[ctypes.c_void_p]:
        """Make a ``graph``, an ``arch``, a ``strat`` or a ``context``, and free it at the end."""
        allocate = self._function(f"{kind}Alloc")
        allocate.restype = ctypes.c_void_p
        pointer = ctypes.c_void_p(allocate())
        if not pointer:
            raise MemoryError(f"Scotch has no memory for a `{kind}`.")
        try:
            self.check(f"{kind}Init", pointer)
            try:
                yield pointer
            finally:
                self(f"{kind}Exit", pointer)
        finally:
            self("memFree", pointer)

    def array(self, values: NDArray[Any]) -> NDArray[Any]:
        """Copy numbers to Scotch's type."""
        return np.ascontiguousarray(values, dtype=self.num)

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, f"SCOTCH_{name}{self._suffix}")
        except AttributeError:  # the wheel's build forgets the suffix of some
            return getattr(self._library, f"SCOTCH_{name}")


@cache
def load() -> Scotch:
    """
    Load the library, once.

    Raises
    ------
    OSError
        It is not there.
    """
    return Scotch()


def map_graph(
    begins: IntArray,  # [V + 1]
    neighbours: IntArray,  # [2E] every edge from both ends
    edge_weights: IntArray,  # [2E] positive
    vertex_weights: IntArray,  # [V]
    part_weights: IntArray,  # [P] positive
    distances: IntArray | None,  # [P, P] symmetric and positive; None: all alike
    seed: int,
) -> IntArray:  # [V]
    """
    Map a graph onto parts: little weight times distance across, loads in proportion to the parts.

    Raises
    ------
    RuntimeError
        The arrays are no graph, or Scotch fails.
    """
    scotch = load()
    with ExitStack() as stack:
        context = stack.enter_context(scotch.made("context"))
        scotch.check("contextThreadSpawn", context, 1, None)
        scotch.check("contextRandomClone", context)
        scotch("contextRandomSeed", context, scotch.num(seed))

        def bound(*arrays: NDArray[Any]) -> ctypes.c_void_p:
            return stack.enter_context(_bound_graph(scotch, context, *arrays))

        graph = bound(begins, neighbours, edge_weights, vertex_weights)
        arch = stack.enter_context(scotch.made("arch"))
        count = len(part_weights)
        weights = scotch.array(part_weights)
        if distances is None:
            scotch.check("archCmpltw", arch, scotch.num(count), _pointer(weights))
        else:
            others = ~np.eye(count, dtype=np.bool_)
            ends = np.nonzero(others)[1]
            target = bound(np.arange(count + 1) * (count - 1), ends, distances[others], weights)
            # It joins the nearest parts first; `archBuild0` halves them whatever the distances.
            scotch.check("archBuild2", arch, target, scotch.num(0), None)
        strategy = stack.enter_context(scotch.made("strat"))
        scotch.check(
            "stratGraphMapBuild",
            strategy,
            scotch.num(_STRATEGY),
            scotch.num(count),
            ctypes.c_double(_IMBALANCE),
        )
        parts = scotch.array(np.full(len(begins) - 1, -1))
        scotch.check("graphMap", graph, arch, strategy, _pointer(parts))
        return parts.astype(np.int64)


@contextmanager
def _bound_graph(
    scotch: Scotch,
    context: ctypes.c_void_p,
    begins: NDArray[Any],
    neighbours: NDArray[Any],
    edge_weights: NDArray[Any],
    vertex_weights: NDArray[Any],
) -> Iterator[ctypes.c_void_p]:
    """Build a graph, check it, and bind it to a context. Scotch keeps pointers to the arrays."""
    arrays = [scotch.array(a) for a in (begins, neighbours, edge_weights, vertex_weights)]
    starts, ends, costs, loads = (_pointer(array) for array in arrays)
    base, vertices, edges = (scotch.num(n) for n in (0, len(begins) - 1, len(neighbours)))
    with scotch.made("graph") as graph, scotch.made("graph") as bound:
        scotch.check(
            "graphBuild", graph, base, vertices, starts, None, loads, None, edges, ends, costs
        )
        scotch.check("graphCheck", graph)
        scotch.check("contextBindGraph", context, graph, bound)
        yield bound


def _pointer(array: NDArray[Any]) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def _load_wheel() -> tuple[ctypes.CDLL, ctypes.CDLL | None] | None:
    """Load what the `pyscotch` wheel brings along, if it is there."""
    spec = find_spec("pyscotch")
    for package in (spec.submodule_search_locations or []) if spec else []:
        found = {file.stem: file for file in Path(package, "_libs", "lib64").glob("lib*")}
        if "libscotch" in found and "libpyscotch_compat" in found:
            messages = ctypes.CDLL(str(found["libpyscotch_compat"]), mode=ctypes.RTLD_GLOBAL)
            messages.pyscotch_err_get.restype = ctypes.c_char_p
            return ctypes.CDLL(str(found["libscotch"])), messages
    return None


def _load_system() -> tuple[ctypes.CDLL, None]:
    """Load the system's library; what goes wrong inside it is told on stderr."""
    for version in ("", "-7.0"):
        errors = ctypes.util.find_library(f"scotcherr{version}")
        library = ctypes.util.find_library(f"scotch{version}")
        if errors and library:
            ctypes.CDLL(errors, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(library), None
    raise OSError("There is no Scotch library.")
