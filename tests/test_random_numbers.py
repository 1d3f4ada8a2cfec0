"""What a placed module draws: once for what is computed twice, from no generator of its own."""

from __future__ import annotations

import pytest

import placewright as pw
from placewright.errors import InputError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.marks import two_cores  # noqa: E402
from tests.random_module_cases import make_plan  # noqa: E402

pytestmark = two_cores
SIZE = 100


class Dropped(nn.Module):
    """Two layers that drop out and are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(SIZE)) for _ in range(2))

    def forward(self, x):
        a = checkpoint(lambda y: F.dropout(y * self.first), x, use_reentrant=False)
        b = checkpoint(lambda y: F.dropout(y * self.second), x, use_reentrant=False)
        return a, b


def total(result):
    return result[0].sum() + result[1].sum()


@pytest.mark.parametrize("placement", [-2, -1, 3])
def test_checkpointed_layers_drop_out_again_what_they_did_before(placement):
    module, x = Dropped(), torch.ones(SIZE)
    how = {"train": True, "loss": total}
    plan = make_plan(pw.capture(module, (x,), **how).graph, placement)
    placed = pw.apply(plan, module, (x,), **how)
    for _ in range(2):
        a, b = placed(x)
        total((a, b)).backward()
        assert torch.equal(module.first.grad, a)  # of x * weight, where both are one
        assert torch.equal(module.second.grad, b)
        assert not torch.equal(a, b)
        module.zero_grad()


def test_a_training_step_drops_out_again_what_it_did_before():
    module, x = Dropped(), torch.ones(SIZE)
    how = {"loss": lambda result: result[0].sum(), "optimizer": "sgd"}
    plan = make_plan(pw.capture(module, (x,), train=True, **how).graph, -2)
    step = pw.TrainStep(plan, module, (x,), **how)
    loss = step((x,))
    step.close()
    kept = int((module.first != 1).sum())
    assert 0 < kept < SIZE
    assert loss.item() == 2 * kept


class Drawing(nn.Module):
    """Draws random numbers as it is told."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x + self.draw()


def seeding():
    torch.manual_seed(3)
    return torch.rand(4)


def forked():
    with torch.random.fork_rng(devices=[]):
        return seeding()


@pytest.mark.parametrize("draw", [seeding, forked])
def test_a_module_that_seeds_what_it_draws_is_refused(draw):
    with pytest.raises(
        InputError, match=r"`forward` seeds PyTorch's random numbers .* Seed before"
    ):
        pw.capture(Drawing(draw), (torch.zeros(4),))


@pytest.mark.parametrize("name", ["rand", "randn", "normal_"])
def test_a_module_with_a_generator_of_its_own_is_refused(name):
    own = torch.Generator().manual_seed(3)

    def draw():
        if name == "normal_":
            return torch.zeros(4).normal_(generator=own)
        return getattr(torch, name)(4, generator=own)

    with pytest.raises(InputError, match=r"from a generator of its own, .* without `generator=`"):
        pw.capture(Drawing(draw), (torch.zeros(4),))


@pytest.mark.parametrize("draw", [seeding, lambda: torch.rand(4)])
def test_capturing_leaves_pytorchs_generator_as_it_was(draw):
    before = torch.get_rng_state()
    try:
        pw.capture(Drawing(draw), (torch.zeros(4),))
    except InputError:
        assert draw is seeding
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_from_anywhere_in_memory_see_what_is_beside_a_tensor():
    class Beside(nn.Module):
        def forward(self, x):
            return torch.as_strided_copy(x[::2] * 1, (2,), (1,)), torch.as_strided_copy(
                x[::2], (3,), (1,), 0
            )

    x = torch.arange(6.0)
    plan = make_plan(pw.capture(Beside(), (x,)).graph, -2)
    placed = pw.apply(plan, Beside(), (x,))
    for ours, theirs in zip(placed(x), Beside()(x), strict=True):
        assert torch.equal(ours, theirs)
    gaps = torch.arange(7.0)[1:]
    with pytest.raises(InputError, match=r"Input 0 begins inside of its memory"):
        placed(gaps)
