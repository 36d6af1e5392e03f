"""Backward pass of the gradients of many features: all operations on them that need no weight.

The gradients of K features of B examples are one tensor (K B, ...), pictures channels_last. Slopes of activations,
factors of BatchNorm and sums at skips are deferred until a layer needs the full tensor. All of them are then one pass
over the memory.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from secateur.gpu.triton_loader import loaded


class Thin(NamedTuple):
    """Pictures with values at every n-th position down and right, and zeros between them."""

    values: Tensor  # (K B, C, h, w)
    size: tuple[int, ...]
    steps: tuple[int, ...]  # down and right

    def whole(self) -> Tensor:
        """Return the full tensor, (K B, C, H, W)."""
        whole = laid_out(self.values.new_zeros(*self.values.shape[:2], *self.size))
        whole[:, :, :: self.steps[0], :: self.steps[1]] = self.values
        return whole


class Lone(NamedTuple):
    """Values in one channel per feature, and zeros in the others, as at the start of a feature's gradient."""

    values: Tensor  # (K B, 1, ...)
    channel: Tensor  # (K,)
    channels: int

    def of(self, shared: Tensor) -> Tensor:
        """Return the entries of `shared` (B, C, ...) in the features' channels, (K, B, 1, ...)."""
        every = shared.expand(-1, self.channels, *shared.shape[2:])
        return every[:, self.channel].transpose(0, 1).unsqueeze(2)

    def whole(self) -> Tensor:
        """Return the full tensor, (K B, C, ...)."""
        hot = F.one_hot(self.channel, self.channels).to(self.values.dtype)
        hot = hot.repeat_interleave(len(self.values) // len(hot), 0)
        values = self.values.movedim(1, -1)
        return laid_out((values * hot.view(len(hot), *[1] * (values.ndim - 2), -1)).movedim(-1, 1))


class Shared:
    """Full tensor of a flow that several layers need, computed at the first request."""

    def __init__(self, flow: Flow) -> None:
        self.left: Flow | None = flow
        self.full: Tensor | None = None

    def whole(self) -> Tensor:
        """Return the full tensor, (K B, ...)."""
        return self.take(self.left.whole()) if self.left else cast(Tensor, self.full)

    def take(self, full: Tensor) -> Tensor:
        """Store the full tensor and free the flow; return the tensor."""
        self.left, self.full = None, full
        return full


class Flow(NamedTuple):
    """Sum of the parts, times a slope that all K features share."""

    parts: tuple[Tensor | Thin | Lone | Shared, ...]  # one or two of (K B, ...), a Thin last
    slope: Tensor | None = None  # broadcasts to (B, ...)

    def scaled(self, slope: Tensor) -> Flow:
        """Return the flow times a slope, deferred."""
        return self._replace(slope=slope if self.slope is None else self.slope * slope)

    def joined(self, other: Flow) -> Flow:
        """Return the sum of two flows, deferred."""
        if self.slope is None and other.slope is None and len(self.parts) == len(other.parts) == 1:
            left, right = self.parts + other.parts
            return Flow((right, left) if isinstance(left, Thin) else (left, right))
        return Flow((self.whole(), other.whole()))

    def whole(self) -> Tensor:
        """Compute the full tensor, (K B, ...)."""
        first, *others = parts = self._tensors()
        if self.slope is not None and (kernels := kernels_for(first)):
            product: Tensor = kernels.summed(parts, self.slope)
            return product
        total = first + filled(others[0]) if others else first
        return total if self.slope is None else (parted(total, len(self.slope)) * self.slope).flatten(0, 1)

    def lone(self) -> Lone | None:
        """Return the flow as Lone if it has one channel per feature, else None."""
        first = self.parts[0]
        if not isinstance(first, Lone) or len(self.parts) > 1:
            return None
        if self.slope is None:
            return first
        values = parted(first.values, len(first.values) // len(first.channel))
        return first._replace(values=(values * first.of(self.slope)).flatten(0, 1))

    def apart(self) -> tuple[Tensor, Tensor | None]:
        """Return the full tensor (K B, C, ...), and a slope (1, C, 1, 1) left out of it, or None.

        Such a slope is one factor per channel, which the caller can multiply into the weights.
        """
        if self.slope is None or self.slope.numel() > self.slope.shape[1]:
            return self.whole(), None
        return Flow(self.parts).whole(), self.slope

    def centred(self, normal: Tensor) -> Tensor | Lone:
        """Return g - mean(g) - x mean(g x) by feature and channel, for the flow g.

        `normal` holds BatchNorm's normalised inputs x, (B, C, ...).
        """
        if lone := self.lone():
            return lone._replace(values=centred(parted(lone.values, len(normal)), lone.of(normal)))
        first = self.parts[0] if self.slope is None and len(self.parts) == 1 else None
        shared = first if isinstance(first, Shared) else None
        flow = (shared and shared.left) or self
        parts = flow._tensors()
        if kernels := kernels_for(parts[0]):
            result, kept = kernels.centred(parts, flow.slope, normal, keep=flow is not self)
            if shared and kept is not None:
                shared.take(kept)
            return cast(Tensor, result)
        return centred(parted(self.whole(), len(normal)), normal)

    def _tensors(self) -> tuple[Tensor, *tuple[Tensor | Thin, ...]]:
        """Return the parts with the first as a full tensor; only the second may be Thin."""
        others = (part if isinstance(part, Thin) else filled(part) for part in self.parts[1:])
        return filled(self.parts[0]), *others


def filled(part: Tensor | Thin | Lone | Shared) -> Tensor:
    """Return a part as a full tensor."""
    return part if isinstance(part, Tensor) else part.whole()


def centred(g: Tensor, x: Tensor) -> Tensor:
    """Return g - mean(g) - x mean(g x), (K B, C, ...), for g (K, B, C, ...); means over examples and positions."""
    axes = [axis for axis in range(1, g.ndim) if axis != 2]
    mean, along = g.mean(axes, keepdim=True), (g * x).mean(axes, keepdim=True)
    return (g - mean).addcmul_(x, along, value=-1).flatten(0, 1)


def parted(x: Tensor, rows: int) -> Tensor:
    """View (K rows, ...) as (K, rows, ...)."""
    return x.view(-1, rows, *x.shape[1:])


def laid_out(x: Tensor) -> Tensor:
    """Return pictures as channels_last, the fast layout for tensor cores, and other tensors contiguous."""
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.contiguous_format)


def kernels_for(x: Tensor) -> ModuleType | None:
    """Return the kernels if they support gradients like this one, else None."""
    return _kernels() if x.is_cuda and x.ndim == 4 and x.dtype != torch.float64 else None


@cache
def _kernels() -> ModuleType | None:
    def probe(kernels: ModuleType) -> None:
        zero = torch.zeros(1, 1, 1, 1, device="cuda")
        kernels.summed((zero,), zero)

    return loaded("secateur.gpu.jacobian.kernels", probe, "soteria")
