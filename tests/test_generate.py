"""Hugging Face's `generate`, unchanged, with placed models."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numpy as np  # noqa: E402

import placewright as pw  # noqa: E402
from placewright.execute.calls import NewProgramWarning  # noqa: E402
from tests.marks import any_call, one_thread, two_cores  # noqa: E402
from tests.random_module_cases import make_plan  # noqa: E402
from tests.test_execute import BOX, GPU, on_gpu  # noqa: E402

transformers.logging.set_verbosity_error()

WORDS, LENGTH = 97, 7
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
HALVES = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
ENDS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",
}

MODELS = {
    "Llama": GROUPED,
    "GPT2": {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "Qwen3": GROUPED,
    "Gemma2": GROUPED | {"sliding_window": 8},  # shorter than what is generated
    "Mixtral": SIZES | {"num_key_value_heads": 2} | EXPERTS,
    "Mamba": {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "T5": {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1} | ENDS,
    "Bart": {"vocab_size": WORDS, "d_model": 32, "max_position_embeddings": 512} | HALVES | ENDS,
}
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 2},
}

pytestmark = [
    two_cores,
    one_thread,
    any_call,
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning"),
]


def model_of(name):
    """Make a model whose next words are far from equally likely."""
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    ends = "ConditionalGeneration" if name in ("T5", "Bart") else "CausalLM"
    kind = getattr(transformers, f"{name}LMHeadModel", None) or getattr(
        transformers, f"{name}For{ends}"
    )
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def prompt(length=LENGTH, rows=2):
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(length))


def place(model):
    ids = prompt()
    named = {"input_ids": ids, "use_cache": False}
    if model.config.is_encoder_decoder:
        named["decoder_input_ids"] = ids
    plan = make_plan(pw.capture(model, (), kwargs=named).graph, 3)
    return pw.apply(plan, model, (), kwargs=named)


def generate(model, ids, **how):
    torch.manual_seed(5)
    how = {"max_new_tokens": 10, "pad_token_id": 0, **how}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)


def count(placed):
    return len(placed._calls.programs.all())


@pytest.mark.parametrize("name", MODELS)
def test_greedy_and_sampled_words_are_those_of_the_model(name):
    model = model_of(name)
    wanted = {way: generate(model, prompt(), **how) for way, how in WAYS.items()}
    placed = place(model)
    for way, how in WAYS.items():
        found = generate(placed, prompt(), **how)
        assert torch.equal(found, wanted[way]), way
    # One as captured; a prompt and a step program for two rows, and two more for beams.
    assert count(placed) == 5


def test_longer_answers_and_prompts_share_the_program_of_a_step():
    model = model_of("Llama")
    placed = place(model)
    for length, more in ((7, 5), (7, 40), (9, 40), (12, 30)):
        wanted = generate(model, prompt(length), max_new_tokens=more)
        assert torch.equal(generate(placed, prompt(length), max_new_tokens=more), wanted)
    assert count(placed) == 1 + 3 + 1  # three lengths of prompts, one step
    wanted = generate(model, prompt(), max_new_tokens=90)
    assert torch.equal(generate(placed, prompt(), max_new_tokens=90), wanted)
    assert count(placed) == 5 + 2


def test_a_cache_that_the_caller_chooses_is_used():
    model = model_of("Llama")
    wanted = generate(model, prompt(), max_new_tokens=4)
    placed = place(model)
    assert torch.equal(
        generate(placed, prompt(), max_new_tokens=4, cache_implementation="dynamic"), wanted
    )
    assert count(placed) == 1 + 4  # a length each
    assert torch.equal(generate(placed, prompt(), max_new_tokens=4, use_cache=False), wanted)
    cache = transformers.DynamicCache(config=model.config)
    assert torch.equal(generate(placed, prompt(), max_new_tokens=4, past_key_values=cache), wanted)
    assert cache.get_seq_length() == LENGTH + 3
    assert all(type(layer.keys) is torch.Tensor for layer in cache.layers)  # not fake ones


def test_an_answer_goes_on_from_a_cache_as_the_model_does():
    model = model_of("Qwen3")
    placed = place(model)
    found = []
    for each in (model, placed):
        with torch.no_grad():
            first = each(input_ids=prompt(), use_cache=True)
            following = prompt(3)
            then = each(input_ids=following, past_key_values=first.past_key_values)
        found.append((first.logits, then.logits, then.past_key_values.layers[1].keys))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_the_warning_about_many_kinds_of_calls_names_the_cache():
    placed = place(model_of("Llama"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", NewProgramWarning)
        generate(placed, prompt(), max_new_tokens=34, cache_implementation="dynamic")
    assert any("cache" in str(each.message) for each in told)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_each_layer_keeps_its_cache_on_its_own_device(name, tmp_path):
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu"], more=GPU))
    model = model_of(name)
    wanted = generate(model, prompt())
    named = {"input_ids": prompt(), "use_cache": False}
    problem = pw.Problem(
        pw.capture(model, (), kwargs=named).graph, pw.Cluster.load(tmp_path / "box.toml")
    )
    is_first = [".layers.0." in f".{module}." for module in problem.graph.op_modules]
    placement = np.where(is_first, 0, 1)
    placement[problem.colocation_members] = placement[problem.colocation_leaders]
    plan = pw.Plan.of(pw.simulate(problem, placement), "split", lower_bound_s=0.0, placer="hand")
    placed = pw.apply(plan, model, (), kwargs=named)
    ids = prompt().to(placed.device)
    assert torch.equal(generate(placed, ids).cpu(), wanted)
    answer = generate(placed, ids, return_dict_in_generate=True)
    layers = answer.past_key_values.layers
    assert [layer.keys.device.type for layer in layers] == ["cpu", "cuda"]
