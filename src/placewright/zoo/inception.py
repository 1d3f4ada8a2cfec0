"""
Inception-V3.

Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016
(arXiv:1512.00567), with the channel counts of the published weights. There is no dropout, so
that a placed run can be compared with a plain one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_Kernel = int | tuple[int, int]

_AUXILIARY_BLOCK = 7  # the auxiliary head reads this block, the last on the 17x17 grid


class _ConvNorm(nn.Module):
    """Convolve, normalise, and rectify."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: _Kernel, stride: int, is_padded: bool
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if is_padded else 0
        self.conv = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class _Fork(nn.ModuleList):
    """Run every branch on the same input and join their channels."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


@dataclass(frozen=True, slots=True)
class _Builder:
    """
    Make blocks from the paper's channel counts, ``unit`` channels for every 16 there.

    All counts in the paper are multiples of 16, so scaled branches still add up to the scaled
    input of the next block.
    """

    unit: int

    def channels(self, paper_channels: int) -> int:
        return paper_channels // 16 * self.unit

    def conv(
        self, inputs: int, outputs: int, kernel: _Kernel, stride: int = 1, is_padded: bool = False
    ) -> _ConvNorm:
        return _ConvNorm(self.channels(inputs), self.channels(outputs), kernel, stride, is_padded)

    def chain(self, inputs: int, *layers: tuple[int, _Kernel]) -> nn.Sequential:
        """Chain padded convolutions, each given as its output channels and kernel."""
        chain = nn.Sequential()
        for outputs, kernel in layers:
            chain.append(self.conv(inputs, outputs, kernel, is_padded=True))
            inputs = outputs
        return chain

    def pooled(self, inputs: int, outputs: int) -> nn.Sequential:
        pool = nn.AvgPool2d(3, stride=1, padding=1)
        return nn.Sequential(pool, *self.chain(inputs, (outputs, 1)))

    def fork_3x3(self, inputs: int) -> _Fork:
        """Make the 1x3 and 3x1 convolutions that stand side by side on the 8x8 grid."""
        return _Fork([self.chain(inputs, (384, (1, 3))), self.chain(inputs, (384, (3, 1)))])

    def stem(self) -> nn.Sequential:
        return nn.Sequential(
            _ConvNorm(3, self.channels(32), 3, stride=2, is_padded=False),
            self.conv(32, 32, 3),
            self.conv(32, 64, 3, is_padded=True),
            nn.MaxPool2d(3, stride=2),
            self.conv(64, 80, 1),
            self.conv(80, 192, 3),
            nn.MaxPool2d(3, stride=2),
        )

    def grid_35(self, inputs: int, pooled: int) -> _Fork:
        return _Fork(
            [
                self.chain(inputs, (64, 1)),
                self.chain(inputs, (48, 1), (64, 5)),
                self.chain(inputs, (64, 1), (96, 3), (96, 3)),
                self.pooled(inputs, pooled),
            ]
        )

    def from_35_to_17(self) -> _Fork:
        return _Fork(
            [
                self.conv(288, 384, 3, stride=2),
                self.chain(288, (64, 1), (96, 3)).append(self.conv(96, 96, 3, stride=2)),
                nn.MaxPool2d(3, stride=2),
            ]
        )

    def grid_17(self, inner: int) -> _Fork:
        row, column = (1, 7), (7, 1)
        return _Fork(
            [
                self.chain(768, (192, 1)),
                self.chain(768, (inner, 1), (inner, row), (192, column)),
                self.chain(
                    768, (inner, 1), (inner, column), (inner, row), (inner, column), (192, row)
                ),
                self.pooled(768, 192),
            ]
        )

    def from_17_to_8(self) -> _Fork:
        sevens = self.chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)))
        return _Fork(
            [
                self.chain(768, (192, 1)).append(self.conv(192, 320, 3, stride=2)),
                sevens.append(self.conv(192, 192, 3, stride=2)),
                nn.MaxPool2d(3, stride=2),
            ]
        )

    def grid_8(self, inputs: int) -> _Fork:
        return _Fork(
            [
                self.chain(inputs, (320, 1)),
                self.chain(inputs, (384, 1)).append(self.fork_3x3(384)),
                self.chain(inputs, (448, 1), (384, 3)).append(self.fork_3x3(384)),
                self.pooled(inputs, 192),
            ]
        )

    def auxiliary(self, num_classes: int) -> nn.Sequential:
        return nn.Sequential(
            nn.AvgPool2d(5, stride=3), self.conv(768, 128, 1), self.conv(128, 768, 5)
        ).extend(self.classifier(768, num_classes))

    def classifier(self, inputs: int, num_classes: int) -> nn.Sequential:
        linear = nn.Linear(self.channels(inputs), num_classes)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)


class InceptionV3(nn.Module):
    """
    Classify images of 299x299 pixels with eleven blocks of parallel branches.

    Runs ``stem``, ``blocks.0``, ..., ``blocks.10``, ``classifier``, in that order; ``auxiliary``
    reads ``blocks.7``. Images may be as small as 75x75, or 299x299 with the auxiliary head.

    Parameters
    ----------
    num_classes
        Length of the output.
    width
        Scales every channel count, in steps of a sixteenth and to no less than one.
    is_auxiliary
        Whether to add the second, earlier classifier, which runs in training mode only.
    """

    def __init__(
        self, num_classes: int = 1000, width: float = 1.0, is_auxiliary: bool = False
    ) -> None:
        super().__init__()
        build = _Builder(unit=max(1, round(16 * width)))
        self.stem = build.stem()
        self.blocks = nn.ModuleList(
            [
                build.grid_35(192, pooled=32),
                build.grid_35(256, pooled=64),
                build.grid_35(288, pooled=64),
                build.from_35_to_17(),
                build.grid_17(128),
                build.grid_17(160),
                build.grid_17(160),
                build.grid_17(192),
                build.from_17_to_8(),
                build.grid_8(1280),
                build.grid_8(2048),
            ]
        )
        self.auxiliary = build.auxiliary(num_classes) if is_auxiliary else None
        self.classifier = build.classifier(2048, num_classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """
        Return logits ``[B, num_classes]`` of images ``[B, 3, H, W]``.

        In training mode and with the auxiliary head, return its logits too, second.
        """
        x = self.stem(images)
        auxiliary_logits: Tensor | None = None
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == _AUXILIARY_BLOCK and self.auxiliary is not None and self.training:
                auxiliary_logits = self.auxiliary(x)
        logits: Tensor = self.classifier(x)
        return logits if auxiliary_logits is None else (logits, auxiliary_logits)
