"""
Step times as this machine would take them: a plan replayed, with a few constants fitted to it.

This module owns what the simulator leaves out of a step on real devices, as constants that are the
same for all models (`Calibration`); how a plan is replayed with them (`predict`); how sure that is
(`interval`, `probability_faster`); and the file of constants, beside the op times that they belong
to. How they are fitted is `placewright.bench.fidelity_fit`; nothing here needs PyTorch.

What a replay does as the executor does, and the simulator does not:

* Ops run in the order of the plan, whatever becomes ready first.
* A tensor from one CPU device to another is copied by the receiver, before its first reader there,
  and the receiver computes nothing meanwhile. The link's latency is what it takes to wake up, so
  a receiver that finds the tensor made has none. Copies to and from GPUs go on beside computing.
* A CPU device puts what it sends to a GPU into pinned memory first, and computes nothing meanwhile.
* Cores that idle leave memory and caches to the others.

Letters: ``D`` devices, ``X`` transfers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np

from placewright import files
from placewright.cluster import Cluster
from placewright.costs import PS_PER_S
from placewright.errors import InputError
from placewright.execute.op_times import FOLDER, device_keys, torch_version
from placewright.frontends._cache import cache_folder
from placewright.graph import BoolArray, FloatArray, IdArray
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate
from placewright.timeline import Timeline

COVERAGE = 0.9
"""The share of plans whose step time lies in the interval."""


class KindConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ops take on a kind of device."""

    op_factor: float = 1.0  # on op times
    op_overhead_s: float = 0.0  # beside it, for every op that takes time


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is fitted; by itself, nothing beyond op times and links."""

    kinds: Mapping[str, KindConstants] = {}  # by kind of device
    transfer_overhead_s: float = 0.0  # beside a link's latency, for every transfer
    copy_factor: float = 1.0  # on a transfer's bytes by the link's bandwidth,
    weights_factor: float = 1.0  # and on those of weights: nobody's cache has just been given them
    step_overhead_s: float = 0.0  # once a step
    wake_factor: float = 1.0  # on a link's latency, where a core waits for another's tensor
    staging_factor: float = 0.0  # of a transfer to a GPU's time, that its CPU takes to prepare it
    idle_gain: float = 0.0  # share of its time that a CPU device's op saves while others idle


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """
    Constants of a machine, and how far predictions made with them were off.

    `residuals` are logarithms of measured by predicted step times, of plans that the constants
    were not fitted to, in ascending order. `within_sd` is how much they vary among the plans of
    one model, `between_sd` from model to model.
    """

    format: str = "placewright-calibration"
    version: int = 1
    devices: tuple[str, ...]  # whose: keys of `device_keys`
    torch: str
    constants: Constants
    residuals: tuple[float, ...]
    within_sd: float
    between_sd: float
    num_models: int


@dataclass(frozen=True)
class Prediction:
    """A step time, and the interval that `COVERAGE` of all plans' measured times lie in."""

    time_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Replay:
    """
    A plan as its devices run it, reduced to where one waits for another.

    Between two transfers a device just works on, so all that is needed of its ops, up to there, is
    their times' sum, their number, and how long what it has sent to GPUs takes on the way.
    """

    kinds: tuple[str, ...]  # [D]
    is_copied_by_target: tuple[bool, ...]  # [X] it takes the receiving device's time
    is_resident: BoolArray  # [X] a weight, there from the beginning
    target: IdArray  # [X] in the order in which devices come to wait for them
    source: IdArray  # [X]
    target_work: FloatArray  # [X, 3] the receiver's before it: seconds, ops, seconds on the way
    source_work: FloatArray  # [X, 3] the sender's up to its op that makes the tensor
    source_last: IdArray  # [X] the last transfer that the sender waited for before that, or -1
    latency_s: FloatArray  # [X] zero where there is nothing to copy, unless a core waits
    copy_s: FloatArray  # [X] bytes by bandwidth
    total_work: FloatArray  # [D, 3]

    @classmethod
    def of(cls, timeline: Timeline) -> Replay:
        """Reduce a simulated plan."""
        return _reduce(timeline)

    def time_s(self, constants: Constants) -> float:
        """Give how long a step takes."""
        scale = np.array(
            [
                (each.op_factor, each.op_overhead_s, constants.staging_factor)
                for each in (constants.kinds.get(kind, KindConstants()) for kind in self.kinds)
            ]
        )
        time_s = self._run(constants, scale)
        is_cpu = np.array([kind == "cpu" for kind in self.kinds])
        if constants.idle_gain > 0 and is_cpu.sum() > 1 and time_s > 0:
            # Op times are those with all cores at work. Where the others are known to idle for a
            # part of the step, that part of an op's time, on average, is shorter.
            work_s = (self.total_work * scale).sum(axis=1)
            others_s = (work_s[is_cpu].sum() - work_s) / (is_cpu.sum() - 1)
            idle = np.where(is_cpu, 1 - np.minimum(others_s / time_s, 1.0), 0.0)
            time_s = self._run(constants, scale * (1 - constants.idle_gain * idle)[:, None])
        return time_s + constants.step_overhead_s

    def _run(self, constants: Constants, scale: FloatArray) -> float:
        """Go from transfer to transfer; `scale` is on each device's work, [D, 3]."""
        before = (self.target_work * scale[self.target]).sum(axis=1).tolist()
        made = (self.source_work * scale[self.source]).sum(axis=1).tolist()
        takes_s = np.where(self.copy_s > 0, constants.transfer_overhead_s, 0.0)
        factor = np.where(self.is_resident, constants.weights_factor, constants.copy_factor)
        takes_s += self.copy_s * factor
        takes, latency = takes_s.tolist(), self.latency_s.tolist()
        wake = (self.latency_s * constants.wake_factor).tolist()
        waited = [0.0] * len(self.kinds)  # by each device so far
        then = [0.0] * (len(takes) + 1)  # by its receiver, after each transfer; the last stays 0
        free: dict[tuple[int, int], float] = {}  # when a link to or from a GPU is
        ways = zip(self.source.tolist(), self.target.tolist(), strict=True)
        for k, (source, target) in enumerate(ways):
            now = before[k] + waited[target]
            ready = made[k] + then[self.source_last[k]]
            if self.is_copied_by_target[k]:
                end = (ready + wake[k] if ready > now else now) + takes[k]
            else:
                arrived = max(ready, free.get((source, target), 0.0)) + latency[k] + takes[k]
                free[source, target] = arrived
                end = max(now, arrived)
            waited[target] += end - now
            then[k] = waited[target]
        ends = (self.total_work * scale).sum(axis=1) + waited
        return float(ends.max())


def predict(problem: Problem, candidate: Candidate, calibration: Calibration) -> float:
    """
    Predict a candidate's step time, in seconds.

    Parameters
    ----------
    problem
        What is placed, with measured op times (`measured_costs`).
    candidate
        Where ops run; they start in the order that the simulator finds.
    calibration
        The machine's.

    Raises
    ------
    InputError
        The candidate does not fit the problem.
    """
    return Replay.of(simulate(problem, candidate)).time_s(calibration.constants)


def interval(time_s: float, calibration: Calibration, coverage: float = COVERAGE) -> Prediction:
    """
    Give the interval in which a plan's measured time lies, if it is like those calibrated with.

    Its ends are order statistics of the residuals, `coverage` and a little more of them between,
    so that a new one from the same distribution is covered with that probability at least (split
    conformal prediction). With too few residuals for that, it is all of their range.
    """
    low, high = conformal_ends(calibration.residuals, coverage)
    return Prediction(time_s, time_s * math.exp(low), time_s * math.exp(high))


def conformal_ends(residuals: Sequence[float], coverage: float = COVERAGE) -> tuple[float, float]:
    """Give the two residuals between which a new one lies with this probability, at least."""
    ordered = sorted(residuals)
    if not ordered:
        raise InputError("There is no residual to make an interval of; calibrate with more plans.")
    tail = max(math.floor((len(ordered) + 1) * (1 - coverage) / 2 + 1e-9), 1)
    return ordered[tail - 1], ordered[-tail]


def probability_faster(a_s: float, b_s: float, calibration: Calibration) -> float:
    """
    Tell how likely one plan of a model is faster than another, by their predicted times.

    Errors of two plans of one model have the model's own part in common, which does not change
    which is faster; what is left of each is normal with `Calibration.within_sd`, and independent.
    Plans that share most of their placement err alike, so that for them the answer is too careful.
    """
    if a_s == b_s:
        return 0.5
    sd = math.sqrt(2) * max(calibration.within_sd, 1e-9)
    return NormalDist().cdf(math.log(b_s / a_s) / sd)


# --- The file. ---


def calibration_path(cluster: Cluster) -> Path | None:
    """Tell where the calibration of a cluster's devices is; None if there can be none."""
    keys, version, folder = _keys(cluster), torch_version(), cache_folder()
    if keys is None or version is None or folder is None:
        return None
    words = "; ".join((*keys, f"torch {version}"))
    return folder / FOLDER / f"calibration-{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"


def read_calibration(cluster: Cluster) -> Calibration | None:
    """
    Read the calibration of a cluster's devices; None if there is none.

    Raises
    ------
    InputError
        The file is wrong.
    """
    path = calibration_path(cluster)
    if path is None or not path.exists():
        return None
    return files.read_json(path, Calibration, "calibration file")


def save_calibration(calibration: Calibration, cluster: Cluster) -> Path | None:
    """
    Keep a calibration for all who use these devices; give its file, or None if there can be none.

    Raises
    ------
    InputError
        It cannot be written.
    """
    path = calibration_path(cluster)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`{path.parent}` cannot be made: {error.strerror}.") from None
        files.write(path, msgspec.json.format(msgspec.json.encode(calibration), indent=1))
    return path


def calibrated_devices(cluster: Cluster) -> tuple[str, ...]:
    """Name what a calibration is of: the devices' keys, or their names where there is none."""
    return _keys(cluster) or cluster.device_names


def _keys(cluster: Cluster) -> tuple[str, ...] | None:
    keys = device_keys(cluster.device_names, cluster.device_kinds, cluster.device_models)
    known = [key for key in keys if key is not None]
    return tuple(sorted(known)) if len(known) == len(keys) else None


# --- Replays. ---


def _reduce(timeline: Timeline) -> Replay:
    """Walk through a plan's ops in their order and note where one device waits for another."""
    problem = timeline.problem
    graph, cluster = problem.graph, problem.cluster
    place = timeline.candidate.placement.tolist()
    times_s = problem.costs.op_ps[np.arange(graph.num_ops), timeline.candidate.placement] / PS_PER_S
    inputs = graph.use_tensor[graph.input_order].tolist()
    begins, maker = graph.op_inputs.tolist(), graph.tensor_op.tolist()
    sizes = graph.tensor_bytes.tolist()
    staged_s = _staged_s(timeline)
    nothing = (0.0, 0.0, 0.0)
    work = [nothing] * cluster.num_devices
    last = [-1] * cluster.num_devices
    done = [(nothing, -1)] * graph.num_ops
    received: set[tuple[int, int]] = set()
    rows = []
    for op in timeline.sequence[timeline.sequence < graph.num_ops].tolist():
        d = place[op]
        for tensor in inputs[begins[op] : begins[op + 1]]:
            s = place[maker[tensor]]
            if s == d or (tensor, d) in received:
                continue
            received.add((tensor, d))
            made, source_last = done[maker[tensor]]
            is_resident = graph.op_is_resident[maker[tensor]]
            rows.append((d, s, *work[d], *made, source_last, sizes[tensor], is_resident))
            last[d] = len(rows) - 1
        if times_s[op] > 0:
            work[d] = (work[d][0] + float(times_s[op]), work[d][1] + 1, work[d][2] + staged_s[op])
        if not graph.op_is_resident[op]:
            done[op] = (work[d], last[d])
    table = np.array(rows, dtype=np.float64).reshape(-1, 11)
    target, source = table[:, 0].astype(np.int32), table[:, 1].astype(np.int32)
    kinds, size = cluster.device_kinds, table[:, 9]
    has_bytes = size > 0
    ways = zip(target, source, strict=True)
    is_copied = np.array([kinds[t] == kinds[s] == "cpu" for t, s in ways], dtype=np.bool_)
    return Replay(
        kinds=kinds,
        is_copied_by_target=tuple(is_copied.tolist()),
        is_resident=table[:, 10] > 0,
        target=target,
        source=source,
        target_work=table[:, 2:5],
        source_work=table[:, 5:8],
        source_last=table[:, 8].astype(np.int32),
        latency_s=np.where(has_bytes | is_copied, cluster.latency_s[source, target], 0.0),
        copy_s=np.where(has_bytes, size / cluster.bytes_per_s[source, target], 0.0),
        total_work=np.array(work),
    )


def _staged_s(timeline: Timeline) -> list[float]:  # [N]
    """Tell how long what each op on a CPU sends to GPUs takes on the way."""
    graph, cluster = timeline.problem.graph, timeline.problem.cluster
    place, kinds = timeline.candidate.placement, cluster.device_kinds
    staged_s = [0.0] * graph.num_ops
    tensors = graph.use_tensor.astype(np.int64)
    ways = np.unique(np.stack([tensors, place[graph.use_op]], axis=1), axis=0)
    for tensor, target in ways.tolist():
        op = int(graph.tensor_op[tensor])
        source = int(place[op])
        if kinds[source] == "cpu" and kinds[target] == "cuda" and not graph.op_is_resident[op]:
            rate = cluster.bytes_per_s[source, target]
            staged_s[op] += float(graph.tensor_bytes[tensor] / rate)
    return staged_s
