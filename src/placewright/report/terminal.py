"""Tables for the terminal, made with rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placewright.bounds import Bounds
from placewright.cluster import Cluster
from placewright.costs import PS_PER_S
from placewright.graph import Graph
from placewright.report.facts import describe_graph
from placewright.timeline import Step, Timeline
from placewright.units import format_bytes, format_count, format_time

if TYPE_CHECKING:
    from placewright.comparing import Comparison
    from placewright.placing import Result
    from placewright.problem import Problem


def table(title: str, *columns: str, text: Collection[str] = ()) -> Table:
    """Start a table: its first column and those named hold text, the others figures."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for k, column in enumerate(columns):
        is_text = k == 0 or column in text
        made.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return made


def show_timeline(timeline: Timeline, bounds: Bounds, name: str) -> RenderableType:
    """Show one simulated step: the time and its bound, the devices, the critical path."""
    problem = timeline.problem
    cluster = problem.cluster
    gap = timeline.makespan_s / bounds.best_s - 1 if bounds.best_ps else 0.0
    lines = [
        f"{problem.graph.name} on {cluster.name}, {name}, {timeline.candidate.discipline} order",
        f"Simulated step time {format_time(timeline.makespan_s)};"
        f" no placement takes less than {format_time(bounds.best_s)} (gap {gap:.1%}).",
        f"{len(timeline.transfers):,} transfers move {format_bytes(timeline.moved_bytes)}.",
    ]
    if not timeline.is_feasible:
        lines.append(
            f"It does not fit: {format_bytes(timeline.overflow_bytes)} more memory is needed."
        )
    parts: list[RenderableType] = [Text("\n".join(lines)), _show_devices(timeline)]
    if len(timeline.transfers):
        parts.append(_show_channels(timeline))
    parts.append(_show_critical_path(timeline))
    return Group(*parts)


def _show_devices(timeline: Timeline) -> RenderableType:
    problem = timeline.problem
    cluster = problem.cluster
    devices = table("Devices", "device", "ops", "busy", "peak memory", "of", "")
    counts = np.bincount(timeline.candidate.placement, minlength=problem.num_devices)
    for d, device in enumerate(cluster.device_names):
        fits = timeline.peak_bytes[d] <= cluster.memory_bytes[d]
        devices.add_row(
            device,
            f"{counts[d]:,}",
            f"{timeline.device_utilisation[d]:.1%}",
            format_bytes(timeline.peak_bytes[d]),
            format_bytes(cluster.memory_bytes[d]),
            "fits" if fits else Text("does not fit", style="red"),
        )
    return devices


def _show_channels(timeline: Timeline) -> RenderableType:
    channels = table("Channels in use", "channel", "busy", "of the step")
    for c in np.argsort(-timeline.channel_busy_s, kind="stable")[:8]:
        if timeline.channel_busy_s[c] > 0:
            channels.add_row(
                timeline.problem.cluster.channel_names[c],
                format_time(timeline.channel_busy_s[c]),
                f"{timeline.channel_utilisation[c]:.1%}",
            )
    return channels


def _show_critical_path(timeline: Timeline) -> RenderableType:
    path = timeline.critical_path
    spent: Counter[str] = Counter()
    for step in path:
        spent[_where(timeline, step)] += step.end_ps - step.start_ps
    shares = table("Critical path: what the step time is made of", "on", "time", "share")
    for where, time_ps in spent.most_common(8):
        share = time_ps / max(timeline.makespan_ps, 1)
        shares.add_row(where, format_time(time_ps / PS_PER_S), f"{share:.1%}")
    longest = table(
        "Its longest steps",
        "op or transfer",
        "where",
        "time",
        "began when",
        text=("where", "began when"),
    )
    reasons = {
        "start": "the step began",
        "input": "its last input was there",
        "device": "the device was free",
        "channel": "the channel was free",
        "trigger": "its trigger had ended",
    }
    for step in sorted(path, key=lambda step: step.start_ps - step.end_ps)[:6]:
        longest.add_row(
            _name(timeline, step),
            _where(timeline, step),
            format_time((step.end_ps - step.start_ps) / PS_PER_S),
            reasons[step.cause],
        )
    return Group(shares, longest)


def _name(timeline: Timeline, step: Step) -> str:
    graph = timeline.problem.graph
    if step.kind == "op":
        return graph.op_names[step.index]
    return graph.tensor_name(int(timeline.transfers.tensor[step.index]))


def _where(timeline: Timeline, step: Step) -> str:
    names = timeline.problem.cluster.device_names
    if step.kind == "op":
        return str(names[timeline.candidate.placement[step.index]])
    moves = timeline.transfers
    return f"{names[moves.source[step.index]]} to {names[moves.target[step.index]]}"


def show_graph(graph: Graph) -> RenderableType:
    """Show a graph: its size, its kinds of ops, its largest ops."""
    facts = describe_graph(graph)
    shown = table(graph.name, "", "")
    for what, value in (
        ("ops", f"{facts.num_ops:,}"),
        ("  of them parameters and buffers", f"{facts.num_resident_ops:,}"),
        ("tensors", f"{facts.num_tensors:,}"),
        ("uses", f"{facts.num_uses:,}"),
        ("flops", format_count(facts.flops)),
        ("bytes moved", format_bytes(facts.moved_bytes)),
        ("parameters", format_bytes(facts.parameter_bytes)),
        ("optimiser state", format_bytes(facts.state_bytes)),
        ("buffers and constants", format_bytes(facts.buffer_bytes)),
        ("activations kept for backward", format_bytes(facts.activation_bytes)),
        ("all other tensors", format_bytes(facts.other_bytes)),
        ("critical path: longest chain", f"{facts.chain_ops:,} ops"),
        ("critical path: heaviest chain", f"{format_count(facts.chain_flops)} flops"),
        ("co-location groups", f"{len(graph.colocations):,}"),
        ("fingerprint", facts.fingerprint[:16]),
    ):
        shown.add_row(what, value)
    kinds = table("Kinds of ops", "kind", "ops", "flops", "share")
    total = float(graph.op_flops.sum()) or 1.0
    counts = Counter(graph.op_kinds)
    flops: Counter[str] = Counter()
    for kind, work in zip(graph.op_kinds, graph.op_flops.tolist(), strict=True):
        flops[kind] += work
    for kind in sorted(counts, key=lambda kind: (-flops[kind], -counts[kind], kind))[:12]:
        share = f"{flops[kind] / total:.1%}"
        kinds.add_row(kind, f"{counts[kind]:,}", format_count(flops[kind]), share)
    largest = table("Largest ops", "op", "kind", "flops", "outputs", text=("kind",))
    made = np.zeros(graph.num_ops)
    np.add.at(made, graph.tensor_op, graph.tensor_bytes)
    for i in np.lexsort((-made, -graph.op_flops))[:8]:
        largest.add_row(
            graph.op_names[i],
            graph.op_kinds[i],
            format_count(graph.op_flops[i]),
            format_bytes(made[i]),
        )
    return Group(shown, kinds, largest)


def show_by_hand(
    alone: Sequence[tuple[str, Timeline | None]],
    experts: Sequence[tuple[str, Timeline]],
    bounds: Bounds,
    cluster: Cluster,
) -> RenderableType:
    """Show what each device alone and each expert would do, and what bounds all placements."""
    columns = ("placement", "simulated step time", "peak memory", "of", "")
    made = table(f"On {cluster.name}, by hand", *columns)
    for names, timeline in _alike(alone):
        if timeline is None:
            made.add_row(f"all on {names}", "", "", "", "some op may not run here")
            continue
        made.add_row(f"all on {names}", *_row(timeline))
    for name, timeline in experts:
        made.add_row(name, *_row(timeline))
    lines = [
        f"No placement takes less than {format_time(bounds.best_s)}:",
        f"  critical path at fastest devices  {format_time(bounds.critical_path_ps / PS_PER_S)}",
        f"  work shared perfectly             {format_time(bounds.load_ps / PS_PER_S)}",
        f"  both together                     {format_time(bounds.combined_ps / PS_PER_S)}",
    ]
    return Group(made, Text("\n".join(lines)))


def _alike(alone: Sequence[tuple[str, Timeline | None]]) -> list[tuple[str, Timeline | None]]:
    """Put devices together that do the same in the same memory."""
    groups: dict[object, tuple[list[str], Timeline | None]] = {}
    for d, (name, timeline) in enumerate(alone):
        key: object = name
        if timeline is not None:
            memory = int(timeline.problem.cluster.memory_bytes[d])
            key = (timeline.makespan_ps, int(timeline.peak_bytes[d]), memory)
        groups.setdefault(key, ([], timeline))[0].append(name)
    return [
        (names[0] if len(names) == 1 else f"{names[0]} (as on {len(names) - 1} others)", timeline)
        for names, timeline in groups.values()
    ]


def _row(timeline: Timeline) -> tuple[str, str, str, Text]:
    """Give time, the fullest device's peak and memory, and whether all fit."""
    memory = timeline.problem.cluster.memory_bytes
    d = int(np.argmax(timeline.peak_bytes / memory))
    fits = timeline.is_feasible
    verdict = Text("fits") if fits else Text("does not fit", style="red")
    return (
        format_time(timeline.makespan_s),
        format_bytes(timeline.peak_bytes[d]),
        format_bytes(memory[d]),
        verdict,
    )


def show_models(models: Sequence[tuple[str, str]]) -> RenderableType:
    """List models."""
    made = table("Models", "name", "what one step of it is", text=("what one step of it is",))
    for name, summary in models:
        made.add_row(name, summary)
    return made


def show_placers(placers: Sequence[tuple[str, str]]) -> RenderableType:
    """List placers."""
    made = table("Placers", "name", "what it does", text=("what it does",))
    for name, summary in placers:
        made.add_row(name, summary)
    return made


def show_result(result: Result) -> RenderableType:
    """Show what was found, how good it is, and why."""
    is_simulated = result.basis == "simulated"
    is_load = is_simulated and result.objective_s != result.makespan_s
    what = "time per step" if is_load else "step time"
    simulated_s = result.objective_s if is_simulated else result.makespan_s
    gap = simulated_s / result.lower_bound_s - 1 if result.lower_bound_s else 0.0
    cluster = result.problem.cluster
    how = "tried" if result.basis == "measured" else "simulated"
    lines = [
        f"{result.problem.graph.name} on {cluster.name}, placed by {result.placer}"
        f" ({result.samples:,} {how} in {format_time(result.wall_s)})",
        f"Simulated {what} {format_time(simulated_s)}; no placement takes less than"
        f" {format_time(result.lower_bound_s)} (gap {gap:.1%}).",
        f"Why: {result.reason}",
    ]
    if not is_simulated:
        words = {"measured": "Measured step time", "expected": "Expected step time on this machine"}
        lines.insert(1, f"{words[result.basis]} {format_time(result.objective_s)}.")
    return Group(Text("\n".join(lines)), _show_devices(result.timeline))


def show_comparison(rows: Sequence[Comparison], problem: Problem, how: str) -> RenderableType:
    """Show placers side by side, best first."""
    has_seeds = any(row.worst_s != row.best_s for row in rows)
    columns = ["placer", "time", *["worst seed"] * has_seeds, "planned", "balance", "moved", "on"]
    made = table(f"{problem.graph.name} on {problem.cluster.name}, {how}", *columns, "fits")
    made.columns[0].no_wrap = True
    for row in rows:
        if row.objective_s is None:
            blanks = [""] * (len(columns) - 1)
            made.add_row(row.placer, *blanks, Text(row.problem.split(".")[0], style="dim"))
            continue
        made.add_row(
            row.placer,
            format_time(row.objective_s),
            *([format_time(row.worst_s or 0.0)] * has_seeds),
            format_time(row.planning_s or 0.0),
            f"{row.balance:.2f}",
            format_bytes(row.cut_bytes or 0),
            str(row.num_devices),
            "yes" if row.is_feasible else Text("no", style="red"),
        )
    note = (
        "balance: the busiest device over the mean of those used; moved: bytes between devices;"
        " on: devices that compute."
    )
    return Group(made, Text(note))


def show_clusters(clusters: Sequence[Cluster]) -> RenderableType:
    """List clusters, with where their figures come from."""
    columns = ("name", "devices", "memory", "description")
    made = table("Clusters", *columns, text=columns)
    for cluster in clusters:
        kinds = Counter(zip(cluster.device_kinds, cluster.memory_bytes.tolist(), strict=True))
        made.add_row(
            cluster.name,
            ", ".join(f"{n} {kind}" for (kind, _), n in kinds.items()),
            ", ".join(format_bytes(size) for _, size in kinds),
            cluster.description,
        )
    sources = [f"{cluster.name}: {cluster.source.strip()}" for cluster in clusters]
    return Group(made, Text("Where the figures come from:\n" + "\n".join(sources)))


MOST_LINKS = 12


def show_cluster(cluster: Cluster) -> RenderableType:
    """Show a cluster: its devices, its links, and where the figures come from."""
    columns = ("device", "model", "memory", "flops/s", "memory bandwidth", "launch")
    devices = table(f"{cluster.name}: {cluster.description}", *columns, text=("model",))
    for d, name in enumerate(cluster.device_names):
        rates = (f"{format_count(rate)} {dtype}" for dtype, rate in cluster.flops[d].items())
        devices.add_row(
            name,
            cluster.device_models[d],
            format_bytes(cluster.memory_bytes[d]),
            "\n".join(rates),
            f"{cluster.memory_bytes_per_s[d] / 1e9:.3g} GB/s",
            format_time(cluster.launch_s[d]),
        )
    links = table("Links", "from", "to", "latency", "bandwidth", text=("to",))
    ends = [*permutations(range(cluster.num_devices), 2)]
    for source, target in ends[:MOST_LINKS]:
        links.add_row(
            cluster.device_names[source],
            cluster.device_names[target],
            format_time(cluster.latency_s[source, target]),
            f"{cluster.bytes_per_s[source, target] / 1e9:.3g} GB/s",
        )
    parts: list[RenderableType] = [devices, *([links] if ends else [])]
    if len(ends) > MOST_LINKS:
        parts.append(Text(f"and {len(ends) - MOST_LINKS} more links"))
    return Group(*parts, Text(cluster.source))
