"""
Step times as this machine would take them: a plan replayed, with a few constants fitted to it.

This module owns what the simulator leaves out of a step on real devices, as constants that are the
same for all models (`Calibration`); what a plan takes with them (`predict`); how sure that is
(`interval`, `probability_faster`); and the file of constants, beside the op times that they belong
to. How they are fitted is `placewright.bench.fidelity_fit`; nothing here needs PyTorch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import msgspec

from placewright import files
from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.execute.op_times import FOLDER, device_keys, torch_version
from placewright.execute.replay import RULES, Constants, Replay
from placewright.frontends._cache import cache_folder
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate

COVERAGE = 0.9
"""The share of plans whose step time lies in the interval."""


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
    words = "; ".join((*keys, f"torch {version}", f"replay {RULES}"))
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
