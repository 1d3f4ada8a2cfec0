"""The zoo: sizes and work as published, shapes as the papers describe."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from placewright import zoo  # noqa: E402
from placewright.errors import InputError  # noqa: E402
from placewright.frontends.torch import capture  # noqa: E402
from placewright.load import load_model  # noqa: E402
from placewright.report.facts import describe_graph  # noqa: E402
from placewright.zoo.inception import InceptionV3  # noqa: E402
from placewright.zoo.resnet import ResNet  # noqa: E402
from placewright.zoo.transformers import Bert, Gpt2, Llama  # noqa: E402

META = torch.device("meta")


def forward(make, *inputs):
    with META:
        return capture(make().eval(), inputs).graph


def images(pixels):
    return torch.empty(1, 3, pixels, pixels, device="meta")


def tokens(length):
    return torch.zeros(1, length, dtype=torch.int64, device="meta")


def num_parameters(graph):
    return describe_graph(graph).parameter_bytes // 4


# Multiply-adds of torchvision's models are those that its documentation lists. BERT base at 128
# tokens has 22.5 GFLOPs in the TinyBERT and MobileBERT papers. GPT-2 small at 1,024 tokens has
# 291.6 GFLOPs with its output layer, in the sizing notebook of nanoGPT.
@pytest.mark.parametrize(
    ("make", "inputs", "parameters", "flops"),
    [
        (lambda: ResNet((3, 4, 6, 3)), (images(224),), 25_557_032, 2 * 4.09e9),
        (lambda: ResNet((3, 8, 36, 3)), (images(224),), 60_192_808, 2 * 11.51e9),
        (InceptionV3, (images(299),), 23_834_568, 2 * 5.71e9),
        (Bert, (tokens(128), tokens(128)), 109_482_240, 22.5e9),
        (Gpt2, (tokens(1024),), 124_439_808, 291.65e9),
        (Llama, (tokens(16),), 6_738_415_616, None),
    ],
    ids=["resnet-50", "resnet-152", "inception-v3", "bert-base", "gpt2-small", "llama-7b"],
)
def test_parameters_are_exact_and_forward_flops_within_two_percent(make, inputs, parameters, flops):
    graph = forward(make, *inputs)
    assert num_parameters(graph) == parameters
    if flops is not None:
        assert graph.op_flops.sum() == pytest.approx(flops, rel=0.02)


def test_a_training_step_costs_three_forward_passes():
    for name in ("resnet-50", "gpt2-small", "rnnlm"):
        work = zoo.build(name)
        once = capture(work.module, work.inputs).graph
        step = load_model(name)
        assert step.op_flops.sum() == pytest.approx(3 * once.op_flops.sum(), rel=0.05)


@pytest.mark.parametrize(("layers", "name"), [(2, "nmt-2"), (4, "nmt-4")])
def test_translation_models_have_the_papers_sizes(layers, name):
    graph = load_model(name)
    units, words = 1024, 32000
    encoder = layers * (4 * units * 2 * units + 4 * units)
    decoder = layers * (4 * units * 3 * units + 4 * units)
    attention = 2 * units * units + units
    expected = 3 * words * units + words + encoder + decoder + attention
    assert num_parameters(graph) == expected
    for k in range(layers):
        assert [*graph.op_names].count(f"decoder.{k}.gates.weight") == 1
    steps = [
        module == f"encoder.{layers - 1}.gates" and kind == "aten.addmm"
        for module, kind in zip(graph.op_modules, graph.op_kinds, strict=True)
    ]
    assert sum(steps) == 40


def test_every_expert_of_a_mixture_is_a_module_of_its_own():
    graph = load_model("tiny-moe")
    experts = {m.rpartition(".")[0] for m in graph.op_modules if ".experts." in m}
    assert {f"layers.0.mlp.experts.{k}" for k in range(4)} <= experts


def test_a_mixture_of_experts_computes_what_its_definition_says():
    from placewright.zoo.transformers import ExpertMlp

    torch.manual_seed(0)
    layer = ExpertMlp(8, 12, num_experts=4, capacity_factor=4.0)  # room for every token
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        weights = torch.softmax(layer.router(x), -1)
        best, chosen = weights.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        every = torch.stack([expert(x) for expert in layer.experts], -2)
        picked = every.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, 8))
        expected = (picked * best.unsqueeze(-1)).sum(-2)
        torch.testing.assert_close(layer(x), expected)


def test_an_unknown_workload_is_told_the_known_ones():
    with pytest.raises(InputError, match=r"no model `nmt-3`.*nmt-4"):
        zoo.build("nmt-3")


def test_each_family_has_a_tiny_one_that_captures_quickly():
    families = {recipe.make for recipe in zoo.RECIPES.values()}
    tiny = {recipe.make for name, recipe in zoo.RECIPES.items() if name.startswith("tiny-")}
    assert tiny == families
    for name in zoo.RECIPES:
        if name.startswith("tiny-"):
            assert load_model(name).num_ops < 2000
