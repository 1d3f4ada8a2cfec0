"""
PyTorch's operator samples, run through `placewright` and compared with eager PyTorch.

    python -m tests.operator_samples --samples 4 --jobs 2

prints how many were equal, why others were refused, and what failed; `--table docs/refused-ops.md`
writes the page about those that are refused. Operators run in processes of their own, which are
started again when they die.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.operator_sample_cases import (
    KINDS,
    LIMIT_S,
    TRACED,
    Outcome,
    check,
    operators,
    samples_of,
)
from tests.operator_sample_tables import line_of, print_tables, write_page

Found = dict[str, Any]


def run_operator(
    name: str, kinds: list[str], samples: int | None, dtype: torch.dtype | None = None
) -> Iterator[Found]:
    """Run the samples of an operator; yield what starts, and what came of it."""
    op = operators()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in kinds:
            yield {"starts": [name, kind, -1]}
            try:
                drawn = samples_of(op, kind, samples, dtype)
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                yield _found(name, kind, -1, Outcome("invalid", told))
                continue
            for number, sample in enumerate(drawn):
                yield {"starts": [name, kind, number]}
                seed = zlib.crc32(f"{name} {kind} {number}".encode())
                yield _found(name, kind, number, check(op, kind, sample, seed))


def _found(name: str, kind: str, number: int, outcome: Outcome) -> Found:
    detail = " ".join(outcome.detail.split())[:1000]
    found = {"op": name, "how": kind, "sample": number, "kind": outcome.kind}
    return found | {"group": outcome.group, "detail": detail}


# --- The command line. ---


def main() -> None:
    """Run samples, and print what came of them."""
    options = _read_options()
    torch.set_num_threads(1)
    if options.worker:
        for line in sys.stdin:
            for found in run_operator(line.strip(), options.kinds, options.samples, options.dtype):
                print(json.dumps(found), flush=True)
            print(json.dumps({"done": line.strip()}), flush=True)
        return
    names = [name for name in operators() if not options.op or _matches(name, options.op)]
    start, tally = time.perf_counter(), list[Found]()
    for found in _run_all(names, options):
        tally.append(found)
        if options.op or found["kind"] in ("traced", "wrong", "crash"):
            print(line_of(found), flush=True)
        if len(tally) % 1000 == 0:
            print(f"{len(tally)} cases in {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\n{len(names)} operators in {time.perf_counter() - start:.0f} s")
    print_tables(tally)
    if options.json:
        Path(options.json).write_text(json.dumps(tally, indent=0))
    if options.table:
        Path(options.table).write_text(write_page(tally, TRACED, options.samples_word))


def _matches(name: str, wanted: list[str]) -> bool:
    return any(name == each or name.partition(".")[0] == each for each in wanted)


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.operator_samples")
    parser.add_argument("--samples", default="4", help="of each operator: a number, or `all`")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--op", nargs="*", help="only operators of these names")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--dtype", help="such as complex64; float32 where that can be, if absent")
    parser.add_argument("--json", help="write every outcome to this file")
    parser.add_argument("--table", help="write what was refused to this file, as a page")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.samples_word = options.samples
    options.samples = None if options.samples == "all" else int(options.samples)
    options.kinds = options.kinds.split(",")
    options.dtype = getattr(torch, options.dtype) if options.dtype else None
    return options


def _run_all(names: list[str], options: argparse.Namespace) -> Iterator[Found]:
    """Share out operators to processes, and go on after one that dies."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        todo.put(name)
    found: queue.SimpleQueue[Found | None] = queue.SimpleQueue()
    workers = [
        threading.Thread(target=_run_some, args=(todo, found, options), daemon=True)
        for _ in range(options.jobs)
    ]
    for worker in workers:
        worker.start()
    left = len(workers)
    while left:
        each = found.get()
        if each is None:
            left -= 1
        else:
            yield each


def _run_some(todo: Any, found: Any, options: argparse.Namespace) -> None:
    process = None
    with contextlib.suppress(queue.Empty):
        while True:
            name = todo.get_nowait()
            if process is None or process.poll() is not None:
                process = _start(options)
            _run_one(process, name, found)
    if process is not None:
        process.stdin.close()
        process.wait()
    found.put(None)


def _run_one(process: subprocess.Popen[str], name: str, found: Any) -> None:
    """Have a process run one operator; tell which sample it has died of, if it has."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    place = [name, "all", -1]
    timer = threading.Timer(4 * LIMIT_S, process.kill)
    timer.start()
    for line in process.stdout:
        each = json.loads(line)
        if "done" in each:
            timer.cancel()
            return
        if "starts" in each:
            place = each["starts"]
            timer.cancel()
            timer = threading.Timer(4 * LIMIT_S, process.kill)
            timer.start()
        else:
            found.put(each)
    timer.cancel()
    told = f"the process ended with {process.wait()}"
    found.put(_found(place[0], place[1], place[2], Outcome("crash", told, "process")))


def _start(options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.operator_samples", "--worker"]
    command += ["--samples", "all" if options.samples is None else str(options.samples)]
    command += ["--kinds", ",".join(options.kinds)]
    command += ["--dtype", str(options.dtype)[6:]] if options.dtype else []
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL if not options.op else None,
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
