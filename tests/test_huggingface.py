"""Models that nobody here wrote: Hugging Face's, small and with random weights."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from placewright.frontends.torch import capture  # noqa: E402
from tests.marks import one_thread  # noqa: E402
from tests.stepping import random_order, run_in_order  # noqa: E402

transformers.logging.set_verbosity_error()

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def words(**more):
    ids = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, **more}


def bert():
    config = transformers.BertConfig(**SIZES, **NO_DROPOUT)
    return transformers.BertForMaskedLM(config), words()


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=100,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config), words(use_cache=False)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), words(use_cache=False)


def t5():
    config = transformers.T5Config(
        vocab_size=100,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), words(use_cache=False)


def vit():
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    config = transformers.ViTConfig(
        **sizes, **NO_DROPOUT, image_size=32, patch_size=8, num_labels=5
    )
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    inputs = {"pixel_values": pixels, "labels": torch.tensor([1, 2])}
    return transformers.ViTForImageClassification(config), inputs


def mixtral():
    config = transformers.MixtralConfig(
        **SIZES,
        num_key_value_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
    )
    return transformers.MixtralForCausalLM(config), words(use_cache=False)


@one_thread  # with several, adding into a tensor by index is not the same twice
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("build", [bert, gpt2, llama, t5, vit, mixtral])
def test_a_training_step_is_captured_and_runs_as_eager(build):
    torch.manual_seed(0)
    module, inputs = build()
    module.train()
    made = capture(module, inputs, train=True, optimizer="adamw")
    arguments = [tensor.clone() for tensor in made.bind(module, inputs)]
    order = random_order(made.graph, 1)
    loss, _, gradients = run_in_order(made, arguments, order)
    expected = module(**inputs).loss
    assert torch.equal(loss, expected)
    parameters = dict(module.named_parameters())
    wanted = torch.autograd.grad(expected, [parameters[name] for name in made.parameters])
    for name, ours, theirs in zip(made.parameters, gradients, wanted, strict=True):
        assert torch.equal(ours, theirs), name
    # Most ops belong to a layer, in the backward pass as well.
    layered = [any(part.isdecimal() for part in m.split(".")) for m in made.graph.op_modules]
    assert sum(layered) > made.graph.num_ops / 2
