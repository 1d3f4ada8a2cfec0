"""Timelines worked out by hand, and the laws that every timeline obeys."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.bounds import lower_bounds
from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.problem import Candidate, Problem
from placewright.simulator import default_triggers, simulate, simulate_many

from . import tiny, worlds


def starts(timeline):
    return timeline.op_start_ps.tolist()


def moves(timeline):
    """(tensor, target, start, end) of every transfer."""
    x = timeline.transfers
    return list(
        zip(
            x.tensor.tolist(),
            x.target.tolist(),
            x.start_ps.tolist(),
            x.end_ps.tolist(),
            strict=True,
        )
    )


# -- by hand ---------------------------------------------------------------------------------


def test_a_chain_on_one_device_takes_the_sum_of_its_ops():
    timeline = simulate(tiny.chain(), [0, 0, 0])
    assert starts(timeline) == [0, 10, 20]
    assert timeline.makespan_ps == 30
    # a's output goes when b ends, b's when c ends; c's is kept.
    assert timeline.peak_bytes.tolist() == [10, 0]
    assert moves(timeline) == []


def test_a_chain_over_two_devices_pays_latency_and_bytes():
    timeline = simulate(tiny.chain(), [0, 1, 0])
    # A transfer takes 1 ps of latency and 1 ps a byte.
    assert moves(timeline) == [(0, 1, 10, 16), (1, 0, 26, 32)]
    assert starts(timeline) == [0, 16, 32]
    assert timeline.makespan_ps == 42
    assert timeline.peak_bytes.tolist() == [10, 10]


def test_independent_branches_overlap():
    timeline = simulate(tiny.diamond(), [0, 0, 1, 0])
    assert moves(timeline) == [(0, 1, 2, 7), (2, 0, 13, 18)]
    assert starts(timeline) == [0, 2, 7, 18]
    assert timeline.makespan_ps == 21


def test_channels_serve_in_request_order_and_block_what_is_behind():
    cluster = worlds.make_cluster(("cuda",) * 3)
    problem = tiny.problem(
        [
            Op(name="a", outputs=[10, 10]),
            Op(name="b", inputs=["a"], outputs=[]),
            Op(name="c", inputs=["a:1"], outputs=[]),
        ],
        {"a": 1},
        cluster,
    )
    timeline = simulate(problem, [0, 1, 2])
    # Both leave device 0 by its one sending engine: the second waits for the first.
    assert moves(timeline) == [(0, 1, 1, 12), (1, 2, 12, 23)]


def test_a_tensor_goes_to_each_device_once():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[3]),
            *(Op(name=f"r{k}", inputs=["a"], outputs=[]) for k in range(4)),
        ],
        {f"r{k}": 1 for k in range(4)},
    )
    timeline = simulate(problem, [0, 1, 1, 1, 0])
    assert moves(timeline) == [(0, 1, 0, 4)]
    assert starts(timeline) == [0, 4, 5, 6, 0]


def test_a_zero_byte_tensor_takes_the_latency_and_no_channel():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[50]),
            Op(name="b", inputs=["a"], outputs=[]),
            Op(name="c", after=["a"], outputs=[]),
        ],
        {"a": 2, "b": 1, "c": 1},
    )
    timeline = simulate(problem, [0, 1, 1])
    assert moves(timeline) == [(0, 1, 2, 53), (1, 1, 2, 3)]
    assert starts(timeline) == [0, 53, 3]


def test_disciplines_choose_among_ready_ops():
    # On device 0 b becomes ready first, then a; both wait for the op that runs.
    problem = tiny.problem(
        [
            Op(name="busy", outputs=[]),
            Op(name="slow", outputs=[5]),
            Op(name="fast", outputs=[1]),
            Op(name="a", inputs=["slow"], outputs=[]),
            Op(name="b", inputs=["fast"], outputs=[]),
        ],
        {"busy": 20, "slow": 3, "fast": 1, "a": 4, "b": 4},
        worlds.make_cluster(("cuda",) * 3),
    )
    placement = [0, 1, 2, 0, 0]
    # fast arrives at 3, slow at 9: both before busy ends at 20, b first.
    assert starts(simulate(problem, placement))[3:] == [24, 20]
    assert starts(simulate(problem, placement, "program"))[3:] == [20, 24]
    assert starts(simulate(problem, placement, "priority", [0, 0, 0, 1, 2]))[3:] == [24, 20]
    assert starts(simulate(problem, placement, "priority", [0, 0, 0, 2, 1]))[3:] == [20, 24]
    assert starts(simulate(problem, placement, "priority", [0, 0, 0, 7, 7]))[3:] == [20, 24]


def test_transfers_that_end_together_end_in_request_order():
    # Each link has a channel of its own, so p and q can both arrive at 6, after r has at 5: p was
    # requested at 1 and q at 3, though q's channel and its reader have the lower numbers.
    problem = tiny.problem(
        [
            Op(name="busy", outputs=[]),
            Op(name="p", outputs=[4]),
            Op(name="q", outputs=[2]),
            Op(name="r", outputs=[4]),
            Op(name="b", inputs=["q"], outputs=[]),
            Op(name="a", inputs=["p"], outputs=[]),
            Op(name="c", inputs=["r"], outputs=[]),
        ],
        {"busy": 10, "p": 1, "q": 3, "r": 0, "a": 5, "b": 5, "c": 5},
        worlds.make_cluster(("cuda",) * 4, link_channels=[(c,) for c in range(16)]),
    )
    timeline = simulate(problem, [0, 2, 1, 3, 0, 0, 0])
    assert moves(timeline) == [(2, 0, 0, 5), (0, 0, 1, 6), (1, 0, 3, 6)]
    assert timeline.op_start_ps[[4, 5, 6]].tolist() == [20, 15, 10]


def test_workspace_is_held_only_while_the_op_runs():
    problem = tiny.problem(
        [Op(name="a", outputs=[3], workspace=9), Op(name="b", outputs=[1])], {"a": 2, "b": 2}
    )
    timeline = simulate(problem, [0, 0])
    assert timeline.peak_bytes.tolist() == [12, 0]
    time_s, size = timeline.memory_of(0)
    # Nobody reads or keeps the outputs, so each goes when its op ends.
    assert [round(t * 1e12) for t in time_s] == [0, 2, 4]
    assert size.tolist() == [12, 1, 0]


def test_an_alias_adds_no_memory_but_keeps_its_base_and_travels_with_its_own_bytes():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[40, Output(4, alias_of="a:0")]),
            Op(name="b", inputs=["a:1"], outputs=[]),
            Op(name="c", outputs=[]),
        ],
        {"a": 1, "b": 3, "c": 10},
    )
    assert simulate(problem, [0, 0, 0]).peak_bytes.tolist() == [40, 0]
    timeline = simulate(problem, [0, 1, 0])
    assert moves(timeline) == [(1, 1, 1, 6)]
    assert timeline.peak_bytes.tolist() == [40, 4]
    # The base is held until the alias has left, at 6.
    assert timeline.level_bytes[timeline.level_device == 0].tolist() == [40, 0]
    assert timeline.level_ps[timeline.level_device == 0].tolist() == [0, 6]


def test_weights_on_another_device_are_streamed_with_double_buffering():
    problem = tiny.streamed()  # x, w0, f0, w1, f1, w2, f2
    placement = [0, 1, 0, 1, 0, 1, 0]
    assert default_triggers(problem, placement) == {(1, 0): -1, (3, 0): -1, (5, 0): 2}
    timeline = simulate(problem, placement)
    # Two fetches at once fill the window of 20 bytes; the third waits until f0 has ended.
    assert moves(timeline) == [(1, 0, 0, 11), (3, 0, 11, 22), (5, 0, 22, 33)]
    assert timeline.op_start_ps[[2, 4, 6]].tolist() == [11, 22, 33]
    assert timeline.peak_bytes.tolist() == [22, 30]


def test_a_narrow_window_waits_and_a_wide_one_does_not():
    problem = tiny.streamed()
    placement = [0, 1, 0, 1, 0, 1, 0]
    assert default_triggers(problem, placement, 10) == {(1, 0): -1, (3, 0): 2, (5, 0): 4}
    assert default_triggers(problem, placement, 30) == {(1, 0): -1, (3, 0): -1, (5, 0): -1}
    late = simulate(problem, placement, triggers=default_triggers(problem, placement, 10))
    assert late.op_start_ps[[2, 4, 6]].tolist() == [11, 27, 43]
    assert late.peak_bytes[0] < simulate(problem, placement).peak_bytes[0]


def test_an_explicit_trigger_replaces_only_its_own_fetch():
    problem = tiny.streamed()
    placement = [0, 1, 0, 1, 0, 1, 0]
    timeline = simulate(problem, placement, triggers={(5, 0): 4})
    assert timeline.triggers == {(1, 0): -1, (3, 0): -1, (5, 0): 4}
    assert moves(timeline)[2] == (5, 0, 27, 38)


def test_infeasible_candidates_get_a_time_and_an_overflow():
    problem = dataclasses.replace(tiny.chain(), cluster=worlds.make_cluster(memory=7))
    timeline = simulate(problem, [0, 0, 0])
    assert timeline.makespan_ps == 30
    assert not timeline.is_feasible
    assert timeline.overflow_bytes == 3
    assert simulate_many(problem, [[0, 0, 0]]).overflow_bytes.tolist() == [3]


def test_a_graph_of_parameters_alone_takes_no_time():
    problem = tiny.problem([Op(name="w", outputs=[Output(5, persistent=True)])], {})
    timeline = simulate(problem, [1])
    assert timeline.makespan_ps == 0
    assert timeline.peak_bytes.tolist() == [0, 5]
    assert timeline.critical_path == ()


# -- laws ------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_makespan_beats_the_critical_path_or_the_shared_work(data):
    problem = data.draw(worlds.problems())
    timeline = simulate(problem, data.draw(worlds.placements(problem)))
    assert timeline.makespan_ps >= lower_bounds(problem).critical_path_ps
    fastest = problem.costs.op_ps.min(axis=1).sum()
    assert timeline.makespan_ps >= fastest / problem.num_devices


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_one_device_takes_the_sum_of_its_ops_and_moves_nothing(data):
    problem = data.draw(worlds.problems())
    device = data.draw(st.integers(0, problem.num_devices - 1))
    timeline = simulate(problem, [device] * problem.num_ops)
    assert timeline.makespan_ps == problem.costs.op_ps[:, device].sum()
    assert len(timeline.transfers) == 0


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_bandwidth_does_not_matter_with_one_device_in_use(data):
    problem = data.draw(worlds.problems())
    faster = dataclasses.replace(problem.cluster, bytes_per_s=problem.cluster.bytes_per_s * 8)
    placement = [data.draw(st.integers(0, problem.num_devices - 1))] * problem.num_ops
    left = simulate(problem, placement)
    right = simulate(Problem(problem.graph, faster, problem.costs), placement)
    assert starts(left) == starts(right)
    assert left.peak_bytes.tolist() == right.peak_bytes.tolist()


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_equal_inputs_give_equal_timelines_whatever_ran_before(data):
    problem = data.draw(worlds.problems())
    rows = [data.draw(worlds.placements(problem)) for _ in range(2)]
    first = simulate(problem, rows[0])
    simulate(problem, rows[1], "program")  # leaves its traces in the work space
    again = simulate(problem, rows[0])
    for field in ("op_start_ps", "op_end_ps", "peak_bytes", "sequence", "level_ps", "level_bytes"):
        assert getattr(first, field).tolist() == getattr(again, field).tolist()
    assert moves(first) == moves(again)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_doubling_every_duration_doubles_the_timeline(data):
    problem = data.draw(worlds.problems())
    cluster = dataclasses.replace(
        problem.cluster,
        latency_s=problem.cluster.latency_s * 2,
        bytes_per_s=problem.cluster.bytes_per_s / 2,
    )
    # Half a picosecond would be rounded, so only whole ones are doubled exactly.
    if (problem.cluster.bytes_per_s > 1e12).any():
        return
    slower = Problem(
        problem.graph, cluster, dataclasses.replace(problem.costs, op_ps=problem.costs.op_ps * 2)
    )
    placement = data.draw(worlds.placements(problem))
    left, right = simulate(problem, placement), simulate(slower, placement)
    assert (2 * left.op_start_ps).tolist() == right.op_start_ps.tolist()
    assert left.peak_bytes.tolist() == right.peak_bytes.tolist()


# -- golden ----------------------------------------------------------------------------------

GOLDEN = Path(__file__).parent / "golden" / "timelines.json"


def golden_figures():
    """Makespans and peaks of a captured step under fixed placements, to the picosecond."""
    folder = GOLDEN.parent
    graph = Graph.load(folder / "step.graph.json.gz")
    problem = Problem(graph, Cluster.load(folder / "cluster.toml"))
    rng = np.random.default_rng(7)
    figures = {}
    for name, placement in {
        "one": np.full(problem.num_ops, 1),
        "stripes": np.arange(problem.num_ops) * 5 // problem.num_ops,
        "random": rng.integers(0, 5, problem.num_ops),
    }.items():
        placement[problem.colocation_members] = placement[problem.colocation_leaders]
        for discipline in ("fifo", "program"):
            timeline = simulate(problem, placement, discipline)
            figures[f"{name} {discipline}"] = {
                "makespan_ps": timeline.makespan_ps,
                "peak_bytes": timeline.peak_bytes.tolist(),
                "transfers": len(timeline.transfers),
            }
    return figures


def test_golden_makespans_are_bit_identical():
    # A change that moves these is either a mistake or a change of the rules; then say so, and run
    # python -m tests.test_simulator to write the file again.
    assert golden_figures() == json.loads(GOLDEN.read_text())


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        ([0, 0], "A placement has 2 entries; expected 3"),
        ([0, 0, 2], "names device 2; cluster `world` has devices 0 to 1"),
        ([0, -1, 0], "names device -1"),
        ([0.0, 0.0, 1.0], "holds float64 values; expected device numbers"),
        (0, "`placement` has shape (); expected one device for each op"),
        ([[0, 0, 0]], "has shape (1, 3); expected one device for each op"),
        (
            ([0, 0, 0], "lifo"),
            "`discipline` is 'lifo'; expected fifo, program or priority",
        ),
        (([0, 0, 0], "priority"), "`priorities` are missing"),
        (([0, 0, 0], "fifo", [1, 2, 3]), "`priorities` are given"),
        (([0, 0, 0], "priority", [[1, 2, 3]]), "has shape (1, 3); expected one number an op"),
        (([0, 0, 0], "priority", [1, 2]), "expected 3 numbers, one an op"),
        (([0, 0, 0], "priority", [1, 2, float("nan")]), "not finite"),
    ],
)
def test_a_wrong_candidate_is_told_what_is_wrong(candidate, words):
    with pytest.raises(InputError) as caught:
        simulate(tiny.chain(), Candidate(*candidate) if isinstance(candidate, tuple) else candidate)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("triggers", "words"),
    [
        ({(0, 0): -1}, "tensor 0, which is not a persistent one"),
        ({(1, 7): -1}, "device 7, which does not exist"),
        ({(1, 1): -1}, "does not fetch there"),
        ({(3, 0): 4}, "an op that runs there before op 4"),
        ({(3, 0): 1}, "expected -1 for time 0, or an op that runs there"),
    ],
)
def test_a_wrong_trigger_is_told_what_is_wrong(triggers, words):
    with pytest.raises(InputError) as caught:
        simulate(tiny.streamed(), [0, 1, 0, 1, 0, 1, 0], triggers=triggers)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([0, 0, 0],), "expected (B, 3)"),
        (([[0, 0, 0]], "priority"), "`priorities` are missing"),
        (([[0, 0, 0]], "priority", [[1, 2, 3], [1, 2, 3]]), "expected (3,) or (1, 3)"),
        (([[0, 0, 0]], "lifo"), "`discipline` is 'lifo'"),
        (
            ([[0, 0, 0]], "fifo", None, 0),
            "`num_threads` is 0",
        ),
        (([[0, 0, 0]], "fifo", None, float("nan")), "`num_threads` is nan"),
        (([[0, 0, 0]], "fifo", None, 10**6), "`num_threads` is 1000000; expected a whole number"),
    ],
)
def test_wrong_batches_are_told_what_is_wrong(arguments, words):
    with pytest.raises(InputError) as caught:
        simulate_many(tiny.chain(), *arguments)
    assert words in str(caught.value)


def test_a_timeline_does_not_change_with_the_callers_arrays():
    placement, priorities = np.array([0, 1, 0], dtype=np.int32), np.array([1.0, 2.0, 3.0])
    timeline = simulate(tiny.chain(), placement, "priority", priorities)
    placement[:] = 1
    priorities[:] = 0
    assert timeline.candidate.placement.tolist() == [0, 1, 0]
    assert timeline.candidate.priorities.tolist() == [1, 2, 3]
    assert len(timeline.critical_path) == 5


def test_a_negative_window_is_refused():
    with pytest.raises(InputError, match="`window_bytes` is -1"):
        default_triggers(tiny.chain(), [0, 0, 0], -1)


def test_a_candidate_brings_its_own_order():
    with pytest.raises(InputError, match="brings its own order"):
        simulate(tiny.chain(), Candidate([0, 0, 0]), "program")


def test_no_placements_give_no_results():
    batch = simulate_many(tiny.chain(), np.empty((0, 3), dtype=int))
    assert batch.makespan_s.shape == (0,)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden_figures(), indent=1) + "\n")
