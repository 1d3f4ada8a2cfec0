"""Graph partitioners: what they find, whom they give work, and what they must never do."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.costs import Costs
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.placers import _scotch, partition
from placewright.placers.partition import kahypar, metis, mincut, scotch
from placewright.problem import Problem
from tests import worlds


def has_scotch():
    try:
        _scotch.load()
    except OSError:
        return False
    return True


def placer(function, is_there):
    why = pytest.mark.skipif(not is_there, reason=f"the library of `{function.__name__}`")
    return pytest.param(function, id=function.__name__, marks=why)


PLACERS = [
    placer(scotch, has_scotch()),
    placer(mincut, has_scotch()),
    placer(metis, importlib.util.find_spec("pymetis") is not None),
    placer(kahypar, importlib.util.find_spec("mtkahypar") is not None),
]
every_placer = pytest.mark.parametrize("place", PLACERS)
needs_scotch = pytest.mark.skipif(not has_scotch(), reason="Scotch")


def problem_of(ops, kinds=("cuda", "cuda"), op_ps=None, **links):
    graph = Graph.build("world", ops)
    times = np.where(graph.op_is_resident, 0, 100)[:, None] if op_ps is None else np.array(op_ps)
    times = np.broadcast_to(times, (graph.num_ops, len(kinds)))
    return Problem(graph, worlds.make_cluster(kinds, **links), Costs(times))


def clusters_of_ops(counts, heavy=1000, light=1, width=10, seed=0):
    """Clusters of ops that read each other's large outputs; a small tensor leads to the next."""
    rng = np.random.default_rng(seed)
    ops = []
    for c, count in enumerate(counts):
        for i in range(count):
            inputs = [f"op{c}.{j}" for j in range(max(0, i - width), i) if rng.random() < 0.5]
            if i > 0 and f"op{c}.{i - 1}" not in inputs:
                inputs.append(f"op{c}.{i - 1}")
            if i == 0 and c > 0:
                inputs.append(f"op{c - 1}.{counts[c - 1] - 1}:1")
            ops.append(Op(name=f"op{c}.{i}", inputs=inputs, outputs=[heavy, light]))
    return ops


def cluster_of(problem):
    return np.array([int(name[2:].split(".")[0]) for name in problem.graph.op_names])


def cut_bytes(problem, placement):
    graph = problem.graph
    apart = placement[graph.tensor_op[graph.use_tensor]] != placement[graph.use_op]
    return int(graph.tensor_bytes[graph.use_tensor[apart]].sum())


def load_ps(problem, placement):
    times = problem.costs.op_ps[np.arange(problem.num_ops), placement]
    return np.bincount(placement, times, minlength=problem.num_devices)


@every_placer
@pytest.mark.parametrize("count", [2, 4])
def test_a_planted_cut_is_found(place, count):
    problem = problem_of(clusters_of_ops([60] * count), ("cuda",) * count)
    placement = place(problem)
    assert cut_bytes(problem, placement) == count - 1
    assert load_ps(problem, placement).tolist() == [6000] * count


@every_placer
def test_ops_are_not_in_order_of_their_cluster(place):
    ops = clusters_of_ops([40, 40])
    mixed = [op for pair in zip(ops[:40], ops[40:], strict=True) for op in pair]
    problem = problem_of(mixed)
    placement = place(problem)
    cluster = cluster_of(problem)
    assert len(set(zip(cluster.tolist(), placement.tolist(), strict=True))) == 2


@every_placer
def test_unequal_devices_get_unequal_work(place):
    ops = clusters_of_ops([100] * 4)
    times = np.tile([100, 300, 400], (400, 1))
    problem = problem_of(ops, ("cuda",) * 3, times)
    assert_in_proportion(problem, place(problem))


@needs_scotch
def test_unequal_devices_get_unequal_work_over_unequal_links_too():
    times = np.tile([100, 300, 400], (400, 1))
    for near in ([1, 2], [0, 1], [0, 2]):
        rate = np.full((3, 3), 0.1)
        rate[np.ix_(near, near)] = 5.0
        ops = clusters_of_ops([100] * 4)
        problem = problem_of(ops, ("cuda",) * 3, times, bytes_per_ps=rate)
        assert_in_proportion(problem, scotch(problem))


def assert_in_proportion(problem, placement):
    counts = np.bincount(placement, minlength=3)
    wanted = 400 * np.array([12, 4, 3]) / 19
    assert np.abs(counts - wanted).max() < 0.1 * 400
    assert counts[0] > counts[1] >= counts[2]


@every_placer
def test_a_very_slow_device_gets_next_to_nothing(place):
    problem = problem_of(
        clusters_of_ops([100, 100]), ("cpu", "cuda", "cuda"), np.tile([10**8, 100, 100], (200, 1))
    )
    assert np.bincount(place(problem), minlength=3)[0] <= 1


@every_placer
def test_parameters_weigh_nothing_but_stay_with_their_readers(place):
    ops = []
    for c in range(2):
        ops += [Op(name=f"w{c}.{k}", outputs=[Output(5000, persistent=True)]) for k in range(30)]
    for c in range(2):
        for k in range(30):
            before = [f"op{c}.{k - 1}"] if k else [f"op{c - 1}.29:1"] if c else []
            inputs = [f"w{c}.{k}", *before]
            ops.append(Op(name=f"op{c}.{k}", inputs=inputs, outputs=[1000, 1]))
    problem = problem_of(ops)
    placement = place(problem)
    assert cut_bytes(problem, placement) == 1
    assert load_ps(problem, placement).tolist() == [3000, 3000]


@every_placer
def test_a_group_is_one_vertex(place):
    ops = clusters_of_ops([50, 50])
    ops = [
        Op(name=op.name, inputs=op.inputs, outputs=op.outputs, colocate="a" if k % 5 == 0 else None)
        for k, op in enumerate(ops)
    ]
    problem = problem_of(ops)
    placement = place(problem)
    problem.check(placement)
    assert len(set(placement[problem.graph.op_colocation == 0])) == 1


@pytest.mark.skipif(importlib.util.find_spec("mtkahypar") is None, reason="Mt-KaHyPar")
def test_a_tensor_with_many_readers_is_sent_once():
    """
    `hub` is read by twenty ops of 10 each; cutting the readers apart costs 50 once.

    Every edge alone weighs 50, so that a graph of edges must cut a pair (60) elsewhere.
    """
    readers = [
        Op(name=f"r{k}.{i}", inputs=["hub"] if i == 0 else [f"r{k}.0"], outputs=[60])
        for k in range(20)
        for i in range(2)
    ]
    problem = problem_of([Op(name="hub", outputs=[50]), *readers], op_ps=[[0], *[[10]] * 40])
    placement = kahypar(problem)
    place_of = dict(zip(problem.graph.op_names, placement.tolist(), strict=True))
    assert all(place_of[f"r{k}.0"] == place_of[f"r{k}.1"] for k in range(20))
    assert load_ps(problem, placement).tolist() == [200, 200]


@needs_scotch
@pytest.mark.parametrize("kinds", [("cpu", "cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_mincut_never_uses_the_cpu(kinds):
    problem = problem_of(clusters_of_ops([50, 50]), kinds)
    used = {kinds[d] for d in mincut(problem)}
    assert used == {"cuda"}


@needs_scotch
def test_mincut_puts_on_the_cpu_what_can_run_nowhere_else():
    ops = [Op(name=f"op{k}", outputs=[1], devices=("cpu",) if k == 3 else None) for k in range(9)]
    assert np.flatnonzero(mincut(problem_of(ops, ("cpu", "cuda", "cuda"))) == 0).tolist() == [3]


@needs_scotch
def test_mincut_needs_a_device_that_is_no_cpu():
    with pytest.raises(InputError, match="only CPUs"):
        mincut(problem_of([Op(name="a")], ("cpu", "cpu")))


@needs_scotch
@pytest.mark.parametrize("partner", [1, 2, 3])
def test_scotch_keeps_traffic_off_slow_links(partner):
    """Four clusters in two pairs; device 0 is close to `partner`, and the other two are close."""
    ops = clusters_of_ops([40, 40, 40, 40])
    for a, b in ((0, 1), (2, 3)):  # much leads from 0 to 1 and from 2 to 3, little from 1 to 2
        for i in range(20):
            k = next(k for k, op in enumerate(ops) if op.name == f"op{b}.{i + 10}")
            ops[k] = Op(
                name=ops[k].name, inputs=[*ops[k].inputs, f"op{a}.{i}"], outputs=ops[k].outputs
            )
    side = np.isin(np.arange(4), [0, partner])
    close = side[:, None] == side[None]
    problem = problem_of(ops, ("cuda",) * 4, bytes_per_ps=np.where(close, 10.0, 0.5))
    for seed in range(3):
        placement = scotch(problem, seed)
        at = [int(placement[cluster_of(problem) == c][0]) for c in range(4)]
        assert sorted(at) == [0, 1, 2, 3]
        assert close[at[0], at[1]]
        assert close[at[2], at[3]]


@every_placer
def test_a_seed_decides(place):
    rng = np.random.default_rng(0)
    ops = []
    for i in range(300):
        inputs = sorted({f"op{int(j)}" for j in rng.integers(0, i, 3)}) if i else []
        ops.append(Op(name=f"op{i}", inputs=inputs, outputs=[int(rng.integers(1, 100))]))
    problem = problem_of(ops, ("cuda",) * 4)
    first = place(problem, 3)
    place(problem, 4)
    assert place(problem, 3).tolist() == first.tolist()
    assert any(place(problem, seed).tolist() != first.tolist() for seed in range(4))
    for seed in (-1, 2**31, 2**63, 10**30):
        problem.check(place(problem, seed))


@every_placer
def test_threads_do_not_meet(place):
    problem = problem_of(clusters_of_ops([50, 70, 90]), ("cuda",) * 3)
    alone = [place(problem, seed).tolist() for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        assert [p.tolist() for p in pool.map(lambda s: place(problem, s), range(8))] == alone


@every_placer
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_placements_are_valid_in_random_worlds(place, data):
    problem = data.draw(worlds.problems())
    if place is mincut and set(problem.cluster.device_kinds) == {"cpu"}:
        return
    placement = place(problem, data.draw(st.integers(0, 3)))
    assert placement.dtype == np.int64
    problem.check(placement)
    assert place(problem, 1).tolist() == place(problem, 1).tolist()


@every_placer
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_placements_are_valid_under_restrictions(place, data):
    count = data.draw(st.integers(1, 30))
    kinds = ("cpu", "cuda", "tpu", "cuda", "npu")
    some = st.sampled_from([None, ("cpu",), ("cuda",), ("tpu", "cpu"), ("cuda", "tpu")])
    ops = [Op(name=f"op{k}", outputs=[k], devices=data.draw(some)) for k in range(count)]
    problem = problem_of(ops, kinds)
    problem.check(place(problem))


def said(capfd):
    ctypes.CDLL(None).fflush(None)  # what C code has printed may still be in its buffer
    return capfd.readouterr()


def lonely(count):
    return [Op(name=f"op{k}", outputs=[8]) for k in range(count)]


ODD = {
    "one op": (lonely(1), 4),
    "one device": (lonely(20), 1),
    "fewer ops than devices": (lonely(3), 16),
    "no edges": (lonely(200), 5),
    "sixteen devices": (clusters_of_ops([50] * 16), 16),
    "only parameters": (
        [Op(name=f"w{k}", outputs=[Output(9, persistent=True)]) for k in range(20)],
        3,
    ),
    "only control": (
        [Op(name=f"op{k}", after=[f"op{k - 1}"] if k else []) for k in range(30)],
        4,
    ),
    "one tensor for all": (
        [Op(name="x", outputs=[10])]
        + [Op(name=f"op{k}", inputs=["x"], outputs=[1]) for k in range(300)],
        8,
    ),
    "huge tensors": (
        [Op(name=f"op{k}", inputs=[f"op{k - 1}"] if k else [], outputs=[2**44]) for k in range(50)],
        4,
    ),
}


@every_placer
@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_are_placed_without_a_word(place, name, capfd):
    ops, count = ODD[name]
    problem = problem_of(ops, ("cuda",) * count, bytes_per_ps=1e3)
    problem.check(place(problem))
    assert said(capfd) == ("", "")


@every_placer
def test_one_enormous_op_is_placed_without_a_word(place, capfd):
    times = np.ones((200, 16), dtype=np.int64)
    times[50] = 10**15
    problem = problem_of(clusters_of_ops([200]), ("cuda",) * 16, times)
    problem.check(place(problem))
    assert said(capfd) == ("", "")


@every_placer
def test_long_times_are_balanced(place):
    problem = problem_of(clusters_of_ops([100] * 4), ("cuda",) * 4, np.full((400, 1), 10**15))
    loads = load_ps(problem, place(problem))
    assert loads.max() <= 1.2 * loads.mean()


@every_placer
def test_a_device_that_nobody_may_use_takes_no_share(place):
    ops = [
        Op(name=op.name, inputs=op.inputs, outputs=op.outputs, devices=("cuda",))
        for op in clusters_of_ops([60, 60])
    ]
    problem = problem_of(ops, ("tpu", "cuda", "tpu", "cuda"))
    assert load_ps(problem, place(problem)).tolist() == [0, 6000, 0, 6000]


@every_placer
def test_the_process_may_use_the_same_cores_afterwards(place):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("no affinity here")
    before = os.sched_getaffinity(0)
    place(problem_of(clusters_of_ops([60, 60])))
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("place", "module", "message"),
    [
        (metis, "pymetis", r"^METIS is .*`metis` .*'placewright\[metis\]'`\.$"),
        (kahypar, "mtkahypar", r"^Mt-KaHyPar is .*`kahypar` .*'placewright\[kahypar\]'`\.$"),
    ],
)
def test_a_missing_module_is_named(monkeypatch, place, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=message):
        place(problem_of(lonely(3)))


@pytest.mark.parametrize("place", [scotch, mincut])
def test_a_missing_scotch_is_named(monkeypatch, place):
    _scotch.load.cache_clear()
    monkeypatch.setattr(_scotch, "find_spec", lambda name: None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    try:
        with pytest.raises(InputError) as caught:
            place(problem_of(lonely(3)))
    finally:
        _scotch.load.cache_clear()
    assert str(caught.value) == (
        f"Scotch is not installed, and the placer `{place.__name__}` needs it. Install it with"
        " `pip install 'placewright[scotch]'`."
    )


@needs_scotch
@pytest.mark.parametrize(
    ("begins", "neighbours"),
    [
        pytest.param([0, 1, 1], [1], id="an edge from one end"),
        pytest.param([0, 1, 2], [1, 7], id="a neighbour that is none"),
        pytest.param([0, 1, 2], [0, 1], id="loops"),
    ],
)
def test_what_is_no_graph_is_refused_and_the_process_lives(begins, neighbours):
    ones = np.ones(2, dtype=np.int64)
    with pytest.raises(RuntimeError, match=r"^Scotch failed in `graph(Check|Build)`"):
        _scotch.map_graph(
            np.array(begins), np.array(neighbours), ones[: len(neighbours)], ones, ones, None, 0
        )


def test_edges_are_merged_and_seen_from_both_ends():
    """`a` and `b` are one vertex, which reads `x` twice but fetches it once."""
    ops = [
        Op(name="x", outputs=[10, 3]),
        Op(name="a", inputs=["x"], outputs=[5], colocate="g"),
        Op(name="b", inputs=["x", "x:1", "a"], outputs=[7], colocate="g"),
        Op(name="c", inputs=["b", "x"], outputs=[1], after=["a"]),
    ]
    problem = problem_of(ops)
    task = partition._make_task(problem, np.arange(2), np.array([0, 1, 1, 2]), 3)
    edges = task.edges(partition.MAX_TOTAL)
    assert edges.begins.tolist() == [0, 2, 4, 6]
    assert edges.neighbours.tolist() == [1, 2, 0, 2, 0, 1]
    assert edges.weights.tolist() == [13, 10, 13, 7, 10, 7]
    assert task.weight.tolist() == [100, 200, 100]
    nets, weights = task.nets(np.arange(3))
    assert sorted(zip(nets, weights.tolist(), strict=True)) == [
        ([0, 1], 3),
        ([0, 1, 2], 10),
        ([1, 2], 1),
        ([1, 2], 7),
    ]
    inner = edges.within(np.array([False, True, True]))
    assert (inner.begins.tolist(), inner.neighbours.tolist()) == ([0, 1, 2], [1, 0])
    assert inner.weights.tolist() == [7, 7]
