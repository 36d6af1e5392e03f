"""Gradients of many features on their way back through a network: all that is done to them without a weight.

K features of B examples go back together as (K B, ...), pictures channels_last.
Slopes of activations, BatchNorm's factors and the sums at skips wait until a layer needs the whole, and are then taken
in one pass over the memory.
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
    """Pictures with values at every so many places, and nothing between them."""

    values: Tensor  # (K B, C, h, w)
    size: tuple[int, ...]
    steps: tuple[int, ...]  # down and right

    def whole(self) -> Tensor:
        """(K B, C, H, W)."""
        whole = laid_out(self.values.new_zeros(*self.values.shape[:2], *self.size))
        whole[:, :, :: self.steps[0], :: self.steps[1]] = self.values
        return whole


class Lone(NamedTuple):
    """Values in one channel for each feature, and nothing in the others, as where a feature's gradient sets out."""

    values: Tensor  # (K B, 1, ...)
    channel: Tensor  # (K,)
    channels: int

    def of(self, shared: Tensor) -> Tensor:
        """(K, B, 1, ...) what the features' channels have in (B, C, ...)."""
        every = shared.expand(-1, self.channels, *shared.shape[2:])
        return every[:, self.channel].transpose(0, 1).unsqueeze(2)

    def whole(self) -> Tensor:
        """(K B, C, ...)."""
        hot = F.one_hot(self.channel, self.channels).to(self.values.dtype)
        hot = hot.repeat_interleave(len(self.values) // len(hot), 0)
        values = self.values.movedim(1, -1)
        return laid_out((values * hot.view(len(hot), *[1] * (values.ndim - 2), -1)).movedim(-1, 1))


class Shared:
    """The whole of a flow that several layers need, taken when the first of them asks."""

    def __init__(self, flow: Flow) -> None:
        self.left: Flow | None = flow
        self.found: Tensor | None = None

    def whole(self) -> Tensor:
        """(K B, ...), now."""
        return self.take(self.left.whole()) if self.left else cast(Tensor, self.found)

    def take(self, found: Tensor) -> Tensor:
        """The whole is this; what it was made of is let go."""
        self.left, self.found = None, found
        return found


class Flow(NamedTuple):
    """The sum of the parts, times a slope that all K features share."""

    parts: tuple[Tensor | Thin | Lone | Shared, ...]  # one or two of (K B, ...), a thin one last
    slope: Tensor | None = None  # broadcasts to (B, ...)

    def scaled(self, slope: Tensor) -> Flow:
        """Times a slope, later."""
        return self._replace(slope=slope if self.slope is None else self.slope * slope)

    def joined(self, other: Flow) -> Flow:
        """The sum of two, later."""
        if self.slope is None and other.slope is None and len(self.parts) == len(other.parts) == 1:
            one, two = self.parts + other.parts
            return Flow((two, one) if isinstance(one, Thin) else (one, two))
        return Flow((self.whole(), other.whole()))

    def whole(self) -> Tensor:
        """(K B, ...), now."""
        first, *others = parts = self._at_hand()
        if self.slope is not None and (kernels := kernels_for(first)):
            found: Tensor = kernels.summed(parts, self.slope)
            return found
        total = first + filled(others[0]) if others else first
        return total if self.slope is None else (parted(total, len(self.slope)) * self.slope).flatten(0, 1)

    def lone(self) -> Lone | None:
        """The whole, if it is in one channel for each feature."""
        first = self.parts[0]
        if not isinstance(first, Lone) or len(self.parts) > 1:
            return None
        if self.slope is None:
            return first
        values = parted(first.values, len(first.values) // len(first.channel))
        return first._replace(values=(values * first.of(self.slope)).flatten(0, 1))

    def apart(self) -> tuple[Tensor, Tensor | None]:
        """(K B, C, ...) but for a slope that is one factor a channel, (1, C, 1, 1), and that: weights can take it."""
        if self.slope is None or self.slope.numel() > self.slope.shape[1]:
            return self.whole(), None
        return Flow(self.parts).whole(), self.slope

    def centred(self, normal: Tensor) -> Tensor | Lone:
        """Of g: g - mean(g) - x mean(g x), by feature and channel, for BatchNorm's normalised inputs x (B, C, ...)."""
        if lone := self.lone():
            return lone._replace(values=centred(parted(lone.values, len(normal)), lone.of(normal)))
        first = self.parts[0] if self.slope is None and len(self.parts) == 1 else None
        shared = first if isinstance(first, Shared) else None
        flow = (shared and shared.left) or self
        parts = flow._at_hand()
        if kernels := kernels_for(parts[0]):
            found, kept = kernels.centred(parts, flow.slope, normal, keep=flow is not self)
            if shared and kept is not None:
                shared.take(kept)
            return cast(Tensor, found)
        return centred(parted(self.whole(), len(normal)), normal)

    def _at_hand(self) -> tuple[Tensor, *tuple[Tensor | Thin, ...]]:
        """The parts, of which only a second may be thin."""
        others = (part if isinstance(part, Thin) else filled(part) for part in self.parts[1:])
        return filled(self.parts[0]), *others


def filled(part: Tensor | Thin | Lone | Shared) -> Tensor:
    """With zeros where there is nothing."""
    return part if isinstance(part, Tensor) else part.whole()


def centred(g: Tensor, x: Tensor) -> Tensor:
    """(K B, C, ...) g - mean(g) - x mean(g x) of g (K, B, C, ...) over examples and places."""
    places = [axis for axis in range(1, g.ndim) if axis != 2]
    mean, along = g.mean(places, keepdim=True), (g * x).mean(places, keepdim=True)
    return (g - mean).addcmul_(x, along, value=-1).flatten(0, 1)


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

    return loaded("secateur.gpu.jacobian.kernels", probe, "soteria")
