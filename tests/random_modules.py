"""
Random small modules, held equal to eager PyTorch on random placements over two CPU devices.

`run_case(seed)` draws a module (`tests.random_module_drawing`), captures, places and runs it, and
compares it with eager PyTorch to the bit (`tests.random_module_cases`); `shrink` finds the
smallest module that fails in the same way. From the command line:

    python -m tests.random_modules --cases 100000 --seed 0

prints a table of what was refused, and what failed, shrunk. Cases run in a process of their own,
so that one that ends the process is told with its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.random_module_cases import Case, Outcome, check
from tests.random_module_drawing import draw
from tests.random_module_shrinking import shrink

__all__ = ["Case", "Outcome", "check", "draw", "methods_of", "run_case", "shrink"]


def run_case(seed: int, ignored: frozenset[str] = frozenset()) -> Outcome:
    """Draw a case and hold it equal to eager PyTorch."""
    return check(draw(seed), ignored)


def methods_of(case: Case) -> list[str]:
    """List what a module calls, to tell failures apart and to see what is covered."""
    words: set[str] = set()
    for line in case.lines:
        words |= {*re.findall(r"(\w+)\(", line.text)}
        words |= {sign for sign in (" *= ", " += ", "] = ", " @ ") if sign in line.source}
        words |= {f"self.{stem}" for stem in "bcnm" if f"self.{stem}" in line.source}
        words |= {"index"} if re.search(r"\w\[", line.text) else set()
    return sorted(words)


def shape_of(source: str) -> str:
    """Cut a line to what it does to which kind of tensor: ``x.op_()``, ``v = w.chunk()``."""
    source = re.sub(r"\b(self\.)?([a-z])\d+\b", r"\2", source)
    source = re.sub(r"\[[^]]*\]", "[]", source)
    source = re.sub(r" [-+*/@]?= .*", lambda m: " op= ..." if "[]" in source else m[0], source)
    source = re.sub(r"\.[a-z]+_\(.*", ".op_()", source)
    return re.sub(r"\([^()]*\)", "()", source)


# --- The command line. ---


@dataclass
class Tally:
    """Counts of many cases."""

    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[int]] = field(default_factory=dict)  # seeds by signature
    methods: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, found: dict[str, Any]) -> None:
        """Count one case, as `_work` wrote it."""
        kind = found["kind"]
        self.kinds[kind] += 1
        if kind == "refused":
            self.refusals[found["group"]] += 1
        elif kind in ("wrong", "crash"):
            self.failures.setdefault(found["signature"], []).append(found["seed"])
        for name in found["methods"]:
            self.methods.setdefault(name, Counter())[kind] += 1


def main() -> None:
    """Run many cases, and print what was refused and what failed."""
    options = _read_options()
    torch.set_num_threads(1)
    if options.case is not None:
        case = draw(options.case)
        print(case.describe(), "\n", check(case, options.ignored))
        return
    if options.worker:
        _work(options)
        return
    tally, start = Tally(), time.perf_counter()
    for done, found in enumerate(_run_all(options), 1):
        tally.add(found)
        if done % 500 == 0:
            each = 1e3 * (time.perf_counter() - start) / done
            print(f"{done} cases, {each:.0f} ms each: {_counts(tally.kinds)}", flush=True)
    _print_tables(tally, options.coverage)
    _print_failures(tally, options)


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.random_modules")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--case", type=int, help="print and run the one with this seed")
    parser.add_argument("--shrink", type=int, default=60, help="how many failures to shrink")
    parser.add_argument("--coverage", action="store_true", help="print outcomes by call")
    parser.add_argument(
        "--ignore", default="", help="differences to overlook: strides, alias, requires_grad, ..."
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.ignored = frozenset(options.ignore.split(",")) - {""}
    return options


def _work(options: argparse.Namespace) -> None:
    """Run cases one by one and write a line of JSON before and after each."""
    for seed in range(options.seed, options.seed + options.cases, options.jobs):
        print(json.dumps({"starts": seed}), flush=True)
        case = draw(seed)
        outcome = check(case, options.ignored)
        found = {"seed": seed, "kind": outcome.kind, "group": outcome.group}
        found |= {"signature": outcome.signature, "methods": methods_of(case)}
        print(json.dumps(found), flush=True)


def _run_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the cases in processes, several at a time, and go on after one that dies."""
    ends = options.seed + options.cases
    workers = [_Worker(options, options.seed + k, ends) for k in range(options.jobs)]
    while workers:
        for worker in list(workers):
            found = worker.next()
            if found is None:
                workers.remove(worker)
            else:
                yield found


class _Worker:
    """A process that runs every so-manieth case, started again after a crash."""

    def __init__(self, options: argparse.Namespace, seed: int, ends: int) -> None:
        self.options, self.ends, self.seed = options, ends, seed
        self.process = self._start(seed)

    def _start(self, seed: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.random_modules", "--worker"]
        command += ["--seed", str(seed), "--cases", str(self.ends - seed)]
        command += ["--jobs", str(self.options.jobs), "--ignore", self.options.ignore]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def next(self) -> dict[str, Any] | None:
        """Wait for the outcome of the next case; None after the last."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = json.loads(line)
            if "starts" not in found:
                return found
            self.seed = found["starts"]
        if self.process.wait() == 0 or self.seed >= self.ends:
            return None
        code, seed = self.process.returncode, self.seed
        self.seed += self.options.jobs
        self.process = self._start(self.seed)
        told = f"crash: the process ended with {code}"
        return {"seed": seed, "kind": "crash", "group": "", "signature": told, "methods": []}


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())


def _print_tables(tally: Tally, coverage: bool) -> None:
    print(f"\n{_counts(tally.kinds)}\n\nRefused:")
    for words, count in tally.refusals.most_common():
        print(f"{count:7}  {words} ...")
    print("\nFailed, by what was seen first:")
    for signature, seeds in sorted(tally.failures.items(), key=lambda pair: -len(pair[1])):
        print(f"{len(seeds):7}  {signature}  (seeds {seeds[:3]})")
    if coverage:
        print("\nBy call:")
        for name, counts in sorted(tally.methods.items(), key=lambda p: -p[1].total()):
            print(f"{name:24} {_counts(counts)}")


def _print_failures(tally: Tally, options: argparse.Namespace) -> None:
    """Shrink failures, of each signature in turn, and print those that differ."""
    queues = [list(seeds) for key, seeds in tally.failures.items() if "process ended" not in key]
    order = [queue[k] for k in range(options.shrink) for queue in queues if k < len(queue)]
    found: dict[tuple[str, ...], tuple[int, Case, Outcome]] = {}
    count: Counter[tuple[str, ...]] = Counter()
    for seed in order[: options.shrink]:
        case = shrink(draw(seed), options.ignored)
        outcome = check(case, options.ignored)
        key = (outcome.signature, *sorted(shape_of(line.source) for line in case.lines))
        count[key] += 1
        found.setdefault(key, (seed, case, outcome))
    for key, times in count.most_common():
        seed, case, outcome = found[key]
        print(f"\n=== {outcome.signature} ({times} of {len(order[: options.shrink])}, seed {seed})")
        print(f"{case.describe()}\n# {outcome.detail[:400]}")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
