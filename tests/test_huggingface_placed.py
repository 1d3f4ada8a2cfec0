"""Hugging Face's models compute and train, placed at random, what they do unplaced, to the bit."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

import placewright as pw
from placewright.errors import InputError
from tests.marks import any_call, one_thread, two_cores
from tests.placed_models import build, differences, place, same

transformers.logging.set_verbosity_error()

pytestmark = [
    two_cores,
    one_thread,
    any_call,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

COMMON = """
    bart bert convnext deberta distilbert gemma gpt2 llama mamba mixtral qwen3 swin t5 vit wav2vec2
    whisper
    """.split()
OTHERS = """
    albert bloom clip electra falcon gemma2 gpt_neox mistral opt phi phi3 qwen2 resnet roberta
    """.split()
EVERY = [*COMMON, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


@pytest.mark.parametrize("name", EVERY)
def test_a_placed_model_computes_what_the_model_does(name):
    module, given = build(name)
    module.eval()
    placed = place(module, given, train=False)
    with torch.no_grad():
        assert same(placed(**given), module(**given))


@pytest.mark.parametrize("name", EVERY)
def test_a_placed_model_trains_as_the_model_does(name):
    module, given = build(name)
    module.train()
    placed = place(module, given, seed=2)
    ours, theirs = placed(**given), module(**given)
    assert same(ours, theirs)
    for found in (ours, theirs):
        found.loss.backward()
    assert not differences(placed, module)
    assert any(p.grad is not None and p.grad.any() for p in placed.parameters())


# --- Models that choose layers at random. ---


def test_layers_that_are_left_out_at_random_are_refused():
    module, given = build("opt")
    module.model.decoder.layerdrop = 0.5
    with pytest.raises(InputError, match=r"OPTDecoder.*draws a random number to decide.*layerdrop"):
        pw.capture(module.train(), given, train=True)
    module.eval()
    placed = place(module, given)
    with pytest.raises(InputError, match="draws a random number to decide"):
        placed.train()(**given)
    with torch.no_grad():
        assert same(placed.eval()(**given), module(**given))


class Chooses(torch.nn.Module):
    """Compares a random number with a bound, and counts on the answer."""

    def __init__(self, compare):
        super().__init__()
        self.lin, self.compare = torch.nn.Linear(4, 4), compare

    def forward(self, x):
        return -self.lin(x) if self.compare(torch.rand([])) else self.lin(x)


@pytest.mark.parametrize(
    ("compare", "answer"),
    [
        (lambda drawn: drawn < 0, False),
        (lambda drawn: drawn < 1, True),
        (lambda drawn: drawn >= 0.0, True),
        (lambda drawn: drawn >= 1.0, False),
        (lambda drawn: drawn > 1, False),
        (lambda drawn: drawn > -1, True),
        (lambda drawn: drawn <= 1, True),
        (lambda drawn: drawn > 2, False),
    ],
)
def test_a_comparison_with_a_random_number_may_have_only_one_answer(compare, answer):
    module, x = Chooses(compare), torch.randn(2, 4)
    placed = place(module, {"x": x}, train=False)
    with torch.no_grad():
        assert torch.equal(placed(x), -module.lin(x) if answer else module.lin(x))


@pytest.mark.parametrize(
    "compare",
    [
        lambda drawn: drawn < 0.5,
        lambda drawn: drawn <= 0,
        lambda drawn: drawn > 0,
        lambda drawn: drawn.mul_(2) < 1,
        lambda drawn: drawn.neg() < 0,
        lambda drawn: drawn.lt(math.nan),
    ],
)
def test_any_other_comparison_with_a_random_number_is_refused(compare):
    with pytest.raises(InputError, match=r"random number to decide|needs the value of"):
        pw.capture(Chooses(compare), torch.randn(2, 4))


# --- What the first call leaves in a model. ---


def test_capturing_leaves_no_hooks_in_a_model():
    module, given = build("gpt2")
    module.eval()
    flags = {"output_hidden_states": True}
    graphs = [pw.capture(module, {**given, **flags}).graph for _ in range(2)]
    assert graphs[0].fingerprint == graphs[1].fingerprint
    assert not any(part._forward_hooks for part in module.modules())
    assert len(module(**given, **flags).hidden_states) == 3


def test_hooks_that_the_first_call_sets_are_set_by_a_placed_model():
    module, given = build("llama")
    module.eval()
    placed = place(module, given, train=False)
    for flags in ({"output_hidden_states": True}, {"output_hidden_states": True}, {}):
        with torch.no_grad():
            assert same(placed(**given, **flags), module(**given, **flags))
    hooks = [[len(p._forward_hooks) for p in model.modules()] for model in (placed, module)]
    assert hooks[0] == hooks[1]
    assert any(hooks[0])


# --- Batches of one. ---


@pytest.mark.parametrize("name", ["vit", "bert", "t5"])
def test_gradients_have_memory_of_their_own(name):
    module, given = build(name)
    module.train()
    placed = place(module, given)
    row = {key: value[-1:] for key, value in given.items()}
    for model in (placed, module):
        model(**row).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert not differences(placed, module)
    places = [p.grad.untyped_storage().data_ptr() for p in placed.parameters()]
    assert len({*places}) == len(places)


# --- Refusals. ---


def test_reentrant_checkpointing_is_refused_and_the_other_works():
    module, given = build("llama")
    module.train()
    module.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(InputError, match=r"use_reentrant=False"):
        pw.capture(module, given, train=True)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    placed = place(module, given)
    for model in (placed, module):
        model(**given).loss.backward()
    assert not differences(placed, module)


def test_experts_that_are_chosen_by_value_are_refused():
    module, given = build("mixtral")
    module.set_experts_implementation("eager")
    with pytest.raises(InputError, match=r"experts_implementation"):
        pw.capture(module, given)


def test_a_loss_over_chosen_rows_is_refused():
    module, given = build("deberta")
    module.config.problem_type = None
    with pytest.raises(InputError, match="whose shape depends on values"):
        pw.capture(module, given, train=True)
    del given["labels"]
    with torch.no_grad():
        assert same(place(module.eval(), given, train=False)(**given), module(**given))
