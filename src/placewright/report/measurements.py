"""Measured plans beside what was predicted of them, in tables and plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from placewright.report.terminal import table
from placewright.units import format_bytes, format_time

if TYPE_CHECKING:
    from placewright.cluster import Cluster
    from placewright.execute._statistics import Ratio
    from placewright.execute.measuring import Measurement
    from placewright.plan import Plan


def describe_measurements(
    found: Sequence[Measurement], plans: Mapping[str, Plan], ratios: Mapping[str, Ratio]
) -> dict[str, Any]:
    """Tell measurements in plain values; `ratios` are the fastest's times by the others'."""
    return {
        "plans": [_describe(each, plans[each.name]) for each in found],
        "fastest": _fastest(found),
        "fastest_by_others": {name: vars(ratio) for name, ratio in ratios.items()},
    }


def _describe(each: Measurement, plan: Plan) -> dict[str, Any]:
    told: dict[str, Any] = {
        "plan": each.name,
        "failure": each.failure,
        "reason": each.reason,
        "simulated_s": plan.predicted.makespan_s,
        "simulated_peak_bytes": plan.predicted.peak_bytes,
    }
    if each.failure is not None:
        return told
    interval = each.interval
    return told | {
        "median_s": interval.median_s,
        "low_s": interval.low_s if math.isfinite(interval.low_s) else None,
        "high_s": interval.high_s if math.isfinite(interval.high_s) else None,
        "error": plan.predicted.makespan_s / interval.median_s - 1,
        "num_steps": each.num_steps,
        "num_warm_up": each.num_warm_up,
        "has_settled": each.has_settled,
        "is_dropped": each.is_dropped,
        "peak_bytes": dict(each.peak_bytes),
    }


def _fastest(found: Sequence[Measurement]) -> str | None:
    fine = [each for each in found if each.failure is None]
    return min(fine, key=lambda each: each.median_s).name if fine else None


def show_measurements(
    found: Sequence[Measurement],
    plans: Mapping[str, Plan],
    ratios: Mapping[str, Ratio],
    cluster: Cluster | None,
) -> RenderableType:
    """Show measured step times, memory, and how plans compare."""
    parts: list[RenderableType] = [_show_times(found, plans)]
    notes = [
        f"{each.name} failed ({each.failure}): {each.reason}"
        for each in found
        if each.failure is not None
    ]
    notes += [
        f"{each.name} never settled: its first {each.num_warm_up} steps are left out."
        for each in found
        if each.failure is None and not each.has_settled
    ]
    notes += [
        f"{each.name} was clearly not the fastest and was dropped after {each.num_steps} steps."
        for each in found
        if each.is_dropped
    ]
    if any(each.peak_bytes for each in found):
        parts.append(_show_memory(found, plans, cluster))
    if ratios:
        parts.append(_show_ratios(found, ratios))
    if notes:
        parts.append(Text("\n".join(notes)))
    return Group(*parts)


def _show_times(found: Sequence[Measurement], plans: Mapping[str, Plan]) -> RenderableType:
    columns = ("plan", "measured", "95% interval", "steps", "warm-up", "simulated", "error")
    made = table("Step time", *columns)
    for each in found:
        simulated_s = plans[each.name].predicted.makespan_s
        if each.failure is not None:
            failed = Text(f"failed ({each.failure})", style="red")
            made.add_row(each.name, failed, "", "", "", format_time(simulated_s), "")
            continue
        interval = each.interval
        made.add_row(
            each.name,
            format_time(interval.median_s),
            _span(interval.low_s, interval.high_s),
            f"{each.num_steps:,}",
            str(each.num_warm_up),
            format_time(simulated_s),
            f"{simulated_s / interval.median_s - 1:+.1%}",
        )
    return made


def _span(low_s: float, high_s: float) -> str:
    """Write an interval of times, with its unit once."""
    if not math.isfinite(high_s):
        return "unknown"
    (low, low_unit), (high, unit) = format_time(low_s).split(), format_time(high_s).split()
    return f"{low} – {high} {unit}" if low_unit == unit else f"{low} {low_unit} – {high} {unit}"


def _show_memory(
    found: Sequence[Measurement], plans: Mapping[str, Plan], cluster: Cluster | None
) -> RenderableType:
    columns = ("plan", "device", "measured", "simulated", "error", "of", "")
    made = table("Peak memory", *columns[: None if cluster is not None else -2], text=("device",))
    for each in found:
        predicted = plans[each.name].predicted.peak_bytes
        for device, peak in each.peak_bytes.items():
            simulated = predicted.get(device, 0)
            row = [each.name, device, "unknown", format_bytes(simulated), ""]
            if peak is not None:
                row[2] = format_bytes(peak)
                row[4] = f"{simulated / peak - 1:+.1%}" if peak else ""
            if cluster is None:
                made.add_row(*row)
                continue
            memory = int(cluster.memory_bytes[cluster.device_index(device)])
            fits = (peak if peak is not None else simulated) <= memory
            verdict = Text("fits") if fits else Text("does not fit", style="red")
            made.add_row(*row, format_bytes(memory), verdict)
    return made


def _show_ratios(found: Sequence[Measurement], ratios: Mapping[str, Ratio]) -> RenderableType:
    best = _fastest(found)
    title = f"Beside {best}, the fastest; measured in turns"
    made = table(title, "plan", "takes", "95% interval", "is slower")
    for name, ratio in ratios.items():
        sureness = min(ratio.sureness, 0.999)
        words = f"{'>' if sureness < ratio.sureness else ''}{sureness:.1%} sure"
        interval = f"{1 / ratio.high:.3f} – {1 / ratio.low:.3f}"
        made.add_row(name, f"{1 / ratio.ratio:.3f} times as long", interval, words)
    return made
