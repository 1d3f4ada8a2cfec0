"""Plain PyTorch beside plans: the same step, in turns with them, and what is said of it."""

from __future__ import annotations

import io
import json
import os
import re

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from placewright.cli import app
from placewright.errors import InputError
from placewright.load import load_model, load_problem
from placewright.plan import Plan
from placewright.simulator import simulate

torch = pytest.importorskip("torch")

import placewright as pw  # noqa: E402
from placewright.execute import _jobs  # noqa: E402
from placewright.execute._eager import EagerStep  # noqa: E402
from placewright.execute._jobs import choose_eager, job_of_eager  # noqa: E402
from placewright.execute._wire import Job  # noqa: E402
from placewright.execute.measuring import (  # noqa: E402
    EAGER,
    Effort,
    Measurement,
    compare_with_best,
    compare_with_eager,
    measure_jobs,
)
from placewright.execute.processes import CandidateError, Template  # noqa: E402
from placewright.frontends._optimizers import make_optimizer  # noqa: E402
from placewright.report.measurements import (  # noqa: E402
    describe_measurements,
    show_measurements,
    tell_beside_eager,
)

from .test_measuring import BOX, MODEL, MadeUp, MadeUpTemplate  # noqa: E402

needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two cores are needed as two devices",
)


@pytest.fixture(autouse=True)
def undisturbed():
    """A step of plain PyTorch takes over its thread; give it back."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)
    os.sched_setaffinity(0, cores)


# The step.


def branches(optimizer):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    inputs, targets = torch.randn(4, 6), torch.randn(4, 5)
    loss = torch.nn.functional.mse_loss
    return {
        "module": module,
        "inputs": inputs,
        "train": True,
        "loss": loss,
        "targets": targets,
        "optimizer": optimizer and make(optimizer, module),
    }


def make(optimizer, module):
    if optimizer == "two groups":
        weight, *others = module.parameters()
        groups = [{"params": [weight], "lr": 0.1}, {"params": others, "weight_decay": 0.5}]
        return torch.optim.SGD(groups, lr=0.3, momentum=0.8, nesterov=True, foreach=True)
    if optimizer == "some":
        return torch.optim.AdamW([next(module.parameters())], lr=0.1, amsgrad=True)
    return optimizer


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "two groups", "some"])
def test_a_training_step_is_the_step_that_people_write(optimizer):
    mine, theirs = branches(optimizer), branches(optimizer)
    module, chosen = theirs["module"], theirs["optimizer"]
    if isinstance(chosen, str):
        chosen = make_optimizer(chosen, module)
    step = EagerStep(mine, "cpu")
    for _ in range(3):
        step.run()
        module.zero_grad()
        theirs["loss"](module(theirs["inputs"]), theirs["targets"]).backward()
        chosen.step()
    assert torch.equal(module[1].running_mean, mine["module"][1].running_mean)
    for one, other in zip(mine["module"].parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_without_an_update_leaves_parameters_alone():
    given = branches(None)
    before = [each.detach().clone() for each in given["module"].parameters()]
    EagerStep(given, "cpu").run()
    after = [*given["module"].parameters()]
    assert all(map(torch.equal, before, after))
    assert all(each.grad is not None for each in after)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x, *, cache):
        cache.items.append(x)
        self.seen.append((len(cache.items), torch.is_grad_enabled()))
        return x + 1


class Cache:
    def __init__(self):
        self.items = []


def test_each_forward_pass_has_no_gradients_and_its_arguments_as_they_were():
    module = Counting()
    given = {"module": module, "inputs": torch.ones(2), "kwargs": {"cache": Cache()}}
    step = EagerStep(given, "cpu")
    step.run()
    step.run()
    assert module.seen == [(1, False), (1, False)]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # of PyTorch before 2.12
def test_memory_is_what_stays_and_what_a_step_makes():
    wide = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.Linear(4096, 256))
    step = EagerStep({"module": wide, "inputs": torch.ones(512, 256)}, "cpu")
    step.run()
    held = sum(each.nbytes for each in wide.parameters()) + 512 * 256 * 4
    made = 512 * (4096 + 256) * 4
    assert step.peaks() == {"cpu": pytest.approx(held + made, rel=0.05)}
    given = branches("adam")
    found = EagerStep(given, "cpu")
    found.run()
    assert found.peaks()["cpu"] > 3 * sum(p.nbytes for p in given["module"].parameters())


# Which device it gets.


class Small:
    """A template on whose GPU nothing has room."""

    def __init__(self, failed=None):
        self.failed, self.jobs, self.is_open = failed, [], True

    def begin(self, job, limit_s):
        self.jobs.append(job)
        return self

    def ready(self, limit_s):
        if self.failed is not None:
            raise self.failed

    def run(self, num_steps, limit_s):
        return [1.0] * num_steps

    def close(self):
        self.is_open = False


class OnDevices:
    def __init__(self, *names):
        self.devices = dict(enumerate(names))


def test_it_has_all_cores_unless_a_plan_uses_a_gpu():
    template = Small()
    job, note = choose_eager(template, [OnDevices("cpu:0", "cpu:1")], None, 1.0)
    assert (job, note, template.jobs) == (Job(eager="cpu"), "", [])
    plans = [OnDevices("cpu"), OnDevices("cpu", "cuda:1/0-9", "cuda:2")]
    job, note = choose_eager(template, plans, None, 1.0)
    assert (job, note) == (Job(eager="cuda:1"), "")
    assert template.jobs == [job]
    assert not template.is_open


def test_where_the_gpu_has_no_room_it_has_all_cores_and_says_so():
    template = Small(CandidateError("memory", "GPU 0 has no room for another 2.00 GiB."))
    job, note = choose_eager(template, [OnDevices("cuda:0", "cpu")], None, 1.0)
    assert job == Job(eager="cpu")
    assert note == (
        "Plain PyTorch cannot run the step on cuda:0 alone, and is timed on all cores instead:"
        " GPU 0 has no room for another 2.00 GiB."
    )


def test_it_may_use_what_the_devices_have_together(tmp_path):
    words = BOX.format(memory="1GiB")
    share = words[words.index("[[device]]") : words.index("[link]")]
    share = share.replace('"cpu:0", "cpu:1"', '"cuda:0/0-9", "cuda:0/10-19"')
    text = words.replace("[link]", share.replace('"cpu"', '"cuda"') + "[link]")
    (tmp_path / "box.toml").write_text(text)
    box = pw.Cluster.load(tmp_path / "box.toml")
    assert job_of_eager("cpu", box) == Job(eager="cpu", cpu_bytes=2 * 2**30)
    shares = {"cuda:0/0-9": 2**30, "cuda:0/10-19": 2**30}
    assert job_of_eager("cuda:0", box).gpu_bytes == shares


# What is said.


def measured(name, median_s, eager="", **more):
    random = np.random.default_rng(0 if eager else 1)
    rounds = tuple(median_s * np.exp(0.01 * random.standard_normal((6, 10))))
    return Measurement(name=name, rounds=rounds, has_settled=True, eager=eager, num_cores=2, **more)


def words_of(plan_s, eager_s, device="cpu"):
    found = [measured("a.json", plan_s), measured(EAGER, eager_s, device)]
    (words,) = tell_beside_eager(found, compare_with_eager(found))
    return words


def test_a_plan_that_is_faster_is_said_to_be_so():
    found = re.fullmatch(
        r"The plan takes 20\.\d+ ms; plain PyTorch on all 2 cores takes 30\.\d+ ms: the plan is"
        r" (1\.\d\d) times as fast \(95% interval (1\.\d\d) – (1\.\d\d)\)\.",
        words_of(0.0203, 0.0305),
    )
    assert found is not None
    ratio, low, high = map(float, found.groups())
    assert 1.45 < low <= ratio <= high < 1.55


def test_a_plan_that_is_no_faster_is_said_to_be_so():
    found = re.fullmatch(
        r"The plan is no faster than plain PyTorch on cuda:0 alone \(20\.\d+ ms\): it takes"
        r" 30\.\d+ ms, 1\.(49|50|51) times as long \(95% interval 1\.\d\d – 1\.\d\d\)\.",
        words_of(0.0305, 0.0203, "cuda:0"),
    )
    assert found is not None
    assert words_of(0.0203, 0.0203).startswith("The plan is no faster than plain PyTorch on all")


def test_each_of_several_plans_is_named_and_failures_are_told():
    plain = measured(EAGER, 0.02, "cpu", note="It is here.")
    found = [measured("a.json", 0.01), measured("b.json", 0.03), plain]
    said = tell_beside_eager(found, compare_with_eager(found))
    assert [words.split()[0] for words in said] == ["It", "a.json", "b.json"]
    assert {*compare_with_best(found)} == {"b.json"}  # among plans alone
    failed = Measurement(name=EAGER, eager="cpu", failure="memory", reason="No room.", num_cores=1)
    found = [measured("a.json", 0.01), failed]
    assert compare_with_eager(found) == {}
    said = tell_beside_eager(found, {})
    assert said == ["plain PyTorch on the one core failed (memory): No room."]
    assert tell_beside_eager(found[:1], {}) == []


def test_plain_pytorch_neither_drops_plans_nor_is_dropped():
    made = {"a": MadeUp(0.02), "b": MadeUp(0.03), "plain": MadeUp(0.01, seed=1)}
    jobs = {name: Job(device_names=(name,)) for name in made}
    jobs["plain"] = msgspec.structs.replace(jobs["plain"], eager="cpu")
    effort = Effort(target=1e-6)
    found = measure_jobs(MadeUpTemplate(**made), jobs, effort, drops=True)
    assert [each.is_dropped for each in found] == [False, True, False]
    assert [each.eager for each in found] == ["", "", "cpu"]


def test_where_the_work_is_gets_told():
    said = []
    jobs = {"a": Job(device_names=("a",))}
    effort = Effort(target=1e-6, max_steps=40)
    measure_jobs(MadeUpTemplate(a=MadeUp(0.01)), jobs, effort, progress=said.append)
    assert said[:2] == ["a gets ready", "a warms up"]
    assert said[-1] == "memory of a"
    assert re.fullmatch(r"turn 1 of each; \d+ steps so far, at most 40", said[2])


# Real processes.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("beside")
    (made / "model.py").write_text(MODEL)
    (made / "box.toml").write_text(BOX.format(memory="4GiB"))
    return made


@pytest.fixture(scope="module")
def plan(folder):
    problem = load_problem(load_model(f"{folder / 'model.py'}:build"), folder / "box.toml")
    timeline = simulate(problem, np.zeros(problem.num_ops, dtype=np.int64))
    made = Plan.of(timeline, "a plan", lower_bound_s=0.0, placer="given")
    made.save(folder / "plan.json")
    return made


@needs_cores
def test_the_command_holds_a_plan_against_plain_pytorch(folder, plan):
    model, path = f"{folder / 'model.py'}:build", str(folder / "plan.json")
    command = ["measure", model, "--plan", path, "--steps", "8", "--cluster"]
    done = CliRunner().invoke(app, [*command, str(folder / "box.toml"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [each["plan"] for each in told["plans"]] == [path]
    assert told["fastest"] == path
    eager = told["eager"]
    assert (eager["device"], eager["num_steps"], eager["failure"]) == ("cpu", 8, None)
    assert eager["num_cores"] == len(os.sched_getaffinity(0))
    assert eager["low_s"] <= eager["median_s"] <= eager["high_s"]
    assert eager["peak_bytes"]["cpu"] > 2**20
    ratio = told["by_eager"][path]
    assert ratio["is_faster"] == (ratio["high"] < 1)
    assert len(told["answer"]) == 1
    assert "load" in told


@needs_cores
def test_plain_pytorch_can_be_left_out(folder, plan):
    model = f"{folder / 'model.py'}:build"
    command = ["measure", model, "--plan", str(folder / "plan.json"), "--steps", "3"]
    done = CliRunner().invoke(app, [*command, "--no-eager"])
    assert done.exit_code == 0, done.output
    assert "plain PyTorch" not in done.stdout
    with pytest.raises(InputError, match="Rename it"):
        pw.measure(model, {EAGER: plan})


@needs_cores
def test_an_exported_program_is_run_in_plain_pytorch_too(folder):
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    path = folder / "program.pt2"
    torch.export.save(torch.export.export(module, (torch.randn(2, 8),)), path)
    with Template(str(path)) as template:
        jobs = {EAGER: job_of_eager("cpu", None)}
        (found,) = measure_jobs(template, jobs, Effort(max_steps=4))
    assert (found.failure, found.num_steps, found.eager) == (None, 4, "cpu")
    assert found.peak_bytes["cpu"] > 0


@needs_cores
def test_a_failure_of_plain_pytorch_is_told_and_is_not_the_plans(folder, plan, monkeypatch):
    tight = Job(eager="cpu", cpu_bytes=2**23)
    monkeypatch.setattr(_jobs, "job_of_eager", lambda *_: tight)
    found = pw.measure(f"{folder / 'model.py'}:build", {"mine": plan}, effort=Effort(max_steps=3))
    assert [each.failure for each in found] == [None, "memory"], found[1].reason
    shown = Console(width=200, file=io.StringIO())
    shown.print(show_measurements(found, {"mine": plan}, {}, {}, None))
    assert "failed (memory): " in shown.file.getvalue()
    told = describe_measurements(found, {"mine": plan}, {}, {})
    assert told["eager"]["failure"] == "memory"
    assert told["by_eager"] == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_plain_pytorch_trains_on_a_gpu(folder):
    with Template(f"{folder / 'model.py'}:build") as template:
        job, note = choose_eager(template, [OnDevices("cuda:0")], None, 120.0)
        assert (job.eager, note) == ("cuda:0", "")
        (found,) = measure_jobs(template, {EAGER: job}, Effort(max_steps=5))
        assert (found.failure, found.reason, found.num_steps) == (None, "", 5)
        assert found.peak_bytes["cuda:0"] > 2**20
        tight = Job(eager="cuda:0", gpu_bytes={"cuda:0": 1})
        (found,) = measure_jobs(template, {EAGER: tight}, Effort(max_steps=5))
        assert found.failure == "memory"
