"""Tables for the terminal, made with rich."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placewright.bounds import Bounds
from placewright.cluster import Cluster
from placewright.costs import PS_PER_S
from placewright.graph import Graph
from placewright.timeline import Step, Timeline
from placewright.units import format_bytes, format_count, format_time


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
            "" if fits else Text("does not fit", style="red"),
        )
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
    parts: list[RenderableType] = [Text("\n".join(lines)), devices]
    if len(timeline.transfers):
        parts.append(_show_channels(timeline))
    parts.append(_show_critical_path(timeline))
    return Group(*parts)


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
    facts = table(f"{graph.name}", "", "")
    transient = ~graph.tensor_is_resident & (graph.tensor_base < 0)
    for what, value in (
        ("ops", f"{graph.num_ops:,}"),
        ("  of them parameters and buffers", f"{int(graph.op_is_resident.sum()):,}"),
        ("tensors", f"{graph.num_tensors:,}"),
        ("uses", f"{graph.num_uses:,}"),
        ("flops", format_count(float(graph.op_flops.sum()))),
        ("persistent memory", format_bytes(graph.tensor_bytes[graph.tensor_persistent].sum())),
        ("all other tensors", format_bytes(graph.tensor_bytes[transient].sum())),
        ("longest chain of ops", f"{_depth(graph):,}"),
        ("co-location groups", f"{len(graph.colocations):,}"),
        ("fingerprint", graph.fingerprint[:16]),
    ):
        facts.add_row(what, value)
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
    return Group(facts, kinds, largest)


def _depth(graph: Graph) -> int:
    depth = [1] * graph.num_ops
    makers = graph.tensor_op[graph.use_tensor].tolist()
    for maker, reader in zip(makers, graph.use_op.tolist(), strict=True):
        depth[reader] = max(depth[reader], depth[maker] + 1)
    return max(depth)


def show_single_devices(
    timelines: Sequence[tuple[str, Timeline | None]], bounds: Bounds, cluster: Cluster
) -> RenderableType:
    """Show what each device alone would do, and the bounds that hold for all placements."""
    alone = table(f"On {cluster.name}", "everything on", "simulated step time", "peak memory", "")
    for device, timeline in timelines:
        if timeline is None:
            alone.add_row(device, "", "", "some op may not run here")
            continue
        d = cluster.device_index(device)
        verdict = Text("fits") if timeline.is_feasible else Text("does not fit", style="red")
        alone.add_row(
            device, format_time(timeline.makespan_s), format_bytes(timeline.peak_bytes[d]), verdict
        )
    lines = [
        f"No placement takes less than {format_time(bounds.best_s)}:",
        f"  critical path at fastest devices  {format_time(bounds.critical_path_ps / PS_PER_S)}",
        f"  work shared perfectly             {format_time(bounds.load_ps / PS_PER_S)}",
        f"  both together                     {format_time(bounds.combined_ps / PS_PER_S)}",
    ]
    return Group(alone, Text("\n".join(lines)))


def show_models(graphs: Sequence[tuple[str, Graph]]) -> RenderableType:
    """List models."""
    made = table("Models", "name", "ops", "flops", "persistent memory")
    for name, graph in graphs:
        made.add_row(
            name,
            f"{graph.num_ops:,}",
            format_count(float(graph.op_flops.sum())),
            format_bytes(graph.tensor_bytes[graph.tensor_persistent].sum()),
        )
    return made


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
