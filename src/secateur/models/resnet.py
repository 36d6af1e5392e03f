"""ResNet18 (He et al. 2016) with a 3x3 stem for small images: two basic blocks a stage, four stages."""

from __future__ import annotations

from torch import Tensor, nn

from secateur.models.create import channels, model


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the residual and the shortcut, after ReLU."""
        inner = self.relu1(self.norm1(self.conv1(x)))
        residual = self.norm2(self.conv2(inner))
        return self.relu2(residual + self.shortcut(x))  # type: ignore[no-any-return]


def _resnet18(inputs: int, classes: int, width: int, pool: bool) -> nn.Sequential:
    stem = [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    if pool:
        stem.append(nn.MaxPool2d(3, stride=2, padding=1))
    blocks = []
    before = width
    for stage in range(4):
        after = width * 2**stage
        blocks += [Block(before, after, stride=1 if stage == 0 else 2), Block(after, after, stride=1)]
        before = after
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*stem, *blocks, *head)


@model("resnet18", "dgp")
def resnet18(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """ResNet18 with a 3x3 stem of stride 1 and no stem pool, as DGP (AAAI 2024, Table 3) counts it."""
    return _resnet18(channels("resnet18", input_shape), classes, width=64, pool=False)


@model("resnet18-pool", "samia_ppb")
def resnet18_pool(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """ResNet18 with a 3x3 stem of stride 1 and a max-pool after it, as in SAMIA (USENIX Security 2022)."""
    return _resnet18(channels("resnet18-pool", input_shape), classes, width=64, pool=True)


@model("resnet18-w16", "-")
def resnet18_w16(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """ResNet18 a quarter as wide (16-32-64-128), for CPUs; our own, after He et al. 2016."""
    return _resnet18(channels("resnet18-w16", input_shape), classes, width=16, pool=False)
