"""
How loops are compiled.

This module owns the options of compiled functions: those that others of them call (`inline`,
`cold`), and those that Python calls, which are kept on disk where that is possible (`kept`,
`outer`). Numba's cache notices a change of options no more than one of this file: after either,
what is on disk has to go (``__pycache__``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

_inner: dict[str, Any] = {
    "error_model": "numpy",
    "_nrt": False,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}

inline: Any = numba.njit(forceinline=True, **_inner)
"""Compile a function into those that call it."""

cold: Any = numba.njit(**_inner)
"""Compile a function that others call."""


def kept(*signature: str, **options: Any) -> Callable[[Any], Any]:
    """Compile a function for callers in Python; keep it on disk where that is possible."""
    make: Any = numba.njit

    def compiled(function: Any) -> Any:
        try:
            return make(*signature, cache=True, **options)(function)
        except RuntimeError:  # neither the package nor the user's cache directory can be written to
            return make(*signature, **options)(function)

    return compiled


outer: Any = kept(error_model="numpy", _nrt=False, nogil=True)
"""Compile a function for callers in Python that makes no arrays."""
