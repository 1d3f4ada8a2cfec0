"""
A model of yours, for ``placewright inspect examples/mymodel.py:build --cluster laptop``.

The function takes no arguments and returns ``(module, inputs)``, or a dict of arguments for
`placewright.capture`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def build() -> dict[str, Any]:
    """Give one training step of a small transformer encoder."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=6, enable_nested_tensor=False)
    module = nn.Sequential(nn.Embedding(10_000, 256), encoder, nn.Linear(256, 10_000))
    words = torch.zeros(16, 128, dtype=torch.int64)
    return {
        "module": module,
        "inputs": words,
        "train": True,
        "loss": lambda logits, labels: functional.cross_entropy(logits.flatten(0, 1), labels),
        "targets": words.flatten(),
        "optimizer": "adamw",
    }
