"""Placements by hand: layers from module paths, and the frozen experts."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.grouping.layers import find_layers
from placewright.load import load_cluster, load_model, load_problem
from placewright.placers.experts import (
    BASELINES,
    cpu_only,
    expert_paper,
    expert_strong,
    one_gpu,
)
from placewright.problem import Problem
from placewright.simulator import simulate

pytest.importorskip("torch")

FROZEN = Path(__file__).parent / "golden" / "experts.json"


def op(name, module, inputs=(), kind="aten.mm", flops=1e9, **more):
    more.setdefault("outputs", [1000])
    return Op(name=name, kind=kind, module=module, inputs=inputs, flops=flops, bytes=1.0, **more)


def stack():
    """Embedding, four numbered layers, a norm inside `model`, a head, and ops of no module."""
    names = [f"model.layers.{k}" for k in range(4)]
    ops = [op("x", "", kind="input", flops=0.0)]
    ops.append(op("embed", "model.embed", ["x"], kind="aten.embedding", flops=0.0))
    for k, name in enumerate(names):
        ops.append(op(f"mm{k}", f"{name}.mlp", [ops[-1].name]))
    ops.append(op("norm", "model.norm", ["mm3"], kind="aten.native_layer_norm", flops=1e3))
    ops.append(op("head", "head", ["norm"], flops=2e9))
    ops.append(op("loss", "loss", ["head"], kind="aten.mean", flops=1e3))
    ops.append(op("grad", "model.layers.3.mlp", ["loss"], phase="backward"))
    return Graph.build("stack", ops)


def on_devices(problem, placement):
    return {
        name: problem.cluster.device_names[d]
        for name, d in zip(problem.graph.op_names, placement, strict=True)
    }


def test_layers_are_read_off_module_paths():
    layers = find_layers(stack())
    assert layers.names == (
        "model.embed",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "model.layers.3",
        "model.norm",
        "head",
    )
    where = dict(zip(stack().op_names, layers.op_layer.tolist(), strict=True))
    assert where["x"] == 0  # goes with its reader
    assert where["loss"] == 6  # goes with what it reads
    assert where["grad"] == where["mm3"] == 4
    assert not layers.is_recurrent.any()
    assert layers.multiplies.tolist() == [False, True, True, True, True, False, True]


def test_a_layer_with_most_of_the_work_is_taken_apart():
    ops = [op("x", "", kind="input", flops=0.0)]
    ops.append(op("embed", "0", ["x"], kind="aten.embedding", flops=0.0))
    for k in range(3):
        ops.append(op(f"mm{k}", f"1.layers.{k}.linear", [ops[-1].name]))
    ops.append(op("norm", "1.norm", ["mm2"], kind="aten.native_layer_norm", flops=1e3))
    ops.append(op("head", "2", ["norm"]))
    layers = find_layers(Graph.build("sequence", ops))
    assert layers.names == ("0", "1.layers.0", "1.layers.1", "1.layers.2", "1.norm", "2")


def test_a_model_without_modules_is_one_layer():
    graph = Graph.build("flat", [op("a", ""), op("b", "", ["a"])])
    assert find_layers(graph).num_layers == 1


def test_unrolled_layers_are_told_by_weights_that_are_used_again_and_again():
    layers = find_layers(load_model("tiny-nmt"))
    recurrent = {layers.names[k] for k in np.flatnonzero(layers.is_recurrent)}
    assert {"encoder.0", "encoder.1", "decoder.0", "decoder.1", "softmax"} <= recurrent
    assert not {"source", "target"} & recurrent
    assert not find_layers(load_model("tiny-gpt2")).is_recurrent.any()


def test_the_papers_expert_gives_each_lstm_layer_a_gpu_of_its_own():
    problem = Problem(load_model("tiny-nmt"), load_cluster("k40x4"))
    devices = on_devices(problem, expert_paper(problem))
    for stack_name in ("encoder", "decoder"):
        for k in range(2):
            assert devices[f"{stack_name}.{k}.gates.weight"] == f"cuda:{k}"
            assert devices[f"{stack_name}.{k}.gates.addmm"] == f"cuda:{k}"
            assert devices[f"{stack_name}.{k}.gates.backward.mm"] == f"cuda:{k}"
    assert devices["source.weight"] == devices["target.weight"] == "cuda:0"
    assert devices["attention.query.weight"] == devices["softmax.weight"] == "cuda:3"
    two = Problem(load_model("tiny-nmt"), load_cluster("k40x2"))
    assert on_devices(two, expert_paper(two))["softmax.addmm"] == "cuda:1"


def test_the_papers_expert_cuts_other_models_into_blocks_of_equal_work():
    problem = Problem(stack(), load_cluster("k40x2"))
    devices = on_devices(problem, expert_paper(problem))
    # 1 + 1 + 1 + (1 + 1) + 2 billion flops: the first three layers have three of seven.
    assert [devices[f"mm{k}"] for k in range(4)] == ["cuda:0"] * 3 + ["cuda:1"]
    assert devices["embed"] == "cuda:0"
    assert devices["head"] == devices["loss"] == "cuda:1"


@pytest.mark.parametrize("name", ["tiny-rnnlm", "tiny-nmt", "tiny-gpt2", "tiny-llama"])
@pytest.mark.parametrize("memory", [None, "70%"])
def test_the_strong_expert_is_the_best_of_all_contiguous_splits(name, memory):
    problem = load_problem(load_model(name), "k40x2", memory)
    layers = find_layers(problem.graph)
    splits = []
    for parts in (1, 2):
        for borders in combinations(range(1, layers.num_layers), parts - 1):
            part = np.searchsorted(
                np.array(borders, dtype=int), np.arange(layers.num_layers), "right"
            )
            placement = 1 + part[layers.op_layer]
            placement[problem.colocation_members] = placement[problem.colocation_leaders]
            splits.append(placement)
    lines = [simulate(problem, placement) for placement in splits]
    best = min((line.overflow_bytes, line.makespan_ps) for line in lines)
    found = simulate(problem, expert_strong(problem))
    assert (found.overflow_bytes, found.makespan_ps) <= best


def test_the_strong_expert_is_never_slower_than_the_papers():
    for name in ("tiny-nmt", "tiny-moe", "tiny-inception"):
        for cluster in ("k40x4", "a100x8", "k40x4-tight"):
            problem = load_problem(load_model(name), cluster)
            strong, paper = (
                simulate(problem, expert(problem)) for expert in (expert_strong, expert_paper)
            )
            assert (strong.overflow_bytes, strong.makespan_ps) <= (
                paper.overflow_bytes,
                paper.makespan_ps,
            )


def test_one_device_baselines_use_one_device():
    problem = Problem(load_model("tiny-gpt2"), load_cluster("k40x4"))
    assert set(cpu_only(problem)) == {0}
    assert set(one_gpu(problem)) == {1}


def test_an_op_that_may_not_run_on_a_gpu_goes_where_it_may_with_its_group():
    ops = [
        op("w", "0", kind="param", flops=0.0, outputs=[Output(8, persistent=True)], colocate="w"),
        op("a", "0", ["w"]),
        op("b", "0", ["a"], devices=("cpu",), colocate="w"),
    ]
    ops[0] = Op(name="w", kind="param", module="0", outputs=ops[0].outputs, colocate="w")
    problem = Problem(Graph.build("g", ops), load_cluster("laptop"))
    for baseline in BASELINES.values():
        placement = baseline(problem)
        problem.check(placement)
        assert placement[0] == placement[2] == 0
    assert one_gpu(problem)[1] == 1


def test_clusters_that_lack_what_a_baseline_needs_are_told_so():
    graph = load_model("tiny-gpt2")
    laptop = load_cluster("laptop")
    kept = {"latency_s": laptop.latency_s[:1, :1], "bytes_per_s": laptop.bytes_per_s[:1, :1]}
    fields = {
        name: value[:1] if name.startswith("device_") or name in ("flops", "efficiency") else value
        for name, value in vars(laptop).items()
    }
    for name in ("memory_bytes", "memory_bytes_per_s", "launch_s"):
        fields[name] = fields[name][:1]
    lonely = Cluster(**fields | kept | {"link_channels": ((),)})
    for baseline in (one_gpu, expert_paper, expert_strong):
        with pytest.raises(InputError, match="has only CPUs"):
            baseline(Problem(graph, lonely))
    gpu = Cluster(**fields | kept | {"link_channels": ((),), "device_kinds": ("cuda",)})
    with pytest.raises(InputError, match="no device of kind `cpu`"):
        cpu_only(Problem(graph, gpu))


def frozen_figures():
    """Step times of the experts on a fixed graph and cluster, to the picosecond."""
    folder = FROZEN.parent
    graph, cluster = (
        Graph.load(folder / "step.graph.json.gz"),
        Cluster.load(folder / "cluster.toml"),
    )
    problem = Problem(graph, cluster)
    return {name: simulate(problem, make(problem)).makespan_ps for name, make in BASELINES.items()}


def test_the_experts_are_frozen():
    # They are opponents: a change that moves these figures must make them stronger, and say so.
    assert frozen_figures() == json.loads(FROZEN.read_text())


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(frozen_figures(), indent=1) + "\n")
