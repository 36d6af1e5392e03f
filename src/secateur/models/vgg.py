"""VGG networks (Simonyan and Zisserman 2015) for small images: 3x3 convolutions, max-pools, a fully connected head."""

from __future__ import annotations

from torch import nn

from secateur.models.create import channels, flat_size, model


def _features(name: str, plan: str, input_shape: tuple[int, ...], norm: bool) -> nn.Sequential:
    """Return the convolutions of a plan such as `64 M 128 M`, where M is a max-pool that halves the sides."""
    steps = plan.split()
    before = channels(name, input_shape, smallest=2 ** steps.count("M"))
    layers: list[nn.Module] = []
    for step in steps:
        if step == "M":
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Conv2d(before, int(step), 3, padding=1))
        before = int(step)
        layers += [nn.BatchNorm2d(before), nn.ReLU()] if norm else [nn.ReLU()]
    return nn.Sequential(*layers)


def _vgg(
    name: str, plan: str, hidden: tuple[int, ...], input_shape: tuple[int, ...], classes: int, norm: bool = False
) -> nn.Module:
    """Build a VGG network; without BatchNorm its head is initialised as in PruneFL's public code.

    PriPrune builds on that code. With torch's initialisation, the outputs of VGG-11 for two pictures differ by 3e-5,
    and nothing is learnt in thousands of steps.
    """
    features = _features(name, plan, input_shape, norm)
    widths = (flat_size(features, input_shape), *hidden)
    head: list[nn.Module] = [nn.Flatten()]
    for before, after in zip(widths, hidden, strict=False):
        head += [nn.Linear(before, after), nn.ReLU()]
    last = nn.Linear(widths[-1], classes)
    if not norm:
        for layer in (module for module in head if isinstance(module, nn.Linear)):
            nn.init.kaiming_uniform_(layer.weight)
        nn.init.kaiming_uniform_(last.weight, a=1.5, mode="fan_out")
    return nn.Sequential(*features, *head, last)


@model("vgg-4", "priprune")
def vgg_4(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """VGG-4 of PriPrune (TOMPECS 2024): two convolutions, as its parameter count needs, and two linear layers."""
    return _vgg("vgg-4", "64 M 128 M", (128,), input_shape, classes)


@model("vgg-6", "priprune")
def vgg_6(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """VGG-6 of PriPrune (TOMPECS 2024): four convolutions and two linear layers."""
    return _vgg("vgg-6", "64 M 128 M 256 M 512 M", (128,), input_shape, classes)


@model("vgg-9", "priprune")
def vgg_9(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """VGG-9 of PriPrune (TOMPECS 2024): six convolutions and three linear layers."""
    return _vgg("vgg-9", "64 M 128 M 256 M 512 M 512 512 M", (256, 128), input_shape, classes)


@model("vgg-11", "priprune")
def vgg_11(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """VGG-11 of PriPrune (TOMPECS 2024): eight convolutions and three linear layers."""
    return _vgg("vgg-11", "64 M 128 M 256 256 M 512 512 M 512 512 M", (256, 128), input_shape, classes)


@model("vgg11-bn", "dgp")
def vgg11_bn(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """VGG11 of DGP (AAAI 2024, Table 3): eight convolutions with BatchNorm and one linear layer."""
    plan = "64 M 128 M 256 256 M 512 512 M 512 512 M"
    return _vgg("vgg11-bn", plan, (), input_shape, classes, norm=True)


@model("vgg16-bn", "samia_ppb")
def vgg16_bn(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, dropout: float = 0.5) -> nn.Module:
    """VGG16 with BatchNorm and a 4096-4096 head with dropout, as in SAMIA (USENIX Security 2022)."""
    plan = "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M"
    features = _features("vgg16-bn", plan, input_shape, norm=True)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 4096), nn.ReLU(), nn.Dropout(dropout)]
    head += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*features, *head, nn.Linear(4096, classes))
