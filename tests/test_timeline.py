from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.simulator import simulate

from . import tiny, worlds


def path(timeline):
    return [
        (step.kind, step.index, step.start_ps, step.end_ps, step.cause)
        for step in timeline.critical_path
    ]


def test_the_critical_path_of_a_split_chain_goes_through_its_transfers():
    assert path(simulate(tiny.chain(), [0, 1, 0])) == [
        ("op", 0, 0, 10, "start"),
        ("transfer", 0, 10, 16, "input"),
        ("op", 1, 16, 26, "input"),
        ("transfer", 1, 26, 32, "input"),
        ("op", 2, 32, 42, "input"),
    ]


def test_the_critical_path_tells_a_busy_device_from_a_late_input():
    # On one device a runs 0-2, b 2-12, c 12-18 (it was ready at 2), d 18-21.
    assert path(simulate(tiny.diamond(), [0, 0, 0, 0])) == [
        ("op", 0, 0, 2, "start"),
        ("op", 1, 2, 12, "input"),
        ("op", 2, 12, 18, "device"),
        ("op", 3, 18, 21, "input"),
    ]


def test_the_critical_path_tells_channels_and_triggers():
    # The three fetches follow each other on one channel; the third also waited for it.
    assert path(simulate(tiny.streamed(), [0, 1, 0, 1, 0, 1, 0])) == [
        ("transfer", 0, 0, 11, "start"),
        ("transfer", 1, 11, 22, "channel"),
        ("transfer", 2, 22, 33, "channel"),
        ("op", 6, 33, 38, "input"),
    ]
    late = simulate(tiny.streamed(), [0, 1, 0, 1, 0, 1, 0], triggers={(5, 0): 4})
    assert path(late)[-3:] == [
        ("op", 4, 22, 27, "input"),
        ("transfer", 2, 27, 38, "trigger"),
        ("op", 6, 38, 43, "input"),
    ]


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_the_critical_path_has_no_gaps_and_is_as_long_as_the_makespan(data):
    problem = data.draw(worlds.problems())
    discipline = data.draw(st.sampled_from(("fifo", "program")))
    timeline = simulate(problem, data.draw(worlds.placements(problem)), discipline)
    steps = timeline.critical_path
    if problem.graph.op_is_resident.all():
        assert steps == ()
        return
    assert steps[0].start_ps == 0
    assert steps[-1].end_ps == timeline.makespan_ps
    for before, after in pairwise(steps):
        assert before.end_ps == after.start_ps
    assert steps[0].cause == "start"
    assert all(step.cause != "start" for step in steps[1:])


def test_timelines_and_problems_print_in_a_line():
    timeline = simulate(tiny.chain(), [0, 1, 0])
    assert repr(timeline) == "Timeline(tiny on world: 4.2e-11 s, fits)"
    assert repr(timeline.problem) == (
        "Problem(Graph('tiny': 3 ops, 3 tensors) on Cluster('world': cuda:0, cuda:1))"
    )


def test_utilisation_is_busy_time_over_the_makespan():
    timeline = simulate(tiny.chain(), [0, 1, 0])
    assert timeline.device_busy_s.tolist() == [20e-12, 10e-12]
    assert timeline.device_utilisation == pytest.approx([20 / 42, 10 / 42])
    # Channels: 0 and 1 send, 2 and 3 receive; each transfer takes 6 ps.
    assert [round(s * 1e12) for s in timeline.channel_busy_s] == [6, 6, 6, 6]
    assert timeline.moved_bytes == 10


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_no_channel_is_busier_than_the_step_is_long(data):
    problem = data.draw(worlds.problems())
    timeline = simulate(problem, data.draw(worlds.placements(problem)))
    assert (timeline.channel_busy_s <= timeline.makespan_s + 1e-18).all()
    assert (timeline.device_busy_s <= timeline.makespan_s + 1e-18).all()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_memory_ends_with_what_is_kept(data):
    problem = data.draw(worlds.problems())
    graph = problem.graph
    placement = data.draw(worlds.placements(problem))
    timeline = simulate(problem, placement)
    base = graph.tensor_base.copy()
    for device in range(problem.num_devices):
        stays = {
            t
            for t in range(graph.num_tensors)
            if placement[graph.tensor_op[t]] == device
            and base[t] < 0
            and (graph.tensor_persistent[t] or graph.tensor_keep[t])
        }
        # A kept alias holds what it shares memory with: its base, or a copy of it.
        copies = set()
        for t in range(graph.num_tensors):
            if graph.tensor_keep[t] and base[t] >= 0 and placement[graph.tensor_op[t]] == device:
                while base[t] >= 0 and placement[graph.tensor_op[t]] == device:
                    t = int(base[t])  # noqa: PLW2901
                (stays if placement[graph.tensor_op[t]] == device else copies).add(t)
        _, levels = timeline.memory_of(device)
        assert levels[-1] == sum(int(graph.tensor_bytes[t]) for t in [*stays, *copies])
