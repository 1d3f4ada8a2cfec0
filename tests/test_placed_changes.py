"""A placed module follows what is done to its parts, and hands out gradients of their own."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest

import placewright as pw
from placewright.errors import InputError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from tests.marks import any_call, one_thread, two_cores  # noqa: E402
from tests.random_module_cases import make_plan  # noqa: E402

pytestmark = [
    two_cores,
    one_thread,
    any_call,
]


def place(module, inputs):
    """Place a copy of a module that is trained on the sum of its result."""
    module, how = copy.deepcopy(module), {"train": True, "loss": lambda y: y.sum()}
    return pw.apply(make_plan(pw.capture(module, inputs, **how).graph, 1), module, inputs, **how)


def check(placed, module, x):
    """Check that results and gradients are the same."""
    found = []
    for model in (placed, module):
        model.zero_grad()
        found.append(model(x))
        found[-1].square().sum().backward()
    assert torch.equal(*found)
    ours, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (placed, module))
    assert [*ours] == [*theirs]
    for name, gradient in theirs.items():
        assert (ours[name] is gradient is None) or torch.equal(ours[name], gradient), name


class Layers(nn.Module):
    """Runs layers one after the other, and may have something before and behind them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])
        self.behind = nn.ModuleList()
        self.register_parameter("scale", None)
        self.register_buffer("shift", None)

    def forward(self, x):
        for layer in (*self.layers, *self.behind):
            x = layer(x).tanh()
        x = x if self.scale is None else x * self.scale
        x = x if self.shift is None else x + self.shift
        return x if getattr(self, "late", None) is None else x * self.late


def _set(name, make):
    return lambda m: setattr(m, name, make())


def _seeded(change):
    def seeded(module):
        torch.manual_seed(1)
        change(module)

    return seeded


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.layers.__setitem__(0, nn.Linear(8, 8)),
        lambda m: m.layers.append(nn.Linear(8, 8)),
        lambda m: m.behind.append(nn.Linear(8, 8)),
        lambda m: m.layers.pop(0),
        lambda m: m.layers.__setitem__(1, nn.Identity()),
        _set("scale", lambda: nn.Parameter(torch.randn(8))),
        _set("shift", lambda: torch.randn(8)),
        lambda m: m.register_buffer("late", torch.randn(8)),
        lambda m: m.register_parameter("late", nn.Parameter(torch.randn(8))),
        lambda m: setattr(m.layers[1], "bias", nn.Parameter(torch.randn(8))),
        lambda m: setattr(m.layers[0], "bias", None),
        lambda m: setattr(m.layers[1], "weight", m.layers[0].weight),
        lambda m: parametrizations.weight_norm(m.layers[1]),
    ],
)
def test_parts_may_be_put_in_and_taken_out(change):
    module, x = Layers(), torch.randn(3, 8)
    placed = place(module, x)
    for step in (lambda m: None, _seeded(change), lambda m: None):
        step(placed)
        step(module)
        check(placed, module, x)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (placed, module)]
    for optimizer in optimizers:
        optimizer.step()
    check(placed, module, x)


def test_what_is_put_in_is_followed_as_well():
    module, x = Layers(), torch.randn(3, 8)
    placed = place(module, x)
    for model in (placed, module):
        torch.manual_seed(2)
        model.layers[0] = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0))
    check(placed, module, x)
    for change in (
        lambda m: m.layers[0][0].requires_grad_(False),
        lambda m: m.layers[0].eval(),
        lambda m: m.layers[0].__setitem__(1, nn.ReLU()),
        lambda m: setattr(m.layers[0][0], "weight", nn.Parameter(torch.ones(8, 8))),
    ):
        change(placed)
        change(module)
        check(placed, module, x)


class Makes(nn.Module):
    """Makes a part of itself in the first call."""

    def __init__(self, make):
        super().__init__()
        self.lin, self.make = nn.Linear(8, 8), make

    def forward(self, x):
        self.make(self)
        return self.lin(x)


def _adds_layer(m):
    if not hasattr(m, "extra"):
        m.extra = nn.Linear(8, 8)


def _fills_buffer(m):
    m.lin.register_buffer("seen", torch.zeros(1))


def _replaces_layer(m):
    m.lin = nn.Linear(8, 8)


def _drops_bias(m):
    m.lin.bias = None


@pytest.mark.parametrize("make", [_adds_layer, _fills_buffer, _replaces_layer, _drops_bias])
def test_a_forward_that_changes_what_a_module_consists_of_is_refused(make):
    module, x = Makes(make), torch.randn(3, 8)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(InputError, match="adds, replaces or removes `"):
        pw.capture(module, x)
    assert {*module.state_dict()} == {*before}
    assert [*module._modules] == ["lin"]


def test_a_hook_that_takes_itself_off_is_refused():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(3, 8)
    handle = module[0].register_forward_hook(lambda *_: handle.remove())
    with pytest.raises(InputError, match="adds, replaces or removes a hook"):
        pw.capture(module, x)
    assert len(module[0]._forward_hooks) == 1


# --- Gradients. ---


class Token(nn.Module):
    """Puts a token before a sequence, and adds a position to each."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        tokens = self.token.expand(len(x), -1, -1)
        return self.lin(torch.cat([tokens, x], 1) + self.position)


@pytest.mark.parametrize("rows", [1, 2])
def test_gradients_that_are_scaled_in_place_are_not_scaled_twice(rows):
    module, x = Token(), torch.randn(rows, 4, 8)
    placed = place(module, x)
    for model in (placed, module):
        for _ in range(2):
            model(x).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for ours, theirs in zip(placed.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    places = [p.grad.untyped_storage().data_ptr() for p in placed.parameters()]
    assert len({*places}) == len(places)


class Sums(nn.Module):
    """Adds up inputs, whose gradients are all the same."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x, y):
        return x + y + self.bias.view(1, 8)


def test_a_gradient_that_is_passed_in_stays_the_callers():
    module = Sums()
    given = {"x": torch.randn(1, 8, requires_grad=True), "y": torch.randn(1, 8, requires_grad=True)}
    placed, slope = place(module, given), torch.ones(1, 8)
    placed(**given).backward(slope)
    gradients = [given["x"].grad, given["y"].grad, placed.bias.grad]
    for factor, gradient in enumerate(gradients, start=2):
        gradient.mul_(factor)
    assert torch.equal(slope, torch.ones(1, 8))
    for factor, gradient in enumerate(gradients, start=2):
        assert torch.equal(gradient, torch.full_like(gradient, factor))


def test_a_steps_gradients_of_inputs_have_memory_of_their_own():
    module, how = Sums(), {"loss": lambda found: found.sum()}
    given = {"x": torch.randn(1, 8, requires_grad=True), "y": torch.randn(1, 8, requires_grad=True)}
    plan = make_plan(pw.capture(module, given, train=True, **how).graph, 1)
    step = pw.TrainStep(plan, module, given, **how)
    step(given)
    given["x"].grad.mul_(3)
    assert torch.equal(given["x"].grad, torch.full((1, 8), 3.0))
    assert torch.equal(given["y"].grad, torch.ones(1, 8))


def test_gradients_of_gradients_are_refused():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(3, 8, requires_grad=True)
    placed = place(module, x)
    for create in (
        lambda y: torch.autograd.grad(y.sum(), x, create_graph=True),
        lambda y: y.sum().backward(create_graph=True),
    ):
        with pytest.raises(InputError, match="gradients of gradients"):
            create(placed(x))
    check(placed, module, x.detach())


def test_callers_of_several_threads_take_turns():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    placed, batches = place(module, torch.randn(3, 8)), [torch.randn(k, 8) for k in range(1, 7)]

    def slope(model, x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(model(leaf).square().sum(), leaf)[0]

    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda x: slope(placed, x), batches * 3)]
    for ours, x in zip(found, batches * 3, strict=True):
        assert torch.equal(ours, slope(module, x))
