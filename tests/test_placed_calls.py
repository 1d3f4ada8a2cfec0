"""A placed module is called as its module is: every kind of call, each held equal to eager."""

from __future__ import annotations

import copy
import inspect
import io
import subprocess
import sys
import textwrap
import warnings

import pytest

import placewright as pw
from placewright.errors import InputError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from placewright.execute.calls import NewProgramWarning  # noqa: E402
from tests.marks import any_call, one_thread, two_cores  # noqa: E402
from tests.random_module_cases import make_plan  # noqa: E402

pytestmark = [
    two_cores,
    one_thread,
    any_call,
]

ALTERNATING = -2


def place(module, inputs, *, seed=ALTERNATING, **how):
    """Place a copy of a module at random."""
    module = copy.deepcopy(module)
    plan = make_plan(pw.capture(module, inputs, **how).graph, seed)
    return pw.apply(plan, module, inputs, **how)


def place_step(module, inputs, *, seed=ALTERNATING, **how):
    """Place the whole training step of a copy of a module at random."""
    module = copy.deepcopy(module)
    plan = make_plan(pw.capture(module, inputs, train=True, **how).graph, seed)
    return module, pw.TrainStep(plan, module, inputs, **how)


def same(ours, theirs):
    if isinstance(theirs, (tuple, list)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours is theirs is None or torch.equal(ours, theirs)


def gradients_of(module):
    return [p.grad for p in module.parameters()]


class Function(nn.Module):
    """A linear layer, and a function of it."""

    def __init__(self, function, size=8):
        super().__init__()
        self.lin = nn.Linear(size, size)
        self.function = function

    def forward(self, x):
        return self.function(self.lin, x)


# --- In-place ops between views of one storage. ---


def _halves(lin, x):
    a, b = lin(x).chunk(2, -1)
    return a.mul_(b) + 1


def _slices(lin, x):
    y = lin(x)
    y[..., :4] *= y[..., 4:]
    return y


def _gate(lin, x):
    a, b = lin(x).chunk(2, -1)
    return F.silu(a, inplace=True).mul_(b)


def _sums(lin, x):
    a, b = lin(x).chunk(2, -1)
    a.add_(b)
    b.add_(a)
    return a, b, a.add_(b)


@pytest.mark.parametrize("function", [_halves, _slices, _gate, _sums])
@pytest.mark.parametrize("seed", [-1, ALTERNATING, 1, 2])
def test_in_place_ops_between_views_of_one_storage(function, seed):
    module, x = Function(function), torch.randn(4, 8)
    with torch.no_grad():
        expected = module(x)
    assert same(place(module, x, seed=seed)(x), expected)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("seed", [-1, ALTERNATING])
def test_recurrent_layers(kind, train, seed):
    module, x = kind(16, 32, num_layers=2, batch_first=True), torch.randn(3, 5, 16)
    how = {"train": True, "loss": lambda found, y: F.mse_loss(found[0], y)} if train else {}
    if train:
        how["targets"] = torch.randn(3, 5, 32)
    placed = place(module, x, seed=seed, **how)
    with torch.set_grad_enabled(train):
        ours, theirs = placed(x), module(x)
    assert same(ours[0], theirs[0])
    if train:
        for model, found in ((placed, ours), (module, theirs)):
            F.mse_loss(found[0], how["targets"]).backward()
            assert model is not None
        assert same(gradients_of(placed), gradients_of(module))


# --- Arguments. ---


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, input_ids, attention_mask=None, *, scale=1.0, flag=False, extra=None):
        x = self.embed(input_ids)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        if flag:
            x = -x
        return self.out(x) * scale if extra is None else self.out(x) * scale + extra


def _named_arguments():
    return {
        "input_ids": torch.randint(20, (2, 5)),
        "attention_mask": torch.randint(2, (2, 5)),
    }


def test_keyword_arguments_are_bound_by_name():
    module, given = Named().eval(), _named_arguments()
    placed = place(module, given)
    turned = dict(reversed(given.items()))
    with torch.no_grad():
        expected = module(**given)
    assert same(placed(**turned), expected)
    assert same(placed(*given.values()), expected)
    assert same(placed(given["input_ids"], attention_mask=given["attention_mask"]), expected)


def test_numbers_flags_and_none_count():
    module, given = Named().eval(), _named_arguments()
    placed = place(module, {**given, "scale": 2.0})
    for more in (
        {"scale": 2.0},
        {"scale": 5.0},
        {"flag": True},
        {"attention_mask": None},
        {"extra": torch.randn(4)},
        {"scale": float("nan")},
        {"scale": 2},
    ):
        with torch.no_grad():
            expected = module(**{**given, **more})
        found = placed(**{**given, **more})
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), more


def test_arguments_that_the_module_does_not_take_are_refused_as_python_does():
    module, given = Named().eval(), _named_arguments()
    placed = place(module, given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'token_types'"):
        placed(**given, token_types=None)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        placed(given["input_ids"], **given)
    with pytest.raises(TypeError, match="missing a required argument: 'input_ids'"):
        placed()
    with torch.no_grad():
        assert same(placed(**given), module(**given))


def test_the_signature_and_the_class_are_the_modules():
    module = Named()
    placed = place(module, _named_arguments())
    assert inspect.signature(placed.forward) == inspect.signature(module.forward)
    assert type(placed).__name__ == "Named"
    assert isinstance(placed, Named)
    assert {*placed.state_dict()} == {*module.state_dict()}


def test_an_argument_that_cannot_be_compared_is_refused():
    class Strange:
        __slots__ = ()
        __hash__ = None

    module, given = Named().eval(), _named_arguments()
    placed = place(module, given)
    with pytest.raises(InputError, match="neither looked into nor compared"):
        placed(**given, extra=Strange())
    with torch.no_grad():
        assert same(placed(**given), module(**given))


# --- Shapes. ---


def test_another_shape_gets_a_program_and_says_so_once():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    placed = place(module, torch.randn(6, 8))
    with pytest.warns(NewProgramWarning, match="another kind than those before"):
        found = placed(x := torch.randn(3, 8))
    with torch.no_grad():
        assert same(found, module(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (1, 2, 6):
            x = torch.randn(rows, 8)
            with torch.no_grad():
                assert same(placed(x), module(x))


def test_a_wrong_shape_is_an_error_that_names_the_module_and_not_for_ever():
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    placed, x = place(module, torch.randn(6, 8)), torch.randn(6, 8)
    with pytest.raises(InputError, match=r"`0` \(Linear\).*got \[6, 9\]"):
        placed(torch.randn(6, 9))
    with torch.no_grad():
        assert same(placed(x), module(x))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(2, 3),
        lambda x: x[:, :, ::2],
        lambda x: x[:1].expand(2, -1, -1, -1),
        lambda x: x.double().float(),
        lambda x: x[1:].contiguous(),
    ],
)
@pytest.mark.parametrize("train", [False, True])
def test_inputs_of_any_layout(change, train):
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 8, 8)
    how = {"train": True, "loss": lambda found: found.square().sum()} if train else {}
    placed, x = place(module, x, **how), change(x)
    with torch.set_grad_enabled(train):
        ours, theirs = placed(x), module(x)
    assert same(ours, theirs)
    assert ours.stride() == theirs.stride()
    if train:
        for found in (ours, theirs):
            found.square().sum().backward()
        assert same(gradients_of(placed), gradients_of(module))


@pytest.mark.parametrize("seed", range(4))
def test_expanded_tensors_cross_devices(seed):
    def expands(lin, x):
        keys = lin(x)[:, None].expand(-1, 3, -1)
        return (keys * keys.sum(-1, keepdim=True)).relu()

    module, x = Function(expands), torch.randn(4, 8)
    how = {"train": True, "loss": lambda found: found.sum()}
    placed = place(module, x, seed=seed, **how)
    for model in (placed, module):
        model(x).sum().backward()
    assert same(gradients_of(placed), gradients_of(module))


# --- Losses and gradients. ---


class Loss(nn.Module):
    """Returns its own loss, beside other things that have gradients."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        hidden = self.body(x).relu()
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "hidden": [hidden]}


@pytest.mark.parametrize(
    "loss",
    [
        lambda o: o["loss"],
        lambda o: o["loss"] + 0.1 * o["logits"].pow(2).mean(),
        lambda o: o["logits"].pow(2).mean(),
        lambda o: o["hidden"][0].sum() + o["loss"],
        lambda o: 3 * o["hidden"][0].mean(),
    ],
)
@pytest.mark.parametrize("seed", [ALTERNATING, 3])
def test_every_output_carries_its_gradient(loss, seed):
    module, given = Loss(), {"x": torch.randn(6, 8), "labels": torch.randint(3, (6,))}
    placed = place(module, given, seed=seed, train=True)
    for _ in range(2):
        for model in (placed, module):
            model.zero_grad()
            loss(model(**given)).backward()
        assert same(gradients_of(placed), gradients_of(module))


def test_several_losses_one_after_the_other():
    module, given = Loss(), {"x": torch.randn(6, 8), "labels": torch.randint(3, (6,))}
    placed = place(module, given, train=True)
    for model in (placed, module):
        out = model(**given)
        out["logits"].sum().backward(retain_graph=True)
        out["loss"].backward()
    assert same(gradients_of(placed), gradients_of(module))


def test_inputs_get_their_gradients():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8)
    module.requires_grad_(False)
    placed = place(module, x.clone().requires_grad_(), train=True, loss=lambda y: y.sum())
    found = []
    for model in (placed, module):
        leaf = x.clone().requires_grad_()
        soft = leaf * 2
        model(soft).sum().backward()
        found.append(leaf.grad)
    assert same(*found)


def test_a_backward_pass_that_waits_sees_the_module_as_it_was():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 3)), torch.randn(4, 8)
    placed = place(module, x, train=True, loss=lambda y: y.sum())
    for model in (placed, module):
        first = model(x)
        model.eval()
        model(x).square().sum().backward()
        first.sum().backward(retain_graph=True)
        first.sum().backward()
    assert same(gradients_of(placed), gradients_of(module))
    placed.train()
    first = placed(x)
    placed[0].weight = nn.Parameter(torch.randn(8, 8))
    first.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="an input, a parameter or a buffer has changed"):
        first.sum().backward()


def test_accumulation_clipping_and_schedules():
    module, given = Loss(), {"x": torch.randn(6, 8), "labels": torch.randint(3, (6,))}
    placed = place(module, given, train=True)
    norms = []
    for model in (placed, module):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=6)
        for step in range(6):
            for part in range(2):
                (model(**given)["loss"] / (part + 1)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1 * (step + 1)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    assert same(norms[:6], norms[6:])
    assert same([*placed.parameters()], [*module.parameters()])


# --- PyTorch's modes, the module's, and what it keeps. ---


@pytest.mark.parametrize("train", [False, True])
def test_autocast_at_run_time(train):
    module, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)), torch.randn(4, 8)
    how = {"train": True, "loss": lambda y: y.float().sum()} if train else {}
    placed = place(module, x, **how)
    for _ in range(2):
        for casts in (True, False):
            found = []
            for model in (placed, module):
                model.zero_grad()
                with torch.set_grad_enabled(train), torch.autocast("cpu", enabled=casts):
                    found.append(model(x))
                if train:
                    found[-1].float().sum().backward()
            assert same(*found)
            assert found[0].dtype == (torch.bfloat16 if casts else torch.float32)
            assert not train or same(gradients_of(placed), gradients_of(module))


def test_training_mode_may_change():
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 8)
    placed = place(module, x)
    for is_training in (True, False, True, False):
        placed.train(is_training)
        module.train(is_training)
        with torch.no_grad():
            assert same(placed(x), module(x))
        assert same([*placed.buffers()], [*module.buffers()])


def test_hooks_on_inner_modules_run_as_they_are():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 8)
    placed = place(module, x)
    with torch.no_grad():
        plain = module(x)
        assert same(placed(x), plain)
        handles = [m[0].register_forward_hook(lambda *a: a[2] * 2) for m in (placed, module)]
        assert same(placed(x), module(x))
        assert not torch.equal(placed(x), plain)
        for handle in handles:
            handle.remove()
        assert same(placed(x), plain)


def test_a_hook_that_keeps_a_tensor_is_refused():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 8)
    placed, kept = place(module, x), []
    handle = placed[0].register_forward_hook(lambda *a: kept.append(a[2]))
    with pytest.raises(InputError, match="keeps a tensor outside of the module"):
        placed(x)
    handle.remove()
    with torch.no_grad():
        assert same(placed(x), module(x))


def test_inputs_that_forward_changes_are_changed():
    def doubles(lin, x):
        x.mul_(2)
        return lin(x)

    module, x = Function(doubles), torch.randn(4, 8)
    placed = place(module, x.clone())
    mine, theirs = x.clone(), x.clone()
    with torch.no_grad():
        assert same(placed(mine), module(theirs))
    assert same(mine, theirs)


def test_results_may_be_changed_in_place():
    def layers(lin, x):  # whose result is a view inside of it
        y = lin(x)
        return y, y[..., 1:].detach()

    module, x = Function(layers), torch.randn(2, 4, 8)
    placed = place(module, x, train=True, loss=lambda y: y[0].sum())
    found = []
    for each in (placed, module):
        y, part = each(x)
        assert (y.requires_grad, part.requires_grad) == (True, False)
        y = y.clone() if each is module else y
        y += 1
        y.mul_(3).sum().backward()
        found.append((y.detach().clone(), gradients_of(each)))
    assert same(*found)


def test_a_second_run_of_the_forward_pass_begins_at_what_the_first_began_at():
    def scales(lin, x):
        x.mul_(2)
        return lin(x), lin(x).square()

    module, x = Function(scales), torch.randn(4, 8)
    placed = place(module, x.clone(), train=True, loss=lambda y: y[0].sum())
    for each in (placed, module):
        loss = each(x.clone())[1].sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert same(gradients_of(placed), gradients_of(module))


class Remembers(nn.Module):
    """Returns what a buffer was before it is assigned something else."""

    def __init__(self):
        super().__init__()
        self.last = nn.Buffer(torch.zeros(4))

    def forward(self, x):
        before, self.last = self.last, x + self.last
        return before


def test_a_buffer_as_it_was_before_it_is_assigned_is_not_returned():
    with pytest.raises(InputError, match="was before it assigns something else"):
        place(Remembers(), torch.randn(4))


def test_what_looks_beyond_its_memory_is_refused():
    module = Function(lambda lin, x: lin(x) + x.as_strided([8], [1], 16))
    with pytest.raises(InputError, match="looks beyond its end"):
        place(module, torch.randn(4, 8)[:2])


def test_lists_of_views_with_gradients_are_not_overwritten():
    def doubles(lin, x):
        y = lin(x).view(-1)
        torch._foreach_mul_([y], 2)
        return y

    with pytest.raises(InputError, match="one by one"):
        place(Function(doubles), torch.randn(4, 8), train=True, loss=torch.sum)


def test_what_is_made_of_a_constant_is_made_anew_in_each_call():
    def fills(lin, x):
        y = torch.tensor([0.5, -1.0, 3.0]).expand(2, -1)
        before = y.double()
        y.fill_diagonal_(2.0)
        return lin(x), before

    module, x = Function(fills), torch.randn(4, 8)
    placed = place(module, x)
    with torch.no_grad():
        for _ in range(3):
            assert same(placed(x), module(x))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.lin(x) * self.calls


def test_python_state_that_changes_in_forward_is_refused():
    module, x = Counts(), torch.randn(4, 8)
    with pytest.raises(InputError, match=r"sets `calls` to something else in each call"):
        place(module, x)
    assert module.calls == 0


def test_a_module_on_the_meta_device_is_refused():
    with torch.device("meta"):
        module = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    plan = make_plan(pw.capture(module, x).graph, 1)
    with pytest.raises(InputError, match="on the meta device and has no values"):
        pw.apply(plan, module, x)


def test_weights_may_be_frozen_replaced_and_loaded():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 8)
    placed = place(module, x, train=True, loss=lambda y: y.sum())
    state = {key: torch.randn_like(value) for key, value in module.state_dict().items()}
    for change in (
        lambda m: m[0].requires_grad_(False),
        lambda m: m.load_state_dict(state),
        lambda m: m.double().float(),
        lambda m: setattr(m[2], "weight", nn.Parameter(state["2.weight"].clone())),
        lambda m: m[0].requires_grad_(True),
    ):
        for model in (placed, module):
            change(model)
            model.zero_grad()
            model(x).sum().backward()
        ours, theirs = gradients_of(placed), gradients_of(module)
        assert [g is None for g in ours] == [g is None for g in theirs]
        assert all(g is None or torch.equal(g, h) for g, h in zip(ours, theirs, strict=True))


# --- Copies, files, other ways to run. ---


def test_copies_are_placed_and_have_their_own_weights():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 8)
    placed = place(module, x)
    other = copy.deepcopy(placed)
    with torch.no_grad():
        other[0].weight.zero_()
        assert same(placed(x), module(x))
        module[0].weight.zero_()
        assert same(other(x), module(x))


def test_a_placed_module_is_saved_by_its_state_dict():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 8)
    placed, file = place(module, x), io.BytesIO()
    with pytest.raises(InputError, match=r"Save `placed.state_dict\(\)`"):
        torch.save(placed, file)
    file = io.BytesIO()
    torch.save(placed.state_dict(), file)
    file.seek(0)
    fresh = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    fresh.load_state_dict(torch.load(file))
    with torch.no_grad():
        assert same(fresh(x), placed(x))


def test_torch_compile_leaves_a_placed_module_as_it_is():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 8)
    placed = place(module, x)
    compiled = torch.compile(placed, backend="eager")
    with torch.no_grad():
        assert same(compiled(x), module(x))
        assert same(compiled(x[:2]), module(x[:2]))


def test_a_call_in_a_transform_is_refused():
    module, x = nn.Linear(8, 3), torch.randn(4, 8)
    placed = place(module, x)
    with pytest.raises(InputError, match=r"`torch.func` transform"):
        torch.func.vmap(placed)(x)
    with torch.no_grad():
        assert same(placed(x), module(x))


def test_a_forked_child_computes_or_says_why_not():
    script = """
    import copy, os, sys, torch
    from torch import nn
    import placewright as pw
    from tests.random_module_cases import make_plan
    torch.set_num_threads(1)
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 8)
    placed = pw.apply(make_plan(pw.capture(module, x).graph, -2), module, x)
    expected = placed(x)
    child = os.fork()
    if child == 0:
        try:
            print("same" if torch.equal(placed(x), expected) else "other", flush=True)
        except pw.InputError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    assert torch.equal(placed(x), expected)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "same" or "forked" in done.stdout


# --- Whole steps. ---


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_steps_learning_rate_is_its_optimisers(kind):
    module, x, y = nn.Linear(8, 3), torch.randn(4, 8), torch.randn(4, 3)
    mine = copy.deepcopy(module)
    optimizer, theirs = (kind(m.parameters(), lr=0.1, fused=True) for m in (mine, module))
    how = {"loss": F.mse_loss, "targets": y, "optimizer": optimizer}
    plan = make_plan(pw.capture(mine, x, train=True, **how).graph, 1)
    step = pw.TrainStep(plan, mine, x, **how)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, theirs)]
    for lr in (None, 0.0, None, 0.3):
        for each in (optimizer, theirs):
            if lr is not None:
                each.param_groups[0]["lr"] = lr
        loss = step(x, y)
        theirs.zero_grad()
        expected = F.mse_loss(module(x), y)
        expected.backward()
        theirs.step()
        assert same(loss, expected)
        assert same([*mine.parameters()], [*module.parameters()])
        for schedule in schedules:
            schedule.step()


def test_a_steps_state_is_saved_and_loaded():
    module, x, y = nn.Linear(8, 3), torch.randn(4, 8), torch.randn(4, 3)
    how = {"loss": F.mse_loss, "targets": y, "optimizer": "adamw"}
    first, one = place_step(module, x, **how)
    for _ in range(3):
        one(x, y)
    saved = copy.deepcopy((first.state_dict(), one.optimizer.state_dict()))
    second, two = place_step(module, x, seed=5, **how)
    second.load_state_dict(saved[0])
    two.optimizer.load_state_dict(saved[1])
    for _ in range(2):
        assert same(one(x, y), two(x, y))
    assert same([*first.parameters()], [*second.parameters()])


def test_a_step_takes_a_smaller_last_batch():
    module, x, y = nn.Linear(8, 3), torch.randn(4, 8), torch.randn(4, 3)
    how = {"loss": F.mse_loss, "targets": y, "optimizer": "momentum"}
    mine, step = place_step(module, x, **how)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, fused=True)
    for rows in (4, 4, 1, 4):
        found = step(x[:rows], y[:rows])
        optimizer.zero_grad()
        expected = F.mse_loss(module(x[:rows]), y[:rows])
        expected.backward()
        optimizer.step()
        assert same(found, expected)
    assert same([*mine.parameters()], [*module.parameters()])
