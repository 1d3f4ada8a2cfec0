"""Hugging Face's models, of many architectures, tiny and with random weights, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
DECODER = SIZES | {"num_key_value_heads": 1}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"image_size": 16, "patch_size": 8, "num_labels": 3}


def words(rows: int = 2, length: int = 7, **more: Any) -> dict[str, Any]:
    """Draw sentences, with their own words as labels and the last row padded."""
    ids = torch.randint(3, 60, (rows, length))
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone(), **more}


def classes(rows: int = 2) -> dict[str, Any]:
    """Draw sentences, each of a class."""
    return words(rows) | {"labels": torch.arange(rows) % 3}


def pictures(rows: int = 2, size: int = 16) -> dict[str, Any]:
    """Draw pictures, each of a class."""
    return {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.arange(rows) % 3}


def _sized(*leave_out: str, **more: Any) -> dict[str, Any]:
    return {key: value for key, value in SIZES.items() if key not in leave_out} | more


def still(config: Any) -> Any:
    """Take the dropout out of a configuration: eager draws other random numbers than a plan."""
    for name, value in [*vars(config).items()]:
        if isinstance(value, transformers.PreTrainedConfig):
            still(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def bert() -> Any:
    return transformers.BertForMaskedLM(still(transformers.BertConfig(**SIZES))), words()


def roberta() -> Any:
    config = transformers.RobertaConfig(**SIZES, type_vocab_size=1, num_labels=3)
    return transformers.RobertaForSequenceClassification(still(config)), classes()


def distilbert() -> Any:
    config = transformers.DistilBertConfig(
        vocab_size=60, dim=16, n_layers=2, n_heads=2, hidden_dim=32, num_labels=3
    )
    return transformers.DistilBertForSequenceClassification(still(config)), classes()


def albert() -> Any:
    config = transformers.AlbertConfig(**SIZES, embedding_size=8)
    return transformers.AlbertForMaskedLM(still(config)), words()


def electra() -> Any:
    config = transformers.ElectraConfig(**SIZES, embedding_size=8, num_labels=3)
    return transformers.ElectraForTokenClassification(still(config)), words() | {
        "labels": torch.randint(3, (2, 7))
    }


def deberta() -> Any:
    config = transformers.DebertaV2Config(
        **SIZES,
        num_labels=3,
        relative_attention=True,
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        conv_kernel_size=3,
        problem_type="single_label_classification",
    )
    return transformers.DebertaV2ForSequenceClassification(still(config)), classes()


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=32, **TOKENS
    )
    return transformers.GPT2LMHeadModel(still(config)), words()


def opt() -> Any:
    config = transformers.OPTConfig(
        **_sized("intermediate_size"), ffn_dim=32, word_embed_proj_dim=16, **TOKENS
    )
    return transformers.OPTForCausalLM(still(config)), words()


def bloom() -> Any:
    config = transformers.BloomConfig(vocab_size=60, hidden_size=16, n_layer=2, n_head=2, **TOKENS)
    return transformers.BloomForCausalLM(still(config)), words()


def llama() -> Any:
    return transformers.LlamaForCausalLM(still(transformers.LlamaConfig(**DECODER))), words()


def mistral() -> Any:
    config = transformers.MistralConfig(**DECODER, sliding_window=4)
    return transformers.MistralForCausalLM(still(config)), words()


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **DECODER,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
        output_router_logits=True,
    )
    return transformers.MixtralForCausalLM(still(config)), words()


def gemma() -> Any:
    config = transformers.GemmaConfig(**DECODER, head_dim=8)
    return transformers.GemmaForCausalLM(still(config)), words()


def gemma2() -> Any:
    config = transformers.Gemma2Config(**DECODER, head_dim=8, sliding_window=4)
    return transformers.Gemma2ForCausalLM(still(config)), words()


def qwen2() -> Any:
    return transformers.Qwen2ForCausalLM(still(transformers.Qwen2Config(**DECODER))), words()


def qwen3() -> Any:
    config = transformers.Qwen3Config(**DECODER, head_dim=8)
    return transformers.Qwen3ForCausalLM(still(config)), words()


def phi() -> Any:
    return transformers.PhiForCausalLM(still(transformers.PhiConfig(**DECODER))), words()


def phi3() -> Any:
    config = transformers.Phi3Config(**DECODER, **TOKENS)
    return transformers.Phi3ForCausalLM(still(config)), words()


def gpt_neox() -> Any:
    return transformers.GPTNeoXForCausalLM(still(transformers.GPTNeoXConfig(**SIZES))), words()


def falcon() -> Any:
    config = transformers.FalconConfig(**_sized("intermediate_size"), alibi=False)
    return transformers.FalconForCausalLM(still(config)), words()


def mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=60, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2
    )
    return transformers.MambaForCausalLM(still(config)), words()


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(still(config)), words()


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        max_position_embeddings=32, decoder_start_token_id=2, forced_eos_token_id=2, **TOKENS,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(still(config)), words()


def vit() -> Any:
    config = transformers.ViTConfig(**_sized("vocab_size", "max_position_embeddings"), **IMAGE)
    return transformers.ViTForImageClassification(still(config)), pictures()


def swin() -> Any:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4,
        num_labels=3,
    )  # fmt: skip
    return transformers.SwinForImageClassification(still(config)), pictures(2, 32)


def convnext() -> Any:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, drop_path_rate=0.1
    )
    return transformers.ConvNextForImageClassification(still(config)), pictures(2, 32)


def resnet() -> Any:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(still(config)), pictures(2, 32)


def clip() -> Any:
    text = _sized("max_position_embeddings", max_position_embeddings=16, **TOKENS)
    sight = _sized("vocab_size", "max_position_embeddings", image_size=16, patch_size=8)
    config = transformers.CLIPConfig(text_config=text, vision_config=sight, projection_dim=8)
    ids = torch.randint(3, 60, (2, 7))
    ids[:, -1] = 2
    given = {"input_ids": ids, "pixel_values": pictures()["pixel_values"], "return_loss": True}
    return transformers.CLIPModel(still(config)), given


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=60, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_source_positions=10, max_target_positions=16,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, **TOKENS,
    )  # fmt: skip
    given = {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 60, (2, 5))}
    return transformers.WhisperForConditionalGeneration(still(config)), given


def wav2vec2() -> Any:
    config = transformers.Wav2Vec2Config(
        **_sized("max_position_embeddings"), conv_dim=(8, 8), conv_stride=(5, 2),
        conv_kernel=(10, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2, mask_time_prob=0.0, num_labels=3,
        classifier_proj_size=8,
    )  # fmt: skip
    given = {"input_values": torch.randn(2, 400), "labels": torch.tensor([0, 2])}
    return transformers.Wav2Vec2ForSequenceClassification(still(config)), given
