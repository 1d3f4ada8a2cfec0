"""
The zoo: benchmark models in plain PyTorch, with the papers' sizes, by name.

This module owns the list of names and what a step of each one is. It loads PyTorch only when a
model is built.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placewright.errors import InputError

if TYPE_CHECKING:
    from placewright.zoo.recipes import Workload


@dataclass(frozen=True)
class Recipe:
    """How a workload is made, and what is known about it."""

    summary: str
    make: str  # a function of `placewright.zoo.recipes`
    settings: dict[str, Any]
    paper_ops: int | None = None  # of the TensorFlow graph, in the Hierarchical Planner's paper


_TINY = {"num_layers": 2, "width": 32, "num_heads": 4, "vocabulary": 60}
_INCEPTION = "Inception-V3 (Szegedy et al., 2015), 299 pixels, float32, momentum"
_RESNET = "ResNet-{} (He et al., 2015), 224 pixels, float32, momentum"
_NMT = "{0} encoder and {0} decoder LSTM layers of 1,024, attention, 40 steps, batch 64, Adam"


def _nmt(num_layers: int, paper_ops: int) -> Recipe:
    settings = {"num_layers": num_layers, "num_units": 1024, "vocabulary": 32000}
    return Recipe(
        _NMT.format(num_layers), "nmt", settings | {"num_steps": 40, "batch": 64}, paper_ops
    )


RECIPES: dict[str, Recipe] = {
    "inception-v3": Recipe(f"{_INCEPTION}, batch 32", "inception", {"batch": 32}),
    "inception-v3-b1": Recipe(f"{_INCEPTION}, batch 1", "inception", {"batch": 1}, 24713),
    "resnet-50": Recipe(
        f"{_RESNET.format(50)}, batch 128", "resnet", {"depths": (3, 4, 6, 3), "batch": 128}
    ),
    "resnet-152": Recipe(
        f"{_RESNET.format(152)}, batch 128",
        "resnet",
        {"depths": (3, 8, 36, 3), "batch": 128},
        20586,
    ),
    "resnet-152-b32": Recipe(
        f"{_RESNET.format(152)}, batch 32", "resnet", {"depths": (3, 8, 36, 3), "batch": 32}
    ),
    "rnnlm": Recipe(
        "2 LSTM layers of 2,048, 40 steps, batch 64, 10,000 words, SGD",
        "rnnlm",
        {"num_layers": 2, "num_units": 2048, "vocabulary": 10000, "num_steps": 40, "batch": 64},
        9021,
    ),
    "nmt-2": _nmt(2, 28044),
    "nmt-4": _nmt(4, 46600),
    "nmt-8": _nmt(8, 83712),
    "nasnet-a": Recipe(
        "NASNet-A 4 @ 1056 (Zoph et al., 2018), 224 pixels, float32, batch 32, momentum",
        "nasnet",
        {"batch": 32},
    ),
    "bert-base": Recipe(
        "BERT base with its masked head, 32 x 128 tokens, float32, AdamW",
        "bert",
        {"batch": 32, "length": 128},
    ),
    "gpt2-small": Recipe(
        "GPT-2 small, 8 x 1,024 tokens, float32, AdamW", "gpt2", {"batch": 8, "length": 1024}
    ),
    "llama-7b": Recipe(
        "A decoder of Llama 7B's shape, 1 x 2,048 tokens, bfloat16, AdamW",
        "llama",
        {"batch": 1, "length": 2048, "dtype": "bfloat16"},
    ),
    "llama-7b-forward": Recipe(
        "The same, forward pass only (2,048 tokens of prompt)",
        "llama",
        {"batch": 1, "length": 2048, "dtype": "bfloat16", "train": False},
    ),
    "moe": Recipe(
        "A decoder with mixtures of 8 experts: 12 layers of 1,024, 4 x 512 tokens, AdamW",
        "llama",
        {
            "batch": 4,
            "length": 512,
            "sizes": {
                "num_layers": 12,
                "width": 1024,
                "num_heads": 16,
                "inner": 2816,
                "num_experts": 8,
            },
        },
    ),
    "tiny-inception": Recipe(
        "Inception-V3 with a tenth of the channels, 80 pixels, batch 2",
        "inception",
        {"batch": 2, "pixels": 80, "sizes": {"width": 0.1, "num_classes": 10}},
    ),
    "tiny-resnet": Recipe(
        "A ResNet of 4 small blocks, 32 pixels, batch 2",
        "resnet",
        {
            "depths": (1, 1, 1, 1),
            "batch": 2,
            "pixels": 32,
            "sizes": {"width": 8, "num_classes": 10},
        },
    ),
    "tiny-nasnet": Recipe(
        "NASNet-A with one cell a stage and 4 filters, 32 pixels, batch 2",
        "nasnet",
        {
            "batch": 2,
            "pixels": 32,
            "sizes": {"num_cells": 1, "filters": 4, "stem_filters": 8, "num_classes": 10},
        },
    ),
    "tiny-rnnlm": Recipe(
        "2 LSTM layers of 16, 5 steps, batch 3, 50 words, SGD",
        "rnnlm",
        {"num_layers": 2, "num_units": 16, "vocabulary": 50, "num_steps": 5, "batch": 3},
    ),
    "tiny-nmt": Recipe(
        "2 encoder and 2 decoder LSTM layers of 16, attention, 4 steps, batch 3, Adam",
        "nmt",
        {"num_layers": 2, "num_units": 16, "vocabulary": 50, "num_steps": 4, "batch": 3},
    ),
    "tiny-bert": Recipe(
        "A BERT of 2 layers of 32, 2 x 8 tokens, AdamW",
        "bert",
        {
            "batch": 2,
            "length": 8,
            "sizes": {**_TINY, "max_length": 16},
        },
    ),
    "tiny-gpt2": Recipe(
        "A GPT-2 of 2 layers of 32, 2 x 8 tokens, AdamW",
        "gpt2",
        {
            "batch": 2,
            "length": 8,
            "sizes": {**_TINY, "max_length": 16},
        },
    ),
    "tiny-llama": Recipe(
        "A Llama of 2 layers of 32, 2 x 8 tokens, AdamW",
        "llama",
        {
            "batch": 2,
            "length": 8,
            "sizes": {**_TINY, "inner": 48},
        },
    ),
    "tiny-moe": Recipe(
        "A decoder with mixtures of 4 experts: 2 layers of 32, 2 x 8 tokens, AdamW",
        "llama",
        {
            "batch": 2,
            "length": 8,
            "sizes": {**_TINY, "inner": 48, "num_experts": 4},
        },
    ),
}
"""Every workload by its name."""


def build(name: str, device: str = "meta", seed: int = 0) -> Workload:
    """
    Build a workload.

    On ``meta``, the default, nothing is allocated, which is all that capturing needs; on a real
    device weights and inputs are random.

    Raises
    ------
    InputError
        There is none of that name, or PyTorch is not installed.
    """
    if name not in RECIPES:
        raise InputError(f"There is no model `{name}`. The zoo has: {', '.join(RECIPES)}.")
    try:
        recipes = importlib.import_module("placewright.zoo.recipes")
    except ImportError:
        raise InputError(
            f"PyTorch is not installed, and building `{name}` needs it. Install it with"
            " `pip install 'placewright[torch]'`."
        ) from None
    made: Workload = recipes.make(name, RECIPES[name].make, RECIPES[name].settings, device, seed)
    return made
