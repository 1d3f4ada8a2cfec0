"""Groupings: each rule by hand, and what all of them guarantee on random worlds."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.cluster import Cluster
from placewright.coarsening import coarsen
from placewright.errors import InputError
from placewright.graph_file import Op, Output
from placewright.grouping import (
    GROUPINGS,
    by_module,
    colocated,
    heavy_edges,
    repeated_blocks,
    sole_consumer,
)
from placewright.load import load_model
from placewright.problem import Problem

from . import tiny, worlds


def together(problem, grouping):
    """The groups as sets of op names, in order."""
    names: list[set[str]] = [set() for _ in range(int(grouping.max()) + 1)]
    for name, group in zip(problem.graph.op_names, grouping.tolist(), strict=True):
        names[group].add(name)
    return names


def sets(*words):
    return [set(word.split()) for word in words]


def model(name):
    pytest.importorskip("torch")
    return Problem(load_model(name), Cluster.preset("k40x4"))


def unrolled():
    """One weight, two steps of a module `fc`, their gradients, and an update."""
    weights = [Output(8, persistent=True), Output(8, alias_of="w:0"), Output(8, alias_of="w:0")]
    return tiny.problem(
        [
            Op(name="w", kind="param", module="fc", outputs=weights, colocate="w"),
            Op(name="x", outputs=[2]),
            Op(name="f1", module="fc", inputs=["x", "w:1"], outputs=[2]),
            Op(name="f2", module="fc", inputs=["f1", "w:1"], outputs=[2]),
            Op(name="loss", module="loss", inputs=["f2"], outputs=[2]),
            Op(name="b2", module="fc", phase="backward", inputs=["loss", "w:2"], outputs=[2]),
            Op(name="g2", module="fc", phase="backward", inputs=["loss", "f1"], outputs=[8]),
            Op(name="g1", module="fc", phase="backward", inputs=["b2", "x"], outputs=[8]),
            Op(name="sum", module="fc", phase="backward", inputs=["g1", "g2"], outputs=[8]),
            Op(name="bare", phase="backward", inputs=["b2"], outputs=[1]),
            Op(
                name="step",
                module="fc",
                phase="update",
                inputs=["sum"],
                after=["f1", "f2", "b2"],
                colocate="w",
            ),
        ],
        {"f1": 4, "f2": 4, "b2": 4, "g2": 4, "g1": 4},
    )


# What all groupings guarantee.


def assert_is_grouping(problem, groups):
    assert groups.dtype == np.int64
    assert groups.shape == (problem.num_ops,)
    _, first = np.unique(groups, return_index=True)
    assert groups[np.sort(first)].tolist() == list(range(len(first)))  # numbered by first op


def keeps_colocation(problem, groups):
    return (groups[problem.colocation_members] == groups[problem.colocation_leaders]).all()


VARIANTS = {
    **{name: group for name, group in GROUPINGS.items() if name != "heavy-edges"},
    "colocated with gradients": lambda problem: colocated(problem, with_gradients=True),
    "sole-consumer with gradients": lambda problem: sole_consumer(problem, with_gradients=True),
    "by-module with phases": lambda problem: by_module(problem, phases_apart=True),
    "by-module, one deep": lambda problem: by_module(problem, depth=1),
}


@pytest.mark.parametrize("name", VARIANTS)
@given(st.data())
@settings(max_examples=50, deadline=None)
def test_every_grouping_is_one_and_keeps_colocated_ops_together(name, data):
    problem = data.draw(worlds.problems())
    groups = VARIANTS[name](problem)
    assert_is_grouping(problem, groups)
    assert keeps_colocation(problem, groups)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-nmt", "nmt-2"])
def test_every_grouping_of_a_model_keeps_colocated_ops_together(name):
    problem = model(name)
    for group in [*VARIANTS.values(), heavy_edges]:
        groups = group(problem)
        assert_is_grouping(problem, groups)
        assert keeps_colocation(problem, groups)


def test_importing_groupings_does_not_load_torch():
    script = "import placewright.grouping, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


# Co-location.


def test_a_parameter_is_with_its_update_and_other_ops_are_alone():
    problem = unrolled()
    assert together(problem, colocated(problem)) == sets(
        "w step", "x", "f1", "f2", "loss", "b2", "g2", "g1", "sum", "bare"
    )


def test_gradients_go_with_the_forward_op_that_shares_an_input():
    problem = unrolled()
    # g2 reads f1, an output of the module; g1 reads x, as f1 does. b2 reads what g2 reads, and
    # sum what g1 and g2 make. Backward ops of no module stay alone.
    assert together(problem, colocated(problem, with_gradients=True)) == sets(
        "w step", "x", "f1 b2 g2 g1 sum", "f2", "loss", "bare"
    )


def test_gradients_of_steps_go_with_their_steps():
    ops = [Op(name="x", outputs=[2])]
    for k in (1, 2, 3):
        ops.append(Op(name=f"in{k}", inputs=["x" if k == 1 else f"f{k - 1}"], outputs=[2]))
        ops.append(Op(name=f"f{k}", module="fc", inputs=[f"in{k}"], outputs=[2]))
    grad = "f3"
    for k in (3, 2, 1):
        ops.append(Op(name=f"b{k}", module="fc", phase="backward", inputs=[grad], outputs=[2]))
        ops.append(
            Op(name=f"g{k}", module="fc", phase="backward", inputs=[grad, f"in{k}"], outputs=[2])
        )
        ops.append(Op(name=f"in{k}'", phase="backward", inputs=[f"b{k}"], outputs=[2]))
        grad = f"in{k}'"
    problem = tiny.problem(ops, {})
    groups = together(problem, colocated(problem, with_gradients=True))
    assert {"f3", "b3", "g3"} in groups
    assert {"f2", "b2", "g2"} in groups
    assert {"f1", "b1", "g1"} in groups


# Sole consumers.


def test_chains_and_diamonds_become_one_group():
    assert sole_consumer(tiny.chain()).tolist() == [0, 0, 0]
    assert sole_consumer(tiny.diamond()).tolist() == [0, 0, 0, 0]


def test_what_two_groups_read_is_a_group_of_its_own():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[4]),
            Op(name="b", inputs=["a"], outputs=[4]),
            Op(name="c", inputs=["b"], outputs=[4]),
            Op(name="d", inputs=["b"], outputs=[4]),
        ],
        {},
    )
    assert together(problem, sole_consumer(problem)) == sets("a b", "c", "d")


def test_parameters_go_with_their_sole_reader():
    assert together(tiny.streamed(), sole_consumer(tiny.streamed())) == sets("x w0 f0 w1 f1 w2 f2")
    problem = unrolled()
    # w is read by f1, f2 and b2; f1 and f2 are read by one other op beside the update's signal.
    assert together(problem, sole_consumer(problem)) == sets(
        "w sum step g1 g2", "x", "f1", "f2 loss", "b2", "bare"
    )


def test_a_signal_counts_only_if_nothing_else_is_made():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[4]),
            Op(name="b", inputs=["a"], outputs=[4]),
            Op(name="c", after=["a"], outputs=[4]),
            Op(name="d", outputs=[]),
            Op(name="e", after=["d"], outputs=[4]),
        ],
        {},
    )
    assert together(problem, sole_consumer(problem)) == sets("a b", "c", "d e")


def slow_sole_consumer(problem):
    """The rule as it is told, on sets."""
    graph, label = problem.graph, colocated(problem).tolist()
    makes_bytes = {int(graph.tensor_op[t]) for t in np.flatnonzero(graph.tensor_bytes)}
    edges = [
        (int(graph.tensor_op[t]), int(op))
        for t, op in zip(graph.use_tensor, graph.use_op, strict=True)
        if graph.tensor_bytes[t] or int(graph.tensor_op[t]) not in makes_bytes
    ]
    changed = True
    while changed:
        changed = False
        for group in sorted(set(label)):
            readers = {label[r] for m, r in edges if label[m] == group} - {group}
            if len(readers) == 1:
                (other,) = readers
                label = [other if k == group else k for k in label]
                changed = True
    return label


@given(worlds.problems(max_ops=16))
@settings(max_examples=200, deadline=None)
def test_the_fixpoint_is_that_of_the_rule(problem):
    fast, slow = sole_consumer(problem).tolist(), slow_sole_consumer(problem)
    assert len(set(zip(fast, slow, strict=True))) == len(set(fast)) == len(set(slow))


# Heavy edges.


def test_the_heaviest_edge_is_contracted_first():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[5]),
            Op(name="b", inputs=["a"], outputs=[9]),
            Op(name="c", inputs=["b"], outputs=[1]),
        ],
        {"a": 10, "b": 10, "c": 10},
    )
    assert heavy_edges(problem, 3).tolist() == [0, 1, 2]
    assert heavy_edges(problem, 2).tolist() == [0, 1, 1]
    assert heavy_edges(problem, 1).tolist() == [0, 0, 0]
    assert heavy_edges(problem).tolist() == [0, 1, 2]


def test_an_edge_around_another_op_is_not_contracted():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[1, 100]),
            Op(name="b", inputs=["a"], outputs=[2]),
            Op(name="c", inputs=["a:1", "b"]),
        ],
        {"a": 10, "b": 10, "c": 10},
    )
    assert heavy_edges(problem, 2).tolist() == [0, 1, 1]


def test_groups_stay_balanced_in_time():
    # Without a cap, the nine ops that exchange most would be one group and the others alone.
    ops = [
        Op(name=f"op{k}", inputs=[f"op{k - 1}"] if k else [], outputs=[100 if k < 8 else 1])
        for k in range(12)
    ]
    problem = tiny.problem(ops, {f"op{k}": 10 for k in range(12)})
    groups = heavy_edges(problem, 4)
    assert np.bincount(groups).max() <= 6  # twice the average of three
    assert groups.tolist() == sorted(groups.tolist())


def test_parameters_join_who_reads_most_of_them():
    problem = tiny.streamed()
    assert together(problem, heavy_edges(problem, 4)) == sets("x", "w0 f0", "w1 f1", "w2 f2")


def test_what_no_edge_joins_is_cut_into_stretches():
    ops = [Op(name=f"op{k}", outputs=[Output(1, keep=True)]) for k in range(6)]
    problem = tiny.problem(ops, {f"op{k}": 10 for k in range(6)})
    assert heavy_edges(problem, 3).tolist() == [0, 0, 1, 1, 2, 2]


def test_groups_that_no_device_could_run_are_not_made():
    problem = tiny.problem(
        [
            Op(name="a", outputs=[100], devices=["cpu"], colocate="k"),
            Op(name="b", inputs=["a"], outputs=[100], devices=["cuda"]),
            Op(name="c", inputs=["b"], outputs=[100], colocate="k"),
            Op(name="d", inputs=["c"], devices=["cuda"]),
        ],
        {"a": 1, "b": 1, "c": 1, "d": 1},
        worlds.make_cluster(kinds=("cpu", "cuda")),
    )
    # a and c have to share the CPU, and b, between them, may not run there.
    groups = heavy_edges(problem, 1)
    assert groups.tolist() == [0, 1, 2, 3]
    coarsen(problem, groups)


def test_a_number_of_groups_below_one_is_refused():
    with pytest.raises(InputError, match="`num_groups` is 0; expected at least 1"):
        heavy_edges(tiny.chain(), 0)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_heavy_edges_never_make_circles_and_give_as_many_groups_as_asked(data):
    problem = data.draw(worlds.problems(max_ops=data.draw(st.sampled_from((4, 12, 24)))))
    most = int(heavy_edges(problem, problem.num_ops).max()) + 1
    num_groups = data.draw(st.integers(1, problem.num_ops))
    groups = heavy_edges(problem, num_groups)
    assert_is_grouping(problem, groups)
    coarsen(problem, groups)
    assert groups.max() + 1 == min(num_groups, most)
    running = problem.graph.op_colocation[~problem.graph.op_is_resident]
    if np.bincount(running[running >= 0], minlength=1).max() < 2:
        assert keeps_colocation(problem, groups)


@pytest.mark.parametrize("seed", range(20))
def test_heavy_edges_of_a_tangle_are_coarsened(seed):
    rng = np.random.default_rng(seed)
    ops = [Op(name="op0", outputs=[1])]
    for i in range(1, 400):
        near = rng.integers(max(0, i - int(rng.choice((3, 30, 400)))), i, rng.integers(1, 4))
        inputs = [f"op{j}" for j in dict.fromkeys(near.tolist())]
        ops.append(Op(name=f"op{i}", inputs=inputs, outputs=[int(rng.integers(1, 1000))]))
    problem = tiny.problem(ops, {f"op{i}": int(rng.integers(1, 100)) for i in range(400)})
    for num_groups in (200, 50, 7):
        groups = heavy_edges(problem, num_groups)
        assert groups.max() + 1 == num_groups
        coarsen(problem, groups)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-nmt", "nmt-2"])
def test_heavy_edges_of_a_model_are_balanced_and_cut_less_than_a_plain_order(name):
    problem = model(name)
    groups = heavy_edges(problem, 32)
    assert groups.max() + 1 == 32
    coarsen(problem, groups)
    time = problem.costs.op_ps.min(axis=1)
    busy = np.bincount(groups, weights=time)
    assert busy.max() <= max(2.01 * time.sum() / 32, time.max())
    leader = np.arange(problem.num_ops)
    leader[problem.colocation_leaders] = problem.colocation_members  # with the update
    plain = np.minimum((np.cumsum(time) - 1) * 32 // time.sum(), 31)[leader]
    assert cut_bytes(problem, groups) < 0.8 * cut_bytes(problem, plain)


def cut_bytes(problem, groups):
    graph = problem.graph
    reader = groups[graph.use_op]
    crosses = groups[graph.tensor_op[graph.use_tensor]] != reader
    pairs = {*zip(graph.use_tensor[crosses].tolist(), reader[crosses].tolist(), strict=True)}
    return sum(int(graph.tensor_bytes[tensor]) for tensor, _ in pairs)


# Modules.


def test_ops_are_grouped_by_module_and_others_go_with_what_they_read():
    problem = unrolled()
    assert together(problem, by_module(problem)) == sets("w x f1 f2 b2 g2 g1 sum bare step", "loss")
    assert together(problem, by_module(problem, phases_apart=True)) == sets(
        "w step", "x f1 f2", "loss", "b2 g2 g1 sum bare"
    )


def test_paths_are_cut_at_a_depth():
    modules = ["encoder.0.mlp", "encoder.0", "encoder.1", "head"]
    ops = [Op(name=f"op{k}", module=module, outputs=[1]) for k, module in enumerate(modules)]
    problem = tiny.problem([*ops, Op(name="alone")], {})
    assert by_module(problem).tolist() == [0, 1, 2, 3, 4]
    assert by_module(problem, depth=2).tolist() == [0, 0, 1, 2, 3]
    assert by_module(problem, depth=1).tolist() == [0, 0, 0, 1, 2]
    with pytest.raises(InputError, match="`depth` is 0; expected at least 1"):
        by_module(problem, depth=0)


def test_groups_of_models_have_sensible_numbers():
    def count(groups):
        return int(groups.max()) + 1

    for name, ops, num_modules in (
        ("tiny-gpt2", 132, 6),
        ("tiny-llama", 270, 5),
        ("tiny-nmt", 608, 7),
        ("nmt-2", 5708, 7),
    ):
        problem = model(name)
        assert problem.num_ops == ops
        with_gradients = colocated(problem, with_gradients=True)
        assert count(colocated(problem)) == ops - len(problem.graph.colocations)
        assert count(with_gradients) < 0.6 * ops
        assert count(sole_consumer(problem)) < 0.5 * ops
        assert count(sole_consumer(problem, with_gradients=True)) < 0.3 * ops
        assert count(by_module(problem, depth=1)) == num_modules


# Repeated blocks.


def test_equal_layers_are_found_and_others_not():
    def layer(k, size, reads):
        name = f"layers.{k}"
        return [
            Op(name=f"w{k}", kind="param", module=name, outputs=[Output(size, persistent=True)]),
            Op(name=f"mm{k}", kind="mm", module=name, inputs=[reads, f"w{k}"], outputs=[4]),
            Op(name=f"add{k}", kind="add", module=name, inputs=[f"mm{k}", reads], outputs=[4]),
        ]

    ops = [Op(name="x", outputs=[4]), *layer(0, 8, "x"), *layer(1, 8, "add0")]
    problem = tiny.problem([*ops, *layer(2, 9, "add1"), *layer(3, 8, "add2")], {})
    blocks = repeated_blocks(problem)
    assert blocks.block_layers == ("layers.0", "layers.1", "layers.3")
    assert blocks.num_patterns == 1
    where = dict(
        zip(
            problem.graph.op_names,
            zip(blocks.block_of.tolist(), blocks.role_of.tolist(), strict=True),
            strict=True,
        )
    )
    assert where["x"] == where["mm2"] == (-1, -1)
    assert [where[name] for name in ("w0", "mm0", "add0")] == [(0, 0), (0, 1), (0, 2)]
    assert [where[name] for name in ("w3", "mm3", "add3")] == [(2, 0), (2, 1), (2, 2)]
    assert blocks.same_layers("layers.0", "layers.3")
    assert not blocks.same_layers("layers.0", "layers.2")


def test_layers_wired_differently_are_not_equal():
    ops = [Op(name="x", outputs=[4])]
    for k, reads in enumerate(("a", "b")):
        name = f"layers.{k}"
        ops += [
            Op(name=f"a{k}", module=name, inputs=["x"], outputs=[4]),
            Op(name=f"b{k}", module=name, inputs=["x"], outputs=[4]),
            Op(name=f"c{k}", module=name, inputs=[f"{reads}{k}"], outputs=[4]),
        ]
    blocks = repeated_blocks(tiny.problem(ops, {}))
    assert blocks.num_blocks == blocks.num_patterns == 0
    assert set(blocks.block_of.tolist()) == {-1}


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama"])
def test_the_layers_of_a_transformer_are_equal_in_every_phase(name):
    problem = model(name)
    blocks = repeated_blocks(problem)
    assert set(blocks.block_layers) == {"layers.0", "layers.1"}
    assert blocks.num_blocks == 6
    assert blocks.num_patterns == 3
    assert blocks.same_layers("layers.0", "layers.1")
    # An op of the first layer and the one with its role in the second are named alike.
    names: dict[tuple[int, int], set[str]] = {}
    for op, (block, role) in enumerate(zip(blocks.block_of, blocks.role_of, strict=True)):
        if block >= 0:
            pattern = int(blocks.pattern_of_block[block])
            found = names.setdefault((pattern, int(role)), set())
            found.add(problem.graph.op_names[op].split(".", 2)[2])
    assert all(len(found) == 1 for found in names.values())


def test_recurrent_layers_are_equal_as_far_as_their_gradients_are():
    blocks = repeated_blocks(model("tiny-nmt"))
    pattern = dict(
        zip(
            zip(blocks.block_layers, blocks.block_phases, strict=True),
            blocks.pattern_of_block.tolist(),
            strict=True,
        )
    )
    for phase in ("forward", "update"):
        assert pattern["encoder.0", phase] == pattern["encoder.1", phase]
        assert pattern["decoder.0", phase] == pattern["decoder.1", phase]
        assert pattern["encoder.0", phase] != pattern["decoder.0", phase]
    # The last encoder layer adds up the gradients from attention and from its own next step.
    assert ("encoder.0", "backward") not in pattern


def test_inner_recurrent_layers_are_equal_in_every_phase():
    pytest.importorskip("torch")
    from placewright.frontends.torch import capture
    from placewright.zoo.recipes import make

    sizes = {"num_units": 4, "vocabulary": 10, "num_steps": 3, "batch": 2}
    work = make("deep-nmt", "nmt", {"num_layers": 4, **sizes}, "meta", 0)
    graph = capture(**work.arguments()).graph
    blocks = repeated_blocks(Problem(graph, Cluster.preset("k40x4")))
    assert blocks.same_layers("encoder.1", "encoder.2")
    assert blocks.same_layers("decoder.1", "decoder.2")
    assert not blocks.same_layers("encoder.0", "encoder.1")
    assert not blocks.same_layers("encoder.1", "decoder.1")
