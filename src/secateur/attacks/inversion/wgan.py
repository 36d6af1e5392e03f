"""The two networks of the class-conditional WGAN-GP that generator.py trains, for pictures of any size."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LATENT = 128
Box = tuple[Tensor, Tensor]  # the lowest and the highest input of a valid picture, (C, 1, 1) each


class Generator(nn.Module):
    """DCGAN-like: a linear layer, then upsampling convolutions whose BatchNorm scales and shifts by the class."""

    low: Tensor
    high: Tensor

    def __init__(self, input_shape: tuple[int, ...], classes: int, box: Box, width: int = 64) -> None:
        super().__init__()
        colours, *sides = input_shape
        stages = doublings(input_shape)
        widths = [min(2**i, 4) * width for i in reversed(range(stages + 1))]
        self.base = tuple(-(-side // 2**stages) for side in sides)
        self.sides = sides
        self.first = nn.Linear(LATENT, widths[0] * self.base[0] * self.base[1])
        self.norms = nn.ModuleList(ClassNorm(wide, classes) for wide in widths)
        pairs = pairwise(widths)
        self.convs = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1) for before, after in pairs)
        self.last = nn.Conv2d(widths[-1], colours, 3, padding=1)
        for name, value in zip(("low", "high"), box, strict=True):
            self.register_buffer(name, value.detach().clone().reshape(colours, 1, 1))

    def forward(self, z: Tensor, labels: Tensor) -> Tensor:
        """(N, 128) noise and (N,) labels -> (N, C, H, W) pictures inside the box."""
        x = self.first(z.to(self.first.weight.dtype)).unflatten(1, (-1, *self.base))
        x = self.norms[0](x, labels).relu()
        for conv, norm in zip(self.convs, list(self.norms)[1:], strict=True):
            x = norm(conv(F.interpolate(x, scale_factor=2)), labels).relu()
        x = self.last(x)[..., : self.sides[0], : self.sides[1]]
        pictures: Tensor = self.low + (self.high - self.low) * x.sigmoid()
        return pictures


class ClassNorm(nn.Module):
    """BatchNorm whose scale and shift belong to the class."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=False)
        self.scale = nn.Parameter(torch.ones(classes, channels))
        self.shift = nn.Parameter(torch.zeros(classes, channels))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """(N, C, H, W) and (N,) -> (N, C, H, W)."""
        found: Tensor = self.norm(x) * self.scale[labels, :, None, None] + self.shift[labels, :, None, None]
        return found


class Critic(nn.Module):
    """Strided convolutions without normalisation (the penalty is per example), and a projection by the class."""

    def __init__(self, input_shape: tuple[int, ...], classes: int, width: int = 64) -> None:
        super().__init__()
        stages = doublings(input_shape)
        widths = [min(2**i, 4) * width for i in range(stages + 1)]
        layers: list[nn.Module] = [nn.Conv2d(input_shape[0], width, 3, padding=1), nn.LeakyReLU(0.2)]
        for before, after in pairwise(widths):
            layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.features = nn.Sequential(*layers, nn.Flatten())
        rows, columns = (side // 2**stages for side in input_shape[1:])
        self.score = nn.Linear(widths[-1] * rows * columns, 1)
        self.of_class = nn.Embedding(classes, widths[-1] * rows * columns)
        nn.init.zeros_(self.of_class.weight)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """(N,) high = real."""
        found = self.features(pictures)
        scores: Tensor = self.score(found)[:, 0] + (found * self.of_class(labels)).sum(1)
        return scores


def doublings(input_shape: tuple[int, ...]) -> int:
    """How often a side can be halved and keep at least four pixels.

    Example:
        >>> [doublings((1, side, side)) for side in (5, 8, 28, 32)]
        [0, 1, 2, 3]
    """
    return max(0, (min(input_shape[1:]) // 4).bit_length() - 1)
