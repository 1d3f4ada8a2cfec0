"""
Cells in processes: a fresh one each, on cores of its own, that may crash or hang.

This module owns time limits, cores and memory of workers, and what the end of one that gave no
outcome means. POSIX only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from placewright.bench.cells import Cell, Failure, Outcome
from placewright.bench.worker import Task, describe_machine, failure_of
from placewright.children import python_command
from placewright.errors import InputError
from placewright.placers.run import Budget

GRACE_S = 120.0
"""What a cell may take beyond twice its budget: loading, compiling, a first capture."""

MEMORY_SHARE = 0.9
"""What workers may use of the machine's memory, together."""

POLL_S = 0.05


def run_cells(cells: Sequence[Cell], jobs: int, threads: int) -> Generator[Outcome]:
    """
    Run cells in order, so many at once, and give each outcome when it is there.

    Every cell's budget must have seconds; one that takes more than twice that and `GRACE_S` is
    killed. When the iterator is closed, so are all processes.

    Raises
    ------
    InputError
        There are not enough cores.
    """
    free = _share_cores(jobs, threads)
    memory_bytes = int(MEMORY_SHARE * _memory_bytes() / jobs)
    waiting, running = deque(cells), list[_Worker]()
    with tempfile.TemporaryDirectory(prefix="placewright-bench-") as folder:
        try:
            while waiting or running:
                while waiting and free:
                    path = Path(folder) / str(len(waiting))
                    cell = waiting.popleft()
                    running.append(_start(cell, path, free.pop(), memory_bytes))
                time.sleep(POLL_S)
                for worker in [worker for worker in running if worker.is_over]:
                    running.remove(worker)
                    free.append(worker.task.cores)
                    yield worker.outcome()
        finally:
            for worker in running:
                worker.kill()


def limit_s(cell: Cell) -> float:
    """Give how long a cell's process may live."""
    seconds = Budget.parse(cell.budget).seconds
    assert seconds is not None
    return 2 * seconds + GRACE_S


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(_cores())


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def _share_cores(jobs: int, threads: int) -> list[list[int]]:
    """Give each job cores of its own."""
    cores = _cores()
    if jobs * threads > len(cores):
        raise InputError(
            f"`--jobs {jobs}` with `--threads {threads}` need {jobs * threads} cores; there are"
            f" {len(cores)}."
        )
    return [cores[k * threads : (k + 1) * threads] for k in reversed(range(jobs))]


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Worker:
    """A process that runs a cell."""

    task: Task
    process: subprocess.Popen[bytes]
    errors: Path
    ends_s: float  # on the monotonic clock
    is_late: bool = False

    @property
    def is_over(self) -> bool:
        """Tell whether it has ended, killing it if it is late."""
        if self.process.poll() is None and time.monotonic() > self.ends_s:
            self.is_late = True
            self.kill()
        return self.process.poll() is not None

    def kill(self) -> None:
        """End it, and what it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._close()

    def _close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def outcome(self) -> Outcome:
        """Read what it wrote, or tell why it wrote nothing."""
        self._close()
        result = Path(self.task.result)
        if result.exists():
            return msgspec.json.decode(result.read_bytes(), type=Outcome)
        failure, reason = self._end()
        machine = describe_machine(len(self.task.cores))
        return Outcome(cell=self.task.cell, failure=failure, reason=reason, machine=machine)

    def _end(self) -> tuple[Failure, str]:
        if self.is_late:
            limit = limit_s(self.task.cell)
            return "time", f"It was still running after {limit:g} s and was killed."
        code = self.process.returncode
        if code == -signal.SIGKILL:
            return "memory", "Its process was killed from outside, as when memory runs out."
        how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        said = self.errors.read_text(errors="replace").strip()
        words = f": {said.splitlines()[-1]}" if said else "."
        return failure_of(said), f"Its process ended {how}{words}"


def _start(cell: Cell, path: Path, cores: list[int], memory_bytes: int) -> _Worker:
    task = Task(cell=cell, result=f"{path}.json", cores=cores, memory_bytes=memory_bytes)
    names = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    errors = path.with_suffix(".errors")
    with errors.open("wb") as file:
        process = subprocess.Popen(
            python_command("placewright.bench.worker"),
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=os.environ | dict.fromkeys(names, str(len(cores))),
            start_new_session=True,  # Ctrl-C is for the bench, which then ends its workers
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: its outcome says so
        process.stdin.write(msgspec.json.encode(task) + b"\n")
        process.stdin.flush()
    return _Worker(task, process, errors, time.monotonic() + limit_s(cell))
