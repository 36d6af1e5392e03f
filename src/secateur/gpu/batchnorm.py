"""BatchNorm of many users in one batch: the rows of each user are normalised separately.

Inputs are (users, positions, channels), the memory order of channels_last pictures.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.gpu.triton_loader import loaded


class Moments(NamedTuple):
    """Statistics by user and channel, (users, C)."""

    mean: Tensor
    var: Tensor  # biased
    inverse: Tensor  # 1 / sqrt(var + eps)
    scale: Tensor  # inverse * weight


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, skip: Tensor | None = None, relu: bool = False
) -> tuple[Tensor, Moments]:
    """Return (x - mean) / sqrt(var + eps) * weight + bias, and the statistics.

    Weight and bias are (C,), or (users, C) if they differ by user. `skip` is added to the output; `relu` then applies
    the ReLU.
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
    """Return the gradients by x, and by weight and bias of each user, (users, C).

    `g` is the gradient by the output. The gradient by x is scale * (g - mean(g) - z mean(g z)) for the normalised z.
    `relu` is the bias if the output passed through ReLU, else None.
    """
    mean, _, inverse, scale = moments
    if kernels := _kernels_for(x):
        gradients: tuple[Tensor, Tensor, Tensor] = kernels.returned(g, x, mean, inverse, scale, relu)
        return gradients
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
