"""The two small networks that attacks on gradients are shown on: smooth or invertible activations, no pooling."""

from __future__ import annotations

from torch import nn

from secateur.models.parts import channels, flat_size, model

# CNN6's convolutions: outputs, kernel, stride, padding
CNN6 = ((12, 4, 2, 2), (36, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1))


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
