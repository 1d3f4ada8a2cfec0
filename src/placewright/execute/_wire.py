"""
What a measuring process, its template and its candidates tell each other.

This module owns the messages (JSON, one a line, over Unix sockets; no pickle) and imports no
PyTorch, which the process that asks need not load.
"""

from __future__ import annotations

import socket
import time
from typing import Literal, TypeVar

import msgspec

from placewright.plan import Plan

REQUEST = "=q"
FORK = 0
"""
What a template is asked, packed so: to fork a process, with its socket; to wait for the one of this
number; or, if the number is negative, to kill it first.
"""

Failure = Literal["memory", "crash", "time"]
Started = int | tuple[int, int]
Message = TypeVar("Message")


class Setup(msgspec.Struct, frozen=True):
    """To a template: the model that it is of."""

    model: str


class Built(msgspec.Struct, frozen=True, tag=True):
    """From a template: it has captured this graph."""

    fingerprint: str


class Forked(msgspec.Struct, frozen=True):
    """From a template: a candidate's process is there."""

    pid: int


class Ended(msgspec.Struct, frozen=True):
    """From a template: how a candidate's process ended, as `os.waitstatus_to_exitcode` gives it."""

    code: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """To a candidate: where its ops run, and the memory that it may use."""

    eager: str = ""  # the device that plain PyTorch gets, instead of the next four
    plan: Plan | None = None  # instead of the next three
    device_names: tuple[str, ...] = ()
    placement: list[int] = []
    sequence: list[Started] = []
    cpu_bytes: int | None = None  # what all CPU devices have together; None: what is free
    gpu_bytes: dict[str, int] = {}  # by device


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a candidate: it can begin."""


class Run(msgspec.Struct, frozen=True, tag=True):
    """To a candidate: run so many steps, and begin none after so many seconds."""

    num_steps: int
    limit_s: float


class Times(msgspec.Struct, frozen=True, tag=True):
    """From a candidate: how long each step took."""

    times_s: list[float]


class Weigh(msgspec.Struct, frozen=True, tag=True):
    """To a candidate: run a step that tells what memory is used."""


class Peaks(msgspec.Struct, frozen=True, tag=True):
    """From a candidate: the most that each device held, in bytes; None if that is not known."""

    peak_bytes: dict[str, int | None]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From a candidate, or a template that cannot be: what went wrong. It ends after this."""

    failure: Literal["memory", "crash", "input"]
    reason: str


class Wire:
    """
    Messages over a socket.

    `receive` raises `EOFError` when the other end has gone, and both raise `TimeoutError`.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._read = b""

    def send(self, message: msgspec.Struct, limit_s: float | None = None) -> None:
        """Send a message."""
        self.socket.settimeout(limit_s)
        try:
            self.socket.sendall(msgspec.json.encode(message) + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None

    def receive(self, kind: type[Message], limit_s: float | None = None) -> Message:
        """Wait for a message."""
        parts, until_s = [self._read], time.monotonic() + (limit_s or 0.0)
        while b"\n" not in parts[-1]:
            left_s = None if limit_s is None else max(until_s - time.monotonic(), 1e-3)
            self.socket.settimeout(left_s)
            try:
                parts.append(self.socket.recv(2**20))
            except ConnectionResetError:
                raise EOFError from None
            if not parts[-1]:
                raise EOFError
        line, _, self._read = b"".join(parts).partition(b"\n")
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """Hang up."""
        self.socket.close()
