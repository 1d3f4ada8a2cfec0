from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from placewright.zoo.inception import InceptionV3  # noqa: E402
from placewright.zoo.nasnet import NasNetA  # noqa: E402
from placewright.zoo.resnet import ResNet  # noqa: E402

# builder, image side, published parameters, published multiply-adds of one image
PUBLISHED = {
    "resnet-50": (lambda: ResNet((3, 4, 6, 3)), 224, 25_557_032, 4.09e9),
    "resnet-152": (lambda: ResNet((3, 8, 36, 3)), 224, 60_192_808, 11.51e9),
    "inception-v3": (InceptionV3, 299, 23_834_568, 5.71e9),
    "nasnet-a-mobile": (NasNetA, 224, 5_289_978, 0.564e9),
}

# builder, image side (75 is the least Inception-V3 can take)
TINY = {
    "resnet": (lambda: ResNet((1, 2, 1, 1), width=8, num_classes=10), 32),
    "inception": (lambda: InceptionV3(num_classes=10, width=0.1), 75),
    "nasnet": (lambda: NasNetA(num_cells=1, filters=4, stem_filters=8, num_classes=10), 32),
    "nasnet on odd sizes": (lambda: NasNetA(2, filters=8, stem_filters=4, num_classes=10), 53),
}

Builder = Callable[[], nn.Module]


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("build", "side", "parameters", "multiply_adds"), PUBLISHED.values(), ids=PUBLISHED
)
def test_full_size_has_the_published_parameters_and_work(
    build: Builder, side: int, parameters: int, multiply_adds: float
) -> None:
    with torch.device("meta"):
        model = build().eval()
        image = torch.empty(1, 3, side, side)
    with FlopCounterMode(display=False) as counter:
        logits = model(image)

    assert logits.shape == (1, 1000)
    assert num_parameters(model) == parameters
    assert counter.get_total_flops() == pytest.approx(2 * multiply_adds, rel=0.02)


@pytest.mark.parametrize(("build", "side"), TINY.values(), ids=TINY)
def test_tiny_version_trains_every_parameter(build: Builder, side: int) -> None:
    torch.manual_seed(0)
    model = build()
    logits = model(torch.randn(2, 3, side, side))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()

    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(("build", "side"), TINY.values(), ids=TINY)
def test_modules_run_in_the_order_of_their_paths(build: Builder, side: int) -> None:
    model = build().to("meta")
    steps = ["stem", "classifier"]
    for name, module in model.named_modules():
        if name in {"blocks", "cells"}:
            steps[-1:-1] = [f"{name}.{index}" for index, _ in module.named_children()]
    ran: list[str] = []
    for step in steps:
        model.get_submodule(step).register_forward_pre_hook(
            lambda _module, _inputs, step=step: ran.append(step)
        )
    model(torch.empty(2, 3, side, side, device="meta"))
    assert ran == steps


def test_auxiliary_head_of_inception_answers_in_training_only() -> None:
    with torch.device("meta"):
        assert num_parameters(InceptionV3(is_auxiliary=True)) == 27_161_264

    torch.manual_seed(0)
    model = InceptionV3(num_classes=10, width=1 / 16, is_auxiliary=True)
    images = torch.randn(2, 3, 299, 299)
    logits, auxiliary_logits = model(images)
    assert logits.shape == auxiliary_logits.shape == (2, 10)
    (logits + auxiliary_logits).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

    assert model.eval()(images).shape == (2, 10)


def test_a_nasnet_that_cannot_be_quartered_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`filters` must be .* multiple of 4.* got 42\. Try 40"):
        NasNetA(filters=42)
