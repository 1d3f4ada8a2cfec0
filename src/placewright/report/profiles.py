"""Measured op times for the terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from placewright.execute.profiling import DeviceProfile, RooflineError
from placewright.graph import Graph
from placewright.report.terminal import table
from placewright.units import format_time

_NUM_KINDS = 8
_NUM_FAILURES = 3


def describe_profile(
    graph: Graph, found: DeviceProfile, error: RooflineError | None
) -> dict[str, Any]:
    """Give a profile's figures, as `--json` prints them."""
    return {
        "device": found.key,
        "device_names": found.device_names,
        "num_distinct": found.num_distinct,
        "num_known": found.num_known,
        "num_new": found.num_new,
        "failures": dict(found.failures),
        "wall_s": found.wall_s,
        "issue_s": found.issue_s,
        "step_s": found.step_s,
        "slowest_kinds": [
            {"kind": kind, "num_ops": count, "time_s": time_s}
            for kind, count, time_s in slowest_kinds(graph, found)
        ],
        "roofline": None if error is None else vars(error),
    }


def show_profile(graph: Graph, found: DeviceProfile, error: RooflineError | None) -> RenderableType:
    """Show what was timed, what takes longest, and how wrong estimates were."""
    lines = [
        f"{graph.name} on {', '.join(found.device_names)} ({found.key})",
        f"{found.num_distinct:,} distinct ops: {found.num_new:,} timed in"
        f" {format_time(found.wall_s)}, {found.num_known:,} known before.",
        f"All ops of a step, one after the other: {format_time(found.step_s)}, with"
        f" {format_time(found.issue_s)} to issue each.",
    ]
    if error is not None:
        lines.append(
            f"The cluster's estimates are {error.median_ratio:.2f} times these (median of distinct"
            f" ops), {error.total_ratio:.2f} times in total."
        )
    if found.failures:
        lines.append(f"{len(found.failures):,} could not be timed and stay estimated:")
        lines += [f"  {name}: {why}" for name, why in [*found.failures.items()][:_NUM_FAILURES]]
        lines += ["  ..."] * (len(found.failures) > _NUM_FAILURES)
    kinds = table("Where the time goes", "kind", "ops", "time", "share")
    for kind, count, time_s in slowest_kinds(graph, found):
        share = time_s / found.step_s if found.step_s else 0.0
        kinds.add_row(kind, f"{count:,}", format_time(time_s), f"{share:.1%}")
    return Group(Text("\n".join(lines)), kinds)


def slowest_kinds(graph: Graph, found: DeviceProfile) -> list[tuple[str, int, float]]:
    """List the kinds of ops that take longest in a step: kind, number of ops, time."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for i in np.flatnonzero(~np.isnan(found.op_time_s)):
        times[graph.op_kinds[i]] += float(found.op_time_s[i])  # type: ignore[assignment]
        counts[graph.op_kinds[i]] += 1
    slowest = sorted(times.items(), key=lambda item: (-item[1], item[0]))[:_NUM_KINDS]
    return [(kind, counts[kind], float(time_s)) for kind, time_s in slowest]
