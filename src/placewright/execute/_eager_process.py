"""
A candidate that builds its model itself: ``python -m placewright.execute._eager_process``.

A process that a template has forked cannot go back on a GPU in plain PyTorch: autograd counts GPUs
once, which it has done there, and starts a thread for each. So that candidate becomes a fresh
process, which keeps its number, its socket and its parent.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from placewright.execute._candidate import obey_eager
from placewright.execute._wire import Job, Wire


def main() -> None:
    """Be a candidate for the socket, the model and the job that the arguments name."""
    end, model, job = sys.argv[1:]
    wire = Wire(socket.socket(fileno=int(end)))
    obey_eager(wire, model, msgspec.json.decode(job, type=Job))


if __name__ == "__main__":
    main()
