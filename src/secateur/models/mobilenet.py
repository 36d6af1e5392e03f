"""MobileNetV2 (Sandler et al. 2018) for small images: inverted residuals around depthwise convolutions."""

from __future__ import annotations

from torch import Tensor, nn

from secateur.models.create import channels, model

STAGES = ((16, 1, 1), (24, 2, 2), (40, 2, 2), (64, 2, 1))  # output channels, blocks, stride of the first block
EXPANSION = 4


class InvertedResidual(nn.Module):
    """Expansion by a 1x1 convolution, a depthwise 3x3 convolution, and a linear projection; a shortcut if it fits."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = EXPANSION * inputs
        self.expand = _layer(inputs, inner, 1)
        self.depthwise = _layer(inner, inner, 3, stride, groups=inner)
        self.project = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection, added to the input where the shapes are equal."""
        inner = self.norm(self.project(self.depthwise(self.expand(x))))
        return x + inner if self.adds else inner  # type: ignore[no-any-return]


def _layer(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution, its BatchNorm and a ReLU6."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


@model("mobilenet-v2-small", "-")
def mobilenet_v2_small(input_shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """MobileNetV2 (Sandler et al. 2018) with a 3x3 stem of stride 1 and seven narrow blocks, for small images."""
    before = 16
    layers = [_layer(channels("mobilenet-v2-small", input_shape), before, 3)]
    blocks = []
    for outputs, count, stride in STAGES:
        for number in range(count):
            blocks.append(InvertedResidual(before, outputs, stride if number == 0 else 1))
            before = outputs
    head = [_layer(before, 2 * before, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * before, classes)]
    return nn.Sequential(*layers, *blocks, *head)
