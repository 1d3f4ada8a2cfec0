"""
What candidates are given to do: jobs of plans, and of plain PyTorch beside them.

This module owns what memory a candidate may use, and which device plain PyTorch gets: a whole GPU
if a plan uses one, all cores otherwise. It imports no PyTorch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

from placewright.cluster import Cluster
from placewright.execute._lanes import whole_gpu
from placewright.execute._wire import Job
from placewright.execute.processes import CandidateError, Template
from placewright.plan import Plan


def job_of_plan(plan: Plan, cluster: Cluster | None) -> Job:
    """Make a candidate's job of a plan."""
    if cluster is None:
        return Job(plan=plan)
    return Job(plan=plan, **memory_caps(cluster, {*plan.devices.values()}))


def job_of_eager(device: str, cluster: Cluster | None) -> Job:
    """Make the job of plain PyTorch on a device: ``cpu``, or a GPU with all that shares of it."""
    if cluster is None:
        return Job(eager=device)
    used = {name for name in cluster.device_names if whole_gpu(name) == device}
    return Job(eager=device, **memory_caps(cluster, used))


def memory_caps(cluster: Cluster, used: Collection[str]) -> dict[str, Any]:
    """
    Give a job's caps: what CPU devices have together, and each GPU that is used.

    Without a CPU device the process's own memory, which libraries of GPUs need, has no cap.
    """
    sizes = dict(zip(cluster.device_names, cluster.memory_bytes.tolist(), strict=True))
    kinds = dict(zip(cluster.device_names, cluster.device_kinds, strict=True))
    cpus = [size for name, size in sizes.items() if kinds[name] == "cpu"]
    return {
        "cpu_bytes": sum(cpus) if cpus else None,
        "gpu_bytes": {n: sizes[n] for n in sizes if kinds[n] == "cuda" and n in used},
    }


def choose_eager(
    template: Template, plans: Iterable[Plan], cluster: Cluster | None, limit_s: float
) -> tuple[Job, str]:
    """
    Make the job of plain PyTorch beside some plans; say why if it is not on their GPU.

    A step is tried there first: what one plan spreads may be too much for one GPU.
    """
    used = {whole_gpu(name) for plan in plans for name in plan.devices.values()}
    gpus = sorted(name for name in used if name.startswith("cuda"))
    if not gpus:
        return job_of_eager("cpu", cluster), ""
    job = job_of_eager(gpus[0], cluster)
    try:
        with contextlib.closing(template.begin(job, limit_s)) as process:
            process.ready(limit_s)
            process.run(1, limit_s)
    except CandidateError as failed:
        words = f"Plain PyTorch cannot run the step on {gpus[0]} alone, and is timed on all cores"
        return job_of_eager("cpu", cluster), f"{words} instead: {failed.reason}"
    return job, ""
