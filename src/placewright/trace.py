"""
A timeline as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

This module owns the trace's form: a process for devices with a thread each, one for channels with
a thread each, arrows from the op that makes a tensor through its transfer to its first reader, and
counters of each device's memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from placewright import files
from placewright.arguments import expect_path, expect_type
from placewright.timeline import Timeline

_DEVICES, _CHANNELS = 1, 2
_THREADS = 100  # so that no thread has its process's number, which viewers take for a main thread


def _us(time_ps: int) -> float:
    """Give a time in microseconds, cut to whole nanoseconds, which is what viewers keep."""
    return (time_ps // 1000) / 1000


def _span(start_ps: int, end_ps: int) -> dict[str, float]:
    """Give a slice's place in time; slices that follow each other never overlap by rounding."""
    return {"ts": _us(start_ps), "dur": (end_ps // 1000 - start_ps // 1000) / 1000}


def save_trace(timeline: Timeline, path: str | Path) -> None:
    """
    Write a timeline as Chrome trace JSON, gzipped if `path` ends in ``.gz``.

    Times are in microseconds, as the format wants, with a nanosecond's precision.
    """
    expect_type(timeline, Timeline, "timeline", "a `Timeline`, such as `simulate` gives")
    expect_path(path, "path")
    trace = {"displayTimeUnit": "ns", "traceEvents": trace_events(timeline)}
    files.write(path, msgspec.json.encode(trace))


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """List the trace's events: names (``M``), slices (``X``), arrows (``s``, ``f``), counters."""
    return [
        *_names(timeline),
        *_op_slices(timeline),
        *_transfer_slices(timeline),
        *_arrows(timeline),
        *_memory(timeline),
    ]


def _names(timeline: Timeline) -> list[dict[str, Any]]:
    cluster = timeline.problem.cluster
    events: list[dict[str, Any]] = []
    used = timeline.channel_busy_s > 0
    for process, title, threads in (
        (_DEVICES, f"{timeline.problem.graph.name}: devices", cluster.device_names),
        (_CHANNELS, f"{timeline.problem.graph.name}: channels", cluster.channel_names),
    ):
        events.append(_meta("process_name", process, 0, {"name": title}))
        events.append(_meta("process_sort_index", process, 0, {"sort_index": process}))
        for thread, name in enumerate(threads):
            if process == _DEVICES or used[thread]:
                at = _THREADS + thread
                events.append(_meta("thread_name", process, at, {"name": name}))
                events.append(_meta("thread_sort_index", process, at, {"sort_index": thread}))
    return events


def _meta(name: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _op_slices(timeline: Timeline) -> list[dict[str, Any]]:
    graph = timeline.problem.graph
    critical = {step.index for step in timeline.critical_path if step.kind == "op"}
    return [
        {
            "ph": "X",
            "name": graph.op_names[i],
            "cat": graph.op_phases[i],
            "pid": _DEVICES,
            "tid": _THREADS + int(timeline.candidate.placement[i]),
            **_span(int(timeline.op_start_ps[i]), int(timeline.op_end_ps[i])),
            "args": {
                "kind": graph.op_kinds[i],
                "module": graph.op_modules[i],
                "critical": i in critical,
            },
        }
        for i in np.flatnonzero(~graph.op_is_resident).tolist()
    ]


def _first_channel(timeline: Timeline, transfer: int) -> int:
    cluster, moves = timeline.problem.cluster, timeline.transfers
    link = int(moves.source[transfer]) * cluster.num_devices + int(moves.target[transfer])
    return cluster.link_channels[link][0]


def _transfer_slices(timeline: Timeline) -> list[dict[str, Any]]:
    graph, cluster = timeline.problem.graph, timeline.problem.cluster
    moves = timeline.transfers
    critical = {step.index for step in timeline.critical_path if step.kind == "transfer"}
    events = []
    for n in range(len(moves)):
        size = int(graph.tensor_bytes[moves.tensor[n]])
        if size == 0:
            continue  # occupies no channel; its arrow shows it
        link = int(moves.source[n]) * cluster.num_devices + int(moves.target[n])
        events += [
            {
                "ph": "X",
                "name": graph.tensor_name(int(moves.tensor[n])),
                "cat": "transfer",
                "pid": _CHANNELS,
                "tid": _THREADS + channel,
                **_span(int(moves.start_ps[n]), int(moves.end_ps[n])),
                "args": {
                    "bytes": size,
                    "from": cluster.device_names[moves.source[n]],
                    "to": cluster.device_names[moves.target[n]],
                    "critical": n in critical,
                },
            }
            for channel in cluster.link_channels[link]
        ]
    return events


def _arrows(timeline: Timeline) -> list[dict[str, Any]]:
    """Draw an arrow from each transfer's maker to the transfer, and on to its first reader."""
    graph, moves = timeline.problem.graph, timeline.transfers
    placement = timeline.candidate.placement
    events = []
    for n in range(len(moves)):
        tensor, target = int(moves.tensor[n]), int(moves.target[n])
        maker = int(graph.tensor_op[tensor])
        uses = graph.use_op[graph.tensor_uses[tensor] : graph.tensor_uses[tensor + 1]]
        readers = uses[placement[uses] == target]
        reader = int(readers[timeline.op_start_ps[readers].argmin()])
        stops = [(_DEVICES, target, int(timeline.op_start_ps[reader]))]
        if graph.tensor_bytes[tensor] > 0:
            stops.insert(0, (_CHANNELS, _first_channel(timeline, n), int(moves.start_ps[n])))
        if not graph.op_is_resident[maker]:
            stops.insert(0, (_DEVICES, int(placement[maker]), int(timeline.op_start_ps[maker])))
        for k, (process, thread, time_ps) in enumerate(stops if len(stops) > 1 else ()):
            phase = "s" if k == 0 else "f" if k == len(stops) - 1 else "t"
            events.append(
                {
                    "ph": phase,
                    "name": "tensor",
                    "cat": "tensor",
                    "id": n,
                    "pid": process,
                    "tid": _THREADS + thread,
                    "ts": _us(time_ps),
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
    return events


def _memory(timeline: Timeline) -> list[dict[str, Any]]:
    names = timeline.problem.cluster.device_names
    return [
        {
            "ph": "C",
            "name": f"memory of {names[device]}",
            "pid": _DEVICES,
            "ts": _us(time_ps),
            "args": {"bytes": size},
        }
        for time_ps, device, size in zip(
            timeline.level_ps.tolist(),
            timeline.level_device.tolist(),
            timeline.level_bytes.tolist(),
            strict=True,
        )
    ]
