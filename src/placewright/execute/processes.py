"""
Candidates in processes of their own, that may crash or hang, as seen by who measures them.

This module owns how these processes begin and end. A `Template` is a fresh Python that holds a
built and captured model (see `_template`); a `CandidateProcess` is forked from it for one
candidate. Every wait has a limit; what takes longer is killed. All of them end with this process,
and Ctrl-C reaches this process alone. POSIX only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import TypeVar

import msgspec

from placewright.children import python_command
from placewright.errors import InputError
from placewright.execute._cores import where_plans_run
from placewright.execute._wire import (
    FORK,
    REQUEST,
    Built,
    Ended,
    Failed,
    Failure,
    Forked,
    Job,
    Message,
    Peaks,
    Ready,
    Run,
    Setup,
    Times,
    Weigh,
    Wire,
)
from placewright.load import check_runnable
from placewright.units import format_time

GRACE_S = 10.0
"""What a candidate may take for a step that began just before its limit."""

START_LIMIT_S = 120.0
"""What a candidate may take until it can run its first step, at least."""

FORK_LIMIT_S = 60.0
"""What a template may take to fork a process, or to tell how one ended."""

Answer = TypeVar("Answer", Ready, Times, Peaks)


class CandidateError(Exception):
    """A candidate ran out of memory or time, or crashed: a result, to be kept as such."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure: Failure = failure
        self.reason = reason


class Template:
    """
    A process that holds a model, built and captured, and forks candidates.

    It starts at once; `wait` waits until it is ready. One that has died is started again when a
    candidate is asked for.

    Parameters
    ----------
    model
        A model that can be run: a name of the zoo, ``file.py:function``, a ``.pt2`` program.

    Raises
    ------
    InputError
        It is none of these.
    """

    def __init__(self, model: str) -> None:
        check_runnable(model)
        self.model = model
        self.fingerprint = ""  # of the graph; known once it is ready
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None
        self._begin()

    def _begin(self) -> None:
        mine, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                python_command("placewright.execute._template", str(its.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                # By itself PyTorch looks for GPUs in a way that a process does not survive forking.
                env=where_plans_run(os.environ) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                pass_fds=(its.fileno(),),
                start_new_session=True,
            )
        self._wire = Wire(mine)
        self._wire.send(Setup(self.model))
        self.fingerprint = ""

    def wait(self) -> str:
        """
        Wait until the model is captured; give its graph's fingerprint.

        Raises
        ------
        InputError
            It cannot be built, captured, or run.
        """
        if self._process is None:
            self._begin()
        if not self.fingerprint:
            try:
                built = self._wire.receive(Built | Failed)  # type: ignore[arg-type]
            except BaseException as error:
                code = self._end()
                if not isinstance(error, EOFError):
                    raise
                words = self.said() or f"it ended with code {code}"
                if code == -signal.SIGKILL:
                    words = "its process was killed, as when memory runs out"
                raise InputError(f"`{self.model}` cannot be built: {words}.") from None
            if isinstance(built, Failed):
                self._end()
                words = f"`{self.model}` cannot be built: {built.reason}."
                raise InputError(built.reason if built.failure == "input" else words)
            self.fingerprint = built.fingerprint
        return self.fingerprint

    def begin(self, job: Job, limit_s: float) -> CandidateProcess:
        """
        Fork a process for a candidate and have it get ready.

        Raises
        ------
        CandidateError
            It fails at once.
        InputError
            The model cannot be built.
        """
        self.wait()
        try:
            made = self._fork()
        except (EOFError, TimeoutError):  # it has died, or hangs: another one may not
            self.wait()
            made = self._fork()
        try:
            made.begin(job, limit_s)
        except BaseException:
            made.close()
            raise
        return made

    def _fork(self) -> CandidateProcess:
        mine, its = socket.socketpair()
        with its:
            begin = os.fstat(self._errors.fileno()).st_size
            try:
                pid = self._ask(FORK, Forked, its).pid
            except BaseException:
                mine.close()
                raise
        return CandidateProcess(self, Wire(mine), pid, begin, self._process)

    def wait_for(self, pid: int, kills: bool, parent: subprocess.Popen[bytes] | None) -> int | None:
        """
        Give the exit code of a process that `parent` has forked, negative for a signal.

        None if nobody knows it: it has ended with the template that it was forked from.
        """
        if self._process is None or self._process is not parent:
            return None
        try:
            return self._ask(-pid if kills else pid, Ended).code
        except (EOFError, TimeoutError):
            return None

    def _ask(self, number: int, kind: type[Message], end: socket.socket | None = None) -> Message:
        """Ask for a fork, or for how one ended. If that is interrupted, the template is lost."""
        try:
            data = [struct.pack(REQUEST, number)]
            socket.send_fds(self._wire.socket, data, [] if end is None else [end.fileno()])
            return self._wire.receive(kind, FORK_LIMIT_S)
        except BaseException as error:
            self._end()
            if isinstance(error, (BrokenPipeError, ConnectionResetError)):
                raise EOFError from None
            raise

    def said(self, begin: int = 0) -> str:
        """Give the last line that the template or a candidate printed since `begin`."""
        file = self._errors.fileno()
        begin = max(begin, os.fstat(file).st_size - 2**16)
        said = os.pread(file, 2**16, begin)  # where others write on stays
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1].strip().rstrip(".") if lines else ""

    def _end(self) -> int | None:
        """Kill the template and all that it has forked; give its exit code."""
        if self._process is None:
            return None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)  # its own until it is waited for
        code = self._process.wait()
        self._process = None
        self._wire.close()
        return code

    def close(self) -> None:
        """End it, and everything that was forked from it."""
        self._end()
        self._errors.close()

    def __enter__(self) -> Template:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class CandidateProcess:
    """A candidate in a process of its own. After a failure it has ended."""

    def __init__(
        self,
        template: Template,
        wire: Wire,
        pid: int,
        begin: int,
        parent: subprocess.Popen[bytes] | None,
    ) -> None:
        self.pid = pid
        self._template, self._wire, self._begin = template, wire, begin
        self._parent = parent
        self._has_ended = False

    def begin(self, job: Job, limit_s: float) -> None:
        """Give it its job."""
        self._send(job, max(limit_s, START_LIMIT_S))

    def ready(self, limit_s: float) -> None:
        """
        Wait until it is ready.

        Raises
        ------
        CandidateError
            It failed.
        InputError
            The job cannot be run here.
        """
        self._receive(Ready, max(limit_s, START_LIMIT_S))

    def begin_run(self, num_steps: int, limit_s: float) -> None:
        """Have it run steps; `times` gives what `run` does."""
        self._send(Run(num_steps, limit_s), limit_s + GRACE_S)

    def times(self, limit_s: float) -> list[float]:
        """Wait for the steps that it was asked to run; raises what `run` does."""
        return self._receive(Times, limit_s + GRACE_S).times_s

    def run(self, num_steps: int, limit_s: float) -> list[float]:
        """
        Run steps, none of which begins after `limit_s`; give the seconds that each took.

        Raises
        ------
        CandidateError
            It failed.
        """
        self.begin_run(num_steps, limit_s)
        return self.times(limit_s)

    def peaks(self, limit_s: float) -> dict[str, int | None]:
        """
        Run a step that tells the most that each device holds, in bytes; None if that is unknown.

        Raises
        ------
        CandidateError
            It failed.
        """
        self._send(Weigh(), limit_s + GRACE_S)
        return self._receive(Peaks, limit_s + GRACE_S).peak_bytes

    def _send(self, asked: msgspec.Struct, limit_s: float) -> None:
        with self._failures(limit_s):
            self._wire.send(asked, limit_s)

    def _receive(self, kind: type[Answer], limit_s: float) -> Answer:
        with self._failures(limit_s):
            answer = self._wire.receive(kind | Failed, limit_s)  # type: ignore[arg-type]
        if not isinstance(answer, Failed):
            return answer
        self.close()
        if answer.failure == "input":
            raise InputError(answer.reason)
        raise CandidateError(answer.failure, answer.reason)

    @contextlib.contextmanager
    def _failures(self, limit_s: float) -> Iterator[None]:
        """Meanwhile, call the process's end or silence what it is."""
        try:
            yield
        except TimeoutError:
            self.close()
            words = f"It did not answer for {format_time(limit_s)} and was killed."
            raise CandidateError("time", words) from None
        except EOFError:
            raise self._ended() from None
        except BaseException:
            self.close()
            raise

    def _ended(self) -> CandidateError:
        """Say how the process ended, which gave no answer."""
        code = self._wait(kills=False)
        said = self._template.said(self._begin)
        if code is None:
            return CandidateError("crash", "The process that it was forked from has ended.")
        if code == -signal.SIGKILL:
            words = "Its process was killed from outside, as when memory runs out."
            return CandidateError("memory", words)
        if "bad_alloc" in said:
            return CandidateError("memory", f"{said}.")
        how = f"with code {code}: {said}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return CandidateError("crash", f"Its process ended {how}.")

    def let_go(self) -> None:
        """Have it end, if it listens, without waiting until it has."""
        self._wire.close()

    def close(self) -> None:
        """Kill the process."""
        if not self._has_ended:
            self._wait(kills=True)

    def _wait(self, kills: bool) -> int | None:
        self._has_ended = True
        self._wire.close()
        return self._template.wait_for(self.pid, kills, self._parent)


def close_all(processes: Collection[CandidateProcess]) -> None:
    """End processes together: leaving a GPU takes a while."""
    for process in processes:
        process.let_go()
    for process in processes:
        process.close()
