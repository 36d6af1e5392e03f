"""BatchNorm of many users whose batches lie in one: each user's rows are normalised by themselves.

What is normalised is (users, places, channels), as channels_last pictures lie in memory.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.gpu.triton_loader import loaded


class Moments(NamedTuple):
    """By user and channel, (users, C)."""

    mean: Tensor
    var: Tensor  # biased
    inverse: Tensor  # 1 / sqrt(var + eps)
    scale: Tensor  # inverse * weight


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, skip: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Moments]:
    """(x - mean) / sqrt(var + eps) * weight + bias, plus a skip; of that the ReLU.

    Weight and bias are (C,), or (users, C) where each user has its own.
    """
    if kernels := _kernels_for(x):
        out, moments = kernels.normalised(x, weight, bias, eps, skip, relu)
        return out, Moments(*moments)
    var, mean = torch.var_mean(x, 1, correction=0)
    inverse = (var + eps).rsqrt()
    moments = Moments(mean, var, inverse, inverse * weight)
    out = torch.addcmul(bias.expand_as(mean)[:, None], x - mean[:, None], moments.scale[:, None])
    out = out if skip is None else out.add_(skip)
    return out.relu_() if relu else out, moments


def returned(g: Tensor, x: Tensor, moments: Moments, relu: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to x, and for each user to weight and bias, (users, C), of g, that of the output.

    The first is scale * (g - mean(g) - z mean(g z)) for the normalised z. `relu` is the bias where the output went
    through ReLU.
    """
    mean, _, inverse, scale = moments
    if kernels := _kernels_for(x):
        found: tuple[Tensor, Tensor, Tensor] = kernels.returned(g, x, mean, inverse, scale, relu)
        return found
    z = x - mean[:, None]
    g = g if relu is None else g * (torch.addcmul(relu.expand_as(mean)[:, None], z, scale[:, None]) > 0)
    z.mul_(inverse[:, None])
    total, along = g.sum(1), (g * z).sum(1)
    inputs = (g - total[:, None] / x.shape[1] - z * along[:, None] / x.shape[1]) * scale[:, None]
    return inputs, along, total


def _kernels_for(x: Tensor) -> ModuleType | None:
    return _kernels() if x.is_cuda and x.dtype == torch.float32 else None


@cache
def _kernels() -> ModuleType | None:
    def probe(kernels: ModuleType) -> None:
        zero = torch.zeros(1, 1, 1, device="cuda")
        kernels.normalised(zero, zero[0, 0], zero[0, 0], 1.0, None, False)

    return loaded("secateur.gpu.batchnorm_kernels", probe, "a step")
