"""PyTorch's own shared libraries, for the few functions in them that have no name in Python."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def torch_library(name: str) -> ctypes.CDLL | None:
    """Give one of the libraries that PyTorch has loaded; None if there is none of that name."""
    path = Path(torch.__path__[0]) / "lib" / f"lib{name}.so"
    return ctypes.CDLL(str(path)) if path.exists() else None
