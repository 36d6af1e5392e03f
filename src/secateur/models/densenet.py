"""DenseNet121 (Huang et al. 2017) for small images: dense blocks of 6, 12, 24 and 16 layers, growth 32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from secateur.models.create import channels, model

GROWTH = 32
BLOCKS = (6, 12, 24, 16)
STEM = 64


class DenseLayer(nn.Module):
    """A 1x1 bottleneck of four times the growth and a 3x3 convolution, whose outputs join the inputs."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(inputs, 4 * GROWTH, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * GROWTH)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the inputs with the new channels appended."""
        bottleneck = self.conv1(self.relu1(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu2(self.norm2(bottleneck)))], dim=1)


def _transition(inputs: int) -> list[nn.Module]:
    """Return the layers between two blocks, which halve the channels and the sides."""
    conv = nn.Conv2d(inputs, inputs // 2, 1, bias=False)
    return [nn.BatchNorm2d(inputs), nn.ReLU(), conv, nn.AvgPool2d(2)]


@model("densenet121", "samia_ppb")
def densenet121(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """DenseNet121 with a 3x3 stem of stride 1 and a max-pool after it, as in SAMIA (USENIX Security 2022)."""
    stem = nn.Conv2d(channels("densenet121", input_shape, smallest=15), STEM, 3, padding=1, bias=False)
    layers = [stem, nn.BatchNorm2d(STEM), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    width = STEM
    for index, depth in enumerate(BLOCKS):
        if index > 0:
            layers += _transition(width)
            width //= 2
        layers += [DenseLayer(width + GROWTH * i) for i in range(depth)]
        width += GROWTH * depth
    layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(*layers)
