"""
Residual networks built of bottleneck blocks.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016 (arXiv:1512.03385). A block
that shrinks the image does so in its 3x3 convolution ("v1.5") and not in its first 1x1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_EXPANSION = 4  # a block's output channels per channel of its 3x3 convolution


class Bottleneck(nn.Module):
    """
    Add to the input what a 1x1, a 3x3 and a 1x1 convolution make of it.

    Parameters
    ----------
    in_channels
        Channels of the input.
    width
        Channels of the 3x3 convolution; the output has four times as many.
    stride
        How much smaller the output's sides are than the input's.
    """

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = _EXPANSION * width
        self.residual = nn.Sequential(
            nn.Conv2d(in_channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 4 * width, H / stride, W / stride]``."""
        return torch.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Module):
    """
    Classify images with stages of bottleneck blocks.

    Runs ``stem``, ``blocks.0``, ``blocks.1``, ..., ``classifier``, in that order.

    Parameters
    ----------
    depths
        Blocks in each stage: ``(3, 4, 6, 3)`` is ResNet-50, ``(3, 8, 36, 3)`` is ResNet-152.
    width
        Channels of the stem; every stage after the first is twice as wide as the one before.
    num_classes
        Length of the output.
    """

    def __init__(self, depths: Sequence[int], width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential()
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                self.blocks.append(Bottleneck(channels, width << stage, stride))
                channels = _EXPANSION * (width << stage)
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[B, num_classes]`` of images ``[B, 3, H, W]``."""
        logits: Tensor = self.classifier(self.blocks(self.stem(images)))
        return logits
