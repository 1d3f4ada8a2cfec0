from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from placewright.cli import app
from placewright.cluster import Cluster
from placewright.costs import PS_PER_S, Costs
from placewright.errors import InputError
from placewright.execute import _cores, op_bench, op_times, profiling
from placewright.execute._cores import own_cores, share_cores, sleep_at_once, where_plans_run
from placewright.execute._indices import find_indices
from placewright.execute._probe_memory import model_of
from placewright.execute.allocation import keep_memory, leave_room
from placewright.execute.devices import Lane, find_device, find_devices
from placewright.execute.issuing import time_issue
from placewright.execute.op_bench import Effort, OpBench
from placewright.execute.op_times import (
    Times,
    Timing,
    add_times,
    device_keys,
    measured_costs,
    op_signatures,
    processor_model,
    read_times,
    times_path,
    torch_version,
    use_distances,
)
from placewright.execute.profiling import compare_roofline, profile
from placewright.execute.retiming import Retiming
from placewright.execute.solo import Solos
from placewright.frontends.torch import capture
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.load import load_capture, load_model, load_problem
from placewright.zoo import RECIPES

QUICK = Effort(
    min_samples=1,
    max_samples=1,
    sample_s=0.0,
    total_s=0.0,
    max_warm_up=1,
    max_copies=2,
    has_company=False,
)
SLOW = ("tiny-inception", "tiny-nasnet")  # many distinct ops
TINY = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in RECIPES
    if name.startswith("tiny")
]
CORE = find_devices(("cpu:0",))
MIB = 2**20

needs_two_cores = pytest.mark.skipif(len(own_cores()) < 2, reason="needs two cores")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profiling, "EFFORT", QUICK)


def quiet(_):
    pass


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def make_times(key, ops, issue_s=0.0, ahead=False):
    timings = {words: Timing(time_s, time_s / 10, 5) for words, time_s in ops.items()}
    return Times(device=key, torch=torch_version(), issue_s=issue_s, is_replayed=ahead, ops=timings)


def write_cluster(path, names=("cpu:0", "cpu:1"), model=None):
    entries = [
        f'[[device]]\nname = "{name}"\nkind = "cpu"\nmodel = "{model or processor_model()}"\n'
        'memory = "1GiB"\nflops = { float32 = 1e9 }\nmemory_bandwidth = "1GB/s"\n'
        for name in names
    ]
    link = '[link]\nlatency = "1us"\nbandwidth = "1GB/s"\n'
    path.write_text('name = "cores"\n' + "".join(entries) + link)
    return path


def small_graph(**changes):
    ops = [
        Op(name="w", kind="param", outputs=[Output(64, persistent=True, shape=(4, 4))]),
        Op(name="x", kind="input", outputs=[Output(64, shape=(4, 4))]),
        Op(
            name="mm",
            kind="aten.mm",
            inputs=["x", "w"],
            outputs=[Output(64, shape=(4, 4))],
            flops=128.0,
            bytes=192.0,
        ),
        Op(
            name="mm_2",
            kind="aten.mm",
            inputs=["mm", "w"],
            outputs=[Output(64, shape=(4, 4))],
            flops=128.0,
            bytes=192.0,
        ),
        Op(
            name="add",
            kind="aten.add",
            inputs=["mm", "mm_2"],
            outputs=[Output(64, keep=True, shape=(4, 4))],
            flops=16.0,
            bytes=192.0,
            **changes,
        ),
    ]
    return Graph.build("small", ops)


# --- Every op can be timed. ---


@pytest.mark.parametrize("name", TINY)
def test_every_op_of_a_tiny_model_can_be_timed(name):
    captured = load_capture(name)
    (found,) = profile(captured, CORE, say=quiet)
    graph = captured.graph
    works = (graph.op_flops > 0) | (graph.op_bytes > 0)
    assert found.failures == {}
    assert found.num_new == found.num_distinct > 0
    assert np.array_equal(~np.isnan(found.op_time_s), works)
    assert (found.op_time_s[works] > 0).all()


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-resnet", "tiny-nmt", "tiny-moe"])
def test_an_op_by_itself_makes_what_it_makes_in_its_step(name):
    captured = load_capture(name)
    solos, graph = Solos(captured), captured.graph
    nodes = {node.name: node for node in captured.tape.graph.nodes}
    with torch.no_grad():
        for op in solos.distinct().values():
            solo = solos.build(op, CORE[0])
            made = range(*graph.op_outputs[op : op + 2].tolist())
            labels = [captured.tensor_nodes[t] for t in made if graph.tensor_base[t] < 0]
            wanted = [nodes[label].meta["tensor"] for label in labels if label]
            for copy in solo.make([1, 2, 3]).copies:
                results = solo.call(*copy)
                found = [(tuple(t.shape), t.stride(), t.dtype) for t in results]
                assert sorted(map(str, found)) == sorted(map(str, wanted)), graph.op_names[op]


def test_what_is_off_or_far_comes_in_copies_and_what_is_near_does_not():
    captured = load_capture("tiny-resnet")
    solos = Solos(captured)
    seen = set()
    for op in solos.distinct().values():
        solo = solos.build(op, CORE[0])
        copies = solo.make([1, 2, 3]).copies
        for at, (k, _) in enumerate(solo._looks):
            addresses = {
                copy[at].data_ptr() for copy in copies if isinstance(copy[at], torch.Tensor)
            }
            distance = solo.memories[k].distance
            seen.add(distance)
            assert len(addresses) == distance + 1
    assert {0, 1} <= seen


def test_overwritten_memory_is_filled_anew():
    module = nn.Linear(3, 2)
    step = capture(module, torch.ones(4, 3), train=True, loss=lambda y: y.sum(), optimizer="sgd")
    op = step.graph.op_names.index("weight.update")
    solo = Solos(step).build(op, CORE[0])
    arguments = solo.make([1, 1, 1])
    (copy,) = arguments.copies
    before = [tensor.clone() for tensor in copy if isinstance(tensor, torch.Tensor)]
    with torch.no_grad():
        solo.call(*copy)
    after = [tensor for tensor in copy if isinstance(tensor, torch.Tensor)]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    arguments.refresh()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Indexing(nn.Module):
    """Uses indices in every way that has a bound of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, words, picks, image):
        rows = self.table(words)
        picked = torch.gather(rows, 1, picks)
        chosen = rows.index_select(1, words[0]) + rows[:, words[1]]
        added = rows.index_add(1, words[0], rows)
        pooled = nn.functional.max_pool2d(image * rows.sum(), 2)
        return picked.sum() + chosen.sum() + added.sum() + pooled.sum()


def test_indices_are_in_range():
    words = torch.zeros(2, 5, dtype=torch.int64)
    inputs = (words, torch.zeros(2, 5, 4, dtype=torch.int64), torch.zeros(1, 2, 6, 6))
    step = capture(Indexing(), inputs, train=True)
    bounds = {}
    for node in step.tape.graph.nodes:
        if node.op == "call_function" and hasattr(node.target, "_schema"):
            for _, (bound, _) in find_indices(node):
                bounds.setdefault(node.target._schema.name.partition("::")[2], set()).add(bound)
    assert bounds["embedding"] == bounds["embedding_dense_backward"] == {7}
    assert bounds["gather"] == bounds["index_select"] == {5}
    assert bounds["max_pool2d_with_indices_backward"] == {36}
    (found,) = profile(step, CORE, say=quiet)
    assert found.failures == {}


def test_indices_into_a_table_are_spread_over_it():
    captured = load_capture("tiny-gpt2")
    op = next(i for i, kind in enumerate(captured.graph.op_kinds) if kind == "aten.embedding")
    solo = Solos(captured).build(op, CORE[0])
    words = next(t for t in solo.make([1, 1, 1]).copies[0] if not t.is_floating_point())
    assert words.min() >= 0
    assert words.max() < 60
    assert len(words.unique()) > 5


# --- Equal ops. ---


def test_signatures_come_from_the_graph_alone(tmp_path):
    graph = load_capture("tiny-nmt").graph
    graph.save(tmp_path / "m.graph.json")
    assert op_signatures(Graph.load(tmp_path / "m.graph.json")) == op_signatures(graph)


def test_equal_ops_have_equal_signatures_and_what_has_no_work_has_none():
    words = op_signatures(small_graph())
    assert words[:2] == (None, None)
    assert words[2] == words[3]
    assert words[4] not in (None, words[2])
    assert words[2] == (
        "aten.mm float32: 2 * (4x4) 64 B -> (4x4) 64 B; 128 flops, 192 bytes, 0 workspace"
    )


@pytest.mark.parametrize("change", [{"phase": "update"}, {"dtype": "float16"}, {"workspace": 8}])
def test_signatures_tell_apart_what_takes_another_time(change):
    assert op_signatures(small_graph(**change))[4] != op_signatures(small_graph())[4]


def test_a_control_dependency_is_no_part_of_a_signature():
    assert op_signatures(small_graph(after=("x",))) == op_signatures(small_graph())


def distances_of(ops):
    graph = Graph.build("distances", ops)
    return {
        (graph.tensor_name(int(t)), graph.op_names[i]): int(d)
        for t, i, d in zip(graph.use_tensor, graph.use_op, use_distances(graph), strict=True)
    }


def moving(name, inputs, out, moved=None):
    moved = 100.0 * MIB if moved is None else moved
    return Op(name=name, inputs=inputs, outputs=[out], bytes=moved)


def test_a_tensor_is_as_far_away_as_what_was_touched_since_it_was():
    found = distances_of(
        [
            Op(name="w", kind="param", outputs=[Output(64, persistent=True)]),
            moving("a", ("w",), 64),
            moving("b", ("a",), 2 * MIB),
            moving("c", ("a", "b"), 15 * MIB),
            moving("d", ("a", "w"), 64),
        ],
    )
    assert found == {
        ("w", "a"): 0,  # the step before ended with it
        ("a", "b"): 0,
        ("a", "c"): 1,  # b, of 2 MiB, and itself
        ("b", "c"): 1,
        ("a", "d"): 2,
        ("w", "d"): 2,
    }


def test_what_is_touched_again_and_again_counts_once():
    again = [moving(f"again-{k}", ("big",), 64) for k in range(100)]
    ops = [moving("small", (), 64), moving("big", (), 6 * MIB), *again]
    assert distances_of([*ops, moving("end", ("small",), 64)])["small", "end"] == 1


def test_nothing_is_farther_than_ops_have_moved():
    rows = [moving(f"row-{k}", ("table",), 64, moved=128.0) for k in range(3)]
    table = Op(name="table", kind="param", outputs=[Output(100 * MIB, persistent=True)])
    found = distances_of(
        [table, moving("small", (), 64, 0.0), *rows, moving("end", ("small",), 64)]
    )
    assert found["small", "end"] == 0
    assert found["table", "row-2"] == 0


def test_equal_ops_are_timed_once_and_known_ones_not_again(monkeypatch):
    timed = []
    time_op = OpBench.time_op

    def count(bench, solos, op):
        timed.append(op)
        return time_op(bench, solos, op)

    monkeypatch.setattr(OpBench, "time_op", count)
    captured = load_capture("tiny-gpt2")
    distinct = {words for words in op_signatures(captured.graph) if words}
    (first,) = profile(captured, CORE, say=quiet)
    assert len(timed) == len(distinct) == first.num_new
    (second,) = profile(captured, CORE, say=quiet)
    assert len(timed) == len(distinct)
    assert (second.num_new, second.num_known) == (0, len(distinct))
    assert np.array_equal(first.op_time_s, second.op_time_s, equal_nan=True)
    (third,) = profile(captured, CORE, again=True, say=quiet)
    assert third.num_new == len(distinct)


def test_models_share_times():
    profile(load_capture("tiny-gpt2"), CORE, say=quiet)
    (found,) = profile(load_capture("tiny-bert"), CORE, say=quiet)
    assert 0 < found.num_known < found.num_distinct


# --- The files. ---


def test_times_come_back_as_they_were_written():
    times = make_times("a device", {"one": 1e-3, "two": 2e-6}, issue_s=1e-6)
    assert add_times(times) == times
    assert read_times("a device") == times
    assert read_times("another device") is None


def test_times_are_added_to_those_on_disk():
    add_times(make_times("d", {"one": 1.0, "two": 2.0}))
    both = add_times(make_times("d", {"two": 3.0, "three": 4.0}))
    assert {words: timing.time_s for words, timing in both.ops.items()} == {
        "one": 1.0,
        "two": 3.0,
        "three": 4.0,
    }
    assert read_times("d") == both


def test_processes_do_not_lose_each_others_times():
    script = (
        "import sys; from placewright.execute.op_times import *\n"
        "for k in range(20):\n"
        "    ops = {f'{sys.argv[1]} {k}': Timing(1.0, 0.0, 1)}\n"
        "    add_times(Times(device='d', torch=torch_version(), issue_s=0.0,"
        " is_replayed=False, ops=ops))"
    )
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen([*command, str(k)]) for k in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(read_times("d").ops) == 60


@pytest.mark.parametrize(
    ("field", "figure"),
    [
        ("scratch_bytes", 2**63),
        ("scratch_bytes", 10**30),
        ("time_s", 1e308),
        ("idle_gain_s", 1e308),
    ],
)
def test_a_file_with_a_figure_that_no_op_has_is_set_aside(field, figure):
    add_times(make_times("d", {"one": 1.0}))
    path = times_path("d")
    content = json.loads(path.read_bytes())
    content["ops"]["one"][field] = figure
    path.write_text(json.dumps(content))
    said = []
    assert read_times("d", said.append) is None
    assert field in said[0] or "op-times file" in said[0]


def test_times_of_another_pytorch_are_not_used(monkeypatch):
    add_times(make_times("d", {"one": 1.0}))
    monkeypatch.setattr(op_times, "torch_version", lambda: "1.0")
    assert read_times("d") is None
    monkeypatch.setattr(op_times, "torch_version", lambda: None)
    assert read_times("d") is None
    monkeypatch.undo()


@pytest.mark.parametrize(
    "content", [b"not json", b'{"format": "placewright-op-times", "version": 1}', b""]
)
def test_a_file_that_cannot_be_read_is_set_aside(content):
    add_times(make_times("d", {"one": 1.0}))
    path = times_path("d")
    path.write_bytes(content)
    said = []
    assert read_times("d", said.append) is None
    (aside,) = path.parent.glob("*.broken-*")
    assert aside.read_bytes() == content
    assert str(aside) in said[0]
    assert "placewright profile" in said[0]
    add_times(make_times("d", {"two": 2.0}), said.append)
    assert [*read_times("d").ops] == ["two"]
    assert len(said) == 1


def test_without_a_cache_there_is_nowhere_to_keep_times(monkeypatch):
    monkeypatch.setenv("PLACEWRIGHT_CACHE", "")
    assert read_times("d") is None
    with pytest.raises(InputError, match="`PLACEWRIGHT_CACHE` is empty"):
        profile(load_capture("tiny-gpt2"), CORE, say=quiet)


def test_a_folder_that_cannot_be_written_is_known_before_anything_is_timed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(OpBench, "time_op", lambda *_: pytest.fail("timed an op"))
    with pytest.raises(InputError, match="cannot be made"):
        profile(load_capture("tiny-gpt2"), CORE, say=quiet)


def test_on_several_cores_the_lesser_of_two_times_counts(monkeypatch):
    timed = Counter()

    def now_and_again(_bench, _solos, op):
        timed[op] += 1
        is_held_up = timed[op] == 1 + op % 2
        return Timing(100.0 if is_held_up else 1.0, 0.0, 1)

    monkeypatch.setattr(OpBench, "time_op", now_and_again)
    captured = load_capture("tiny-gpt2")
    (found,) = profile(captured, find_devices(("cpu",)), say=quiet)
    assert {*timed.values()} == {2}
    assert np.nanmax(found.op_time_s) == pytest.approx(1.0 + found.issue_s)
    assert found.num_new == len(timed)


def test_what_was_timed_is_kept_when_it_is_stopped(monkeypatch):
    timed, before = [], {*threading.enumerate()}

    def stop_at_four(_bench, _solos, op):
        timed.append(op)
        if len(timed) == 4:
            raise KeyboardInterrupt
        return Timing(1.0, 0.0, 1)

    monkeypatch.setattr(OpBench, "time_op", stop_at_four)
    with pytest.raises(KeyboardInterrupt):
        profile(load_capture("tiny-gpt2"), CORE, say=quiet)
    (key,) = device_keys(["cpu:0"], ["cpu"], [processor_model()])
    assert len(read_times(key).ops) == 3
    after = {*threading.enumerate()} - before
    assert not [thread for thread in after if thread.name == "placewright cpu:0"]


def test_an_op_that_fails_does_not_stop_the_others(monkeypatch):
    def fail_on_mm(_bench, solos, op):
        if solos.capture.graph.op_kinds[op] == "aten.mm":
            raise RuntimeError("no\n  such kernel")
        return Timing(1.0, 0.0, 1)

    monkeypatch.setattr(OpBench, "time_op", fail_on_mm)
    (found,) = profile(load_capture("tiny-gpt2"), CORE, say=quiet)
    assert set(found.failures.values()) == {"RuntimeError: no such kernel"}
    assert found.num_new == found.num_distinct - len(found.failures) > 0


def test_an_op_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr("placewright.execute.op_bench.memory_of", lambda *_, **__: 10)
    (found,) = profile(load_capture("tiny-gpt2"), CORE, say=quiet)
    assert found.num_new == 0
    assert all("10 B of memory are free" in why for why in found.failures.values())


# --- Devices. ---


def test_devices_that_are_alike_have_one_key():
    model = processor_model()
    cores = device_keys(["cpu:0", "cpu:1"], ["cpu"] * 2, [model] * 2)
    assert cores == (f"{model}, 1 thread, 2 at a time",) * 2
    gpus = device_keys(["cuda:0", "cuda:1"], ["cuda"] * 2, ["NVIDIA H200"] * 2)
    assert gpus == ("NVIDIA H200",) * 2
    (whole,) = device_keys(["cpu"], ["cpu"], [model])
    assert whole == f"{model}, {len(own_cores())} threads"


def test_a_gpus_thread_has_a_core_of_its_own_where_there_are_enough(monkeypatch):
    model = processor_model()
    monkeypatch.setattr(_cores, "own_cores", lambda: (0, 1, 2, 5))
    assert share_cores(0) == ((0, 1, 2, 5), ())
    assert share_cores(1) == ((0, 1, 2), (5,))
    assert share_cores(2) == ((0, 1), (2, 5))
    keys = device_keys(["cpu", "cuda:0"], ["cpu", "cuda"], [model, "NVIDIA H200"])
    assert keys == (f"{model}, 3 threads", "NVIDIA H200")
    names = ["cpu", "cuda:0", "cuda:1"]  # one thread for both
    keys = device_keys(names, ["cpu", "cuda", "cuda"], [model, "a", "b"])
    assert keys[0] == f"{model}, 3 threads"
    names = ["cpu", "cuda:0/0-31", "cuda:0/32-131"]
    keys = device_keys(names, ["cpu", "cuda", "cuda"], [model, "a", "b"])
    assert keys[0] == f"{model}, 2 threads"
    monkeypatch.setattr(_cores, "own_cores", lambda: (0, 1))
    assert share_cores(1) == ((0, 1), ())


def test_of_many_cores_the_processor_has_an_even_number_beside_a_gpu(monkeypatch):
    for count, left in ((16, 14), (15, 14), (11, 10), (10, 8), (9, 8), (8, 7), (4, 3)):
        monkeypatch.setattr(_cores, "own_cores", lambda count=count: tuple(range(count)))
        assert share_cores(0) == (tuple(range(count)), ())
        assert share_cores(1) == (tuple(range(left)), (count - 1,))


def test_threads_sleep_where_libraries_share_cores_but_not_where_plans_run(monkeypatch):
    mine = {"HOME": "/root"}
    monkeypatch.setattr(_cores, "os", SimpleNamespace(environ=mine))
    sleep_at_once()
    assert mine["OMP_WAIT_POLICY"] == "passive"
    assert where_plans_run(mine) == {"HOME": "/root"}
    users = {"OMP_WAIT_POLICY": "passive"}
    monkeypatch.setattr(_cores, "os", SimpleNamespace(environ=users))
    sleep_at_once()
    assert where_plans_run(users) == users == {"OMP_WAIT_POLICY": "passive"}


def test_a_processor_of_another_model_has_no_key():
    assert device_keys(["cpu", "cuda:0"], ["cpu", "cuda"], ["Z80", ""]) == (None, None)


def test_a_probe_and_a_profile_name_processors_alike():
    assert model_of(find_device("cpu")) == processor_model()


@needs_two_cores
def test_two_cores_are_timed_as_one_with_the_other_busy():
    both = find_devices(("cpu:0", "cpu:1"))
    effort = Effort(min_samples=2, max_samples=2, total_s=0.0, max_copies=2)
    captured = load_capture("tiny-rnnlm")
    (found,) = profile(captured, both, effort=effort, say=quiet)
    assert found.device_names == ("cpu:0", "cpu:1")
    assert found.key.endswith("2 at a time")
    assert found.failures == {}


def test_the_whole_processor_can_be_timed():
    (found,) = profile(load_capture("tiny-rnnlm"), find_devices(("cpu",)), say=quiet)
    assert found.failures == {}


def test_issuing_an_op_takes_some_time_but_not_much():
    lane = Lane(CORE[0])
    try:
        issue_s = lane.submit(lambda: time_issue(CORE[0])).result()
    finally:
        lane.close()
    assert 0 <= issue_s < 1e-2


def test_memory_can_be_kept():
    assert keep_memory() == sys.platform.startswith("linux")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts faults of a thread")
@pytest.mark.parametrize("num_locals", [10, 1000, *range(1900, 1960, 4), 2020, 3000, 4100])
def test_calls_find_room_whatever_the_size_of_the_caller(num_locals):
    import resource

    lines = [*(f" x{k} = None" for k in range(num_locals)), *[" call()"] * 500]
    names = {"call": lambda: None}
    exec("\n".join(["def run():", *lines]), names)
    leave_room(names["run"])

    def count_faults():
        names["run"]()
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        names["run"]()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(count_faults).result() < 100


# --- Costs. ---


def cluster_of(tmp_path, **options):
    return Cluster.load(write_cluster(tmp_path / "cores.toml", **options))


def test_measured_times_win_over_the_roofline_and_unseen_ops_fall_back(tmp_path):
    graph, cluster = small_graph(), cluster_of(tmp_path)
    words = op_signatures(graph)
    times = make_times("d", {words[2]: 0.5, "something else": 9.0}, issue_s=0.25)
    found = measured_costs(graph, cluster, {"cpu:0": times})
    estimated = Costs.estimate(graph, cluster).op_ps
    assert found.costs.op_ps[2:4, 0].tolist() == [0.75 * PS_PER_S] * 2  # issuing comes on top
    assert np.array_equal(found.costs.op_ps[[0, 1, 4], 0], estimated[[0, 1, 4], 0])
    assert np.array_equal(found.costs.op_ps[:, 1], estimated[:, 1])
    assert found.is_measured.tolist() == [[False, False]] * 2 + [[True, False]] * 2 + [
        [False, False]
    ]
    assert found.share_of_ops == pytest.approx(2 / 6)
    assert found.share_of_time == pytest.approx(1.0, abs=1e-3)
    assert "2 of 6 op times are measured (100% of the time)" in found.describe()


def test_a_gpu_does_not_wait_for_ops_to_be_issued(tmp_path):
    graph, cluster = small_graph(), cluster_of(tmp_path)
    words = op_signatures(graph)
    times = make_times("d", {words[2]: 0.5, words[4]: 0.1}, issue_s=0.25, ahead=True)
    found = measured_costs(graph, cluster, {"cpu:0": times})
    assert found.costs.op_ps[2:, 0].tolist() == [0.5e12, 0.5e12, 0.1e12]


def test_memory_that_ops_were_seen_to_take_is_found_again(tmp_path):
    graph, cluster = small_graph(), cluster_of(tmp_path)
    ops = {op_signatures(graph)[4]: Timing(0.1, 0.0, 5, scratch_bytes=77)}
    add_times(msgspec.structs.replace(make_times("d", {}), ops=ops))
    found = measured_costs(graph, cluster, {"cpu:1": read_times("d")})
    assert found.costs.scratch_bytes.tolist() == [[0, 0]] * 4 + [[0, 77]]


class Slow(OpBench):
    """Times ops in moments that are told: how long the core's piece of work takes then."""

    def __init__(self, paces, **known):
        super().__init__(find_devices(("cpu:0",)), QUICK, **known)
        self.paces, self.count = iter(paces), 0
        self._lane.submit = self.do

    def do(self, task):
        made = Future()
        if task is op_bench._pace_s:
            made.set_result(next(self.paces))
        else:
            self.count += 1
            made.set_result(Timing(float(self.count), 0.0, 1))
        return made


@pytest.mark.parametrize(
    ("paces", "known", "expected", "num_slow"),
    [
        ([1.0, 1.1], {}, [1, 2], 0),
        ([1.0, 1.9, 1.0, 1.0], {}, [1, 4], 0),  # it was slow, then had been since
        ([1.9, 1.0, 1.0], {"pace_s": 1.0}, [3], 0),
        ([1.9, 1.5, 1.8, 1.7, 1.6], {"pace_s": 1.0}, [5], 1),  # as good as it gets
    ],
)
def test_ops_are_timed_again_if_the_machine_was_slow(paces, known, expected, num_slow, monkeypatch):
    monkeypatch.setattr(op_bench, "PAUSE_S", 0.0)
    solos = Solos(load_capture("tiny-gpt2"))
    op = next(iter(solos.distinct().values()))
    with Slow(paces, **known) as bench:
        assert [bench.time_op(solos, op).time_s for _ in expected] == expected
        assert bench.num_slow == num_slow
        assert bench.pace_s == 1.0


@needs_two_cores
def test_what_an_op_gains_while_other_cores_idle_is_noted(monkeypatch):
    busy = []

    @contextlib.contextmanager
    def in_company(lanes, *_):
        busy.append(len(lanes))
        yield
        busy.pop()

    monkeypatch.setattr(op_bench, "_in_company", in_company)
    solos = Solos(load_capture("tiny-gpt2"))
    op = next(iter(solos.distinct().values()))
    for names, expected in ((("cpu:0", "cpu:1"), (3.0, 1.0)), (("cpu:0",), (2.0, 0.0))):
        with OpBench(find_devices(names), replace(QUICK, has_company=True)) as bench:
            bench._sample = lambda *_: 2.0 + sum(busy)
            timing = bench.time_op(solos, op)
        assert (timing.time_s, timing.idle_gain_s) == expected


@needs_two_cores
def test_what_an_op_gains_with_the_core_that_works_for_a_gpu_is_noted(monkeypatch):
    [processor] = find_devices(("cpu",))
    processor = replace(processor, cores=processor.cores[:2])
    solos = Solos(load_capture("tiny-gpt2"))
    op = next(iter(solos.distinct().values()))
    for more, expected in ((processor.cores[:1], (3.0, 1.0)), ((), (3.0, 0.0))):
        monkeypatch.setattr(op_bench, "own_cores", lambda more=more: (*processor.cores, *more))
        with OpBench([processor], QUICK) as bench:
            bench._sample = lambda *_: 5.0 - torch.get_num_threads()
            timing = bench.time_op(solos, op)
            assert bench._lane.submit(torch.get_num_threads).result() == 2
        assert (timing.time_s, timing.idle_gain_s) == expected


def test_the_longest_ops_are_timed_again_in_turns(monkeypatch):
    capture = load_capture("tiny-gpt2")
    signatures = [words for words in op_signatures(capture.graph) if words]
    once = [words for words, count in Counter(signatures).items() if count == 1][:4]
    longest = dict(zip(once, (0.4, 0.3, 0.29, 0.01), strict=True))
    [core] = CORE[:1]
    [key] = profiling.group_alike([core])
    first = {words: Timing(time_s, 0.0, 3, 77, 0.1) for words, time_s in longest.items()}
    add_times(Times(device=key, torch=torch_version(), issue_s=0.0, is_replayed=False, ops=first))

    timed = []

    def time_op(self, solos, op):
        timed.append(op)
        if len(timed) == 2:
            raise RuntimeError("not this time")
        return Timing(1.0, 0.0, 1, 0, 0.3)

    monkeypatch.setattr(OpBench, "time_op", time_op)
    retiming = Retiming(capture, [core])
    retiming.go_on(60.0)
    ops = Solos(capture).distinct()
    assert timed == [ops[words] for words in once[:3]]  # all once, the least not at all
    retiming.go_on(0.0)
    assert timed[3:] == timed[:1]
    retiming.go_on(60.0)
    assert timed[4:] == [timed[1], timed[2], timed[0]]
    table = retiming.tables()[core.name]
    found = [(t.time_s, t.idle_gain_s, t.scratch_bytes) for t in map(table.ops.get, once)]
    assert found == [(1.0, 0.3, 77), (0.65, 0.2, 77), (1.0, 0.3, 77), (0.01, 0.1, 77)]
    assert read_times(key).ops == first  # what is on disk stays


def test_an_op_that_is_timed_again_takes_about_as_long(tmp_path):
    capture, [core] = load_capture("tiny-gpt2"), CORE[:1]
    cluster = cluster_of(tmp_path, names=("cpu:0",))
    profile(capture, [core], effort=QUICK)
    retiming = Retiming(capture, [core])
    retiming.go_on(0.2)
    costs = measured_costs(capture.graph, cluster, retiming.tables()).costs
    before = measured_costs(capture.graph, cluster).costs
    changed = costs.op_ps != before.op_ps
    assert changed.any()
    assert 0.1 < (costs.op_ps[changed] / before.op_ps[changed]).mean() < 10


def test_a_cores_best_pace_is_kept():
    blank = make_times("d", {})
    for pace_s, best_s in ((None, None), (2.0, 2.0), (None, 2.0), (3.0, 2.0), (1.0, 1.0)):
        assert add_times(msgspec.structs.replace(blank, pace_s=pace_s)).pace_s == best_s


@pytest.mark.parametrize(
    "name",
    [
        "cpu:0",
        pytest.param(
            "cuda:0",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
            ],
        ),
    ],
)
def test_what_an_op_holds_while_it_runs_is_noted(name):
    with OpBench(find_devices((name,)), QUICK) as bench:
        given = torch.ones(2**20, device="cuda:0" if name == "cuda:0" else "cpu")
        solo = SimpleNamespace(call=lambda x: (x.exp()[:1].clone(),), num_calls=1)
        assert bench._scratch_bytes(solo, (given,)) == 4 * MIB
        solo.num_calls = 2
        assert bench._scratch_bytes(solo, (given,)) == 0


def test_a_time_in_the_graph_wins_over_measured_ones(tmp_path):
    graph, cluster = small_graph(time_s={"cpu": 2.0}), cluster_of(tmp_path)
    times = make_times("d", dict.fromkeys(filter(None, op_signatures(graph)), 0.5))
    found = measured_costs(graph, cluster, {"cpu:0": times})
    assert found.costs.op_ps[2:, 0].tolist() == [0.5e12, 0.5e12, 2e12]


def test_times_of_a_device_that_the_cluster_does_not_have_are_refused(tmp_path):
    with pytest.raises(InputError, match="has no device `cuda:7`"):
        measured_costs(small_graph(), cluster_of(tmp_path), {"cuda:7": make_times("d", {})})


def test_a_problem_on_a_cluster_file_uses_what_is_on_disk(tmp_path):
    graph, path = small_graph(), write_cluster(tmp_path / "cores.toml")
    said = []
    assert load_problem(graph, path, say=said.append).costs.op_ps[2, 0] < 1e9
    assert said == []  # nothing is measured yet
    (key, _) = device_keys(["cpu:0", "cpu:1"], ["cpu"] * 2, [processor_model()] * 2)
    add_times(make_times(key, {op_signatures(graph)[2]: 0.5}))
    assert load_problem(graph, path, say=said.append).costs.op_ps[2].tolist() == [0.5e12] * 2
    assert said[0].startswith("4 of 6 op times are measured")
    plain = load_problem(graph, path, is_profiled=False, say=said.append)
    assert np.array_equal(plain.costs.op_ps, Costs.estimate(graph, plain.cluster).op_ps)
    assert len(said) == 1


def test_a_cluster_of_other_processors_uses_none_of_it(tmp_path):
    graph, path = small_graph(), write_cluster(tmp_path / "z80.toml", model="Z80")
    for key in device_keys(["cpu:0", "cpu:1"], ["cpu"] * 2, [processor_model()] * 2):
        add_times(make_times(key, {op_signatures(graph)[2]: 0.5}))
    assert load_problem(graph, path).costs.op_ps[2, 0] < 1e9


def test_less_memory_leaves_measured_times_as_they_are(tmp_path):
    path = write_cluster(tmp_path / "cores.toml")
    path.write_text(path.read_text().replace('kind = "cpu"', 'kind = "cuda"'))
    graph = small_graph()
    add_times(make_times(processor_model(), {op_signatures(graph)[2]: 0.5}))
    assert load_problem(graph, path, "50%").costs.op_ps[2, 0] == 0.5e12


def test_the_roofline_is_compared_with_what_was_measured(tmp_path, monkeypatch):
    cluster = cluster_of(tmp_path)
    captured = load_capture("tiny-gpt2")
    estimated_s = Costs.estimate(captured.graph, cluster).op_ps[:, 0] / PS_PER_S
    monkeypatch.setattr(
        OpBench, "time_op", lambda _bench, _solos, op: Timing(float(estimated_s[op]) * 2, 0.0, 1)
    )
    monkeypatch.setattr(OpBench, "time_issue", lambda _: 0.0)
    (found,) = profile(captured, CORE, say=quiet)
    error = compare_roofline(captured.graph, found, cluster)
    assert error.median_ratio == pytest.approx(0.5, rel=1e-3)
    assert error.total_ratio == pytest.approx(0.5, rel=1e-3)


# --- The command. ---


def test_the_command_times_a_model_and_others_use_it(tmp_path):
    names = ("cpu:0",)
    path = write_cluster(tmp_path / "core.toml", names=names)
    first = run("profile", "tiny-gpt2", "--cluster", path, "--json")
    assert first.exit_code == 0, first.output
    (found,) = json.loads(first.stdout)
    assert found["num_new"] == found["num_distinct"] > 0
    assert found["failures"] == {}
    assert found["roofline"]["median_ratio"] > 0
    shown = run("profile", "tiny-gpt2", "--cluster", path)
    assert f"{found['num_distinct']} known before" in shown.stdout
    assert "Where the time goes" in shown.stdout
    simulated = run("simulate", "tiny-gpt2", "--cluster", path, "--on", "cpu:0")
    assert "op times are measured." in simulated.stderr
    estimated = run("simulate", "tiny-gpt2", "--cluster", path, "--on", "cpu:0", "--no-profiled")
    assert "measured" not in estimated.stderr
    step = json.loads(
        run("simulate", "tiny-gpt2", "--cluster", path, "--on", "cpu:0", "--json").stdout
    )
    assert step["makespan_s"] == pytest.approx(found["step_s"], rel=1e-6)


def test_the_command_says_when_a_cluster_will_not_use_the_times(tmp_path):
    path = write_cluster(tmp_path / "z80.toml", names=("cpu:0",), model="Z80")
    done = run("profile", "tiny-rnnlm", "--cluster", path)
    assert done.exit_code == 0
    assert "will not use the times of cpu:0" in done.stderr


def test_the_command_takes_a_function_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(3, 2), (torch.ones(4, 3),)\n"
    )
    done = run("profile", f"{tmp_path / 'mine.py'}:build", "--devices", "cpu:0", "--json")
    assert json.loads(done.stdout)[0]["num_distinct"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m.graph.json"], "not how to run it"),
        (["m.onnx"], "not how to run it"),
        (["nonsense"], "There is no model `nonsense`"),
        (["tiny-gpt2", "--devices", "cpu:99999"], "no device `cpu:99999`"),
        (["tiny-gpt2", "--devices", "cpu:0", "--cluster", "x.toml"], "both say where to time"),
    ],
)
def test_the_command_refuses_what_it_cannot_time(arguments, words):
    done = run("profile", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr


def test_graphs_can_be_loaded_and_priced_without_pytorch(tmp_path):
    load_model("tiny-gpt2").save(tmp_path / "m.graph.json")
    write_cluster(tmp_path / "cores.toml")
    script = (
        "import sys; import placewright as pw\n"
        f"pw.load_problem(pw.Graph.load(r'{tmp_path / 'm.graph.json'}'),"
        f" r'{tmp_path / 'cores.toml'}')\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
