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
    found: Sequence[Measurement],
    plans: Mapping[str, Plan],
    ratios: Mapping[str, Ratio],
    beside: Mapping[str, Ratio],
) -> dict[str, Any]:
    """
    Tell measurements in plain values.

    `ratios` are the fastest plan's times by the others', and `beside` each plan's by plain
    PyTorch's.
    """
    plain = next((each for each in found if each.eager), None)
    return {
        "plans": [_describe_plan(each, plans[each.name]) for each in found if not each.eager],
        "fastest": _fastest(found),
        "fastest_by_others": {name: vars(ratio) for name, ratio in ratios.items()},
        "eager": None if plain is None else _describe_eager(plain),
        "by_eager": {
            name: vars(ratio) | {"is_faster": ratio.high < 1} for name, ratio in beside.items()
        },
        "answer": tell_beside_eager(found, beside),
    }


def _describe_plan(each: Measurement, plan: Plan) -> dict[str, Any]:
    told: dict[str, Any] = {
        "plan": each.name,
        "failure": each.failure,
        "reason": each.reason,
        "simulated_s": plan.predicted.makespan_s,
        "simulated_peak_bytes": plan.predicted.peak_bytes,
    }
    if each.failure is not None:
        return told
    error = plan.predicted.makespan_s / each.interval.median_s - 1
    return told | {"error": error} | _describe_times(each)


def _describe_eager(plain: Measurement) -> dict[str, Any]:
    told: dict[str, Any] = {
        "device": plain.eager,
        "num_cores": plain.num_cores,
        "note": plain.note,
        "failure": plain.failure,
        "reason": plain.reason,
    }
    return told if plain.failure is not None else told | _describe_times(plain)


def _describe_times(each: Measurement) -> dict[str, Any]:
    interval = each.interval
    return {
        "median_s": interval.median_s,
        "low_s": interval.low_s if math.isfinite(interval.low_s) else None,
        "high_s": interval.high_s if math.isfinite(interval.high_s) else None,
        "num_steps": each.num_steps,
        "num_warm_up": each.num_warm_up,
        "has_settled": each.has_settled,
        "is_dropped": each.is_dropped,
        "peak_bytes": dict(each.peak_bytes),
    }


def _fastest(found: Sequence[Measurement]) -> str | None:
    fine = [each for each in found if each.failure is None and not each.eager]
    return min(fine, key=lambda each: each.median_s).name if fine else None


def tell_beside_eager(found: Sequence[Measurement], beside: Mapping[str, Ratio]) -> list[str]:
    """Say of each plan how it compares with plain PyTorch; why not, where that is not known."""
    plain = next((each for each in found if each.eager), None)
    if plain is None:
        return []
    said = [plain.note] if plain.note else []
    if plain.failure is not None:
        return [*said, f"{_where(plain)} failed ({plain.failure}): {plain.reason}"]
    is_only = len(found) == 2
    for each in found:
        if each.name in beside:
            name = "The plan" if is_only else each.name
            said.append(_tell_one(name, each, plain, beside[each.name]))
    return said


def _tell_one(name: str, each: Measurement, plain: Measurement, ratio: Ratio) -> str:
    mine, theirs = format_time(each.median_s), format_time(plain.median_s)
    if ratio.high < 1:
        span = f"{1 / ratio.high:.2f} – {1 / ratio.low:.2f}"
        return (
            f"{name} takes {mine}; {_where(plain)} takes {theirs}: the plan is"
            f" {1 / ratio.ratio:.2f} times as fast (95% interval {span})."
        )
    span = f"{ratio.low:.2f} – {ratio.high:.2f}"
    return (
        f"{name} is no faster than {_where(plain)} ({theirs}): it takes {mine},"
        f" {ratio.ratio:.2f} times as long (95% interval {span})."
    )


def _where(plain: Measurement) -> str:
    if plain.eager != "cpu":
        return f"{plain.name} on {plain.eager} alone"
    cores = f"all {plain.num_cores} cores" if plain.num_cores > 1 else "the one core"
    return f"{plain.name} on {cores}"


def show_measurements(
    found: Sequence[Measurement],
    plans: Mapping[str, Plan],
    ratios: Mapping[str, Ratio],
    beside: Mapping[str, Ratio],
    cluster: Cluster | None,
) -> RenderableType:
    """Show measured step times, memory, and how plans compare, also with plain PyTorch."""
    parts: list[RenderableType] = [_show_times(found, plans)]
    notes = [
        f"{each.name} failed ({each.failure}): {each.reason}"
        for each in found
        if each.failure is not None and not each.eager
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
    notes += tell_beside_eager(found, beside)
    if notes:
        parts.append(Text("\n".join(notes)))
    return Group(*parts)


def _show_times(found: Sequence[Measurement], plans: Mapping[str, Plan]) -> RenderableType:
    columns = ("plan", "measured", "95% interval", "steps", "warm-up", "simulated", "error")
    made = table("Step time", *columns)
    for each in found:
        simulated_s = None if each.eager else plans[each.name].predicted.makespan_s
        simulated = "" if simulated_s is None else format_time(simulated_s)
        if each.failure is not None:
            failed = Text(f"failed ({each.failure})", style="red")
            made.add_row(each.name, failed, "", "", "", simulated, "")
            continue
        interval = each.interval
        made.add_row(
            each.name,
            format_time(interval.median_s),
            _span(interval.low_s, interval.high_s),
            f"{each.num_steps:,}",
            str(each.num_warm_up),
            simulated,
            "" if simulated_s is None else f"{simulated_s / interval.median_s - 1:+.1%}",
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
        predicted = {} if each.eager else plans[each.name].predicted.peak_bytes
        for device, peak in each.peak_bytes.items():
            simulated = None if each.eager else predicted.get(device, 0)
            row = [each.name, device, "unknown", "", ""]
            if simulated is not None:
                row[3] = format_bytes(simulated)
            if peak is not None:
                row[2] = format_bytes(peak)
            if peak and simulated is not None:
                row[4] = f"{simulated / peak - 1:+.1%}"
            known = peak if peak is not None else simulated
            memory = _memory_of(cluster, device)
            if memory is not None and known is not None:
                fits = Text("fits") if known <= memory else Text("does not fit", style="red")
                made.add_row(*row, format_bytes(memory), fits)
            else:
                made.add_row(*row)
    return made


def _memory_of(cluster: Cluster | None, device: str) -> int | None:
    """Give a device's memory; None if there is no cluster, or it has the device only in parts."""
    if cluster is None or device not in cluster.device_names:
        return None
    return int(cluster.memory_bytes[cluster.device_index(device)])


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
