"""The executor: any placement gives what the unplaced model gives, to the bit."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

import placewright as pw
from placewright import zoo
from placewright.bench.fidelity_plans import settled
from placewright.errors import InputError

torch = pytest.importorskip("torch")

from placewright.execute.devices import Lane, find_device, find_devices  # noqa: E402
from placewright.execute.kernels import laid_out  # noqa: E402
from placewright.execute.placed import PlacedStep, whole_step  # noqa: E402
from tests.marks import any_call, one_thread, two_cores  # noqa: E402

TINY = [name for name in zoo.RECIPES if name.startswith("tiny-")]
CORES = ("cpu:0", "cpu:1")
BOX = """
name = "box"
[[device]]
names = {names}
kind = "cpu"
memory = "4GiB"
flops = {{ float32 = 5e10 }}
memory_bandwidth = "10GB/s"
launch = "5us"
{more}
[link]
latency = "20us"
bandwidth = "5GB/s"
"""
GPU = """
[[device]]
name = "cuda:0"
kind = "cuda"
memory = "8GiB"
flops = { float32 = 3e13 }
memory_bandwidth = "1TB/s"
launch = "5us"
"""

pytestmark = [
    two_cores,
    one_thread,
    any_call,
]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture
def box(tmp_path):
    path = tmp_path / "box.toml"
    path.write_text(BOX.format(names=[*CORES], more=""))
    return pw.Cluster.load(path)


def random_placement(problem, seed):
    placement = np.random.default_rng(seed).integers(0, problem.num_devices, problem.num_ops)
    placement[problem.colocation_members] = placement[problem.colocation_leaders]
    return placement


def plan_of(graph, cluster, seed=0, placement=None):
    problem = pw.Problem(graph, cluster)
    if placement is None:
        placement = random_placement(problem, seed)
    timeline = pw.simulate(problem, placement)
    return pw.Plan.of(timeline, "test", lower_bound_s=0.0, placer="random")


def step_of(name):
    """A tiny workload: its module, its inputs and what `capture` is given besides."""
    work = zoo.build(name, "cpu")
    given = work.arguments()
    del given["name"]
    return given.pop("module"), given.pop("inputs"), given


def sharp_step_of(name):
    """A tiny workload in double precision where a GPU can, and how far rounding may go."""
    module, inputs, given = step_of(name)
    if name not in ("tiny-inception", "tiny-resnet", "tiny-nasnet", "tiny-rnnlm", "tiny-nmt"):
        return module, inputs, given, 2e-3
    # Batch norm over so few values makes a large difference of the last bit.
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    return module.double(), inputs, given, 1e-6


# --- Whole steps. ---


@pytest.mark.parametrize("name", TINY)
def test_any_placement_of_a_step_gives_the_same_to_the_bit(name, box):
    module, inputs, given = step_of(name)
    step = pw.capture(module, inputs, **given)
    plain = copy.deepcopy(module)
    loss, outputs, gradients = step.module(*step.bind(plain, inputs, given["targets"]))
    expected = [loss, *outputs, *gradients]
    problem = pw.Problem(step.graph, box)
    for seed in range(2):
        ours = copy.deepcopy(module)
        timeline = pw.simulate(problem, random_placement(problem, seed))
        placed = PlacedStep.of_timeline(step, ours, timeline, whole_step(step, True))
        found = placed.run([*inputs, *given["targets"]])
        placed.close()
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        for key, value in plain.state_dict().items():
            assert torch.equal(ours.state_dict()[key], value), key


def test_steps_follow_each_other_with_the_optimisers_state(box):
    module, inputs, given = step_of("tiny-gpt2")
    plain = copy.deepcopy(module)
    plan = plan_of(pw.capture(module, inputs, **given).graph, box, seed=3)
    step_given = {key: value for key, value in given.items() if key != "train"}
    step = pw.TrainStep(plan, module, inputs, **step_given)
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    for _ in range(4):
        ours = step(inputs, given["targets"])
        theirs = given["loss"](plain(*inputs), *given["targets"])
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        assert torch.equal(ours, theirs)
    step.close()


# --- `apply`. ---


@pytest.mark.parametrize("name", TINY)
def test_an_applied_module_trains_as_before(name, box):
    module, inputs, given = step_of(name)
    plain = copy.deepcopy(module)
    placed = pw.apply(
        plan_of(pw.capture(module, inputs, **given).graph, box, seed=1), module, inputs, **given
    )
    assert [*placed.state_dict()] == [*plain.state_dict()]
    assert {id(p) for p in placed.parameters()} == {id(p) for p in module.parameters()}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (placed, plain)]
    for _ in range(2):
        losses = [given["loss"](m(*inputs), *given["targets"]) for m in (placed, plain)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for ours, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
    for key, value in plain.state_dict().items():
        assert torch.equal(placed.state_dict()[key], value), key


def test_forward_passes_may_wait_for_their_backward_passes(box):
    module, inputs, given = step_of("tiny-gpt2")
    plain = copy.deepcopy(module)
    plan = plan_of(pw.capture(module, inputs, **given).graph, box, seed=5)
    placed = pw.apply(plan, module, inputs, **given)
    other = ((inputs[0] + 1) % 50,)
    for each in (placed, plain):
        losses = [given["loss"](each(*x), *given["targets"]) for x in (inputs, other)]
        (losses[0] + 2 * losses[1]).backward()
    for ours, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_another_loss_than_the_plans_may_be_used(box):
    module, inputs, given = step_of("tiny-gpt2")
    plain = copy.deepcopy(module)
    plan = plan_of(pw.capture(module, inputs, **given).graph, box, seed=5)
    placed = pw.apply(plan, module, inputs, **given)
    for each in (placed, plain):
        each(*inputs).square().mean().backward()
    for ours, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@dataclass
class Answer:
    logits: torch.Tensor
    kept: list


class Structured(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, *, scale=None):
        y = self.left(x).relu()
        return Answer(self.right(y) * scale, [y.argmax(dim=1), "word"])


def test_what_comes_back_has_the_modules_own_structure(box):
    module, x = Structured(), torch.randn(3, 4)
    kwargs = {"scale": torch.tensor(2.0)}
    graph = pw.capture(module, x, kwargs=kwargs).graph
    placed = pw.apply(plan_of(graph, box, seed=2), module, x, kwargs=kwargs)
    found, expected = placed(x, **kwargs), module(x, **kwargs)
    assert isinstance(found, Answer)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.kept[0], expected.kept[0])
    assert found.kept[1] == "word"


def test_without_gradients_nothing_is_kept(box):
    module, inputs, given = step_of("tiny-gpt2")
    plan = plan_of(pw.capture(module, inputs, **given).graph, box)
    placed = pw.apply(plan, module, inputs, **given)
    with torch.no_grad():
        found = placed(*inputs)
    assert not found.requires_grad
    assert torch.equal(found, module(*inputs))


def test_buffers_change_as_they_would(box):
    module, inputs, given = step_of("tiny-resnet")
    plain = copy.deepcopy(module)
    plan = plan_of(pw.capture(module, inputs, **given).graph, box, seed=4)
    placed = pw.apply(plan, module, inputs, **given)
    with torch.no_grad():
        placed(*inputs)
        plain(*inputs)
    for (name, ours), theirs in zip(placed.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.dropout(layer(x), 0.5)
        return x


def test_random_numbers_do_not_depend_on_the_placement(box):
    module, x = Dropping(), torch.randn(4, 8)
    graph = pw.capture(module, x).graph
    found = []
    for seed in range(3):
        placed = pw.apply(plan_of(graph, box, seed), module, x)
        torch.manual_seed(7)
        found.append([placed(x), placed(x)])
    for first, second in found:
        assert torch.equal(first, found[0][0])
        assert torch.equal(second, found[0][1])
        assert not torch.equal(first, second)
    assert 0.2 < float((found[0][0] == 0).float().mean()) < 0.8


# --- Bad input. ---


@pytest.fixture
def applied(box):
    module, inputs, given = step_of("tiny-gpt2")
    plan = plan_of(pw.capture(module, inputs, **given).graph, box)
    return plan, module, inputs, given


def test_a_plan_for_another_model_is_refused(applied):
    plan, *_ = applied
    module, inputs, given = step_of("tiny-bert")
    with pytest.raises(InputError, match=r"made for model .* another fingerprint"):
        pw.apply(plan, module, inputs, **given)


def test_weights_of_another_shape_are_refused(applied):
    plan, module, inputs, given = applied
    module.norm = torch.nn.LayerNorm(32, bias=False)
    with pytest.raises(InputError, match="its structure, its shapes"):
        pw.apply(plan, module, inputs, **given)


def test_a_device_that_is_not_here_is_named(applied):
    plan, module, inputs, given = applied
    far = dict.fromkeys(plan.devices, "cuda:7")
    plan = msgspec.structs.replace(plan, devices=far)
    with pytest.raises(InputError, match="has no device `cuda:7`"):
        pw.apply(plan, module, inputs, **given)


def test_a_plan_that_no_longer_fits_is_refused(applied):
    plan, module, inputs, given = applied
    predicted = msgspec.structs.replace(plan.predicted, peak_bytes={"cpu:0": 2**45, "cpu:1": 0})
    plan = msgspec.structs.replace(plan, predicted=predicted)
    with pytest.raises(InputError, match=r"needs 32.00 TiB on `cpu`"):
        pw.apply(plan, module, inputs, **given)


def test_a_second_backward_pass_adds_the_same_gradients(applied):
    plan, module, inputs, given = applied
    placed = pw.apply(plan, module, inputs, **given)
    loss = placed(*inputs).sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in placed.parameters()]
    loss.backward()
    for parameter, gradient in zip(placed.parameters(), first, strict=True):
        assert torch.equal(parameter.grad, gradient + gradient)


def test_a_second_backward_pass_after_an_update_is_refused(applied):
    plan, module, inputs, given = applied
    placed = pw.apply(plan, module, inputs, **given)
    loss = placed(*inputs).sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        next(placed.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as in eager
        loss.backward()


class Penalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x)


def test_a_loss_may_read_parameters(box):
    module, x = Penalised(), torch.randn(2, 3)
    plain = copy.deepcopy(module)

    def loss(y):
        return y.mean() + module.layer.weight.square().sum()

    given = {"train": True, "loss": loss, "optimizer": "sgd"}
    plan = plan_of(pw.capture(module, x, **given).graph, box)
    placed = pw.apply(plan, module, x, **given)
    loss(placed(x)).backward()
    (plain(x).mean() + plain.layer.weight.square().sum()).backward()
    for ours, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    del given["train"]
    assert torch.isfinite(pw.TrainStep(plan, module, x, **given)(x))


def test_a_module_placed_for_inference_gives_inputs_no_gradients(box):
    module, x = Structured(), torch.randn(3, 4)
    kwargs = {"scale": torch.tensor(2.0)}
    placed = pw.apply(
        plan_of(pw.capture(module, x, kwargs=kwargs).graph, box), module, x, kwargs=kwargs
    )
    x.requires_grad_()
    with pytest.raises(InputError, match="was placed for inference"):
        placed(x, **kwargs)
    with torch.no_grad():
        assert torch.equal(placed(x, **kwargs).logits, module(x, **kwargs).logits)


# --- Threads. ---


def ours():
    return [t for t in threading.enumerate() if t.name.startswith("placewright")]


def test_a_lane_stays_on_its_core_with_one_thread():
    cores = sorted(os.sched_getaffinity(0))
    lane = Lane(find_device("cpu:1"))
    assert lane.submit(lambda: os.sched_getaffinity(0)).result() == {cores[1]}
    assert lane.submit(torch.get_num_threads).result() == 1
    whole = Lane(find_device("cpu"))
    assert whole.submit(torch.get_num_threads).result() == len(cores)
    for each in (lane, whole):
        each.close()
    assert sorted(os.sched_getaffinity(0)) == cores
    assert torch.get_num_threads() == 1  # as this test has set it


def test_threads_to_come_have_the_callers_setting():
    torch.set_num_threads(2)
    lane = Lane(find_device("cpu:0"))
    found = []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    lane.close()
    assert found == [2]


def test_helpers_of_the_caller_end_where_a_lane_has_all_cores():
    torch.set_num_threads(8)
    torch.ones(2**20).sin_()
    before = count_tasks()
    lane = Lane(find_device("cpu"))
    deadline = time.monotonic() + 10
    while count_tasks() > before - 6 + 1 and time.monotonic() < deadline:  # the lane is one, too
        time.sleep(0.01)
    assert count_tasks() <= before - 6 + 1
    assert torch.get_num_threads() == 8
    lane.close()


def count_tasks():
    return len(os.listdir("/proc/self/task"))


def test_a_processor_and_its_cores_are_not_mixed():
    with pytest.raises(InputError, match="one or the other"):
        find_devices(("cpu", "cpu:0"))


def test_threads_end_when_nobody_needs_them(applied):
    plan, module, inputs, given = applied
    before = {*ours()}
    placed = pw.apply(plan, module, inputs, **given)
    placed(*inputs)
    assert {*ours()} - before
    del placed
    gc.collect()
    assert not {*ours()} - before


def test_a_failure_in_one_lane_ends_the_step_in_all(applied):
    plan, module, inputs, given = applied
    step = pw.capture(module, inputs, **given)
    placed = PlacedStep.of_plan(step, module, plan)
    wrong = [torch.full_like(inputs[0], 10**6), *given["targets"]]  # no such word
    expected = given["loss"](module(*inputs), *given["targets"])
    with pytest.raises(IndexError):
        placed.run(wrong)
    again = placed.run([*inputs, *given["targets"]])
    assert torch.equal(again[0], expected)
    placed.close()


def test_a_step_that_was_closed_says_so(applied):
    plan, module, inputs, given = applied
    placed = PlacedStep.of_plan(pw.capture(module, inputs, **given), module, plan)
    placed.close()
    with pytest.raises(RuntimeError, match="This step is closed; make a new one"):
        placed.run([*inputs, *given["targets"]])


def test_ctrl_c_ends_a_step_without_leaving_threads_behind(tmp_path):
    (tmp_path / "box.toml").write_text(BOX.format(names=[*CORES], more=""))
    assert interrupted(tmp_path / "box.toml") == "left [] 0\n"


def interrupted(box):
    """Interrupt steps on two devices: the threads, and bytes of pinned memory, that are left."""
    script = textwrap.dedent(
        """
        import gc, sys, threading, torch
        import placewright as pw

        class Long(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(400, 400) / 20)
            def forward(self, x):
                for _ in range(3000):
                    x = (x @ self.weight).tanh()
                return x

        module, x = Long(), torch.randn(400, 400)
        graph = pw.capture(module, x).graph
        problem = pw.Problem(graph, pw.Cluster.load(sys.argv[1]))
        placement = [i % 2 for i in range(graph.num_ops)]
        timeline = pw.simulate(problem, problem.check(placement).placement)
        plan = pw.Plan.of(timeline, "long", lower_bound_s=0.0, placer="none")
        placed = pw.apply(plan, module, x)
        print("ready", flush=True)
        try:
            with torch.no_grad():
                while True:
                    placed(x)
        except KeyboardInterrupt:
            pass
        del placed, module
        gc.collect()
        left = [t.name for t in threading.enumerate() if t.name.startswith("placewright")]
        pinned = 0
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch._C._host_emptyCache()
            pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
        print("left", left, pinned, flush=True)
        """
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(box)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 0
    return rest


def test_a_result_with_other_strides_gets_those_that_were_captured():
    made = torch.arange(6.0).view(2, 3)
    assert laid_out(made, (3, 1)) is made
    assert laid_out(made[:1], (7, 1)).data_ptr() == made.data_ptr()  # of one row
    other = laid_out(made, (1, 2))
    assert other.stride() == (1, 2)
    assert torch.equal(other, made)


# --- On a GPU. ---


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", TINY)
def test_any_placement_on_cpu_and_gpu_gives_the_same_up_to_rounding(name, tmp_path):
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu"], more=GPU))
    box = pw.Cluster.load(tmp_path / "box.toml")
    check_on_gpus(name, box, [1])


class GroupedAttention(torch.nn.Module):
    """Attention whose keys and values are shared by two heads each."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(16, 64)

    def forward(self, x):
        query, key, value = self.lin(x).split((32, 16, 16), -1)
        heads = [t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (query, key, value)]
        made = torch.nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        return made.transpose(1, 2).flatten(2)


@pytest.mark.gpu
@on_gpu
def test_attention_with_shared_heads_on_a_gpu(tmp_path):
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu"], more=GPU))
    module, x = GroupedAttention(), torch.randn(3, 5, 16)
    expected = module(x)
    expected.square().sum().backward()
    gradient, module.lin.weight.grad = module.lin.weight.grad, None
    how = {"train": True, "loss": torch.sum}
    graph = pw.capture(module, x, **how).graph
    problem = pw.Problem(graph, pw.Cluster.load(tmp_path / "box.toml"))
    timeline = pw.simulate(problem, np.ones(problem.num_ops, dtype=np.int64))
    plan = pw.Plan.of(timeline, "gpu", lower_bound_s=0.0, placer="hand")
    found = pw.apply(plan, module, x, **how)(x)
    assert torch.allclose(found.cpu(), expected, atol=1e-3)
    found.square().sum().backward()
    assert torch.allclose(module.lin.weight.grad.cpu(), gradient, atol=1e-2)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("train", [False, True])
def test_results_on_a_gpu_are_laid_out_as_they_were_captured(train, tmp_path):
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu"], more=GPU))
    module = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    module, x = module.train(train), torch.randn(3, 5, 32)
    how = {"train": True, "loss": torch.sum} if train else {}
    expected = module(x).detach()
    graph = pw.capture(module, x, **how).graph
    problem = pw.Problem(graph, pw.Cluster.load(tmp_path / "box.toml"))
    timeline = pw.simulate(problem, np.ones(problem.num_ops, dtype=np.int64))
    plan = pw.Plan.of(timeline, "gpu", lower_bound_s=0.0, placer="hand")
    placed = pw.apply(plan, module, x, **how)
    with torch.set_grad_enabled(train):
        for _ in range(4):
            found = placed(x)
    assert torch.allclose(found.detach().cpu(), expected, atol=1e-3)
    if train:
        found.sum().backward()


@pytest.mark.gpu
@on_gpu
def test_ctrl_c_leaves_no_pinned_memory_behind(tmp_path):
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu:0"], more=GPU))
    assert interrupted(tmp_path / "box.toml") == "left [] 0\n"


@pytest.mark.gpu
@on_gpu
def test_a_step_that_fails_leaves_no_pinned_memory_behind(tmp_path):
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu:0"], more=GPU))
    module, inputs, given = step_of("tiny-gpt2")
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, pw.Cluster.load(tmp_path / "box.toml"))
    gc.collect()
    before = pinned_bytes()
    kinds = step.graph.op_kinds
    placement = [0 if "embedding" in kind or k % 3 == 0 else 1 for k, kind in enumerate(kinds)]
    timeline = pw.simulate(problem, settled(problem, np.array(placement)))
    placed = PlacedStep.of_timeline(step, module, timeline)
    for _ in range(4):
        placed.run([*inputs, *given["targets"]])
    with pytest.raises(IndexError):
        placed.run([torch.full_like(inputs[0], 10**6), *given["targets"]])  # no such word
    placed.close()
    del placed, module, step
    gc.collect()
    assert pinned_bytes() == before


def pinned_bytes():
    """Tell what is taken of pinned memory; PyTorch keeps none for later, meanwhile."""
    torch.cuda.synchronize()
    torch._C._host_emptyCache()
    return torch.cuda.host_memory_stats()["allocated_bytes.current"]


def check_on_gpus(name, box, alone):
    """Hold a step equal to eager PyTorch up to rounding, on single devices and anywhere."""
    module, inputs, given, tolerance = sharp_step_of(name)
    step = pw.capture(module, inputs, **given)
    plain = copy.deepcopy(module)
    loss, outputs, gradients = step.module(*step.bind(plain, inputs, given["targets"]))
    expected = [loss, *outputs, *gradients]
    problem = pw.Problem(step.graph, box)
    every = [np.full(problem.num_ops, d) for d in alone]
    for placement in (*every, *(random_placement(problem, seed) for seed in range(3))):
        mine = copy.deepcopy(module)
        timeline = pw.simulate(problem, placement)
        placed = PlacedStep.of_timeline(step, mine, timeline, whole_step(step, True))
        found = placed.run([*inputs, *given["targets"]])
        placed.close()
        for x, y in zip(found, expected, strict=True):
            scale = max(float(y.abs().max()), 1e-3) if y.is_floating_point() else 1.0
            assert float((x.cpu() - y).abs().max()) <= tolerance * scale
