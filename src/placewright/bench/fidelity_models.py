"""
Models for `placewright bench fidelity`, as ``file.py:function``: sized for a few CPU cores.

This module owns their sizes: most of a step's time is in ops of 100 µs and more on one core, so
that ops and not the executor are what is measured, and a step takes about 0.1 s or less.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from placewright.zoo.recipes import make


class Branches(nn.Module):
    """Two multilayer perceptrons side by side on the same input."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.left, self.right = _perceptron(width, depth), _perceptron(width, depth)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Add up what both say."""
        out: Tensor = self.head(self.left(x) + self.right(x))
        return out


def _perceptron(width: int, depth: int) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


def branches_training() -> dict[str, Any]:
    """Train two branches."""
    torch.manual_seed(0)
    return {
        "module": Branches(),
        "inputs": (torch.randn(96, 512),),
        "targets": (torch.randint(10, (96,)),),
        "loss": nn.functional.cross_entropy,
        "optimizer": "momentum",
        "train": True,
    }


def branches_inference() -> dict[str, Any]:
    """Run two branches."""
    torch.manual_seed(0)
    return {"module": Branches().eval(), "inputs": (torch.randn(192, 512),), "train": False}


def gpt2_training() -> dict[str, Any]:
    """Train a GPT-2 of 4 layers of 320 on 96 tokens."""
    return _gpt2("gpt2_training", length=96, width=320)


def gpt2_inference() -> dict[str, Any]:
    """Run a GPT-2 of 4 layers of 512 on 24 tokens: it is slow where weights are elsewhere."""
    return _inference(_gpt2("gpt2_inference", length=24, width=512))


def _gpt2(name: str, length: int, width: int) -> dict[str, Any]:
    sizes = {
        "num_layers": 4,
        "width": width,
        "num_heads": width // 64,
        "vocabulary": 2000,
        "max_length": length,
    }
    settings = {"batch": 1, "length": length, "sizes": sizes}
    return make(name, "gpt2", settings, "cpu", 0).arguments()


def resnet_training() -> dict[str, Any]:
    """Train a ResNet of 4 blocks, half as wide, on 4 images of 96 pixels."""
    settings = {
        "depths": (1, 1, 1, 1),
        "batch": 4,
        "pixels": 96,
        "sizes": {"width": 32, "num_classes": 100},
    }
    return make("resnet_training", "resnet", settings, "cpu", 0).arguments()


def nmt_training() -> dict[str, Any]:
    """Train 2 encoder and 2 decoder LSTM layers of 256 on 6 words."""
    settings = {
        "num_layers": 2,
        "num_units": 256,
        "vocabulary": 1000,
        "num_steps": 6,
        "batch": 16,
    }
    return make("nmt_training", "nmt", settings, "cpu", 0).arguments()


def inception_inference() -> dict[str, Any]:
    """Run an Inception-V3 with 0.6 of the channels on an image of 171 pixels."""
    settings = {"batch": 1, "pixels": 171, "sizes": {"width": 0.6, "num_classes": 100}}
    return _inference(make("inception_inference", "inception", settings, "cpu", 0).arguments())


def _inference(step: dict[str, Any]) -> dict[str, Any]:
    module = step["module"].eval()
    return {"name": step["name"], "module": module, "inputs": step["inputs"], "train": False}
