"""List schedulers: published schedules, slow references, and what every placement must keep."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from placewright.costs import Costs
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.load import load_model, load_problem
from placewright.placers import list_scheduling
from placewright.placers._list_kernel import MAX_GAPS, optimistic_costs
from placewright.placers.list_scheduling import heft, m_etf, m_sct, m_topo, peft
from placewright.problem import Problem
from placewright.simulator import simulate, simulate_many

from . import tiny
from .worlds import make_cluster, problems

PLACERS = [m_topo, m_etf, m_sct, heft, peft]

TOPCUOGLU_PS = [
    (14, 16, 9),
    (13, 19, 18),
    (11, 13, 19),
    (13, 8, 17),
    (12, 13, 10),
    (13, 16, 9),
    (7, 15, 11),
    (5, 11, 14),
    (18, 12, 20),
    (21, 7, 16),
]
TOPCUOGLU_EDGES = {
    (1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16, (3, 7): 23,
    (4, 8): 27, (4, 9): 23, (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11, (9, 10): 13,
}  # fmt: skip


def wired(edges, times, cluster):
    """A problem of ops 0, 1, ... with one tensor an edge, of so many bytes (0: control only)."""
    outputs: dict[int, list[int]] = {}
    inputs: dict[int, list[str]] = {}
    for (maker, reader), size in edges.items():
        made = outputs.setdefault(maker, [])
        inputs.setdefault(reader, []).append(f"n{maker}" if not made else f"n{maker}:{len(made)}")
        made.append(size)
    ops = [
        Op(name=f"n{i}", inputs=inputs.get(i, []), outputs=outputs.get(i, []))
        for i in range(len(times))
    ]
    return tiny.problem(ops, {f"n{i}": time for i, time in enumerate(times)}, cluster)


def topcuoglu():
    """The example of the HEFT paper: a byte takes as long as the paper's unit of time."""
    edges = {(a - 1, b - 1): size for (a, b), size in TOPCUOGLU_EDGES.items()}
    return wired(edges, TOPCUOGLU_PS, make_cluster(("cuda",) * 3, latency_ps=0))


def random_problem(seed, num_ops=30, largest=20, latency_ps=3):
    """Ops of random times on three unequal devices, each reading up to three earlier ones."""
    rng = np.random.default_rng(seed)
    edges = {
        (int(maker), reader): int(rng.integers(1, largest)) if largest else 0
        for reader in range(1, num_ops)
        for maker in np.unique(rng.integers(max(0, reader - 12), reader, rng.integers(0, 4)))
    }
    times = rng.integers(1, 30, (num_ops, 3))
    cluster = make_cluster(("cuda",) * 3, latency_ps=latency_ps, memory=10**9)
    return wired(dict(sorted(edges.items())), times, cluster)


def scheduled(problem, kernel, *arguments):
    """Run a placer once, with all memory; give the devices and the times that it planned."""
    facts = list_scheduling._facts(problem, 1.0)
    state = kernel(facts, *arguments)
    return state.unit_device[facts.op_unit], state.start, state.finish


def heft_schedule(problem):
    facts = list_scheduling._facts(problem, 1.0)
    rank = list_scheduling._ranking(list_scheduling._upward(problem, facts))
    return scheduled(problem, list_scheduling._insertion, rank, np.zeros_like(facts.op_ps))


def etf_schedule(problem):
    nobody = list_scheduling._Favourites.nobody(problem)
    return scheduled(problem, list_scheduling._earliest_start, nobody)


def inputs_of(problem):
    graph = problem.graph
    found = [[] for _ in range(problem.num_ops)]
    for tensor, op in zip(graph.use_tensor, graph.use_op, strict=True):
        found[op].append((int(graph.tensor_op[tensor]), int(graph.tensor_bytes[tensor])))
    return found


def moving_ps(problem, size, a, b):
    """How long a tensor takes from one device to the other, alone."""
    if a == b:
        return 0
    latency = problem.cluster.latency_s[a, b] * 1e12
    return round(latency + size * 1e12 / problem.cluster.bytes_per_s[a, b])


def arrival(problem, inputs, placement, finish, i, d):
    return max(
        (finish[m] + moving_ps(problem, size, placement[m], d) for m, size in inputs[i]), default=0
    )


def slow_heft(problem):
    """HEFT as in the paper, with all busy times of each device in a sorted list."""
    inputs = inputs_of(problem)
    op_ps, count = problem.costs.op_ps, problem.num_devices
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    upward = op_ps.mean(axis=1)
    for i in reversed(range(problem.num_ops)):
        for m, size in inputs[i]:
            mean = np.mean([moving_ps(problem, size, a, b) for a, b in pairs])
            upward[m] = max(upward[m], op_ps[m].mean() + mean + upward[i])
    busy = [[(0, 0)] for _ in range(count)]
    placement, start, finish = (np.full(problem.num_ops, -1) for _ in range(3))
    for i in sorted(range(problem.num_ops), key=lambda i: (-upward[i], i)):
        options = []
        for d in range(count):
            ready = arrival(problem, inputs, placement, finish, i, d)
            ps = op_ps[i, d]
            begin = max(ready, busy[d][-1][1])
            for (_, left), (right, _) in pairwise(busy[d]):
                if max(left, ready) + ps <= right:
                    begin = max(left, ready)
                    break
            options.append((begin + ps, d, begin))
        finish[i], placement[i], start[i] = min(options)
        busy[placement[i]] = sorted([*busy[placement[i]], (start[i], finish[i])])
    return placement, start, finish


def slow_etf(problem):
    """ETF with every pair of ready op and device looked at every time."""
    inputs = inputs_of(problem)
    op_ps = problem.costs.op_ps
    free = [0] * problem.num_devices
    placement, start, finish = (np.full(problem.num_ops, -1) for _ in range(3))
    for _ in range(problem.num_ops):
        options = []
        for i in range(problem.num_ops):
            if placement[i] < 0 and all(placement[m] >= 0 for m, _ in inputs[i]):
                for d in range(problem.num_devices):
                    begin = max(free[d], arrival(problem, inputs, placement, finish, i, d))
                    options.append((begin + op_ps[i, d] - op_ps[i].min(), i, d, begin))
        _, i, d, begin = min(options)
        placement[i], start[i], finish[i] = d, begin, begin + op_ps[i, d]
        free[d] = finish[i]
    return placement, start, finish


def test_heft_gives_the_schedule_that_its_paper_prints():
    placement, start, finish = heft_schedule(topcuoglu())
    assert placement.tolist() == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]
    assert start.tolist() == [0, 27, 9, 18, 28, 26, 38, 57, 56, 73]
    assert finish.max() == 80
    assert heft(topcuoglu()).tolist() == placement.tolist()


def test_upward_ranks_are_those_of_the_paper():
    problem = topcuoglu()
    upward = list_scheduling._upward(problem, list_scheduling._facts(problem, 1.0))
    expected = [108.0, 77.0, 80.0, 80.0, 69.0, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert upward == pytest.approx(expected, abs=1e-3)


def test_an_op_is_inserted_into_a_gap_that_holds_it():
    # a, b and e share device 0. b waits for c, on the other one; e is taken last and fits between.
    ops = [
        Op(name="a", outputs=[1], colocate="here"),
        Op(name="c", inputs=["a"], outputs=[1], devices=("cpu",)),
        Op(name="b", inputs=["c"], outputs=[1], colocate="here"),
        Op(name="e", outputs=[], colocate="here"),
    ]
    problem = tiny.problem(
        ops, {"a": 5, "c": 20, "b": 5, "e": 4}, make_cluster(("cuda", "cpu"), latency_ps=0)
    )
    placement, start, finish = heft_schedule(problem)
    where = dict(zip(problem.graph.op_names, start.tolist(), strict=True))
    assert where["a"] == 0
    assert where["c"] == 6
    assert where["b"] == 27
    assert where["e"] == 5  # after a, before b, although it was taken last
    assert finish.max() == 32
    assert placement[problem.graph.op_index["e"]] == 0


@pytest.mark.parametrize("seed", range(40))
def test_heft_is_equal_to_a_slow_reference(seed):
    problem = random_problem(seed)
    fast, slow = heft_schedule(problem), slow_heft(problem)
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.tolist() == theirs.tolist()


def test_the_references_insert_into_gaps_too():
    inserted = 0
    for seed in range(40):
        problem = random_problem(seed)
        facts = list_scheduling._facts(problem, 1.0)
        order = np.argsort(-list_scheduling._upward(problem, facts), kind="stable")
        placement, start, _ = heft_schedule(problem)
        for d in range(3):
            mine = [i for i in order if placement[i] == d]
            inserted += sum(start[b] < start[a] for a, b in pairwise(mine))
    assert inserted > 20


@pytest.mark.parametrize("seed", range(40))
def test_etf_is_equal_to_a_slow_reference_where_channels_are_never_busy(seed):
    problem = random_problem(seed, largest=0, latency_ps=seed % 9)  # control tensors only
    fast, slow = etf_schedule(problem), slow_etf(problem)
    for ours, theirs in zip(fast, slow, strict=True):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("schedule", [heft_schedule, etf_schedule])
@pytest.mark.parametrize("seed", range(3))
def test_no_two_ops_overlap_and_none_starts_before_its_inputs_arrive(schedule, seed):
    problem = random_problem(seed, num_ops=3000, largest=60)
    placement, start, finish = schedule(problem)
    inputs = inputs_of(problem)
    for i in range(problem.num_ops):
        assert start[i] >= arrival(problem, inputs, placement, finish, i, placement[i])
    for d in range(problem.num_devices):
        mine = np.flatnonzero(placement == d)
        mine = mine[np.argsort(start[mine])]
        assert (start[mine][1:] >= finish[mine][:-1]).all()


def test_more_gaps_than_are_remembered_do_no_harm():
    # 1-ps ops on device 0 that each wait for a 9-ps op of device 1: a gap after every one.
    count = 2 * MAX_GAPS
    ops = []
    for k in range(count):
        ops.append(Op(name=f"x{k}", inputs=[f"y{k - 1}"] if k else [], outputs=[0], colocate="x"))
        ops.append(Op(name=f"y{k}", inputs=[f"x{k}"], outputs=[0], devices=("cpu",)))
    ops += [Op(name=f"z{k}", outputs=[], colocate="x") for k in range(count)]
    times = {op.name: {"x": 1, "y": 9, "z": 8}[op.name[0]] for op in ops}
    cluster = make_cluster(("cuda", "cpu"), latency_ps=0)
    placement, start, finish = heft_schedule(tiny.problem(ops, times, cluster))
    mine = np.flatnonzero(placement == 0)
    mine = mine[np.argsort(start[mine])]
    assert (start[mine][1:] >= finish[mine][:-1]).all()
    # x and y run one after the other for 10 ps a pair; only half of the z find their gap.
    assert 10 * count < finish.max() <= 10 * count + 8 * count // 2 + 8


def test_the_optimistic_cost_table_is_worked_out_by_hand():
    # a -> b -> c; moving takes 4. From the end: c follows nothing.
    problem = wired({(0, 1): 4, (1, 2): 4}, [(1, 1), (10, 2), (3, 9)], make_cluster(latency_ps=0))
    facts = list_scheduling._facts(problem, 1.0)
    table = np.zeros((3, 2), dtype=np.int64)
    optimistic_costs(facts, list_scheduling._tensor_ps(problem), table)
    assert table[2].tolist() == [0, 0]
    assert table[1].tolist() == [3, 7]  # c on 0; from 1: there after moving (7), not on 1 (9)
    assert table[0].tolist() == [13, 9]  # b on 0 (10 + 3) or moved to 1 (2 + 7 + 4); b on 1


def test_a_slow_device_that_is_free_is_left_alone_until_it_ends_first():
    # Three ops of 10 on device 0, 25 on device 1: the third ends at 30 on 0, at 25 on 1.
    problem = wired({}, [(10, 25)] * 3, make_cluster())
    assert m_etf(problem).tolist() == [0, 0, 1]
    assert heft(problem).tolist() == [0, 0, 1]
    assert m_etf(wired({}, [(10, 31)] * 3, make_cluster())).tolist() == [0, 0, 0]


def test_etf_keeps_a_chain_together_and_spreads_what_is_worth_moving():
    assert m_etf(tiny.chain()).tolist() == [0, 0, 0]
    # b runs 2 ... 12 with a; c arrives on the other device at 2 + 5 and ends at 13, not at 18.
    assert m_etf(tiny.diamond()).tolist()[:3] == [0, 0, 1]


def test_etf_lets_transfers_wait_for_their_channel():
    # Two tensors of 10 bytes for device 1 share its receiving channel: 1 + 10 ps each.
    ops = [
        Op(name="a", outputs=[10, 10], devices=("cuda",)),
        Op(name="b", inputs=["a"], outputs=[], devices=("cpu",)),
        Op(name="c", inputs=["a:1"], outputs=[], devices=("cpu",)),
    ]
    problem = tiny.problem(ops, {"a": 5, "b": 1, "c": 1}, make_cluster(("cuda", "cpu")))
    _, start, _ = etf_schedule(problem)
    assert start.tolist() == [0, 16, 27]
    _, start, _ = heft_schedule(problem)
    assert start.tolist() == [0, 16, 17]  # HEFT's transfers do not wait


def test_topo_fills_devices_in_turn_and_cpus_last():
    ops = [Op(name=f"n{i}", outputs=[10]) for i in range(9)]
    problem = tiny.problem(ops, {}, make_cluster(("cpu", "cuda", "cuda")))
    # 90 bytes on two devices: 45, and 10 for the largest op.
    assert m_topo(problem).tolist() == [1] * 5 + [2] * 4
    weights = [
        Op(name=f"w{i}", kind="param", outputs=[Output(10, persistent=True)]) for i in range(9)
    ]
    full = tiny.problem(weights, {}, make_cluster(("cpu", "cuda", "cuda"), memory=30))
    assert m_topo(full).tolist() == [1] * 3 + [2] * 3 + [0] * 3


@pytest.mark.parametrize("placer", PLACERS)
def test_weights_go_with_their_first_reader_and_the_whole_group_with_them(placer):
    ops = [
        Op(name="w", kind="param", outputs=[Output(50, persistent=True)], colocate="w"),
        Op(name="f", inputs=["w"], outputs=[2], devices=("cuda",)),
        Op(name="g", inputs=["f", "w"], outputs=[50]),
        Op(name="u", inputs=["g"], after=["g"], outputs=[0], colocate="w"),
    ]
    problem = tiny.problem(ops, {"f": 5, "g": 5, "u": 5}, make_cluster(("cpu", "cuda", "cuda")))
    placement = placer(problem)
    assert len(set(placement)) == 1
    assert placement[0] > 0


@pytest.mark.parametrize("placer", PLACERS)
def test_weights_whose_group_may_not_be_with_their_reader_are_fetched(placer):
    ops = [
        Op(name="w", kind="param", outputs=[Output(50, persistent=True)], colocate="w"),
        Op(name="f", inputs=["w"], outputs=[2], devices=("cuda",)),
        Op(name="u", inputs=["f"], outputs=[0], colocate="w", devices=("cpu",)),
    ]
    problem = tiny.problem(ops, {"f": 5, "u": 5}, make_cluster(("cuda", "cpu")))
    assert placer(problem).tolist() == [1, 0, 1]


@pytest.mark.parametrize("placer", PLACERS[1:])
def test_memory_decides_where_time_would_not(placer):
    # Everything is quickest on device 0, whose 100 bytes hold the weights of two layers.
    ops = []
    for k in range(4):
        ops.append(Op(name=f"w{k}", kind="param", outputs=[Output(45, persistent=True)]))
        ops.append(Op(name=f"f{k}", inputs=[f"w{k}"] + ([f"f{k - 1}"] if k else []), outputs=[1]))
    times = {f"f{k}": (1, 2) for k in range(4)}
    problem = tiny.problem(ops, times, make_cluster(memory=100))
    line = simulate(problem, placer(problem))
    assert line.is_feasible
    assert line.peak_bytes.max() <= 100


@pytest.mark.parametrize("placer", PLACERS)
def test_what_fits_nowhere_is_placed_all_the_same(placer):
    ops = [Op(name=f"w{k}", kind="param", outputs=[Output(80, persistent=True)]) for k in range(3)]
    ops += [Op(name=f"f{k}", inputs=[f"w{k}"], outputs=[30], workspace=7) for k in range(3)]
    problem = tiny.problem(ops, {f"f{k}": 3 for k in range(3)}, make_cluster(memory=40))
    placement = placer(problem)
    problem.check(placement)
    assert set(placement) == {0, 1}


def test_favourites_are_one_to_one():
    for problem in (topcuoglu(), *(random_problem(seed) for seed in range(5))):
        for time_limit_s in (30.0, 0.0):  # by linear program; by longest paths
            child = list_scheduling._favourites(problem, time_limit_s).child
            chosen = child[child >= 0]
            assert chosen.size
            assert len(set(chosen)) == len(chosen)


def test_the_linear_program_frees_the_edge_that_matters():
    # a feeds b (long) and c (short): b is the favourite, by either way of choosing.
    problem = wired({(0, 1): 8, (0, 2): 8}, [2, 20, 3], make_cluster(latency_ps=0))
    for time_limit_s in (30.0, 0.0):
        favourites = list_scheduling._favourites(problem, time_limit_s)
        assert favourites.child.tolist() == [1, -1, -1]
        assert favourites.wait_ps.tolist() == [8, 0, 0]


def test_a_device_waits_for_the_favourite_child_of_its_last_op():
    # a ends at 10 on device 0 and feeds c and x; c also needs b, which ends at 12 on device 1 and
    # is known here at 13. Without favourites x comes first. Waiting for c, x has to wait as well.
    edges = {(0, 2): 20, (0, 3): 20, (1, 2): 0}
    problem = wired(edges, [(10, 99), (99, 12), (5, 60), (9, 90)], make_cluster())
    assert etf_schedule(problem)[1].tolist() == [0, 0, 19, 10]
    waits = list_scheduling._Favourites.nobody(problem)
    waits.child[0], waits.wait_ps[0] = 2, 21
    _, start, _ = scheduled(problem, list_scheduling._earliest_start, waits)
    assert start.tolist() == [0, 0, 13, 18]
    waits.wait_ps[0] = 1  # not that long
    _, start, _ = scheduled(problem, list_scheduling._earliest_start, waits)
    assert start.tolist() == [0, 0, 20, 11]


def test_a_waiting_device_takes_what_could_run_anywhere():
    # As above, but x reads nothing and was taken last at time 0.
    edges = {(0, 2): 20, (1, 2): 0}
    problem = wired(edges, [(10, 99), (99, 12), (5, 60), (9, 90)], make_cluster())
    waits = list_scheduling._Favourites.nobody(problem)
    waits.child[0], waits.wait_ps[0] = 2, 21
    _, start, _ = scheduled(problem, list_scheduling._earliest_start, waits)
    assert start.tolist() == [0, 0, 19, 10]


@pytest.mark.parametrize("placer", PLACERS)
@settings(deadline=None)
@given(problem=problems())
def test_every_placement_is_valid_and_the_same_each_time(placer, problem):
    placement = placer(problem)
    assert placement.dtype == np.int64
    problem.check(placement)
    assert placement.tolist() == placer(problem).tolist()


@pytest.mark.parametrize("placer", PLACERS)
def test_one_device_takes_everything(placer):
    graph = Graph.build("g", [Op(name="a", outputs=[1]), Op(name="b", inputs=["a"], outputs=[])])
    problem = Problem(graph, make_cluster(("cuda",)), Costs(np.array([[1], [2]])))
    assert placer(problem).tolist() == [0, 0]


@pytest.mark.parametrize("placer", PLACERS)
def test_tight_memory_suffices(placer):
    pytest.importorskip("torch")
    problem = load_problem(load_model("tiny-nmt"), "k40x4-tight")
    assert simulate(problem, placer(problem)).is_feasible


@pytest.mark.parametrize("placer", PLACERS)
def test_every_scheduler_beats_placing_at_random(placer):
    pytest.importorskip("torch")
    problem = load_problem(load_model("tiny-nmt"), "k40x4")
    rows = np.random.default_rng(0).integers(0, problem.num_devices, (20, problem.num_ops))
    rows[:, problem.colocation_members] = rows[:, problem.colocation_leaders]
    best = simulate_many(problem, rows).makespan_s.min()
    assert simulate_many(problem, placer(problem)[np.newaxis]).makespan_s[0] < best
