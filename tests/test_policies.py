"""What policies are made of: networks against plain PyTorch, features, rewards, settings."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from scipy.stats import chisquare

from placewright.errors import InputError
from placewright.evaluate import Evaluations
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.grouping import repeated_blocks
from placewright.grouping.layers import find_layers
from placewright.load import load_model, load_problem
from placewright.policies import POLICIES, with_options
from placewright.policies.rewards import (
    Costs,
    LeaveOneOut,
    MovingAverage,
    NoBaseline,
    Pricing,
    make_baseline,
)
from placewright.policies.settings import PRESETS, Training, describe

from . import tiny
from .worlds import make_cluster, problems

torch = pytest.importorskip("torch")

from placewright.policies import _kernels, hierarchical  # noqa: E402
from placewright.policies.features import (  # noqa: E402
    NUM_TYPES,
    Room,
    UnitFeatures,
    device_features,
    equal_devices,
    levels,
    neighbours,
    op_types,
    output_shapes,
)
from placewright.policies.seq2seq import Groups, Limits, Placer, Shaping  # noqa: E402
from placewright.policies.training import Cycle  # noqa: E402

# --- The networks, against plain PyTorch in double precision. ---

LENGTHS = (5, 3, 7)
EACH, HIDDEN, SIZE, DEVICES, FEATURES = 3, 6, 4, 3, 5

CASES = {
    "plain": {},
    "one direction": {"is_bidirectional": False},
    "aligned": {"is_aligned": True},
    "device features": {"features": True},
    "tanh and temperature": {"shaping": Shaping(3.0, 2.5)},
    "noise": {"shaping": Shaping(0.7, 0.0, 0.8)},
    "masks": {"memory": 6.0, "bans": True},
    "equal devices in order": {"twins": True},
    "all of it": {
        "is_aligned": True,
        "features": True,
        "shaping": Shaping(2.0, 1.5, 0.5),
        "memory": 6.0,
        "bans": True,
    },
    "all of it, one direction": {
        "is_bidirectional": False,
        "is_aligned": True,
        "features": True,
        "shaping": Shaping(2.0, 1.5, 0.5),
        "memory": 6.0,
        "bans": True,
    },
}


def make_case(seed=0, lengths=LENGTHS, each=EACH, **case):
    """A Placer with lively weights, groupings of different lengths, and junk for padding."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    features = torch.rand(DEVICES, FEATURES) if case.get("features") else None
    placer = Placer(
        SIZE,
        HIDDEN,
        DEVICES if features is None else features,
        case.get("is_bidirectional", True),
        case.get("is_aligned", False),
    )
    with torch.no_grad():
        for weights in placer.parameters():
            weights.add_(torch.randn_like(weights), alpha=0.5)
    count, most = len(lengths), max(lengths)
    embedding = torch.randn(count, most, SIZE)
    allowed = np.ones((count, most, DEVICES), dtype=np.bool_)
    if case.get("bans"):
        allowed = random.random(allowed.shape) < 0.7
        allowed[0, 0] = False  # a group of ops that may run nowhere in common
    for m, length in enumerate(lengths):
        embedding[m, length:] = 1e3
    needs = random.random((count, most))
    lean = random.standard_normal(allowed.shape, dtype=np.float32)
    groups = Groups(np.array(lengths), embedding, allowed, needs, lean, 1.5)
    capacity = np.full(DEVICES, case.get("memory", np.inf)) * np.array([0.2, 0.4, 0.3])
    twin_of = np.array([-1, 0, 1] if case.get("twins") else [-1, -1, -1])
    return placer, groups, case.get("shaping", Shaping()), Limits(capacity, twin_of), each


def drawn_noise(seed, count, length):
    """The standard normal numbers that `Placer.sample` draws."""
    random = np.random.default_rng(seed)
    random.random((count, length), dtype=np.float32)
    return random.standard_normal((count, length, DEVICES), dtype=np.float32)


def cell(gates, c):
    i, f, n, o = gates.chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(n)
    return torch.sigmoid(o) * torch.tanh(c), c


def read_in_one_direction(inputs, w, b, again):
    h = c = torch.zeros(len(again), dtype=torch.float64)
    hidden = []
    for x in inputs:
        h, c = cell(x @ w + b + h @ again, c)
        hidden.append(h)
    return hidden, h, c


def legal_devices(allowed, needs, used, limits, taken):
    capacity = limits.capacity_bytes
    with_room = [d for d in range(DEVICES) if allowed[d] and used[d] + needs <= capacity[d]]
    in_turn = [d for d in with_room if limits.twin_of[d] in {-1, *taken}]
    if in_turn:
        return in_turn
    among = [d for d in range(DEVICES) if allowed[d]]
    return [max(among, key=lambda d: capacity[d] - used[d])] if among else [*range(DEVICES)]


def reference(p, features, groups, shaping, limits, devices, noise):
    """Log-chances of devices that were drawn, and entropies, step by step; `p` are the weights."""
    log_chances, entropies = [], []
    each = len(devices) // len(groups.lengths)
    embed, to_scores = p["embed"], p["to_scores"]
    if features is not None:
        embed, to_scores = features.double() @ embed, to_scores @ features.double().T
    for b, chosen in enumerate(devices):
        m, length = b // each, groups.lengths[b // each]
        inputs = groups.embedding[m, :length].double()
        hidden, h, c = read_in_one_direction(
            inputs, p["read"][0], p["read_bias"][0], p["read_again"][0]
        )
        if len(p["read"]) == 2:
            back, h2, c2 = read_in_one_direction(
                inputs.flip(0), p["read"][1], p["read_bias"][1], p["read_again"][1]
            )
            hidden = [torch.cat([x, y]) for x, y in zip(hidden, back[::-1], strict=True)]
            h, c = torch.cat([h, h2]), torch.cat([c, c2])
        keys = torch.stack(hidden) @ p["to_keys"]
        seen, used, chosen_chances, entropy = p["go"][0], np.zeros(DEVICES), [], 0.0
        for t in range(length):
            gates = seen @ p["gates"] + p["gates_bias"][0] + h @ p["recurrent"]
            if "align" in p:
                gates = gates + hidden[t] @ p["align"]
            h, c = cell(gates, c)
            attention = (torch.tanh(keys + h @ p["to_query"]) @ p["weight"]).softmax(dim=0)
            scores = torch.cat([h, attention @ keys]) @ to_scores
            scores = scores + torch.from_numpy(groups.lean[m, t])
            if t > 0:
                before = torch.eye(DEVICES, dtype=torch.float64)[chosen[t - 1]]
                scores = scores + groups.follow * before
            logits = scores / shaping.temperature
            if shaping.tanh_constant:
                logits = shaping.tanh_constant * torch.tanh(logits)
            if shaping.noise:
                spread = shaping.noise * logits.detach().square().mean().sqrt()
                logits = logits + spread * torch.from_numpy(noise[b, t])
            legal = legal_devices(
                groups.allowed[m, t], groups.needs_bytes[m, t], used, limits, {*chosen[:t]}
            )
            assert chosen[t] in legal
            chances = logits[legal].log_softmax(dim=0)
            chosen_chances.append(chances[legal.index(chosen[t])])
            entropy = entropy - (chances.exp() * chances).sum()
            used[chosen[t]] += groups.needs_bytes[m, t]
            seen = embed[chosen[t]]
        padding = torch.zeros(devices.shape[1] - length)
        log_chances.append(torch.cat([torch.stack(chosen_chances), padding]))
        entropies.append(entropy / length)
    return torch.stack(log_chances), torch.stack(entropies)


@pytest.mark.parametrize("name", CASES)
def test_chances_entropies_and_all_gradients_are_those_of_plain_pytorch(name):
    placer, groups, shaping, limits, each = make_case(**CASES[name])
    count, most = len(LENGTHS) * each, max(LENGTHS)
    choice = placer.sample(groups, each, shaping, limits, np.random.default_rng(9))
    noise = drawn_noise(9, count, most)
    weights = {k: v.detach().double().requires_grad_() for k, v in placer.named_parameters()}
    expected = reference(
        weights, placer.device_features, groups, shaping, limits, choice.devices, noise
    )
    torch.testing.assert_close(choice.log_chance.double(), expected[0], rtol=0, atol=5e-6)
    torch.testing.assert_close(choice.entropy.double(), expected[1], rtol=0, atol=1e-6)
    # Each choice has a weight of its own, so that no error hides in a sum.
    pulls = torch.linspace(-1.0, 2.0, count * most).view(count, most)
    ((pulls * choice.log_chance).sum() + (pulls[:, 0] * choice.entropy).sum()).backward()
    ours = {k: v.grad for k, v in placer.named_parameters()}
    pulls = pulls.double()
    ((pulls * expected[0]).sum() + (pulls[:, 0] * expected[1]).sum()).backward()
    for key, weight in weights.items():
        scale = float(weight.grad.abs().max())
        assert scale > 1e-4, key  # the case says something about every weight
        torch.testing.assert_close(
            ours[key].double(), weight.grad, rtol=0, atol=1e-5 * scale, msg=lambda s, k=key: k + s
        )


def test_gradients_reach_what_embeds_the_groups():
    placer, groups, shaping, limits, each = make_case()
    groups.embedding.requires_grad_()
    placer.sample(
        groups, each, shaping, limits, np.random.default_rng(1)
    ).log_chance.sum().backward()
    slopes = groups.embedding.grad
    for m, length in enumerate(LENGTHS):
        assert (slopes[m, :length] != 0).all()
        assert (slopes[m, length:] == 0).all()


@pytest.mark.parametrize("name", ["plain", "all of it"])
def test_what_lies_past_a_groupings_length_changes_nothing(name):
    placer, groups, shaping, limits, each = make_case(**CASES[name])
    found = placer.sample(groups, each, shaping, limits, np.random.default_rng(2))
    other = groups.embedding.clone()
    for m, length in enumerate(LENGTHS):
        other[m, length:] = -7.0
    again = placer.sample(
        replace(groups, embedding=other), each, shaping, limits, np.random.default_rng(2)
    )
    for b in range(len(found.devices)):
        length = LENGTHS[b // each]
        assert (found.devices[b, :length] == again.devices[b, :length]).all()
    assert torch.equal(found.log_chance, again.log_chance)
    assert torch.equal(found.entropy, again.entropy)


def test_devices_that_are_given_are_as_likely_as_when_they_were_drawn():
    placer, groups, shaping, limits, each = make_case(is_aligned=True, memory=6.0, bans=True)
    drawn = placer.sample(groups, each, shaping, limits, np.random.default_rng(3))
    told = placer.sample(
        groups, each, shaping, limits, np.random.default_rng(4), forced=drawn.devices
    )
    assert (told.devices == drawn.devices).all()
    assert torch.equal(told.log_chance, drawn.log_chance)
    assert torch.equal(told.entropy, drawn.entropy)


@pytest.mark.parametrize("name", ["plain", "tanh and temperature", "all of it"])
def test_devices_are_drawn_as_often_as_they_are_likely(name):
    case = {**CASES[name], "shaping": replace(CASES[name].get("shaping", Shaping()), noise=0.0)}
    count = 20_000
    placer, groups, shaping, limits, _ = make_case(lengths=(3,), **case)
    with torch.no_grad():
        drawn = placer.sample(groups, count, shaping, limits, np.random.default_rng(5)).devices
        all_devices = np.array([*product(range(DEVICES), repeat=3)])
        told = placer.sample(
            groups, len(all_devices), shaping, limits, np.random.default_rng(6), all_devices
        )
    chances = told.log_chance.sum(dim=1).exp().double().numpy()
    number = all_devices @ DEVICES ** np.arange(2, -1, -1)
    counts = np.bincount(drawn @ DEVICES ** np.arange(2, -1, -1), minlength=len(all_devices))
    seen = counts[number]
    legal = chances.cumsum() > -1 if "memory" not in case else seen > 0
    assert chances[legal].sum() == pytest.approx(1.0, abs=1e-3 if "memory" not in case else 0.02)
    common = legal & (chances * count > 5)
    expected = np.append(chances[common], 1 - chances[common].sum()) * count
    found = np.append(seen[common], count - seen[common].sum())
    keep = expected > 1e-6
    assert chisquare(found[keep], expected[keep] * found.sum() / expected[keep].sum()).pvalue > 0.01


def test_no_device_without_room_is_chosen_while_another_has_room():
    placer, groups, shaping, limits, _ = make_case(lengths=(7, 7))
    capacity = np.array([1.0, 2.0, 1.5])
    limits = replace(limits, capacity_bytes=capacity)
    devices = placer.sample(groups, 200, shaping, limits, np.random.default_rng(7)).devices
    was_full = 0
    for b, chosen in enumerate(devices):
        used = np.zeros(DEVICES)
        for t, d in enumerate(chosen):
            needs = groups.needs_bytes[b // 200, t]
            has_room = used + needs <= capacity
            if has_room.any():
                assert has_room[d]
            else:
                assert d == np.argmax(capacity - used)
            was_full += not has_room.all()
            used[d] += needs
    assert was_full > 100


def test_a_group_goes_only_where_it_may():
    placer, groups, shaping, limits, _ = make_case(lengths=(7, 7), bans=True)
    groups.allowed[0, 0] = [False, True, False]
    devices = placer.sample(groups, 50, shaping, limits, np.random.default_rng(8)).devices
    for b, chosen in enumerate(devices):
        allowed = groups.allowed[b // 50]
        at = np.arange(7)
        assert (allowed[at, chosen] | ~allowed.any(axis=1)).all()


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread")
def test_one_thread_and_two_find_the_same_to_the_bit():
    found = []
    before = numba.get_num_threads()
    for threads in (1, 2):
        numba.set_num_threads(threads)
        try:
            placer, groups, shaping, limits, each = make_case(**CASES["all of it"])
            choice = placer.sample(groups, each, shaping, limits, np.random.default_rng(9))
            (choice.log_chance.sum() + choice.entropy.sum()).backward()
            slopes = [weights.grad for weights in placer.parameters()]
            found.append([torch.from_numpy(choice.devices), choice.log_chance.detach(), *slopes])
        finally:
            numba.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_of_equal_devices_one_is_taken_after_the_one_before_it():
    placer, groups, shaping, limits, _ = make_case(lengths=(7, 7), twins=True)
    devices = placer.sample(groups, 100, shaping, limits, np.random.default_rng(8)).devices
    assert (devices[:, 0] == 0).all()
    most = np.maximum.accumulate(devices, axis=1)
    assert (np.diff(most, axis=1) <= 1).all()
    assert (most[:, -1] == 2).any()


SHAPINGS = [(Shaping(), False), (Shaping(3.0, 2.5), False), (Shaping(0.7, 0.0, 0.8), True)]


@pytest.mark.parametrize(("shaping", "is_noisy"), SHAPINGS)
def test_groups_are_drawn_as_by_plain_pytorch(shaping, is_noisy):
    random = np.random.default_rng(0)
    classes, options, count = 30, 7, 4
    scores = torch.from_numpy(3 * random.standard_normal((classes, options), dtype=np.float32))
    noise = np.zeros((classes, 0), dtype=np.float32)
    if is_noisy:
        noise = random.standard_normal((classes, options), dtype=np.float32)
    uniform = random.random((count, classes), dtype=np.float32)
    ours = scores.clone().requires_grad_()
    chosen = np.full((count, classes), -1)
    found = hierarchical._Draw.apply(ours, shaping, noise, uniform, chosen)
    theirs = scores.double().requires_grad_()
    logits = theirs / shaping.temperature
    if shaping.tanh_constant:
        logits = shaping.tanh_constant * torch.tanh(logits)
    if is_noisy:
        logits = logits + torch.from_numpy(noise)
    chances = logits.log_softmax(dim=1)
    sums = chances.detach().exp().cumsum(dim=1).numpy()
    drawn = (sums[None] < uniform[..., None]).sum(axis=2)
    assert (chosen == drawn).all()
    expected = chances[torch.arange(classes), torch.from_numpy(chosen)]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=3e-5)
    pulls = torch.linspace(-1.0, 2.0, count * classes).view(count, classes)
    (pulls * found).sum().backward()
    (pulls.double() * expected).sum().backward()
    scale = float(theirs.grad.abs().max())
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=0, atol=2e-5 * scale)


def test_the_quick_tanh_is_within_five_millionths():
    x = np.linspace(-20, 20, 100_001, dtype=np.float32)
    rows = np.zeros((1, len(x), 4), dtype=np.float32)
    rows[0, :, 0] = rows[0, :, 3] = 100.0  # the gates are open: what comes is tanh(tanh(x))
    rows[0, :, 1] = -100.0  # and nothing is kept
    rows[0, :, 2] = x
    hidden, cells = np.zeros((2, 1, len(x), 1), dtype=np.float32)
    gates = np.zeros_like(rows)
    zero = np.zeros((1, 1, 4), dtype=np.float32)
    _kernels.unroll(np.array([len(x)]), rows, zero, hidden, cells, gates)
    assert np.abs(gates[0, :, 2] - np.tanh(x.astype(np.float64))).max() < 5e-6


# --- Features. ---


def graph_of(ops):
    return Graph.build("g", ops)


def test_op_types_are_numbered_by_how_common_they_are():
    kinds = ["mul", "add", "add", "conv", "add", "conv"]
    graph = graph_of([Op(name=f"o{k}", kind=kind) for k, kind in enumerate(kinds)])
    assert op_types(graph).tolist() == [2, 0, 0, 1, 0, 1]


def test_rare_op_types_share_the_last_number():
    kinds = [f"k{k}" for k in range(NUM_TYPES)] * 2 + ["rare", "rarer"]
    graph = graph_of([Op(name=f"o{k}", kind=kind) for k, kind in enumerate(kinds)])
    found = op_types(graph)
    assert found[-2:].tolist() == [NUM_TYPES, NUM_TYPES]
    assert sorted(found[:NUM_TYPES].tolist()) == [*range(NUM_TYPES)]


def test_output_shapes_are_logarithms_of_sizes_worked_out_by_hand():
    graph = graph_of(
        [
            Op(name="a", outputs=[Output(24, shape=(2, 3)), Output(7, shape=None)]),
            Op(name="b", outputs=[Output(4, shape=(1, 1, 1, 1, 8))]),
            Op(name="c", outputs=[Output(0, shape=())]),
            Op(name="d"),
        ]
    )
    table = output_shapes(graph, Room(num_outputs=2, num_dims=4)).reshape(4, 2, 4) * 16
    three, four = np.log2(3), 2.0
    assert table[0, 0].tolist() == pytest.approx([three, four, -16, -16])
    assert table[0, 1].tolist() == pytest.approx([3.0, -16, -16, -16])  # its seven bytes
    assert table[1, 0].tolist() == pytest.approx([1, 1, 1, 1])
    assert (table[2:] == -16).all()  # a scalar has no sizes, an op without outputs neither


def test_outputs_past_the_sixth_are_left_out():
    many = Op(name="a", outputs=[Output(k, shape=(k,)) for k in range(1, 9)])
    table = output_shapes(graph_of([many]), Room()).reshape(6, 4)
    assert table[:, 0].tolist() == pytest.approx([np.log2(k + 1) / 16 for k in range(1, 7)])


def test_neighbours_are_shares_of_the_graph_inputs_first():
    ops = [
        Op(name="a", outputs=[1]),
        Op(name="b", outputs=[1]),
        Op(name="c", inputs=["b", "a"], outputs=[1]),
        Op(name="d", inputs=["c", "a"]),
    ]
    table = neighbours(graph_of(ops), Room(num_neighbours=2)) * 4
    none = -4
    assert table.tolist() == [
        [none, none, 2, 3],
        [none, none, 2, none],
        [0, 1, 3, none],
        [0, 2, none, none],
    ]


def test_neighbours_past_the_room_are_left_out():
    ops = [Op(name="a", outputs=[1]), *(Op(name=f"r{k}", inputs=["a"]) for k in range(9))]
    table = neighbours(graph_of(ops), Room())
    assert table[0].tolist() == pytest.approx([-1] * 6 + [k / 10 for k in range(1, 7)])


@given(problems())
@hypothesis_settings(max_examples=60, deadline=None)
def test_levels_are_longest_paths(problem):
    graph = problem.graph
    time_s = problem.costs.op_ps.max(axis=1).astype(np.float64)
    edges = {*zip(graph.tensor_op[graph.use_tensor].tolist(), graph.use_op.tolist(), strict=True)}

    def before(op):
        return max((before(a) + time_s[a] for a, b in edges if b == op), default=0.0)

    def behind(op):
        return time_s[op] + max((behind(b) for a, b in edges if a == op), default=0.0)

    ahead, after = levels(graph, time_s)
    assert ahead.tolist() == [before(op) for op in range(graph.num_ops)]
    assert after.tolist() == [behind(op) for op in range(graph.num_ops)]


def colocated_problem():
    """Four ops, of which b and d are together; b -> c -> d."""
    return tiny.problem(
        [
            Op(name="a", kind="x", outputs=[Output(6, persistent=True, shape=(3,))]),
            Op(name="b", kind="y", inputs=["a"], outputs=[Output(8, shape=(7,))], colocate="k"),
            Op(name="c", kind="x", inputs=["b"], outputs=[Output(5, shape=(1,))]),
            Op(name="d", kind="z", inputs=["c", "a"], outputs=[4], colocate="k", phase="backward"),
        ],
        {"a": 10, "b": 20, "c": 5, "d": 40},
    )


def test_units_of_colocated_ops_are_described_as_one():
    problem = colocated_problem()
    found = UnitFeatures.of(problem, np.array([0, 1, 2, 1]), Room())
    assert found.num_units == 3
    assert found.types.tolist() == [[1, 0, 0], [0, 0.5, 0.5], [1, 0, 0]]
    assert found.shapes[1, 0] == pytest.approx(3 / 16)  # as its first op, b
    edges = sorted(zip(found.edge_from, found.edge_to, found.edge_bytes, strict=True))
    assert edges == [(0, 1, 6), (0, 1, 6), (1, 2, 8), (2, 1, 5)]
    # What persists stays; of the forward pass c's output waits for d.
    assert found.resident_bytes.tolist() == [6, 0, 5]
    place = found.path[:, :5]  # ahead, behind, slack, order, whether forward
    assert place[0].tolist() == pytest.approx([0, 1, 0, 0, 1])
    assert place[1].tolist() == pytest.approx([(10 + 35) / 150, (65 + 40) / 150, 0, 2 / 4, 0.5])
    assert found.path[:, 5].tolist() == pytest.approx([10 / 75, 60 / 75, 5 / 75])
    assert found.path[:, 6].tolist() == pytest.approx([6 / 11, 0, 5 / 11])


def test_flow_counts_any_number_of_edges():
    ops = [Op(name="a", kind="x", outputs=[3])]
    ops += [Op(name=f"r{k}", kind="y", inputs=["a"]) for k in range(20)]
    problem = tiny.problem(ops, {})
    found = UnitFeatures.of(problem, np.arange(21), Room())
    # The types y, x before; their number, bytes and place; then the same behind.
    assert found.flow.shape == (21, 10)
    assert found.flow[0].tolist() == pytest.approx(
        [0, 0, 0, 0, 0, 1, 0, np.log1p(20) / 4, np.log1p(60) / 20, 10.5 / 21]
    )
    assert found.flow[1].tolist() == pytest.approx(
        [0, 1, np.log(2) / 4, np.log(4) / 20, 0, 0, 0, 0, 0, 0]
    )


def test_device_features_tell_devices_by_what_they_can_do():
    cluster = make_cluster(["cpu", "cuda"], bytes_per_ps=[[1, 2], [4, 1]], memory=22)
    ops = [Op(name="a", outputs=[Output(11, persistent=True)])]
    problem = tiny.problem(ops, {"a": [40, 10]}, cluster)
    assert device_features(problem).tolist() == [
        pytest.approx([0.25, 0.5, np.log10(2e12) / 12, np.log10(4e12) / 12, 1, 1, 0]),
        pytest.approx([1.0, 0.5, np.log10(4e12) / 12, np.log10(2e12) / 12, 0, 0, 1]),
    ]


def test_a_cluster_of_one_device_has_features_too():
    problem = tiny.problem([Op(name="a", outputs=[1])], {"a": 1}, make_cluster(["cpu"]))
    assert np.isfinite(device_features(problem)).all()


def test_devices_are_equal_if_only_their_names_tell_them_apart():
    ops = [Op(name="a", outputs=[1]), Op(name="b", inputs=["a"])]
    four = make_cluster(["cpu", "cuda", "cuda", "cuda"])
    problem = tiny.problem(ops, {"a": [9, 1, 1, 1], "b": [9, 1, 1, 1]}, four)
    assert equal_devices(problem).tolist() == [-1, -1, 1, 2]
    problem = tiny.problem(ops, {"a": [9, 1, 2, 1], "b": [9, 1, 1, 1]}, four)
    assert equal_devices(problem).tolist() == [-1, -1, -1, 1]


@pytest.mark.parametrize("name", ["latency_s", "bytes_per_s"])
def test_devices_with_links_of_their_own_are_not_equal(name):
    cluster = make_cluster(["cuda"] * 3)
    table = getattr(cluster, name).copy()
    table[0, 1] *= 2
    problem = tiny.problem([Op(name="a")], {"a": 1}, replace(cluster, **{name: table}))
    assert equal_devices(problem).tolist() == [-1, -1, -1]


def test_devices_behind_a_switch_of_their_own_are_not_equal():
    # 0 and 1 share a channel between them, 2 and 3 another; all else has ways of its own.
    pairs = [(a, b) for a in range(4) for b in range(4)]
    shared = {(0, 1): 0, (1, 0): 0, (2, 3): 1, (3, 2): 1}
    channels = [(shared.get(pair, 2 + k),) for k, pair in enumerate(pairs)]
    cluster = make_cluster(["cuda"] * 4, link_channels=channels)
    problem = tiny.problem([Op(name="a")], {"a": 1}, cluster)
    assert equal_devices(problem).tolist() == [-1, 0, -1, 2]


def test_sums_over_groups_and_edges_are_those_of_numpy():
    random = np.random.default_rng(0)
    count, units, groups, width, edges = 3, 40, 6, 5, 200
    group_of = random.integers(0, groups, (count, units))
    values = random.random((units, width)).astype(np.float32)
    source, target = random.integers(0, units, (2, edges))
    weight = random.random(edges)
    sums = np.zeros((count, groups, width), dtype=np.float32)
    _kernels.sum_groups(group_of, values, sums)
    between = np.zeros((count, groups, groups), dtype=np.float32)
    _kernels.sum_edges(group_of, source, target, weight, between)
    for m in range(count):
        expected = np.zeros((groups, width))
        np.add.at(expected, group_of[m], values)
        assert sums[m] == pytest.approx(expected, rel=1e-5)
        expected = np.zeros((groups, groups))
        np.add.at(expected, (group_of[m][source], group_of[m][target]), weight)
        np.fill_diagonal(expected, 0)
        assert between[m] == pytest.approx(expected, rel=1e-5)


# --- Tied decisions. ---


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-bert", "tiny-nmt", "tiny-rnnlm"])
def test_equal_layers_are_cut_alike(model):
    problem = load_problem(load_model(model), "k40x2")
    decisions = hierarchical._tied(problem, 64, 1)
    assert decisions.num_classes < len(decisions.class_of)
    blocks = repeated_blocks(problem)
    is_tied = np.array([*(phase != "update" for phase in blocks.block_phases), False])
    ops = np.flatnonzero(is_tied[blocks.block_of])
    pattern = blocks.pattern_of_block[blocks.block_of[ops]]
    kinds, kind_of, count = np.unique(
        pattern * problem.num_ops + blocks.role_of[ops], return_inverse=True, return_counts=True
    )
    assert (count > 1).all()
    # Ops of the same role in equal layers are decided on together; all but a few, at the edges of
    # stretches, or where a layer has more ops than the part that is repeated.
    decided = decisions.class_of[decisions.unit_of[ops]]
    alike = [len({*decided[kind_of == k].tolist()}) == 1 for k in range(len(kinds))]
    assert np.mean(alike) > 0.85


def test_a_tied_group_is_within_one_layers_pass():
    problem = load_problem(load_model("tiny-gpt2"), "k40x2")
    decisions = hierarchical._tied(problem, 64, 1)
    layers = find_layers(problem.graph)
    is_back = np.array([phase != "forward" for phase in problem.graph.op_phases])
    pass_of = 2 * layers.op_layer + is_back
    leads = np.ones(problem.num_ops, dtype=np.bool_)
    leads[problem.colocation_members] = False
    leads[problem.colocation_leaders] = True
    base = decisions.base_of[decisions.unit_of]
    for at in np.unique(pass_of[leads]):
        assert len(np.unique(base[leads & (pass_of == at)])) == 1
    assert len(np.unique(base)) == len(np.unique(pass_of[leads]))


def test_without_ties_each_colocated_set_is_a_decision():
    problem = colocated_problem()
    decisions = hierarchical._decisions(problem, PRESETS["hierarchical"], None, 1)
    assert decisions.unit_of.tolist() == [0, 1, 2, 1]
    assert decisions.class_of.tolist() == [0, 1, 2]
    assert (decisions.num_options, decisions.num_groups) == (3, 3)


# --- Where a policy begins. ---


def planner(settings, model="tiny-nmt", cluster="k40x2"):
    problem = load_problem(load_model(model), cluster)
    decisions = hierarchical._decisions(problem, settings, None, 1)
    room = Room(settings.num_outputs, settings.num_dims, settings.num_neighbours)
    units = UnitFeatures.of(problem, decisions.unit_of, room)
    torch.manual_seed(0)
    return problem, hierarchical.Planner(problem, settings, decisions, units, None)


def changes(planned):
    """How often the device changes from one group to the next, in the mean over samples."""
    drawn = planned._group(Shaping(), np.random.default_rng(1))
    choice = planned.placer.sample(
        drawn.groups, 32, Shaping(), planned.limits, np.random.default_rng(2)
    )
    return (choice.devices[:, 1:] != choice.devices[:, :-1]).sum(axis=1).mean()


def test_a_policy_that_follows_begins_with_few_changes_of_device():
    plus = replace(PRESETS["hierarchical-plus"], num_groups=1)
    _, follows = planner(plus)
    _, plain = planner(replace(plus, follows=False))
    assert changes(follows) < 0.7 * changes(plain)


def test_a_policy_can_begin_near_a_placement():
    plus = PRESETS["hierarchical-plus"]
    problem, near = planner(plus)
    first = np.random.default_rng(3).integers(0, 2, near.units.num_units)
    near.begin_near(first[near.units.unit_of])
    drawn = near._group(Shaping(), np.random.default_rng(1))
    placements = near._place(drawn, Shaping(), np.random.default_rng(2), None).placements
    _, plain = planner(plus)
    others = plain.sample(np.random.default_rng(2), Shaping()).placements
    wanted = first[near.units.unit_of]
    assert (placements == wanted).mean() > (others == wanted).mean() + 0.1
    assert near._follow() == 0.0  # where it is led it does not follow
    assert len(placements) == plus.num_groupings * plus.num_placements
    assert problem.num_ops == placements.shape[1]


def test_every_second_cycle_refines():
    cycles = [Cycle(k, True) for k in range(5)]
    assert [c.round for c in cycles] == [0, 0, 1, 1, 2]
    assert [c.is_near for c in cycles] == [False, True, False, True, False]
    assert [Cycle(k, False).round for k in range(3)] == [0, 1, 2]
    assert not any(Cycle(k, False).is_near for k in range(3))


# --- Rewards. ---


def found(times, overflow=None):
    times = np.array(times, dtype=np.float64)
    over = np.zeros(len(times), np.int64) if overflow is None else np.array(overflow)
    return Evaluations(times, over, np.zeros((len(times), 1), np.int64))


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("sqrt", [0.5, 3.0]),
        ("identity", [0.25, 9.0]),
        ("log1p", [np.log(1.25), np.log(10)]),
        ("improvement", [-0.5, 17.0]),
    ],
)
def test_costs_are_worked_out_by_hand(reward, expected):
    costs = Pricing(reward).cost(found([0.25, 9.0]), 1, 100.0, 0.5)
    assert costs.cost.tolist() == [pytest.approx(expected)]
    assert not costs.has_failed.any()


def test_a_failure_costs_the_failing_signal():
    costs = Pricing("sqrt").cost(found([4.0, 1.0, np.nan, np.inf], [0, 1, 0, 0]), 2, 10.0, 1.0)
    assert costs.cost.tolist() == [[2.0, 10.0], [10.0, 10.0]]
    assert costs.has_failed.tolist() == [[False, True], [True, True]]


def test_a_penalised_failure_costs_its_time_and_what_it_lacks():
    pricing = Pricing("identity", "penalty", 100.0)
    costs = pricing.cost(found([2.0, 2.0, 2.0, np.nan], [0, 1, 50, 50]), 1, 100.0, 1.0)
    assert costs.cost.tolist() == [pytest.approx([2.0, 2 * 1.52, 2 * 2.5, 100.0])]
    assert costs.has_failed.tolist() == [[False, True, True, True]]


def test_a_penalised_failure_costs_more_than_the_best_that_fits_however_quick_it_is():
    pricing = Pricing("identity", "penalty", 100.0)
    costs = pricing.cost(found([0.1, 9.0], [1, 1]), 1, 100.0, 1.0, fits_s=4.0)
    assert costs.cost.tolist() == [pytest.approx([4 * 1.52, 9 * 1.52])]


@pytest.mark.parametrize("reward", ["sqrt", "identity", "log1p", "improvement"])
def test_a_penalised_failure_always_costs_more_than_what_fits_in_the_same_time(reward):
    pricing = Pricing(reward, "penalty")
    for time_s, over in product((1e-6, 1e-3, 1.0, 50.0, 1e4), (1, 10**6, 10**12)):
        costs = pricing.cost(found([time_s, time_s], [0, over]), 1, 1e10, 1e-3).cost[0]
        assert costs[1] > costs[0]


def test_leave_one_out_with_one_placement_a_grouping_compares_groupings():
    costs = Costs(np.array([[1.0], [2.0], [6.0]]), np.zeros((3, 1), dtype=np.bool_))
    found_ = LeaveOneOut().advantages(costs, np.ones((3, 1), dtype=np.bool_))
    assert found_.device[:, 0].tolist() == [-3.0, -1.5, 4.5]
    assert found_.group.tolist() == [-3.0, -1.5, 4.5]


KEEP = np.ones((1, 2), dtype=np.bool_)


def costs_of(*rows):
    cost = np.array(rows, dtype=np.float64)
    return Costs(cost, np.zeros(cost.shape, dtype=np.bool_))


def test_a_moving_average_is_worked_out_by_hand():
    baseline = MovingAverage(10.0, 0.9)
    first = baseline.advantages(costs_of([2, 4]), KEEP)
    assert first.device.tolist() == [[-8, -6]]
    assert first.group.tolist() == [-7]
    assert baseline.mean == pytest.approx(9.3)  # 0.9 of 10, 0.1 of 3
    second = baseline.advantages(costs_of([10, 1]), np.array([[False, True]]))
    assert second.device.tolist() == [pytest.approx([0, -8.3])]
    assert second.group.tolist() == pytest.approx([-4.15])
    assert baseline.mean == pytest.approx(8.47)  # what is left out does not count
    third = baseline.advantages(costs_of([10, 10]), ~KEEP)
    assert third.device.tolist() == [[0, 0]]
    assert third.group.tolist() == [0]
    assert baseline.mean == pytest.approx(8.47)


def test_a_moving_average_begins_at_the_failing_signal_or_at_the_first_batch():
    pricing = Pricing("sqrt", failure_s=100.0)
    released = make_baseline("moving-average", pricing, 0.9, True)
    assert isinstance(released, MovingAverage)
    assert released.mean == pytest.approx(10.0)
    baseline = make_baseline("moving-average", pricing, 0.9, False)
    assert isinstance(baseline, MovingAverage)
    assert baseline.advantages(costs_of([2, 4]), ~KEEP).device.tolist() == [[0, 0]]
    assert baseline.advantages(costs_of([2, 4]), KEEP).device.tolist() == [[-1, 1]]
    assert baseline.mean == pytest.approx(3.0)


def test_leave_one_out_with_one_grouping_is_worked_out_by_hand():
    baseline = LeaveOneOut()
    first = baseline.advantages(costs_of([1, 2, 6]), np.ones((1, 3), dtype=np.bool_))
    assert first.device.tolist() == [[1 - 4, 2 - 3.5, 6 - 1.5]]
    assert first.group.tolist() == [0]  # there is no past yet
    second = baseline.advantages(costs_of([1, 2, 6]), np.array([[True, True, False]]))
    assert second.device.tolist() == [[-1, 1, 0]]
    assert second.group.tolist() == pytest.approx([1.5 - 3])
    assert baseline.past == pytest.approx(0.9 * 3 + 0.1 * 1.5)
    before = baseline.past
    third = baseline.advantages(costs_of([1, 2, 6]), np.zeros((1, 3), dtype=np.bool_))
    assert third.device.tolist() == [[0, 0, 0]]
    assert third.group.tolist() == [0]
    assert baseline.past == before


def test_leave_one_out_with_two_groupings_is_worked_out_by_hand():
    costs = costs_of([1, 3], [4, 10])
    whole = LeaveOneOut().advantages(costs, np.ones((2, 2), dtype=np.bool_))
    assert whole.device.tolist() == [[-2, 2], [-6, 6]]
    assert whole.group.tolist() == [2 - 7, 7 - 2]
    part = LeaveOneOut().advantages(costs, np.array([[True, True], [True, False]]))
    assert part.device.tolist() == [[-2, 2], [0, 0]]  # the second has none to compare with
    assert part.group.tolist() == [2 - 4, 4 - 2]
    none = LeaveOneOut().advantages(costs, np.array([[True, True], [False, False]]))
    assert none.device.tolist() == [[-2, 2], [0, 0]]
    assert none.group.tolist() == [0, 0]


def test_without_a_baseline_costs_are_taken_as_they_are():
    found = NoBaseline().advantages(costs_of([3, 5]), np.array([[True, False]]))
    assert found.device.tolist() == [[3, 0]]
    assert found.group.tolist() == [1.5]


# --- Settings. ---


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_groups", "64", 64),
        ("num_groups", 64, 64),
        ("learning_rate", "0.5", 0.5),
        ("learning_rate", 1, 1.0),
        ("learning_rate", "1e-3", 1e-3),
        ("tied_layers", "true", True),
        ("tied_layers", "Yes", True),
        ("tied_layers", "off", False),
        ("tied_layers", True, True),
        ("grouping", "none", "none"),
        ("fit", "mask", "mask"),
        ("baseline", "none", "none"),
        ("reward", "log1p", "log1p"),
        ("failures_ignored_after", "none", None),
        ("failures_ignored_after", None, None),
        ("failures_ignored_after", "7", 7),
        ("groups_per_device", "20", 20),
        ("cycle_samples", "None", None),
    ],
)
def test_settings_are_read_from_words_and_values(name, value, expected):
    changed = with_options(POLICIES["hierarchical"], {name: value}).settings
    found = describe(changed)
    found = found[name] if name in found else found["training"][name]
    assert found == expected
    assert type(found) is type(expected)
    others = describe(POLICIES["hierarchical"].settings)
    after = describe(changed)
    for told in (others, after, others["training"], after["training"]):
        told.pop(name, None)
    assert others == after


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_groups", "many", "expected a whole number"),
        ("num_groups", "1.5", "expected a whole number"),
        ("num_groups", 1.5, "expected a whole number"),
        ("num_groups", True, "expected a whole number"),
        ("num_groups", -1, "above zero"),
        ("num_groups", 0, "expected a whole number above zero"),
        ("temperature", "0", "expected a number above zero"),
        ("cycle_samples", 0, "expected a whole number above zero"),
        ("hidden", 7, "expected an even number"),
        ("learning_rate", -1, "expected a number that is not negative"),
        ("num_groups", None, "expected a whole number"),
        ("num_groups", "none", "expected a whole number"),
        ("learning_rate", "fast", "expected a number"),
        ("learning_rate", "nan", "expected a number"),
        ("learning_rate", float("inf"), "expected a number"),
        ("num_groups", float("nan"), "expected a whole number"),
        ("num_groups", float("inf"), "expected a whole number"),
        ("tied_layers", "maybe", "expected `true` or `false`"),
        ("tied_layers", 1, "expected `true` or `false`"),
        ("grouping", "some", "expected one of: learned, random, none"),
        ("grouping", None, "expected one of: learned, random, none"),
        ("failures_ignored_after", "soon", "expected a whole number"),
        ("reward", 3, "expected one of: sqrt, identity"),
    ],
)
def test_values_that_a_setting_cannot_have_are_refused(name, value, words):
    with pytest.raises(InputError, match=words) as caught:
        with_options(POLICIES["hierarchical"], {name: value})
    assert f"The option `{name}` is `" in str(caught.value)


def test_an_unknown_setting_is_refused_with_those_there_are():
    with pytest.raises(InputError, match=r"There is no option `grops`\. There are: .*num_groups"):
        with_options(POLICIES["hierarchical"], {"grops": 3})
    with pytest.raises(InputError, match="There is no option `num_groups`"):
        with_options(POLICIES["colocrl"], {"num_groups": 3})
    with pytest.raises(InputError, match="There is no option `training`"):
        with_options(POLICIES["colocrl"], {"training": Training()})


PUBLISHED = {
    # As the papers and the code that was released have them.
    "colocrl": {
        "num_placements": 10,
        "reward": "sqrt",
        "baseline": "moving-average",
        "failure": "constant",
        "failure_s": 100.0,
        "failures_ignored_after": 5000,
        "tanh_constant": 0.0,
        "noise": 0.0,
        "entropy": 0.0,
    },
    "hierarchical": {
        "grouping": "learned",
        "num_groups": 256,
        "groups_per_device": None,
        "num_groupings": 1,
        "num_placements": 4,
        "grouper_hidden": 64,
        "hidden": 256,
        "type_size": 20,
        "num_outputs": 6,
        "num_dims": 4,
        "num_neighbours": 6,
        "reward": "sqrt",
        "baseline": "moving-average",
        "failure": "constant",
        "learning_rate": 0.1,
        "learning_rate_decay": 1.0,
        "clip_norm": 1.0,
        "temperature": 10.0,
        "tanh_constant": 5.0,
        "noise": 0.0,
        "entropy": 0.0,
        "epochs": 1,
        "fit": "none",
    },
    "hierarchical-grappler": {
        "num_groups": 256,
        "groups_per_device": 20,
        "num_groupings": 1,
        "num_placements": 1,
        "grouper_hidden": 64,
        "hidden": 512,
        "num_outputs": 5,
        "num_dims": 5,
        "counts_edges": True,
        "reward": "sqrt",
        "baseline": "moving-average",
        "baseline_decay": 0.9,
        "baseline_begins_failing": True,
        "failure_s": 100.0,
        "failures_ignored_after": 1000,
        "learning_rate": 0.1,
        "learning_rate_decay": 0.95,
        "decay_every": 50,
        "decay_after": 400,
        "clip_norm": 1.0,
        "temperature": 1.0,
        "tanh_constant": 1.0,
        "noise": 0.5,
        "noise_updates": 750,
        "entropy": 0.0,
        "epochs": 1,
    },
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_settings(preset):
    told = describe(PRESETS[preset])
    told |= told.pop("training")
    assert {name: told[name] for name in PUBLISHED[preset]} == PUBLISHED[preset]


def test_what_the_critics_asked_for_is_off_in_the_papers_presets_and_on_in_plus():
    names = [
        "any_edges",
        "device_features",
        "equal_devices",
        "tied_layers",
        "path_features",
        "aligned",
    ]
    plus = describe(PRESETS["hierarchical-plus"])
    assert all(plus[name] for name in names)
    for preset in ("hierarchical", "hierarchical-grappler"):
        assert not any(describe(PRESETS[preset])[name] for name in names)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_setting_can_be_told_in_words(preset):
    told = describe(PRESETS[preset])
    told |= told.pop("training")
    told.pop("kind")
    words = {name: str(value) for name, value in told.items()}
    assert with_options(POLICIES[preset], words) == POLICIES[preset]
    assert {*told} >= {f.name for f in fields(Training)}
