"""Placed models of Hugging Face are saved, read, copied and asked what they are."""

from __future__ import annotations

import copy
import inspect

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from placewright.errors import InputError
from tests.marks import any_call, one_thread, two_cores
from tests.placed_models import build, differences, place, same, same_weights

transformers.logging.set_verbosity_error()

pytestmark = [
    two_cores,
    one_thread,
    any_call,
]


def train(model, loader, optimizer):
    """Train for a few steps."""
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", ["bert", pytest.param("t5", marks=pytest.mark.slow), "gpt2"])
def test_a_placed_model_is_saved_and_read_as_the_model_is(name, tmp_path):
    module, given = build(name)
    placed = place(module.train(), given)
    train(placed, [given], torch.optim.SGD(placed.parameters(), lr=0.1))
    placed.save_pretrained(tmp_path)
    fresh = type(module).from_pretrained(tmp_path)
    assert same_weights(placed, fresh)
    assert type(placed).__name__ == type(fresh).__name__
    assert fresh.config.architectures == [type(module).__name__]
    again = place(fresh.train(), given, seed=3)
    for model in (again, placed.train()):
        model.zero_grad()
        model(**given).loss.backward()
    assert not differences(again, placed)


@pytest.mark.parametrize("name", ["gpt2", "bart", pytest.param("t5", marks=pytest.mark.slow)])
def test_tied_weights_stay_tied(name):
    module, given = build(name)
    placed = place(module.train(), given)
    other = copy.deepcopy(placed)
    other.load_state_dict(placed.state_dict())
    for model in (placed, other):
        words, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert words is head
        assert len([*model.parameters()]) == len([*module.parameters()])
    assert other.get_input_embeddings().weight is not placed.get_input_embeddings().weight
    for model in (other, placed, module):
        train(model, [given, given], torch.optim.AdamW(model.parameters(), lr=0.01))
    assert same_weights(placed, module)
    assert same_weights(other, module)


def test_a_state_dict_is_loaded_from_and_into_a_plain_model():
    module, given = build("roberta")
    placed = place(module.train(), given)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    placed.load_state_dict(module.state_dict())
    fresh = copy.deepcopy(module)
    fresh.load_state_dict(placed.state_dict(), assign=True)
    with torch.no_grad():
        expected = module(**given)
        assert same(placed(**given), expected)
        assert same(fresh(**given), expected)
    placed.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    with torch.no_grad():
        assert same(placed(**given), expected)


def test_embeddings_may_grow():
    module, given = build("gpt2")
    placed = place(module.eval(), given)
    for model in (placed, module):
        torch.manual_seed(3)
        model.resize_token_embeddings(64, mean_resizing=False)
    with torch.no_grad():
        assert same(placed(**given), module(**given))
    assert placed.get_input_embeddings().weight is placed.get_output_embeddings().weight


# --- A placed model is what it was. ---


def test_a_placed_model_tells_what_the_model_tells():
    module, given = build("bert")
    placed = place(module, given)
    assert isinstance(placed, transformers.BertForMaskedLM)
    assert inspect.signature(placed.forward) == inspect.signature(module.forward)
    assert placed.device == module.device
    assert placed.dtype == module.dtype
    assert placed.num_parameters() == module.num_parameters()
    assert placed.to("cpu") is placed
    assert placed.base_model_prefix == module.base_model_prefix
    with torch.no_grad():
        assert same(placed(**given), module(**given))


def test_a_model_that_is_made_of_its_class_is_not_placed(tmp_path):
    module, given = build("bert")
    placed = place(module.eval(), given)
    placed.save_pretrained(tmp_path)
    made = [type(placed)(module.config), placed.from_pretrained(tmp_path)]
    for other in made:
        assert type(other) is transformers.BertForMaskedLM
        other.load_state_dict({k: v * 2 for k, v in module.state_dict().items()})
    module.load_state_dict(made[0].state_dict())
    with torch.no_grad():
        expected = module(**given)
        assert all(same(other.eval()(**given), expected) for other in made)
        assert not same(placed(**given), expected)


def test_parts_of_a_placed_model_may_be_called():
    module, given = build("bert")
    placed = place(module.eval(), given)
    with torch.no_grad():
        ours = placed.bert(given["input_ids"], given["attention_mask"])
        assert same(ours, module.bert(given["input_ids"], given["attention_mask"]))


def test_half_precision_follows():
    module, given = build("llama")
    placed = place(module.eval(), given)
    for model in (placed, module):
        model.to(torch.bfloat16)
    with torch.no_grad():
        assert same(placed(**given), module(**given))


def test_switching_modes_between_steps():
    module, given = build("bert")
    placed, found = place(module.train(), given), []
    for model in (placed, module):
        losses = []
        for is_training in (True, False, True, False):
            model.train(is_training)
            losses.append(model(**given).loss)
            losses[-1].backward()
        with torch.no_grad():
            losses.append(model(**given).loss)
        with torch.inference_mode():
            losses.append(model(**given).loss.clone())
        found.append(losses)
    assert same(*found)
    assert not differences(placed, module)


def test_a_model_that_was_placed_for_inference_says_so():
    module, given = build("bert")
    placed = place(module, given, train=False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        placed(**given).loss.backward()
    embeds = torch.randn(2, 7, 16, requires_grad=True)
    with pytest.raises(InputError, match="placed for inference"):
        placed(inputs_embeds=embeds)
