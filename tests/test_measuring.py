"""Measuring: statistics on made-up times, and real processes that are really killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from placewright.cli import app
from placewright.cluster import Cluster
from placewright.errors import InputError
from placewright.load import load_cluster, load_model, load_problem, load_step
from placewright.placing import place
from placewright.plan import Plan
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate

torch = pytest.importorskip("torch")

from placewright.execute import measured, measuring, processes  # noqa: E402
from placewright.execute._candidate import flush_denormals, rest, shorten  # noqa: E402
from placewright.execute._jobs import job_of_plan, memory_caps  # noqa: E402
from placewright.execute._statistics import (  # noqa: E402
    FEWEST,
    compare_medians,
    count_warm_up,
    median_interval,
)
from placewright.execute._wire import Job  # noqa: E402
from placewright.execute.devices import Lane, find_device  # noqa: E402
from placewright.execute.measured import MeasuredEvaluator  # noqa: E402
from placewright.execute.measuring import (  # noqa: E402
    Effort,
    compare_with_best,
    measure_jobs,
)
from placewright.execute.processes import CandidateError, Template  # noqa: E402

BOX = """
name = "box"
[[device]]
names = ["cpu:0", "cpu:1"]
kind = "cpu"
memory = "{memory}"
flops = {{ float32 = 5e10 }}
memory_bandwidth = "10GB/s"
launch = "5us"
[link]
latency = "20us"
bandwidth = "5GB/s"
"""
MODEL = """
import torch
from torch import nn

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
        self.right = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, x):
        return (self.left(x) + self.right(x)).square().mean()

def build():
    torch.manual_seed(0)
    inputs = (torch.randn(256, 256),)
    return {"module": Branches(), "inputs": inputs, "train": True, "optimizer": "adam"}

def other():
    return nn.Linear(3, 3), (torch.randn(2, 3),)
"""
MIB = 2**20

needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two cores are needed as two devices",
)
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


# Statistics.


def noisy(median_s, count, seed=0, spread=0.02):
    random = np.random.default_rng(seed)
    return median_s * np.exp(spread * random.standard_normal(count))


def test_steady_times_are_warm_after_two_steps():
    assert count_warm_up(np.full(12, 0.01)) == 2
    assert count_warm_up(np.full(11, 0.01)) is None  # two windows do not fit yet


def test_slow_first_steps_are_left_out():
    times_s = np.concatenate([[0.9, 0.5, 0.3, 0.2, 0.15], noisy(0.1, 30)])
    found = count_warm_up(times_s)
    assert 2 <= found <= 5
    assert np.median(times_s[found:]) == pytest.approx(0.1, rel=0.02)


def test_times_that_keep_growing_never_settle():
    assert count_warm_up(1.1 ** np.arange(60)) is None


def test_the_interval_of_a_median_is_of_order_statistics():
    # Ranks as in tables for the sign test, such as Conover's A3.
    for count, rank in ((6, 1), (8, 1), (9, 2), (12, 3), (25, 8), (100, 40)):
        found = median_interval(np.arange(1.0, count + 1))
        assert (found.low_s, found.high_s) == (rank, count + 1 - rank)
    few = median_interval(np.arange(1.0, FEWEST))
    assert few.median_s == 3.0
    assert np.isinf([few.low_s, few.high_s]).all()


def test_intervals_hold_the_median_as_often_as_they_say():
    random = np.random.default_rng(0)
    samples = random.exponential(size=(2000, 25))
    found = [median_interval(row) for row in samples]
    hits = np.mean([each.low_s <= np.log(2) <= each.high_s for each in found])
    assert 0.94 <= hits <= 0.985


def test_two_that_take_turns_are_compared_in_spite_of_drift():
    drift = np.linspace(1.0, 2.0, 20)  # far more than what they differ by
    left = [noisy(0.9 * d, 10, seed) for seed, d in enumerate(drift)]
    right = [noisy(1.0 * d, 10, 100 + seed) for seed, d in enumerate(drift)]
    found = compare_medians(left, right)
    assert found.low <= 0.9 <= found.high
    assert found.high < 1
    assert found.sureness > 0.99
    same = compare_medians(right, [noisy(d, 10, 200 + seed) for seed, d in enumerate(drift)])
    assert same.low < 1 < same.high
    assert 0.02 < same.sureness < 0.98


def test_one_round_is_enough_to_compare():
    found = compare_medians([noisy(1.0, 30, 1)], [noisy(2.0, 30, 2)])
    assert found.low < 0.5 < found.high < 0.6
    assert found.sureness == 1.0


# Races, with made-up processes.


class MadeUp:
    """A template, and a process, whose steps take made-up times."""

    def __init__(self, median_s, fails_after=10**9, seed=0):
        self.median_s, self.fails_after, self.seed = median_s, fails_after, seed
        self.num_steps, self.is_open, self.turns = 0, True, []

    def ready(self, limit_s):
        pass

    def run(self, num_steps, limit_s):
        self.turns.append(num_steps)
        self.num_steps += num_steps
        if self.num_steps > self.fails_after:
            raise CandidateError("memory", "It was too much.")
        return noisy(self.median_s, num_steps, [self.seed, self.num_steps]).tolist()

    def peaks(self, limit_s):
        return {"cpu:0": 1000}

    def let_go(self):
        pass

    def close(self):
        self.is_open = False


def started(template, job, limit_s):
    """A candidate's process that is ready."""
    process = template.begin(job, limit_s)
    process.ready(limit_s)
    return process


class MadeUpTemplate:
    def __init__(self, **made):
        self.made = made

    def begin(self, job, limit_s):
        return self.made[job.device_names[0]]


def race(effort=None, drops=False, between=None, **made):
    jobs = {name: Job(device_names=(name,)) for name in made}
    template, effort = MadeUpTemplate(**made), effort or Effort()
    found = measure_jobs(template, jobs, effort, drops=drops, between=between)
    assert not any(each.is_open for each in made.values())
    return {each.name: each for each in found}


def test_one_candidate_runs_until_its_interval_is_narrow():
    found = race(a=MadeUp(0.01))["a"]
    assert found.median_s == pytest.approx(0.01, rel=0.03)
    assert found.interval.half_width <= 0.03
    assert found.num_warm_up == 2
    assert found.has_settled
    assert found.num_steps < 50
    assert found.peak_bytes == {"cpu:0": 1000}


def test_no_more_steps_are_run_than_asked_for():
    found = race(Effort(target=1e-6, max_steps=40), a=MadeUp(0.01), b=MadeUp(0.02))
    assert [each.num_steps for each in found.values()] == [40, 40]
    assert race(Effort(max_steps=3), a=MadeUp(0.01))["a"].num_steps == 3


def test_something_else_is_done_after_each_round():
    took = []

    def rest(took_s):
        took.append(took_s)
        time.sleep(0.3)  # for longer than there is time for steps, which does not count

    effort = Effort(target=1e-6, max_steps=60, limit_s=0.1)
    found = race(effort, between=rest, a=MadeUp(0.05), b=MadeUp(0.01))
    assert all(each.num_steps == 60 for each in found.values())
    assert len(took) > 3
    assert 0 <= min(took) <= max(took) < 0.2


def test_those_that_are_clearly_slower_are_dropped_from_a_race():
    made = {"a": MadeUp(0.01), "b": MadeUp(0.01, seed=1), "c": MadeUp(0.02)}
    found = race(Effort(target=1e-6), drops=True, **made)
    assert [each.is_dropped for each in found.values()] == [False, False, True]
    assert made["c"].num_steps < made["a"].num_steps / 2
    ratios = compare_with_best([*found.values()])
    assert len(ratios) == 2
    assert ratios["c"].sureness == 1.0


def test_one_that_fails_in_a_race_does_not_end_it():
    found = race(Effort(target=1e-6), a=MadeUp(0.01), b=MadeUp(0.01, fails_after=30))
    assert found["a"].num_steps == 200
    assert (found["b"].failure, found["b"].reason) == ("memory", "It was too much.")
    assert found["b"].median_s == np.inf
    assert compare_with_best([found["b"]]) == {}


def test_an_effort_must_be_one():
    with pytest.raises(InputError, match="`max_steps` 0"):
        Effort(max_steps=0)


def test_caps_are_of_the_devices_that_a_plan_uses():
    names, kinds = ("cpu:0", "cpu:1", "cuda:0", "cuda:1"), ("cpu", "cpu", "cuda", "cuda")
    box = SimpleNamespace(
        device_names=names, device_kinds=kinds, memory_bytes=np.array([1, 2, 4, 8])
    )
    found = memory_caps(box, {"cpu:0", "cuda:1"})
    assert found == {"cpu_bytes": 3, "gpu_bytes": {"cuda:1": 8}}


def test_without_a_cpu_device_a_process_has_no_cap_of_its_own():
    # Libraries of a GPU need memory there, which none of the devices has.
    box = SimpleNamespace(
        device_names=("cuda:0",), device_kinds=("cuda",), memory_bytes=np.array([4])
    )
    assert memory_caps(box, {"cuda:0"}) == {"cpu_bytes": None, "gpu_bytes": {"cuda:0": 4}}


# Real processes.


def write_box(folder, memory="4GiB"):
    path = folder / f"box-{memory}.toml"
    path.write_text(BOX.format(memory=memory))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("measuring")
    (made / "model.py").write_text(MODEL)
    write_box(made)
    return made


@pytest.fixture(scope="module")
def model(folder):
    return f"{folder / 'model.py'}:build"


@pytest.fixture(scope="module")
def problem(folder, model):
    return load_problem(load_model(model), folder / "box-4GiB.toml")


@pytest.fixture(scope="module")
def template(model):
    with closing(Template(model)) as made:
        made.wait()
        yield made


def split(problem, seed=0):
    """A random placement."""
    random = np.random.default_rng(seed)
    placement = random.integers(0, problem.num_devices, problem.num_ops)
    placement[problem.colocation_members] = placement[problem.colocation_leaders]
    return placement


def plan_of(problem, placement):
    return Plan.of(simulate(problem, placement), "a plan", lower_bound_s=0.0, placer="given")


def job_of(problem, placement, cluster=None):
    return job_of_plan(plan_of(problem, placement), cluster)


@pytest.fixture
def borrowed(template, monkeypatch):
    """Whoever starts a template is lent the tests' own one, which stays open."""

    class Borrowed(Template):
        def __init__(self, model):
            self.__dict__ = template.__dict__

        def close(self):
            pass

    monkeypatch.setattr(measuring, "Template", Borrowed)
    monkeypatch.setattr(measured, "Template", Borrowed)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_cores
def test_steps_run_and_memory_is_measured(template, problem):
    alone = np.zeros(problem.num_ops, dtype=np.int64)
    found = measure_jobs(
        template,
        {"alone": job_of(problem, alone), "split": job_of(problem, split(problem))},
        Effort(target=1e-6, max_steps=12, limit_s=20.0),
    )
    for each, placement in zip(found, (alone, split(problem)), strict=True):
        assert (each.failure, each.reason) == (None, "")
        assert each.num_steps == 12
        assert 0 < each.interval.low_s <= each.median_s <= each.interval.high_s < 10
        predicted = simulate(problem, placement).peak_bytes.tolist()
        named = {n: p for n, p in zip(("cpu:0", "cpu:1"), predicted, strict=True) if p}
        assert predicted[0] > 4 * MIB
        assert each.peak_bytes == pytest.approx(named, rel=0.4)  # lanes are not in step
    assert found[0].peak_bytes["cpu:0"] == pytest.approx(predicted_peak(problem, alone), rel=0.02)


def predicted_peak(problem, placement):
    return int(simulate(problem, placement).peak_bytes[0])


def test_a_candidate_may_use_threads(template, problem):
    # `cpu` is all cores: its ops run on several threads, in a process that was forked.
    plan = plan_of(problem, np.zeros(problem.num_ops, dtype=np.int64))
    plan = msgspec.structs.replace(plan, devices=dict.fromkeys(plan.devices, "cpu"))
    with closing(started(template, Job(plan=plan), 5.0)) as process:
        assert len(process.run(3, 60.0)) == 3
        num_threads = len([*Path(f"/proc/{process.pid}/task").iterdir()])
        assert num_threads >= 1 + torch.get_num_threads()  # its own, and one a core
        assert process.peaks(60.0) == {"cpu": pytest.approx(predicted_peak(problem, [0] * 50))}


def test_a_candidate_rests_until_its_helpers_do():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(20):
            torch.ones(2**20).sin_()  # its helper then waits awake for more
        rest()
        before_s = time.process_time()
        time.sleep(0.03)
        assert time.process_time() - before_s < 0.006
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_plan_for_gpus_alone_is_measured(template, problem, folder):
    words = BOX.format(memory="4GiB").replace('names = ["cpu:0", "cpu:1"]', 'name = "cuda:0"')
    (folder / "gpu.toml").write_text(words.replace('"cpu"', '"cuda"'))
    on_gpu = load_problem(problem.graph, folder / "gpu.toml")
    job = job_of(on_gpu, np.zeros(on_gpu.num_ops, dtype=np.int64), on_gpu.cluster)
    (found,) = measure_jobs(template, {"gpu": job}, Effort(max_steps=5, limit_s=5.0))
    assert (found.failure, found.num_steps) == (None, 5)


@needs_cores
def test_a_candidate_that_hangs_is_found_and_killed(template, problem, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    process = started(template, job_of(problem, split(problem)), 5.0)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(CandidateError, match=r"did not answer for 1\.00 s and was") as found:
        process.run(3, 0.5)
    assert found.value.failure == "time"
    assert not is_alive(process.pid)


@needs_cores
@pytest.mark.parametrize(
    ("how", "failure", "reason"),
    [
        (signal.SIGKILL, "memory", "killed from outside, as when memory runs out"),
        (signal.SIGSEGV, "crash", "ended by SIGSEGV"),
    ],
)
def test_a_candidate_that_is_killed_is_a_result(template, problem, how, failure, reason):
    process = started(template, job_of(problem, split(problem)), 5.0)
    assert len(process.run(2, 60.0)) == 2
    os.kill(process.pid, how)
    with pytest.raises(CandidateError, match=reason) as found:
        process.run(1000, 20.0)
    assert found.value.failure == failure
    assert not is_alive(process.pid)


@needs_cores
@needs_proc
def test_a_candidate_without_memory_is_a_result_and_others_go_on(template, problem, folder):
    tight = Cluster.load(write_box(folder, "1MiB"))
    found = measure_jobs(
        template,
        {"tight": job_of(problem, split(problem), tight), "free": job_of(problem, split(problem))},
        Effort(max_steps=6, limit_s=20.0),
    )
    assert [each.failure for each in found] == ["memory", None]
    assert "memory" in found[0].reason or "thread" in found[0].reason


@needs_cores
def test_a_gpu_without_memory_is_told_in_a_sentence():
    words = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total"
        " capacity of 139.80 GiB of which 135.07 GiB is free. Including non-PyTorch memory, this"
        " process has 824.00 MiB memory in use. {}Of the allocated memory 304.15 MiB is allocated."
    )
    lacks = "GPU 0 has no room for another 16.00 MiB"
    assert shorten(words.format("")) == f"{lacks}."
    capped = shorten(words.format("320.12 MiB allowed; "))
    assert capped == f"{lacks} within the 320.12 MiB that it may use."
    assert shorten("RuntimeError: other words.") == "RuntimeError: other words."


def test_a_template_that_has_died_is_started_again(template, problem):
    process = started(template, job_of(problem, split(problem)), 5.0)
    os.kill(template._process.pid, signal.SIGKILL)
    with pytest.raises(CandidateError, match="The process that it was forked from has ended"):
        process.run(10**6, 60.0)
    wait_until(lambda: not is_alive(process.pid), seconds=5.0)
    again = started(template, job_of(problem, split(problem)), 5.0)
    assert len(again.run(2, 20.0)) == 2
    again.close()
    assert not is_alive(again.pid)


@needs_cores
def test_what_cannot_run_here_is_refused_in_a_sentence(template, problem, folder):
    plan = plan_of(problem, split(problem))
    elsewhere = dict.fromkeys(plan.devices, "cuda:7")
    other = plan_of(
        load_problem(load_model(f"{folder / 'model.py'}:other"), folder / "box-4GiB.toml"), [0] * 4
    )
    too_large = msgspec.structs.replace(plan.predicted, peak_bytes={"cpu:0": 2**60})
    for wrong, words in (
        (msgspec.structs.replace(plan, devices=elsewhere), "This machine has no device `cuda:7`"),
        (other, "was made for model `other`.*Make a new plan"),
        (msgspec.structs.replace(plan, predicted=too_large), "needs 1048576.00 TiB on `cpu`"),
    ):
        with pytest.raises(InputError, match=words):
            started(template, Job(plan=wrong), 5.0)


def test_models_that_cannot_be_built_are_refused_in_a_sentence(folder):
    for name, words in (
        ("graph.json", "`graph.json` is a graph file, which says what a model costs"),
        ("model.onnx", "`model.onnx` is an ONNX file, which says"),
        ("no-such-model", "There is no model `no-such-model`"),
    ):
        with pytest.raises(InputError, match=words):
            load_step(name)
    (folder / "broken.py").write_text("def build():\n    raise OSError('no weights here')\n")
    broken = Template(f"{folder / 'broken.py'}:build")
    with broken, pytest.raises(InputError, match="no weights here"):
        broken.wait()


# The command line.


def save_plans(problem, folder):
    """Save a plan on one device and one on two; give the options that name them."""
    names = []
    for name, placement in (("one", np.zeros(problem.num_ops, np.int64)), ("two", split(problem))):
        path = folder / f"{name}.json"
        plan_of(problem, placement).save(path)
        names += ["--plan", str(path)]
    return names


@needs_cores
def test_the_command_compares_plans(problem, folder, model):
    plans = save_plans(problem, folder)
    box = ["--cluster", str(folder / "box-4GiB.toml")]
    done = CliRunner().invoke(app, ["measure", model, *plans, *box, "--steps", "8", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    one, two = told["plans"]
    assert one["num_steps"] == two["num_steps"] == 8
    assert one["low_s"] <= one["median_s"] <= one["high_s"]
    assert one["error"] == pytest.approx(one["simulated_s"] / one["median_s"] - 1)
    assert {*two["peak_bytes"]} == {"cpu:0", "cpu:1"}
    assert len(told["fastest_by_others"]) == 1
    assert told["fastest"] not in told["fastest_by_others"]


@needs_cores
@needs_proc
def test_the_command_tells_failures_in_its_exit_code(problem, folder, model, borrowed):
    plans = save_plans(problem, folder)
    box = ["--cluster", str(write_box(folder, "1MiB"))]
    done = CliRunner().invoke(app, ["measure", model, *plans, *box])
    assert done.exit_code == 1
    assert " ".join(done.stdout.split()).count(".json failed (memory)") == 2


def test_the_command_refuses_wrong_input(folder, model, problem):
    plan = save_plans(problem, folder)[:2]
    for arguments, words in (
        (["graph.json", *plan], "`graph.json` is a graph file"),
        ([model, *plan, *plan], "is given twice"),
        ([model, "--plan", "nowhere.json"], "There is no plan file at `nowhere.json`"),
        ([model, *plan, "--limit", "soon"], "`--limit` is 'soon'"),
    ):
        done = CliRunner().invoke(app, ["measure", *arguments])
        assert done.exit_code == 2
        assert words in " ".join(done.output.split())


def start(folder, model, problem):
    """Run a measurement that would take long, in a process of its own."""
    command = [sys.executable, "-m", "placewright.cli", "measure", model]
    command += [*save_plans(problem, folder), "--steps", "1000000"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def children_of(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[1]) == pid and words[0] != "Z":
            found.append(int(path.parent.name))
    return found


def wait_until(condition, seconds=120.0):
    for _ in range(int(seconds / 0.05)):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come true")


@needs_cores
@needs_proc
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_measurement_that_is_stopped_leaves_nothing(folder, model, problem, how):
    shared = {*os.listdir("/dev/shm")}
    command = start(folder, model, problem)
    (template,) = wait_until(lambda: children_of(command.pid))
    # Two plans, and plain PyTorch beside them.
    candidates = wait_until(lambda: len(c := children_of(template)) == 3 and c)
    command.send_signal(how)
    said = command.communicate(timeout=30)[1]
    wait_until(lambda: not any(map(is_alive, [template, *candidates])), seconds=10.0)
    assert {*os.listdir("/dev/shm")} <= shared
    if how == signal.SIGINT:
        assert command.returncode == 130
        assert said.splitlines()[-1] == "Stopped: nothing was measured to its end."


@needs_cores
@needs_proc
def test_a_template_ends_with_its_parent_while_it_is_being_built(folder, model, problem):
    command = start(folder, model, problem)
    (template,) = wait_until(lambda: children_of(command.pid))
    command.kill()
    command.communicate(timeout=30)
    wait_until(lambda: not is_alive(template), seconds=20.0)  # it may be importing PyTorch


@needs_cores
@needs_proc
def test_a_candidate_of_a_template_that_has_died_leaves_the_next_one_alone(model, problem):
    job = job_of(problem, np.zeros(problem.num_ops, dtype=np.int64))
    with Template(model) as template:
        old = started(template, job, 60.0)
        os.kill(template._process.pid, signal.SIGKILL)
        template._process.wait()
        new = started(template, job, 60.0)
        old.close()
        assert len(new.run(2, 60.0)) == 2
        new.close()


def test_numbers_that_only_repeating_a_step_makes_do_not_slow_it_down():
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormal numbers")
    lane, tiny = Lane(find_device("cpu:0")), torch.full((4,), 1e-40)
    step = SimpleNamespace(runner=SimpleNamespace(lanes={0: lane}))
    assert lane.submit(lambda: float((tiny * 0.5).sum())).result() > 0
    flush_denormals(step)
    assert lane.submit(lambda: float((tiny * 0.5).sum())).result() == 0
    lane.close()
    assert float((tiny * 0.5).sum()) > 0  # here as ever


# Learning from measured times.


@pytest.fixture(scope="module")
def gpt2(folder):
    return load_problem(load_model("tiny-gpt2"), folder / "box-4GiB.toml")


@pytest.fixture(scope="module")
def evaluator(gpt2):
    with MeasuredEvaluator(gpt2, "tiny-gpt2", limit_s=60.0, num_finalists=2) as made:
        made.prepare()
        yield made


@needs_cores
def test_equal_candidates_are_measured_once(evaluator, gpt2):
    before = evaluator.num_samples, evaluator.num_measured
    candidates = [Candidate(split(gpt2, seed)) for seed in (1, 2, 1)]
    found = evaluator.evaluate(candidates)
    assert evaluator.num_samples == before[0] + 3
    assert evaluator.num_measured == before[1] + 2
    assert found.objective_s[0] == found.objective_s[2]
    assert (found.overflow_bytes == 0).all()
    assert np.isfinite(found.objective_s).all()
    again = evaluator.evaluate(candidates[:1])
    assert again.objective_s[0] == found.objective_s[0]


@needs_cores
def test_annealing_learns_from_measured_times(evaluator, gpt2):
    result = place(gpt2, "annealing", budget="20 samples", evaluator=evaluator)
    assert result.samples == 20
    assert result.basis == "measured"
    assert result.is_feasible
    assert 0 < result.objective_s < 10
    assert result.describe()["measured_s"] == result.objective_s
    assert result.makespan_s == simulate(gpt2, result.placement).makespan_s


@needs_cores
def test_a_policy_learns_from_measured_times(evaluator, gpt2):
    result = place(gpt2, "hierarchical", budget="16 samples", evaluator=evaluator)
    assert result.samples == 16
    assert 0 < result.objective_s < 10


@needs_cores
def test_prescreened_candidates_get_a_time_but_cannot_win(evaluator, gpt2):
    one, two = np.zeros(gpt2.num_ops, dtype=np.int64), split(gpt2, 3)
    assert simulate(gpt2, two).makespan_s > 1.5 * simulate(gpt2, one).makespan_s
    evaluator.prescreen, before = 1.5, evaluator.num_measured
    try:
        found = evaluator.evaluate([Candidate(two), Candidate(one)])
    finally:
        evaluator.prescreen = None
    assert evaluator.num_measured <= before + 1
    assert found.best == 1
    assert np.isfinite(found.objective_s).all()


@needs_cores
@needs_proc
def test_candidates_that_fail_come_last(folder, model, borrowed):
    problem = load_problem(load_model(model), write_box(folder, "1MiB"))
    with MeasuredEvaluator(problem, model, limit_s=20.0) as evaluator:
        found = evaluator.evaluate([Candidate(split(problem)), Candidate(split(problem, 1))])
        assert np.isinf(found.objective_s).all()
        assert (found.overflow_bytes > 2 * MIB).all()
        assert [outcome.failure for outcome in evaluator.failures] == ["memory", "memory"]
        assert evaluator.confirm() is None
        result = place(problem, "annealing", budget="9 samples", evaluator=evaluator)
    assert not result.is_feasible
    assert result.history == ()


def test_devices_that_are_not_here_are_refused_before_anything_is_built(gpt2):
    far = Problem(gpt2.graph, load_cluster("two-hosts"))
    with pytest.raises(InputError, match="This machine has no device"):
        MeasuredEvaluator(far, "tiny-gpt2")


def test_only_the_same_problem_and_objective_are_measured(evaluator, gpt2, problem, borrowed):
    with pytest.raises(InputError, match="Only `latency` can be measured"):
        MeasuredEvaluator(problem, "tiny-gpt2", objective="throughput")
    with pytest.raises(InputError, match="expected a finite number, at least 1"):
        MeasuredEvaluator(problem, "tiny-gpt2", prescreen=0.5)
    with pytest.raises(InputError, match="`evaluator` is for"):
        place(problem, "annealing", evaluator=evaluator)
    other = MeasuredEvaluator(gpt2, "tiny-gpt2")  # whose template, borrowed, holds another one
    with other, pytest.raises(InputError, match="they are not the same model"):
        other.prepare()


@needs_cores
def test_the_place_command_measures(folder, model, borrowed, monkeypatch):
    monkeypatch.setattr(measured, "FINAL_STEPS", 10)
    box = ["--cluster", str(folder / "box-4GiB.toml"), "--placer", "annealing"]
    budget = ["--budget", "9 samples", "--measured", "--prescreen"]
    done = CliRunner().invoke(app, ["place", model, *box, *budget])
    assert done.exit_code == 0, done.output
    said = done.stderr.splitlines()
    assert said[0].startswith("Building ")
    assert any(
        re.fullmatch(r"The best \d are run again, in turns: up to \d+ s\.\.\.", s) for s in said
    )
    assert "placements were run." in done.stderr
    assert "Measured step time" in done.stdout
    assert "(9 tried in" in done.stdout
    done = CliRunner().invoke(app, ["place", model, *box, "--prescreen"])
    assert done.exit_code == 2
    assert "`--prescreen` is for `--measured`" in done.output
