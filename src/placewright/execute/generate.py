"""
Text generation with a placed module: `generate`, as Hugging Face's models have it.

A program is made for each shape and each Python number that a call has. A cache of keys and values
that grows by a token a call would need a program for each length, so this module gives `generate` a
cache of fixed size, unless the caller has chosen one: one program reads the prompt, and one more
makes every token after it. Each layer's part of the cache is made, and stays, on the device of that
layer. Nothing here imports `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from placewright.errors import InputError

CACHE_STEP = 64
"""Caches hold a multiple of so many tokens, so that calls of similar lengths share a program."""

SETS = ("_previous_max_cache_length",)
"""Attributes of a model that its `generate` sets, and its `forward` does not read."""

_CHOICES = (
    "cache_implementation", "past_key_values", "cache_params", "assistant_model",
    "prompt_lookup_num_tokens",
)  # fmt: skip
"""Settings by which a caller chooses a cache, or a way of generating that needs one that grows."""


def generation_of(kind: type) -> dict[str, Any]:
    """Return the methods by which a placed module of a class generates; none if it does not."""
    if not (hasattr(kind, "generate") and hasattr(kind, "_prepare_static_cache")):
        return {}
    given: Any = kind

    def generate(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = torch.get_rng_state()
        try:
            return given.generate(self, *args, **kwargs, **_fixed_cache(self, kwargs))
        except InputError:
            if not _fixed_cache(self, kwargs):
                raise
        # With a cache of fixed size this model cannot be captured.
        torch.set_rng_state(before)
        return given.generate(self, *args, **kwargs)

    def prepare(self: torch.nn.Module, *, max_cache_len: int, **kwargs: Any) -> Any:
        length = -(-max_cache_len // CACHE_STEP) * CACHE_STEP
        made = given._prepare_static_cache(self, max_cache_len=length, **kwargs)
        _widen(getattr(made, "self_attention_cache", made).layers, length)
        return made

    generate.__doc__ = given.generate.__doc__
    return {"generate": generate, "_prepare_static_cache": prepare}


def _fixed_cache(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a cache of fixed size, unless the caller has chosen otherwise."""
    configs = (kwargs.get("generation_config"), model.generation_config)

    def chosen(name: str) -> Any:
        found = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in found if value is not None), None)

    # Hugging Face marks with this the models that compute with a cache of fixed size.
    if not getattr(model, "_can_compile_fullgraph", False) or chosen("use_cache") is False:
        return {}
    if any(chosen(name) is not None for name in _CHOICES):
        return {}
    compiles = {} if "disable_compile" in kwargs else {"disable_compile": True}  # a plan does not
    return {"cache_implementation": "static", **compiles}


def _widen(layers: list[Any], length: int) -> None:
    """
    Make layers that keep a window of tokens keep all of them; the mask of attention has the window.

    Those with a window count tokens in a Python number, which would be another one in each call.
    """
    length = max(length, *(getattr(layer, "max_cache_len", 0) for layer in layers))
    for k, layer in enumerate(layers):
        if getattr(layer, "is_sliding", False):
            whole = next(c for c in type(layer).__mro__ if c.__dict__.get("is_sliding") is False)
            layers[k] = whole(max_cache_len=length)
