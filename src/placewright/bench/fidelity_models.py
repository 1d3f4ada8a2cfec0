"""
Models for `placewright bench fidelity`, as ``file.py:function``: for a few cores, and for a GPU.

This module owns their sizes. Most of a step's time is in ops of 100 µs and more on one core, so
that ops and not the executor are what is measured, and a step takes about 0.1 s or less. A GPU
takes a millisecond for such a step, most of it to begin its ops, so each model has a larger form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from placewright.zoo.recipes import make


class Branches(nn.Module):
    """Two multilayer perceptrons side by side on the same input."""

    def __init__(self, width: int, depth: int = 6) -> None:
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
    return _train_branches(width=512, batch=96)


def branches_training_large() -> dict[str, Any]:
    """Train two branches that are three times as wide, on four times as much."""
    return _train_branches(width=1536, batch=384)


def _train_branches(width: int, batch: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "module": Branches(width),
        "inputs": (torch.randn(batch, width),),
        "targets": (torch.randint(10, (batch,)),),
        "loss": nn.functional.cross_entropy,
        "optimizer": "momentum",
        "train": True,
    }


def branches_inference() -> dict[str, Any]:
    """Run two branches."""
    return _run_branches(width=512, batch=192)


def branches_inference_large() -> dict[str, Any]:
    """Run two branches that are three times as wide, on five times as much."""
    return _run_branches(width=1536, batch=1024)


def _run_branches(width: int, batch: int) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "module": Branches(width).eval(),
        "inputs": (torch.randn(batch, width),),
        "train": False,
    }


def gpt2_training() -> dict[str, Any]:
    """Train a GPT-2 of 4 layers of 320 on 96 tokens."""
    return _gpt2("gpt2_training", length=96, width=320)


def gpt2_training_large() -> dict[str, Any]:
    """Train a GPT-2 of 4 layers of 768 on 384 tokens."""
    return _gpt2("gpt2_training_large", length=384, width=768, vocabulary=8000)


def gpt2_inference() -> dict[str, Any]:
    """Run a GPT-2 of 4 layers of 512 on 24 tokens: it is slow where weights are elsewhere."""
    return _inference(_gpt2("gpt2_inference", length=24, width=512))


def gpt2_inference_large() -> dict[str, Any]:
    """Run a GPT-2 of 4 layers of 1,024 on 256 tokens."""
    return _inference(_gpt2("gpt2_inference_large", length=256, width=1024, vocabulary=8000))


def _gpt2(name: str, length: int, width: int, vocabulary: int = 2000) -> dict[str, Any]:
    sizes = {
        "num_layers": 4,
        "width": width,
        "num_heads": width // 64,
        "vocabulary": vocabulary,
        "max_length": length,
    }
    settings = {"batch": 1, "length": length, "sizes": sizes}
    return make(name, "gpt2", settings, "cpu", 0).arguments()


def resnet_training() -> dict[str, Any]:
    """Train a ResNet of 4 blocks, half as wide, on 4 images of 96 pixels."""
    return _resnet("resnet_training", width=32, batch=4, pixels=96)


def resnet_training_large() -> dict[str, Any]:
    """Train a ResNet of 4 blocks on 16 images of 160 pixels."""
    return _resnet("resnet_training_large", width=64, batch=16, pixels=160)


def _resnet(name: str, width: int, batch: int, pixels: int) -> dict[str, Any]:
    settings = {
        "depths": (1, 1, 1, 1),
        "batch": batch,
        "pixels": pixels,
        "sizes": {"width": width, "num_classes": 100},
    }
    return make(name, "resnet", settings, "cpu", 0).arguments()


def nmt_training() -> dict[str, Any]:
    """Train 2 encoder and 2 decoder LSTM layers of 256 on 6 words."""
    return _nmt("nmt_training", num_units=256, vocabulary=1000, num_steps=6, batch=16)


def nmt_training_large() -> dict[str, Any]:
    """Train 2 encoder and 2 decoder LSTM layers of 768 on 8 words."""
    return _nmt("nmt_training_large", num_units=768, vocabulary=4000, num_steps=8, batch=32)


def _nmt(name: str, **sizes: int) -> dict[str, Any]:
    return make(name, "nmt", {"num_layers": 2, **sizes}, "cpu", 0).arguments()


def inception_inference() -> dict[str, Any]:
    """Run an Inception-V3 with 0.6 of the channels on an image of 171 pixels."""
    return _inception("inception_inference", width=0.6, batch=1, pixels=171)


def inception_inference_large() -> dict[str, Any]:
    """Run an Inception-V3 on 4 images of 299 pixels."""
    return _inception("inception_inference_large", width=1.0, batch=4, pixels=299)


def _inception(name: str, width: float, batch: int, pixels: int) -> dict[str, Any]:
    sizes = {"width": width, "num_classes": 100}
    settings = {"batch": batch, "pixels": pixels, "sizes": sizes}
    return _inference(make(name, "inception", settings, "cpu", 0).arguments())


def _inference(step: dict[str, Any]) -> dict[str, Any]:
    module = step["module"].eval()
    return {"name": step["name"], "module": module, "inputs": step["inputs"], "train": False}
