from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import placewright as pw
from placewright.cli import app
from placewright.cluster import OP_FAMILIES, Cluster
from placewright.costs import Costs, family_of
from placewright.errors import InputError
from placewright.execute import _probe_links, _probe_memory, _probe_timing, devices, probing
from placewright.execute._cores import own_cores
from placewright.execute._probe_cases import LADDERS, Inputs, work_of
from placewright.execute._probe_fit import Sample, fit_device, fit_link
from placewright.execute._probe_links import LinkFigures
from placewright.execute._probe_memory import available_bytes, cores_alike, memory_of, model_of
from placewright.execute._probe_timing import Settings
from placewright.execute.devices import RealDevice
from placewright.graph import Graph
from placewright.graph_file import Op

QUICK = Settings(
    num_passes=1,
    num_rungs=5,
    case_s=0.0,
    sample_s=0.0001,
    pool_bytes=2**22,
    num_variants=8,
    copy_bytes=(2**12, 2**16, 2**20),
    num_copies=3,
)

CORES = [device.name for device in devices.list_devices() if device.name.startswith("cpu:")][:2]

needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="this process may use one core only")
has_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "SETTINGS", QUICK)
        yield


@pytest.fixture(scope="module")
def machine(quick):
    said: list[str] = []
    return pw.probe(CORES, name="box", progress=said.append), said


def same(left: Cluster, right: Cluster) -> bool:
    pairs = [(value, vars(right)[name]) for name, value in vars(left).items()]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


# A machine, end to end.


def test_all_figures_are_there_and_make_sense(machine):
    cluster, said = machine
    assert cluster.name == "box"
    assert cluster.device_names == tuple(CORES)
    assert set(cluster.device_kinds) == {"cpu"}
    assert all(cluster.device_models)
    assert (cluster.launch_s > 1e-8).all()
    assert (cluster.launch_s < 1e-2).all()
    for d in range(cluster.num_devices):
        assert 1e7 < cluster.flops[d]["float32"] < 1e14
        assert 1e7 < cluster.memory_bytes_per_s[d] < 1e13
        assert set(cluster.efficiency[d]) == {*OP_FAMILIES} - {"other"}
    assert said[0] == f"Measuring {', '.join(CORES)}..."
    assert "PyTorch" in cluster.source
    assert "\n" not in cluster.description


@needs_two_cores
def test_every_pair_of_devices_has_a_link_of_its_own(machine):
    cluster, said = machine
    off = ~np.eye(cluster.num_devices, dtype=bool)
    assert np.isfinite(cluster.latency_s[off]).all()
    assert (cluster.bytes_per_s[off] > 1e6).all()
    assert (cluster.bytes_per_s[off] < 1e13).all()
    assert said[-1] == "Measuring 2 links..."
    assert "while the others" in cluster.source


def test_a_link_takes_what_a_step_takes_longer_when_tensors_go_over_it(monkeypatch):
    asked = []

    def time_step(self, size, names, placement):
        asked.append((size, names, placement))
        crossings = sum(a != b for a, b in itertools.pairwise(placement))
        op_s = {"a": 1e-6, "b": 3e-6}
        ops_s = sum(op_s[names[d]] for d in placement)
        return ops_s + crossings * (2e-5 + size / 1e9)

    monkeypatch.setattr(_probe_links._Chain, "_time", time_step)
    chain = _probe_links._Chain(3)
    times = {size: chain.crossing_s(("a", "b"), size) for size in (2**12, 2**20)}
    assert times == pytest.approx({size: 2e-5 + size / 1e9 for size in times})
    assert fit_link(times) == pytest.approx((2e-5, 1e9), rel=0.01)
    chain.crossing_s(("b", "a"), 2**12)
    alone = [names for _, names, placement in asked if not any(placement)]
    assert len(alone) == 4  # each device once for each size


@needs_two_cores
@pytest.mark.parametrize(("few", "asked"), [(2, QUICK.copy_bytes), (1, (2**12,))])
def test_where_there_are_many_links_fewer_sizes_are_timed(few, asked, monkeypatch):
    sizes = []

    def time_links(found, lanes, copy_bytes, num_repeats, tell):
        sizes.append(copy_bytes)
        raise KeyboardInterrupt

    monkeypatch.setattr(probing, "SETTINGS", dataclasses.replace(QUICK, few_links=few))
    monkeypatch.setattr(probing, "time_links", time_links)
    with pytest.raises(KeyboardInterrupt):
        pw.probe(CORES)
    assert sizes == [asked]


@needs_two_cores
def test_what_is_timed_is_a_step_that_runs():
    chain = _probe_links._Chain(3)
    small, large = (chain.crossing_s((CORES[0], CORES[1]), size) for size in (2**12, 2**22))
    assert 1e-7 < small < large < 0.1


@needs_two_cores
def test_cores_that_are_alike_have_the_same_figures_and_share_the_memory(machine):
    cluster, _ = machine
    if len(cores_alike([0, 1])) == 1:
        assert cluster.flops[0] == cluster.flops[1]
        assert cluster.efficiency[0] == cluster.efficiency[1]
    assert cluster.memory_bytes[0] == cluster.memory_bytes[1]
    assert cluster.memory_bytes.sum() < 0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )


def test_what_was_probed_can_be_saved_and_loaded(machine, tmp_path):
    cluster, _ = machine
    cluster.save(tmp_path / "box.toml")
    assert same(Cluster.load(tmp_path / "box.toml"), cluster)


def test_a_product_takes_about_as_long_as_the_cluster_says(machine):
    cluster, _ = machine
    lane = devices.Lane(devices.find_device(CORES[0]))
    matrix = torch.rand(256, 256)

    def measure():
        times = []
        for _ in range(20):
            begun = time.thread_time()
            torch.mm(matrix, matrix)
            times.append(time.thread_time() - begun)
        return np.median(times)

    measured = lane.submit(measure).result()
    lane.close()
    op = Op(name="mm", kind="aten.mm", flops=2 * 256**3, bytes=3 * 4 * 256**2)
    predicted = Costs.estimate(Graph.build("g", [op]), cluster).op_ps[0, 0] / 1e12
    assert measured / 10 < predicted < measured * 10


@has_no_gpu
def test_without_a_gpu_the_cores_are_the_devices():
    assert [d.name for d in probing._find(None)] == [f"cpu:{k}" for k in range(len(own_cores()))]


def test_with_a_gpu_the_processor_and_the_gpus_are_the_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [d.name for d in probing._find(None)] == ["cpu", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["cpu:0", "cpu:0"], "`devices` names `cpu:0` more than once"),
        ([], "`devices` is empty; expected every device to be measured, once."),
        (["tpu:0"], "This machine has no device `tpu:0`"),
        (["cpu", "cpu:0"], "`cpu` is all cores, `cpu:0` one of them"),
    ],
)
def test_devices_that_cannot_be_measured_are_refused(names, words):
    with pytest.raises(InputError) as caught:
        pw.probe(names)
    assert words in str(caught.value)


def test_a_device_without_free_memory_is_refused(quick, monkeypatch):
    monkeypatch.setattr(_probe_timing, "memory_of", lambda *_: 2**20)
    with pytest.raises(InputError, match=r"`cpu:0` has 1.00 MiB of free memory; measuring it"):
        pw.probe(["cpu:0"])


def test_what_fails_while_it_is_measured_leaves_no_thread(quick, monkeypatch):
    def fail(*_):
        raise RuntimeError("stop")

    monkeypatch.setattr(probing, "fit_device", fail)
    before = {*threading.enumerate()}  # of placed modules that other tests have left
    with pytest.raises(RuntimeError, match="stop"):
        pw.probe(["cpu:0"])
    new = {*threading.enumerate()} - before
    assert not [thread for thread in new if thread.name.startswith("placewright cpu")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
def test_a_gpu_and_its_host_are_measured(quick, tmp_path):
    cluster = pw.probe(["cpu", "cuda:0"])
    cluster.save(tmp_path / "box.toml")
    assert same(Cluster.load(tmp_path / "box.toml"), cluster)
    assert cluster.device_models[1] == torch.cuda.get_device_name(0)
    assert {"float32", "float16"} <= set(cluster.flops[1])
    assert 0 < cluster.memory_bytes[1] < torch.cuda.mem_get_info(0)[1]
    off = ~np.eye(2, dtype=bool)
    assert (cluster.bytes_per_s[off] > 1e8).all()
    assert cluster.source.count("memory not pinned") == 2
    assert "on cuda:0 itself" in cluster.source


# What is timed.


def test_every_family_of_ops_is_timed():
    assert {family_of(ladder.kind) for ladder in LADDERS} == {*OP_FAMILIES} - {"other"}


@pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.kind)
def test_an_op_grows_from_rung_to_rung_by_no_more_than_was_reckoned_with(ladder):
    inputs = Inputs(torch.device("cpu"), "float32", 2**20)
    work = []
    for shape in ladder.shapes[:4]:
        arguments = ladder.arguments(inputs, shape)
        flops, moved = work_of(ladder, arguments, ladder.target(*arguments, **ladder.keywords))
        work.append(flops or moved)
    assert all(1 < b / a <= 20 for a, b in itertools.pairwise(work))


def test_work_is_counted_as_in_captured_graphs():
    ladder = next(ladder for ladder in LADDERS if ladder.kind == "aten.addmm")
    module = torch.nn.Linear(32, 32)
    graph = pw.capture(module, (torch.rand(64, 32),)).graph
    i = graph.op_kinds.index("aten.addmm")
    inputs = Inputs(torch.device("cpu"), "float32", 2**20)
    arguments = ladder.arguments(inputs, (64, 32))
    flops, moved = work_of(ladder, arguments, ladder.target(*arguments))
    assert (flops, moved) == (graph.op_flops[i], graph.op_bytes[i])


def test_warm_inputs_stay_and_cold_ones_move_on():
    inputs = Inputs(torch.device("cpu"), "float32", 4 * 1024)
    assert inputs.warm(8, 8) is inputs.warm(8, 8)
    starts = [inputs.cold(4, 64).data_ptr() for _ in range(5)]
    assert len({*starts}) == 4
    assert starts[4] == starts[0]
    assert inputs.cold(4096).shape == (4096,)  # more than the pool has


# Fits.


def roofline(kind, flops, moved, dtype="float32"):
    """Time an op on a device worked out by hand: 10 us, 1 Tflop/s or 2, 100 GB/s, small is slow."""
    rate = 1e12 if dtype == "float32" else 2e12
    family = family_of(kind)
    if family in ("matmul", "convolution", "attention"):
        share = np.interp(math.log(flops), [math.log(1e6), math.log(1e9)], [0.1, 0.9])
        return Sample(kind, dtype, flops, moved, 1e-5 + max(flops / rate / share, moved / 1e11))
    share = {"reduction": 0.5, "gather": 0.25}.get(family, 1.0)
    return Sample(kind, dtype, flops, moved, 1e-5 + moved / 1e11 / share)


def test_a_device_that_is_a_roofline_is_found_again():
    samples = [
        roofline(kind, 0.0 if kind == "aten.clone" else moved / 8, moved)
        for kind in ("aten.add", "aten.clone", "aten.sum", "aten.embedding")
        for moved in [512 * 4.0**k for k in range(9)]
    ]
    samples += [
        roofline(kind, flops, flops / 500, dtype)
        for kind, dtype in (
            ("aten.mm", "float32"),
            ("aten.convolution", "float32"),
            ("aten._scaled_dot_product_flash_attention_for_cpu", "float32"),
            ("aten.mm", "bfloat16"),
        )
        for flops in [1e5 * 4.0**k for k in range(9)]
    ]
    found = fit_device(samples)
    assert found.launch_s == pytest.approx(1e-5, rel=0.01)
    assert found.memory_bytes_per_s == pytest.approx(1e11, rel=0.05)
    assert found.flops["bfloat16"] == pytest.approx(2 * found.flops["float32"], rel=0.1)
    cluster = one_device(found)
    ops = [
        Op(name=f"op {k}", kind=s.kind, dtype=s.dtype, flops=s.flops, bytes=s.bytes)
        for k, s in enumerate(samples)
    ]
    predicted = Costs.estimate(Graph.build("g", ops), cluster).op_ps[:, 0] / 1e12
    assert predicted == pytest.approx([s.time_s for s in samples], rel=0.15)


def one_device(figures) -> Cluster:
    return Cluster(
        name="c", description="", source="", device_names=("cpu",), device_kinds=("cpu",),
        device_models=("",), memory_bytes=np.array([1]), flops=(figures.flops,),
        memory_bytes_per_s=np.array([figures.memory_bytes_per_s]),
        launch_s=np.array([figures.launch_s]), efficiency=(figures.efficiency,),
        latency_s=np.zeros((1, 1)), bytes_per_s=np.ones((1, 1)), channel_names=("bus",),
        link_channels=((0,),),
    )  # fmt: skip


def test_a_link_is_a_latency_and_a_bandwidth():
    copies = {size: 2e-5 + size / 8e9 for size in (2**12, 2**16, 2**20, 2**24)}
    assert fit_link(copies) == (pytest.approx(2e-5), pytest.approx(8e9))
    # Noise that would make the latency negative makes it none.
    latency_s, bytes_per_s = fit_link({1000: 1e-8, 10**6: 1e-3, 10**7: 1e-2})
    assert latency_s >= 0
    assert bytes_per_s > 0
    # Copies that take no longer for more bytes have a bandwidth all the same.
    assert math.isfinite(fit_link({1000: 1e-5, 10**6: 1e-5})[1])


def test_the_source_tells_what_the_figures_leave_out(machine):
    cluster, _ = machine
    figures = probing._Measured(None, [Sample("aten.add", "float32", 1e6, 8e6, 1e-3)], 2.1e-6)
    pageable = {(0, cluster.num_devices - 1): LinkFigures(1.2e-5, 5e9)}
    links = probing.Links({}, pageable)
    lines = probing._source(cluster, [figures] * cluster.num_devices, links)
    assert any("Times of 1 ops measured on cpu:0" in line for line in lines)
    assert f"From cpu:0 to {CORES[-1]}, memory not pinned: 12.00 us, 5 GB/s." in lines
    assert any(line.startswith("A tiny op takes 2.10 us on cpu:0 itself") for line in lines)


# Memory and names.


def machine_at(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8388608 kB\n"}
CPU = RealDevice("cpu", "cpu", (0, 1))


def test_a_plan_may_use_what_is_available_less_headroom(tmp_path):
    root = machine_at(tmp_path, MEMINFO)
    assert available_bytes(root) == 8 * 2**30
    whole = memory_of(CPU, 1, root)
    assert 0.89 * 8 * 2**30 < whole <= 0.9 * 8 * 2**30
    assert whole % 2**20 == 0
    assert 2 * memory_of(CPU, 2, root) <= whole


@pytest.mark.parametrize(
    ("group", "folder", "limit", "used"),
    [
        ("0::/app/inner", "app", "memory.max", "memory.current"),
        ("0::/", ".", "memory.max", "memory.current"),
        ("4:memory:/app", "memory/app", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_a_control_group_may_leave_less(tmp_path, group, folder, limit, used):
    base = f"sys/fs/cgroup/{folder}"
    root = machine_at(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": f"3:cpu:/elsewhere\n{group}\n",
            f"{base}/{limit}": str(2 * 2**30),
            f"{base}/{used}": str(2**30),
            f"{base}/memory.stat": "anon 5\ninactive_file 1024\n",
        },
    )
    assert available_bytes(root) == 2**30 + 1024
    (root / base / limit).write_text("max\n")
    assert available_bytes(root) == 8 * 2**30


def test_a_system_that_tells_nothing_is_taken_to_have_half_its_memory_free(tmp_path):
    assert available_bytes(tmp_path) > 0


def test_gpus_keep_headroom_for_workspaces_and_fragmentation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * 2**30, 12 * 2**30))
    usable = memory_of(RealDevice("cuda:0", "cuda", ()), 1)
    assert usable == 9 * 2**30  # 10 GiB, less 5 % and 512 MiB
    assert _probe_memory.GPU_HEADROOM_BYTES == 512 * 2**20


def test_a_processor_is_called_what_the_system_calls_it(tmp_path):
    root = machine_at(
        tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz \n"}
    )
    assert model_of(CPU, root) == "Some CPU @ 2 GHz"
    assert model_of(CPU, tmp_path / "none")


def test_cores_of_different_speed_are_told_apart(tmp_path):
    fast = {f"sys/devices/system/cpu/cpu{k}/cpufreq/cpuinfo_max_freq": "5000000\n" for k in (0, 1)}
    slow = {"sys/devices/system/cpu/cpu4/cpufreq/cpuinfo_max_freq": "3000000\n"}
    root = machine_at(tmp_path, fast | slow)
    assert cores_alike([0, 4, 1], root) == [[0, 2], [1]]
    assert cores_alike([7, 8], root) == [[0, 1]]


# The command.


def run(*arguments):
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


def test_the_command_prints_a_cluster_file(quick):
    result = run("--devices", "cpu:0", "--name", "my box")
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout)["name"] == "my box"
    assert "Measuring cpu:0" in result.stderr
    assert "memory bandwidth" in result.stderr


def test_the_command_writes_a_cluster_file(quick, tmp_path):
    path = tmp_path / "box.toml"
    result = run("--devices", ",".join(CORES), "-o", path)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert Cluster.load(path).device_names == tuple(CORES)


def test_the_command_prints_json(quick, tmp_path):
    result = run("--devices", "cpu:0", "--json")
    facts = json.loads(result.stdout)
    assert facts["name"] == "this-machine"
    assert facts["devices"][0]["name"] == "cpu:0"
    assert facts["devices"][0]["memory_bytes"] > 0
    assert facts["links"] == []
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "gpu7"], "This machine has no device `gpu7`"),
        (["-o", "nowhere/box.toml"], "`nowhere/box.toml` cannot be written"),
        (["-o", "box.json"], "expected one that ends in `.toml`"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(monkeypatch, arguments, words):
    monkeypatch.setattr(probing, "Lane", None)
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_without_pytorch_the_command_says_what_is_missing():
    script = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['placewright', 'probe']\n"
        "from placewright.cli import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("placewright: PyTorch is not installed")
    assert "Traceback" not in done.stderr
