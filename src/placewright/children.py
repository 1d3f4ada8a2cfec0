"""
How processes of our own are started: without the user's folder among the places of modules.

``python -m`` looks into the current folder first, so that a file there which is called like a
module of the standard library would be run. Nothing here needs PyTorch.
"""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of placewright in a process of its own."""
    return [sys.executable, "-P", "-m", module, *arguments]
