"""
NASNet-A, the image classifier whose cells were found by architecture search.

Zoph et al., "Learning Transferable Architectures for Scalable Image Recognition", CVPR 2018
(arXiv:1707.07012), figure 4 and appendix A. Without the auxiliary head, and without dropout and
path dropping, so that a placed run can be compared with a plain one.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


def _pointwise(in_channels: int, out_channels: int) -> nn.Sequential:
    """Make the rectified 1x1 convolution that brings a cell's input to the cell's filters."""
    conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    return nn.Sequential(nn.ReLU(), conv, _norm(out_channels))


def _separable(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Make a separable convolution, which the paper always applies twice."""
    layers = nn.Sequential()
    for channels, step in ((in_channels, stride), (out_channels, 1)):
        depthwise = nn.Conv2d(
            channels, channels, kernel, step, kernel // 2, groups=channels, bias=False
        )
        pointwise = nn.Conv2d(channels, out_channels, 1, bias=False)
        layers.extend([nn.ReLU(), depthwise, pointwise, _norm(out_channels)])
    return layers


def _average_pool(stride: int) -> nn.AvgPool2d:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


class _Halve(nn.Module):
    """
    Halve the image with two strided 1x1 convolutions, one on even and one on odd pixels.

    One alone would ignore three pixels out of four.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(in_channels, out_channels // 2, 1, stride=2, bias=False)
        self.norm = _norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        # A zero row and column at the far end keep both halves the same size on odd images.
        shifted = functional.pad(x, (-1, 1, -1, 1))
        halved: Tensor = self.norm(torch.cat([self.even(x), self.odd(shifted)], dim=1))
        return halved


class _NormalCell(nn.Module):
    """Keep the image's size; ``fit`` brings the previous cell's output to the filters."""

    def __init__(self, fit: nn.Module, in_channels: int, filters: int) -> None:
        super().__init__()
        self.out_channels = 6 * filters
        self.fit_previous = fit
        self.fit_current = _pointwise(in_channels, filters)
        self.current_5x5 = _separable(filters, filters, 5)
        self.previous_3x3 = _separable(filters, filters, 3)
        self.second_previous_5x5 = _separable(filters, filters, 5)
        self.second_previous_3x3 = _separable(filters, filters, 3)
        self.current_3x3 = _separable(filters, filters, 3)
        self.pool = _average_pool(stride=1)

    def forward(self, previous: Tensor, current: Tensor) -> Tensor:
        previous, current = self.fit_previous(previous), self.fit_current(current)
        sums = [
            self.current_5x5(current) + self.previous_3x3(previous),
            self.second_previous_5x5(previous) + self.second_previous_3x3(previous),
            self.pool(current) + previous,
            self.pool(previous) + self.pool(previous),
            self.current_3x3(current) + current,
        ]
        return torch.cat([previous, *sums], dim=1)


class _ReductionCell(nn.Module):
    """Halve the image; ``fit`` brings the previous cell's output to ``fit_channels``."""

    def __init__(self, fit: nn.Module, fit_channels: int, in_channels: int, filters: int) -> None:
        super().__init__()
        self.out_channels = 4 * filters
        self.fit_previous = fit
        self.fit_current = _pointwise(in_channels, filters)
        self.current_5x5 = _separable(filters, filters, 5, stride=2)
        self.previous_7x7 = _separable(fit_channels, filters, 7, stride=2)
        self.second_previous_7x7 = _separable(fit_channels, filters, 7, stride=2)
        self.previous_5x5 = _separable(fit_channels, filters, 5, stride=2)
        self.first_3x3 = _separable(filters, filters, 3)
        self.max_pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.average_pool = _average_pool(stride=2)
        self.first_pool = _average_pool(stride=1)

    def forward(self, previous: Tensor, current: Tensor) -> Tensor:
        previous, current = self.fit_previous(previous), self.fit_current(current)
        first = self.current_5x5(current) + self.previous_7x7(previous)
        second = self.max_pool(current) + self.second_previous_7x7(previous)
        third = self.average_pool(current) + self.previous_5x5(previous)
        fourth = self.first_pool(first) + second
        fifth = self.first_3x3(first) + self.max_pool(current)
        return torch.cat([second, third, fourth, fifth], dim=1)


def _cells(num_cells: int, filters: int, stem_filters: int) -> nn.ModuleList:
    """Make the cells in the order they run, each fit to the two before it."""
    plan = [(True, filters // 4), (True, filters // 2)]  # whether it reduces, its filters
    plan += [(False, filters)] * num_cells
    for wider in (2 * filters, 4 * filters):
        plan += [(True, wider)] + [(False, wider)] * num_cells

    cells = nn.ModuleList()
    previous = current = stem_filters
    was_reduction = False
    for is_reduction, width in plan:
        fit: nn.Module = _Halve(previous, width) if was_reduction else _pointwise(previous, width)
        fit_channels = width
        if not cells:  # both inputs of the first cell are the stem, and one is taken as it is
            fit, fit_channels = nn.Identity(), stem_filters
        cell: _NormalCell | _ReductionCell
        if is_reduction:
            cell = _ReductionCell(fit, fit_channels, current, width)
        else:
            cell = _NormalCell(fit, current, width)
        cells.append(cell)
        previous, current, was_reduction = current, cell.out_channels, is_reduction
    return cells


class NasNetA(nn.Module):
    """
    Classify images with three stacks of searched cells; the defaults are NASNet-A (4 @ 1056).

    Runs ``stem``, ``cells.0``, ``cells.1``, ..., ``classifier``, in that order; every cell reads
    the outputs of the two before it. Cells 0 and 1 reduce the image, then come three stacks of
    ``num_cells`` normal cells with one reducing cell between two stacks.

    Parameters
    ----------
    num_cells
        Normal cells in a stack.
    filters
        Filters of the first stack's cells, doubled for each stack after it; a multiple of 4.
        The classifier reads ``24 * filters`` channels.
    stem_filters
        Channels of the first convolution.
    num_classes
        Length of the output.

    Raises
    ------
    ValueError
        If ``filters`` is not a positive multiple of 4.
    """

    def __init__(
        self,
        num_cells: int = 4,
        filters: int = 44,
        stem_filters: int = 32,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        if filters < 4 or filters % 4:
            raise ValueError(
                f"`filters` must be a positive multiple of 4, as the first cell has a quarter "
                f"of them; got {filters}. Try {max(4, filters // 4 * 4)}."
            )
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem_filters, 3, stride=2, bias=False), _norm(stem_filters)
        )
        self.cells = _cells(num_cells, filters, stem_filters)
        self.classifier = nn.Sequential(
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24 * filters, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[B, num_classes]`` of images ``[B, 3, H, W]``."""
        previous = current = self.stem(images)
        for cell in self.cells:
            previous, current = current, cell(previous, current)
        logits: Tensor = self.classifier(current)
        return logits
