"""Gradients of many features on their way back through a network: all that is done to them without a weight.

K features of B examples go back together as (K B, ...), pictures channels_last.
Slopes of activations, BatchNorm's factors and the sums at skips wait until a layer needs the whole, and are then taken
in one pass over the memory.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.triton_kernels import loaded


class Flow(NamedTuple):
    """The sum of the parts, times a slope that all K features share."""

    parts: tuple[Tensor, ...]  # one or two of (K B, ...)
    slope: Tensor | None = None  # broadcasts to (B, ...)

    def scaled(self, slope: Tensor) -> Flow:
        """Times a slope, later."""
        return self._replace(slope=slope if self.slope is None else self.slope * slope)

    def joined(self, other: Flow) -> Flow:
        """The sum of two, later."""
        if self.slope is None and other.slope is None and len(self.parts) == len(other.parts) == 1:
            return Flow(self.parts + other.parts)
        return Flow((self.whole(), other.whole()))

    def whole(self) -> Tensor:
        """(K B, ...), now."""
        if self.slope is None:
            return self.parts[0] if len(self.parts) == 1 else self.parts[0] + self.parts[1]
        if kernels := kernels_for(self.parts[0]):
            found: Tensor = kernels.summed(self.parts, self.slope)
            return found
        total = self.parts[0] if len(self.parts) == 1 else self.parts[0] + self.parts[1]
        return (parted(total, len(self.slope)) * self.slope).flatten(0, 1)

    def centred(self, normal: Tensor) -> Tensor:
        """Of g: g - mean(g) - x mean(g x), by feature and channel, for BatchNorm's normalised inputs x (B, C, ...)."""
        if kernels := kernels_for(self.parts[0]):
            found: Tensor = kernels.centred(self.parts, self.slope, normal)
            return found
        whole = parted(self.whole(), len(normal))  # (K, B, C, ...)
        places = [axis for axis in range(1, whole.ndim) if axis != 2]
        mean, along = whole.mean(places, keepdim=True), (whole * normal).mean(places, keepdim=True)
        return (whole - mean).addcmul_(normal, along, value=-1).flatten(0, 1)


def parted(x: Tensor, rows: int) -> Tensor:
    """(K rows, ...) as (K, rows, ...)."""
    return x.view(-1, rows, *x.shape[1:])


def laid_out(x: Tensor) -> Tensor:
    """Pictures channels_last, which tensor cores want, and anything else contiguous."""
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.contiguous_format)


def kernels_for(x: Tensor) -> ModuleType | None:
    """The kernels that take a pass over gradients like these, where there are any."""
    return _kernels() if x.is_cuda and x.ndim == 4 and x.dtype != torch.float64 else None


@cache
def _kernels() -> ModuleType | None:
    def probe(kernels: ModuleType) -> None:
        zero = torch.zeros(1, 1, 1, 1, device="cuda")
        kernels.summed((zero,), zero)

    return loaded("secateur.jacobian.kernels", probe, "soteria")
