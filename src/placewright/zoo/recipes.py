"""
What a step of each family in the zoo is: module, inputs, targets, loss and optimiser.

The papers' models are captured as TensorFlow's graphs were, the parts of a gradient kept until all
are there (`sums_at_end`); the others as PyTorch runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from placewright.zoo.inception import InceptionV3
from placewright.zoo.nasnet import NasNetA
from placewright.zoo.recurrent import Nmt, RnnLm
from placewright.zoo.resnet import ResNet
from placewright.zoo.transformers import Bert, Gpt2, Llama


@dataclass(frozen=True, eq=False, kw_only=True)
class Workload:
    """A model and its step; the fields are the arguments of `placewright.capture`."""

    name: str
    module: nn.Module
    inputs: tuple[Tensor, ...]
    train: bool = True
    targets: tuple[Tensor, ...] = ()
    loss: Callable[..., Tensor] | None = None
    optimizer: str | None = None
    sums_at_end: bool = False

    def arguments(self) -> dict[str, Any]:
        """Give the arguments for `placewright.capture`, by name."""
        return dict(vars(self))


def make(name: str, family: str, settings: dict[str, Any], device: str, seed: int) -> Workload:
    """Make the workload `name` of a family, with random weights and inputs."""
    if device != "meta":
        torch.manual_seed(seed)
    with torch.device(device):
        makers: dict[str, Callable[..., dict[str, Any]]] = {
            "inception": _inception,
            "resnet": _resnet,
            "nasnet": _nasnet,
            "rnnlm": _rnnlm,
            "nmt": _nmt,
            "bert": _bert,
            "gpt2": _gpt2,
            "llama": _llama,
        }
        return Workload(name=name, **makers[family](**settings))


def _classified(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels.flatten())


def _translated(logits: Sequence[Tensor], words: Tensor) -> Tensor:
    losses = [
        functional.cross_entropy(step, word)
        for step, word in zip(logits, words.unbind(1), strict=True)
    ]
    return torch.stack(losses).mean()


def _images(module: nn.Module, batch: int, pixels: int, num_classes: int) -> dict[str, Any]:
    return {
        "module": module,
        "inputs": (torch.randn(batch, 3, pixels, pixels),),
        "targets": (torch.randint(num_classes, (batch,)),),
        "loss": _classified,
        "optimizer": "momentum",
        "sums_at_end": True,
    }


def _inception(
    batch: int, pixels: int = 299, sizes: dict[str, Any] | None = None
) -> dict[str, Any]:
    module = InceptionV3(**sizes or {})
    return _images(module, batch, pixels, (sizes or {}).get("num_classes", 1000))


def _resnet(
    depths: Sequence[int], batch: int, pixels: int = 224, sizes: dict[str, Any] | None = None
) -> dict[str, Any]:
    module = ResNet(depths, **sizes or {})
    return _images(module, batch, pixels, (sizes or {}).get("num_classes", 1000))


def _nasnet(batch: int, pixels: int = 224, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    module = NasNetA(**sizes or {})
    return _images(module, batch, pixels, (sizes or {}).get("num_classes", 1000))


def _rnnlm(
    num_layers: int, num_units: int, vocabulary: int, num_steps: int, batch: int
) -> dict[str, Any]:
    return {
        "module": RnnLm(num_layers, num_units, vocabulary),
        "inputs": (torch.randint(vocabulary, (batch, num_steps)),),
        "targets": (torch.randint(vocabulary, (batch, num_steps)),),
        "loss": _classified,
        "optimizer": "sgd",
        "sums_at_end": True,
    }


def _nmt(
    num_layers: int, num_units: int, vocabulary: int, num_steps: int, batch: int
) -> dict[str, Any]:
    words = [torch.randint(vocabulary, (batch, num_steps)) for _ in range(3)]
    return {
        "module": Nmt(num_layers, num_units, vocabulary),
        "inputs": (words[0], words[1]),
        "targets": (words[2],),
        "loss": _translated,
        "optimizer": "adam",
        "sums_at_end": True,
    }


def _tokens(module: nn.Module, vocabulary: int, batch: int, length: int) -> dict[str, Any]:
    return {
        "module": module,
        "inputs": (torch.randint(vocabulary, (batch, length)),),
        "targets": (torch.randint(vocabulary, (batch, length)),),
        "loss": _classified,
        "optimizer": "adamw",
    }


def _bert(batch: int, length: int, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    module = Bert(**sizes or {}, is_training_head=True)
    step = _tokens(module, module.words.num_embeddings, batch, length)
    return step | {"inputs": (*step["inputs"], torch.zeros(batch, length, dtype=torch.int64))}


def _gpt2(batch: int, length: int, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    module = Gpt2(**sizes or {})
    return _tokens(module, module.words.num_embeddings, batch, length)


def _llama(
    batch: int,
    length: int,
    dtype: str = "float32",
    train: bool = True,
    sizes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    module = Llama(**sizes or {}).to(getattr(torch, dtype))
    step = _tokens(module, module.words.num_embeddings, batch, length)
    if train:
        return step
    return {"module": module.eval(), "inputs": step["inputs"], "train": False}
