"""Conv-1, -2, -4 and -6: convolutions with padding 2, max-pools, and a head with 2048 hidden units."""

from __future__ import annotations

from torch import nn

from secateur.models.create import channels, flat_size, model

# (channels, kernel, True if a 2x2 max-pool follows); each network adds two convolutions to the one before it
CONV_2 = ((32, 5, True), (64, 5, True))
CONV_4 = (*CONV_2, (128, 3, False), (256, 3, True))
CONV_6 = (*CONV_4, (512, 5, False), (1024, 5, True))


def _conv(
    name: str, plan: tuple[tuple[int, int, bool], ...], input_shape: tuple[int, ...], classes: int, smallest: int
) -> nn.Module:
    before = channels(name, input_shape, smallest)
    layers: list[nn.Module] = []
    for after, kernel, pool in plan:
        layers += [nn.Conv2d(before, after, kernel, padding=2), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pool else []
        before = after
    features = nn.Sequential(*layers)
    head = [nn.Flatten(), nn.Linear(flat_size(features, input_shape), 2048), nn.ReLU(), nn.Linear(2048, classes)]
    return nn.Sequential(*features, *head)


@model("conv-1", "priprune")
def conv_1(input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> nn.Module:
    """Conv-1 of PriPrune (TOMPECS 2024): one convolution and two linear layers."""
    return _conv("conv-1", ((8, 3, True),), input_shape, classes, smallest=1)


@model("conv-2", "priprune")
def conv_2(input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> nn.Module:
    """Conv-2 of PriPrune (TOMPECS 2024): two convolutions and two linear layers."""
    return _conv("conv-2", CONV_2, input_shape, classes, smallest=4)


@model("conv-4", "priprune")
def conv_4(input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> nn.Module:
    """Conv-4 of PriPrune (TOMPECS 2024): four convolutions and two linear layers."""
    return _conv("conv-4", CONV_4, input_shape, classes, smallest=4)


@model("conv-6", "priprune")
def conv_6(input_shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> nn.Module:
    """Conv-6 of PriPrune (TOMPECS 2024): six convolutions and two linear layers."""
    return _conv("conv-6", CONV_6, input_shape, classes, smallest=4)
