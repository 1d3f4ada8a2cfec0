"""How soon the command line answers: help, a first simulation, later ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from benchmarks.figures import Figure, median_s

COMMAND = [sys.executable, "-m", "placewright.cli"]
SIMULATE = [*COMMAND, "simulate", "gpt2-small", "--cluster", "k40x4", "--on", "cpu"]


def run() -> list[Figure]:
    """Time whole commands, from start to end."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        began = time.perf_counter()
        first = _run(SIMULATE, environment)
        first_s = time.perf_counter() - began
        assert "Compiling" in first.stderr, "the first simulation said nothing of compiling"
        later_s = median_s(lambda: _run(SIMULATE, environment), 7)
    help_s = median_s(lambda: _run([*COMMAND, "--help"], os.environ), 11)
    import_s = median_s(lambda: _run([sys.executable, "-c", "import placewright"], os.environ), 11)
    return [
        Figure("placewright --help", help_s, "s", 0.3, True),
        Figure("first simulation, nothing compiled yet", first_s, "s", 20.0, True),
        Figure("later simulations", later_s, "s", 1.0, True),
        Figure("import placewright", import_s, "s"),
    ]


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
