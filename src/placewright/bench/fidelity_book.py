"""
What `placewright bench fidelity` has measured, on disk: one plan a line, and the problems.

This module owns the folder: ``plans.jsonl`` (appended whole, so that a bench that is stopped goes
on where it was), the cluster, and for each model its graph and what was measured of its ops when
it was planned, and again while its plans ran; so that tables can be made again without PyTorch,
whatever is profiled later.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from placewright import files
from placewright.bench.fidelity_plans import Placement
from placewright.cluster import Cluster
from placewright.costs import Costs
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.problem import Problem

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Devices in a placement that is written down, a character each."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan, as it was simulated and as it was measured."""

    model: str
    plan: str
    kind: str
    placement: str  # a character of `DIGITS` an op
    simulated_s: float
    simulated_bytes: Mapping[str, int]  # peaks, by device
    measured_s: float | None = None  # the mean of its processes'; None if one failed
    processes_s: tuple[float, ...] = ()  # the median step time of each
    num_steps: int = 0
    measured_bytes: Mapping[str, int | None] = {}
    failure: str = ""
    reason: str = ""
    machine: str
    placewright: str
    torch: str


def to_text(placement: Placement) -> str:
    """Write a placement down."""
    return "".join(DIGITS[d] for d in placement.tolist())


def to_placement(text: str) -> Placement:
    """Read a placement."""
    return np.array([DIGITS.index(letter) for letter in text], dtype=np.int64)


@dataclass(frozen=True)
class FidelityBook:
    """The folder of a bench."""

    folder: Path

    @property
    def path(self) -> Path:
        """Give the file of plans."""
        return self.folder / "plans.jsonl"

    @property
    def cluster_path(self) -> Path:
        """Give the file of the machine."""
        return self.folder / "cluster.toml"

    def open(self) -> None:
        """
        Make the folder and the file of plans, where they are missing.

        Raises
        ------
        InputError
            They cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"):
                pass
        except OSError as error:
            raise InputError(f"`{self.path}` cannot be written: {error.strerror}.") from None

    def read(self) -> dict[tuple[str, str], Record]:
        """
        Read all records by model and plan; of a plan that was measured twice, the later one.

        Raises
        ------
        InputError
            The file is missing, or a line of it is wrong.
        """
        records = {}
        for number, line in enumerate(files.read(self.path, "file of plans").split(b"\n"), start=1):
            if line:
                try:
                    record = msgspec.json.decode(line, type=Record)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise InputError(
                        f"Line {number} of `{self.path}` is no plan: {files.reason_of(error)}."
                        " Delete that line to go on without it."
                    ) from None
                records[record.model, record.plan] = record
        return records

    def append(self, record: Record) -> None:
        """
        Write one record: the whole line, or nothing.

        Raises
        ------
        InputError
            It cannot be written.
        """
        files.append_line(self.path, msgspec.json.encode(record))

    def has_problem(self, model: str) -> bool:
        """Tell whether a model has been captured and profiled."""
        return self._costs_path(model).exists()

    def save_problem(self, model: str, problem: Problem) -> None:
        """Keep a model's graph and op times; the times last, so that one is never alone."""
        problem.graph.save(self._graph_path(model))
        _save_costs(self._costs_path(model), problem.costs)

    def load_problem(self, model: str) -> Problem:
        """
        Load what a model's plans were made for.

        Raises
        ------
        InputError
            It is not there, or cannot be read.
        """
        cluster, graph = Cluster.load(self.cluster_path), Graph.load(self._graph_path(model))
        return Problem(graph, cluster, _load_costs(self._costs_path(model)))

    def save_again(self, model: str, costs: Costs) -> None:
        """Keep the op times that were taken while a model's plans ran."""
        _save_costs(self._again_path(model), costs)

    def load_again(self, model: str) -> Costs | None:
        """
        Load the op times that were taken while a model's plans ran; None if there are none.

        Raises
        ------
        InputError
            They cannot be read.
        """
        path = self._again_path(model)
        return _load_costs(path) if path.exists() else None

    def _graph_path(self, model: str) -> Path:
        return self.folder / f"{_label(model)}.graph.json"

    def _costs_path(self, model: str) -> Path:
        return self.folder / f"{_label(model)}.op-times.npy"

    def _again_path(self, model: str) -> Path:
        return self.folder / f"{_label(model)}.op-times-again.npy"


def _save_costs(path: Path, costs: Costs) -> None:
    data = io.BytesIO()
    seen = (costs.scratch_bytes, costs.idle_gain_ps)
    nothing = np.zeros_like(costs.op_ps)
    np.save(data, np.stack([costs.op_ps, *(nothing if s is None else s for s in seen)]))
    files.write(path, data.getvalue())


def _load_costs(path: Path) -> Costs:
    try:
        every = np.load(io.BytesIO(files.read(path, "file of op times")), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"`{path}` is no file of op times: {error}.") from None
    if len(every) != 3:
        raise InputError(
            f"`{path}` is of an earlier version, which timed ops otherwise. Use another folder."
        )
    return Costs(*every)


def _label(model: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", model).strip("-.")
