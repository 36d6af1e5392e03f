"""Small networks: a CNN for digits, a perceptron for tables, LeNet and CNN6 of gradient inversion, Conv-1 to -6.

LeNet and CNN6 have smooth or invertible activations and no pooling. Conv-1, -2, -4 and -6 have convolutions with
padding 2, max-pools, and a head with 2048 hidden units.
"""

from __future__ import annotations

from math import prod

from torch import nn

from secateur.models.create import channels, flat_size, model

# CNN6's convolutions: outputs, kernel, stride, padding
CNN6 = ((12, 4, 2, 2), (36, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1))


@model("digits-cnn", "-")
def digits_cnn(input_shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> nn.Module:
    """Three convolutions with BatchNorm (16-32-64) for 8x8 digits, trained in seconds on one CPU thread; our own."""
    first = _layer(channels("digits-cnn", input_shape, smallest=4), 16)
    features = nn.Sequential(*first, *_layer(16, 32), nn.MaxPool2d(2), *_layer(32, 64), nn.MaxPool2d(2))
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(flat_size(features, input_shape), classes))


def _layer(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a 3x3 convolution, its BatchNorm and a ReLU."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


@model("mlp", "samia_ppb")
def mlp(input_shape: tuple[int, ...] = (446,), classes: int = 30, dropout: float = 0.1) -> nn.Module:
    """The 256-128 network with dropout for tables of SAMIA (USENIX Security 2022, Section 5.1.2); flattens images."""
    hidden = [nn.Flatten(), nn.Linear(prod(input_shape), 256), nn.ReLU(), nn.Dropout(dropout)]
    hidden += [nn.Linear(256, 128), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*hidden, nn.Linear(128, classes))


@model("lenet-zhu", "dgp")
def lenet_zhu(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """LeNet of Zhu et al. 2019 in DGP (AAAI 2024, Table 3): three sigmoid convolutions, all drawn from U(-.5, .5)."""
    before = channels("lenet-zhu", input_shape)
    layers: list[nn.Module] = []
    for stride in (2, 2, 1):
        layers += [nn.Conv2d(before, 12, 5, stride, padding=2), nn.Sigmoid()]
        before = 12
    features = nn.Sequential(*layers)
    net = nn.Sequential(*features, nn.Flatten(), nn.Linear(flat_size(features, input_shape), classes))
    for value in net.parameters():
        nn.init.uniform_(value, -0.5, 0.5)
    return net


@model("cnn6", "dgp")
def cnn6(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """CNN6 of R-GAP (Zhu and Blaschko 2021) in DGP (AAAI 2024, Table 3): leaky ReLUs of slope .2 and no biases."""
    before = channels("cnn6", input_shape)
    layers: list[nn.Module] = []
    for after, kernel, stride, padding in CNN6:
        layers += [nn.Conv2d(before, after, kernel, stride, padding, bias=False), nn.LeakyReLU(0.2)]
        before = after
    features = nn.Sequential(*layers)
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(flat_size(features, input_shape), classes, bias=False))


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
