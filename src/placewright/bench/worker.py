"""
One cell, in a process of its own: ``python -m placewright.bench.worker`` with a task on its input.

This module owns what is measured of a run, and what its failures are called. The process ends when
its standard input is closed, so that none is left behind by a bench that was killed.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from importlib import metadata
from pathlib import Path

import msgspec

from placewright import __version__, files
from placewright.bench.cells import Answer, Cell, Failure, Machine, Outcome, Point, thin
from placewright.errors import InputError, TooLargeError
from placewright.load import load_model, load_problem
from placewright.placing import find_placer, place
from placewright.simulator import warm_up


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is told: the cell, where to write its outcome, and what it may use."""

    cell: Cell
    result: str
    cores: list[int]
    memory_bytes: int


def run_cell(cell: Cell, threads: int) -> Outcome:
    """Run a cell in this process; whatever goes wrong is its outcome."""
    machine = describe_machine(threads)
    try:
        answer, reason = _answer(cell)
    except InputError as error:
        kind: Failure = "memory" if isinstance(error, TooLargeError) else "input"
        return Outcome(cell=cell, failure=kind, reason=str(error), machine=machine)
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        return Outcome(cell=cell, failure=failure_of(words), reason=words, machine=machine)
    return Outcome(cell=cell, answer=answer, reason=reason, machine=machine)


def _answer(cell: Cell) -> tuple[Answer, str]:
    problem = load_problem(load_model(cell.model), cell.cluster)
    placer = find_placer(cell.placer, cell.options)
    warm_up(problem)
    result = place(problem, placer, budget=cell.budget, seed=cell.seed)
    history = [
        Point(entry.wall_s, entry.samples, entry.objective_s, entry.overflow_bytes)
        for entry in result.history
        if entry.mean_s is None
    ]
    answer = Answer(
        objective_s=result.objective_s,
        is_feasible=result.is_feasible,
        overflow_bytes=result.timeline.overflow_bytes,
        wall_s=result.wall_s,
        samples=result.samples,
        samples_per_s=result.samples / result.wall_s,
        lower_bound_s=result.lower_bound_s,
        num_devices=int((result.timeline.device_utilisation > 0).sum()),
        history=thin(history),
    )
    return answer, result.reason


def failure_of(words: str) -> Failure:
    """Tell by an error's words whether memory ran out."""
    signs = ("MemoryError", "bad_alloc", "allocate memory", "Unable to allocate")
    return "memory" if any(sign in words for sign in signs) else "crash"


def describe_machine(threads: int) -> Machine:
    """Describe this machine, without its name."""
    try:
        torch: str | None = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return Machine(_cpu(), threads, __version__, torch)


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _end_with_parent() -> None:
    """End this process when the other end of its standard input is closed."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _keep_within(task: Task) -> None:
    """Use only the task's cores and memory."""
    import resource

    limit = (task.memory_bytes, task.memory_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, limit)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, task.cores)


def main() -> None:
    """Do the task on standard input."""
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=Task)
    _end_with_parent()
    _keep_within(task)
    outcome = run_cell(task.cell, len(task.cores))
    files.write(task.result, msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()
