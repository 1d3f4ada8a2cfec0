"""
Checkpoints of learned placers, and TensorBoard scalars.

A checkpoint is one safetensors file, ``policy.safetensors``, written whole or not at all: weights,
optimiser and the best placement as tensors, everything else (random state, baseline, counts,
history) as JSON in its metadata. ``state.json`` beside it tells people where the run stands.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from placewright import files
from placewright.errors import InputError
from placewright.placers.run import Entry, Run
from placewright.problem import Candidate, Problem

VERSION = 1
WEIGHTS, STATE = "policy.safetensors", "state.json"


@dataclass(frozen=True)
class Identity:
    """What a checkpoint is for: it is gone on with only where all of this is the same."""

    graph: str
    cluster: str
    costs: str
    objective: str
    grouping: str
    placer: dict[str, Any]
    seed: int

    @classmethod
    def of(cls, run: Run, placer: dict[str, Any]) -> Identity:
        """Identify a run."""
        problem = run.problem
        return cls(
            graph=problem.graph.fingerprint,
            cluster=problem.cluster.fingerprint,
            costs=_other_digest(problem),
            objective=f"{run.evaluator.objective}, overlap {run.evaluator.overlap}",
            grouping="" if run.grouping is None else _digest(np.asarray(run.grouping).tobytes()),
            placer=placer,
            seed=run.seed,
        )


def _other_digest(problem: Problem) -> str:
    """Digest what fingerprints leave out: times, links, memory; phases, modules, shapes."""
    graph, cluster = problem.graph, problem.cluster
    return _digest(
        problem.costs.op_ps.tobytes(),
        cluster.memory_bytes.tobytes(),
        cluster.latency_s.tobytes(),
        cluster.bytes_per_s.tobytes(),
        repr((cluster.link_channels, graph.op_phases, graph.op_modules)).encode(),
        repr(graph.tensor_shapes).encode(),
    )


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Stored:
    """What a trainer keeps in a checkpoint."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


def save_checkpoint(run: Run, identity: Identity, stored: Stored) -> None:
    """
    Save a checkpoint into the run's folder.

    Raises
    ------
    InputError
        It cannot be written.
    """
    from safetensors.torch import save as to_bytes

    assert run.folder is not None
    assert run.best is not None
    told = {
        "wall_s": run.wall_s,
        "samples": run.num_samples,
        "best_s": run.key[1],
        "overflow_bytes": run.key[0],
    }
    values = {
        "version": VERSION,
        "identity": asdict(identity),
        "run": told,
        "history": [asdict(entry) for entry in run.history],
        "recent": run.recent,
        "trainer": stored.values,
    }
    best = torch.from_numpy(np.array(run.best.placement, dtype=np.int64))
    tensors = {k: v.contiguous() for k, v in stored.tensors.items()}
    data = to_bytes({**tensors, "best": best}, metadata={"placewright": json.dumps(values)})
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"`{run.folder}` cannot be made: {error.strerror}.") from None
    files.write(run.folder / WEIGHTS, data)
    words = {**told, "placer": run.placer, "update": stored.values["update"]}
    files.write(run.folder / STATE, (json.dumps(words, indent=1) + "\n").encode())


def load_checkpoint(run: Run, identity: Identity) -> Stored | None:
    """
    Load the checkpoint in the run's folder, if the run is to go on with it, and set the run to it.

    Gives None where there is none and none is asked for.

    Raises
    ------
    InputError
        There is one though it is not asked for, or none though it is; it cannot be read; or it is
        of another version, graph, cluster, placer or seed.
    """
    assert run.folder is not None
    path = run.folder / WEIGHTS
    if not run.resumes:
        if path.exists():
            raise InputError(
                f"`{run.folder}` holds the checkpoint of a run. Go on with it (`--resume`), or"
                " choose another folder."
            )
        return None
    if not path.exists():
        raise InputError(f"There is no checkpoint to go on with in `{run.folder}`: no `{WEIGHTS}`.")
    values, tensors = _read(path)
    _check(path, values, identity)
    _set(run, values, tensors.pop("best"))
    return Stored(tensors, values["trainer"])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            values = json.loads((file.metadata() or {})["placewright"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"The checkpoint `{path}` cannot be read: {error}.") from None
    parts = {"version", "identity", "run", "history", "recent", "trainer"}
    if not isinstance(values, dict) or not parts <= values.keys() or "best" not in tensors:
        raise InputError(f"`{path}` is no checkpoint of a placewright run.")
    return values, tensors


def _check(path: Path, values: dict[str, Any], identity: Identity) -> None:
    """Refuse a checkpoint of anything else, saying what differs."""
    if values.get("version") != VERSION:
        raise InputError(
            f"The checkpoint `{path}` is of version {values.get('version')}; expected {VERSION}."
        )
    theirs, ours = values["identity"], asdict(identity)
    names = {
        "graph": "another graph",
        "cluster": "another cluster",
        "costs": "other op times, links, memory, modules or shapes",
        "objective": f"the objective {theirs['objective']}",
        "grouping": "another grouping",
        "seed": f"the seed {theirs['seed']}",
    }
    for key, words in names.items():
        if theirs[key] != ours[key]:
            raise InputError(f"The checkpoint `{path}` is of {words}; it cannot be gone on with.")
    before = json.loads(json.dumps(ours["placer"]))
    if theirs["placer"] != before:
        name = _difference(theirs["placer"], before)
        raise InputError(
            f"The checkpoint `{path}` is of another placer, or one with other settings"
            f" (`{name}`); it cannot be gone on with."
        )


def _difference(left: dict[str, Any], right: dict[str, Any]) -> str:
    """Name the first setting in which two placers differ."""
    for key in left | right:
        a, b = left.get(key), right.get(key)
        if a != b:
            both = isinstance(a, dict) and isinstance(b, dict)
            return _difference(a, b) if both else key  # type: ignore[arg-type]
    return ""


def _set(run: Run, values: dict[str, Any], best: Tensor) -> None:
    """Set a run to where it was: samples and seconds spent count."""
    told = values["run"]
    run.first_sample -= told["samples"]
    run.began_s -= told["wall_s"]
    run.key = (told["overflow_bytes"], told["best_s"])
    run.best = Candidate(best.numpy())
    run.history = [Entry(**entry) for entry in values["history"]]
    run.recent = [(time_s, fits) for time_s, fits in values["recent"]]


class Scalars:
    """Writes scalars for TensorBoard into a folder, or nothing if there is none."""

    def __init__(self, folder: Path | None, first_sample: int) -> None:
        self._writer: Any = None
        if folder is not None:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise InputError(
                    '`--tensorboard` needs TensorBoard: `pip install "placewright[tensorboard]"`.'
                ) from None
            self._writer = SummaryWriter(str(folder), purge_step=first_sample or None)

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, run: Run, scalars: dict[str, float]) -> None:
        """Write scalars by the number of samples so far."""
        if self._writer is not None:
            for name, value in {"best_s": run.key[1], **scalars}.items():
                self._writer.add_scalar(name, value, run.num_samples)
