"""Placed models of Hugging Face in the loops that people write around them."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from torch import nn

import placewright as pw
from tests.marks import any_call, one_thread, two_cores
from tests.placed_models import build, differences, place, same, same_weights
from tests.random_module_cases import make_plan

transformers.logging.set_verbosity_error()

pytestmark = [
    two_cores,
    one_thread,
    any_call,
]


def batches(given, rows=5, size=2):
    """Load rows in batches, the last of them smaller."""
    torch.manual_seed(1)
    held = {key: value.repeat(3, 1)[:rows] for key, value in given.items() if value.dim() == 2}
    held["input_ids"] = torch.randint(3, 60, held["input_ids"].shape)
    held["attention_mask"][:, -1] = 0
    held["labels"] = given["labels"].repeat(3, *[1] * (given["labels"].dim() - 1))[:rows]
    table = torch.utils.data.TensorDataset(*held.values())
    loader = torch.utils.data.DataLoader(table, batch_size=size)
    return [dict(zip(held, batch, strict=True)) for batch in loader]


def train(model, loader, optimizer, *, accumulate=1, clip=None, to_none=True):
    """Train for an epoch as loops do, and list losses."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    losses = []
    model.train()
    for number, batch in enumerate(loader):
        found = model(**batch)
        (found.loss / accumulate).backward()
        losses.append(found.loss.item())
        if (number + 1) % accumulate == 0 or number + 1 == len(loader):
            if clip is not None:
                losses.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=to_none)
    model.eval()
    with torch.no_grad():
        losses += [model(**batch).loss.item() for batch in loader]
    return losses


# --- Loops. ---


@pytest.mark.parametrize(
    ("name", "to_none"),
    [
        ("roberta", True),
        pytest.param("gpt2", False, marks=pytest.mark.slow),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("t5", False, marks=pytest.mark.slow),
    ],
)
def test_a_loop_with_accumulation_clipping_a_schedule_and_a_smaller_batch(name, to_none):
    module, given = build(name)
    placed, loader = place(module.train(), given), batches(given)
    found = []
    for model in (placed, module):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        how = {"accumulate": 2, "clip": 0.5, "to_none": to_none}
        found.append([train(model, loader, optimizer, **how) for _ in range(2)])
    assert found[0] == found[1]
    assert same_weights(placed, module)


def test_an_optimiser_may_be_made_before_a_model_is_placed():
    module, given = build("bert")
    mine = copy.deepcopy(module.train())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (mine, module)]
    placed = pw.apply(
        make_plan(pw.capture(mine, given, train=True).graph, 1), mine, given, train=True
    )
    loader = batches(given)
    found = [
        train(model, loader, optimizer)
        for model, optimizer in zip((placed, module), optimizers, strict=True)
    ]
    assert found[0] == found[1]
    assert same_weights(mine, module)


@pytest.mark.slow
def test_groups_of_parameters_and_frozen_layers():
    module, given = build("bert")
    module.train()
    placed, loader = place(module, given), batches(given)
    found = []
    for model in (placed, module):
        for parameter in model.bert.embeddings.parameters():
            parameter.requires_grad_(False)
        bare = [p for n, p in model.named_parameters() if "bias" in n or "Norm" in n]
        rest = [p for p in model.parameters() if not any(p is other for other in bare)]
        groups = [{"params": bare, "weight_decay": 0.0}, {"params": rest}]
        found.append(train(model, loader, torch.optim.AdamW(groups, lr=0.01)))
    assert found[0] == found[1]
    assert not differences(placed, module)
    assert placed.bert.embeddings.word_embeddings.weight.grad is None


class LowRank(nn.Module):
    """Adds a product of two small matrices to a frozen linear layer."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def test_small_matrices_beside_frozen_weights():
    module, given = build("llama")
    module.train().requires_grad_(False)
    for layer in module.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    placed, loader, found = place(module, given), batches(given), []
    for model in (placed, module):
        trained = [p for p in model.parameters() if p.requires_grad]
        found.append(train(model, loader, torch.optim.AdamW(trained, lr=0.01)))
    assert found[0] == found[1]
    assert same_weights(placed, module)
    assert placed.model.embed_tokens.weight.grad is None


def test_matrices_may_be_put_beside_weights_of_a_placed_model():
    module, given = build("llama")
    placed, loader, found = place(module.train(), given), batches(given), []
    for model in (placed, module):
        model.requires_grad_(False)
        torch.manual_seed(2)
        layer = model.model.layers[0].self_attn
        layer.q_proj = LowRank(layer.q_proj)
        trained = [layer.q_proj.down, layer.q_proj.up]
        found.append(train(model, loader, torch.optim.AdamW(trained, lr=0.01)))
    assert found[0] == found[1]
    assert same_weights(placed, module)


# --- Gradients of inputs. ---


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_prompts_are_tuned(name):
    module, given = build(name)
    module.train().requires_grad_(False)
    prompt = torch.randn(2, 3, 16)
    words = module.get_input_embeddings()(given["input_ids"])
    given = {
        "attention_mask": torch.cat([torch.ones(2, 3).long(), given["attention_mask"]], 1),
        "labels": torch.cat([torch.full((2, 3), -100), given["labels"]], 1),
    }
    embeds = torch.cat([prompt.clone().requires_grad_(), words], 1)
    placed, found = place(module, {"inputs_embeds": embeds.detach().requires_grad_(), **given}), []
    for model in (placed, module):
        tuned = prompt.clone().requires_grad_()
        optimizer = torch.optim.SGD([tuned], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs_embeds=torch.cat([tuned, words], 1), **given).loss.backward()
            optimizer.step()
        found.append(tuned)
    assert torch.equal(*found)
    assert not torch.equal(found[0], prompt)


def test_pictures_that_fool_a_model():
    module, given = build("vit")
    placed = place(module.eval(), {**given, "pixel_values": given["pixel_values"].requires_grad_()})
    found = []
    for model in (placed, module):
        pixels = given["pixel_values"].detach().clone()
        for _ in range(2):
            pixels.requires_grad_()
            loss = model(pixel_values=pixels, labels=given["labels"]).loss
            (slope,) = torch.autograd.grad(loss, pixels)
            pixels = (pixels + 0.01 * slope.sign()).detach()
        found.append(pixels)
    assert torch.equal(*found)
    assert all(p.grad is None for p in placed.parameters())


# --- What a model returns. ---


@pytest.mark.parametrize(
    "name", ["bert", "gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "t5"))]
)
def test_flags_labels_and_forms_of_the_result(name):
    module, given = build(name)
    module.eval()
    module.set_attn_implementation("eager")
    placed = place(module, given)
    bare = {key: value for key, value in given.items() if key != "labels"}
    if name == "t5":
        bare["decoder_input_ids"] = given["labels"]
    for more in (
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"output_attentions": True, "output_hidden_states": True},
        {"return_dict": False},
        {"return_dict": False, "output_hidden_states": True},
        {},
    ):
        for inputs in (given, bare):
            with torch.no_grad():
                assert same(placed(**inputs, **more), module(**inputs, **more)), more
    assert same(placed(**given, return_dict=True), module(**given, return_dict=True))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mamba"])
def test_caches_hold_tensors_with_values(name):
    module, given = build(name)
    placed = place(module.eval(), given)
    with torch.no_grad():
        ours, theirs = (model(**given, use_cache=True) for model in (placed, module))
    assert same(ours, theirs)
    held = {"mamba": "cache_params"}.get(name, "past_key_values")
    leaves = pw.frontends._structures.leaves_of(getattr(ours, held))
    assert leaves
    assert all(type(leaf) is torch.Tensor and leaf.device.type == "cpu" for leaf in leaves)


def test_losses_of_hidden_states_and_logits():
    module, given = build("bert")
    placed = place(module.train(), given)
    teacher = torch.randn(2, 7, 60)
    for model in (placed, module):
        found = model(**given, output_hidden_states=True)
        logits = found.logits.log_softmax(-1)
        soft = nn.functional.kl_div(logits, teacher.softmax(-1), reduction="batchmean")
        (found.loss + soft + sum(h.square().mean() for h in found.hidden_states)).backward()
    assert not differences(placed, module)
