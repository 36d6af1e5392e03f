"""BatchNorm of many users whose batches lie in one: each user's rows are normalised by themselves.

What is normalised is (users, places, channels), as channels_last pictures lie in memory.
"""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Moments(NamedTuple):
    """By user and channel, (users, C)."""

    mean: Tensor
    var: Tensor  # biased
    inverse: Tensor  # 1 / sqrt(var + eps)
    scale: Tensor  # inverse * weight


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Moments]:
    """(x - mean) / sqrt(var + eps) * weight + bias."""
    if kernels := _kernels_for(x):
        out, moments = kernels.normalised(x, weight, bias, eps)
        return out, Moments(*moments)
    var, mean = torch.var_mean(x, 1, correction=0)
    inverse = (var + eps).rsqrt()
    moments = Moments(mean, var, inverse, inverse * weight)
    return torch.addcmul(bias, x - mean[:, None], moments.scale[:, None]), moments


def returned(g: Tensor, x: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to x, and for each user to weight and bias, (users, C), of g, that of the output.

    The first is scale * (g - mean(g) - z mean(g z)) for the normalised z.
    """
    if kernels := _kernels_for(x):
        found: tuple[Tensor, Tensor, Tensor] = kernels.returned(g, x, moments.mean, moments.inverse, moments.scale)
        return found
    mean, _, inverse, scale = moments
    z = (x - mean[:, None]).mul_(inverse[:, None])
    total, along = g.sum(1), (g * z).sum(1)
    inputs = (g - total[:, None] / x.shape[1] - z * along[:, None] / x.shape[1]) * scale[:, None]
    return inputs, along, total


def _kernels_for(x: Tensor) -> ModuleType | None:
    return _kernels() if x.is_cuda and x.dtype == torch.float32 else None


@cache
def _kernels() -> ModuleType | None:
    """Torch brings Triton along with CUDA; without it the same is done by operations of torch, in more passes."""
    try:
        from secateur.federated import batchnorm_kernels as kernels

        probe = torch.zeros(1, 1, 1, device="cuda")
        kernels.normalised(probe, probe[0, 0], probe[0, 0], 1.0)
    except ImportError:
        return None
    except Exception as error:  # such as no C compiler
        log.warning("Triton cannot be used, which makes a step slower: %s", str(error).split("\n")[0])
        return None
    return kernels
