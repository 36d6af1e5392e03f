"""What the layer-wise engine knows of each kind of layer: the gradient of its parameters, a trial each, and back.

A layer's weight gradient is bilinear in its inputs a and in the loss's gradient d by its outputs. So it is enough to
have it, or its inner products, and to carry a direction v of the weights back to a and d: the gradient of <v, g(a, d)>.
Rows are (trials, places, channels); pictures are channels_last, so that rows are views and a window is copied in runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from secateur.attacks.inversion.engines.windows import Windows

LARGE = 2**18  # entries of a trial's windows from which copying them costs a CPU more than single convolutions


class Note(NamedTuple):
    """One call of a layer."""

    layer: Layer
    inputs: Tensor
    output: GradientEdge  # not the tensor, which the network may overwrite


@dataclass
class Tape:
    """What one forward pass leaves behind."""

    trials: int = 0
    notes: list[Note] = field(default_factory=list)
    statistics: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    wanted: bool = False  # the statistics

    def begin(self, trials: int) -> None:
        """Forget the last pass."""
        self.trials = trials
        self.notes, self.statistics = [], []


class Algebra(NamedTuple):
    """The weight gradient of every trial as a function of a layer's inputs a and of the loss's gradient d."""

    gradient: Callable[[], Tensor]  # (N, ...)
    along: Callable[[Tensor], Tensor]  # a direction (N, ...) -> its gradient by d, as rows
    back: Callable[[Tensor], Tensor]  # a direction (N, ...) -> its gradient by a
    rows: tuple[Tensor, Tensor, Callable[[Tensor], Tensor]] | None = None  # of a and d, and rows of a as a, for Gram


class Layer(ABC):
    """A module whose parameters are matched."""

    channels = True  # whether the parameters lie along axis 1 or along the last ones

    def __init__(self, module: Any, tape: Tape) -> None:
        self.module, self.tape = module, tape

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """What the module does, noting what it is given and what it gives."""

    @abstractmethod
    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """The weight gradient of every trial; nothing here is recorded by autograd."""

    def note(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Keep one call, and return the output."""
        self.tape.notes.append(Note(self, inputs, get_gradient_edge(output)))
        return output

    def rows(self, x: Tensor, trials: int) -> Tensor:
        """(trials, places, channels)."""
        if self.channels:
            return x.movedim(1, -1).reshape(trials, -1, x.shape[1])
        return x.reshape(trials, -1, self.width)

    def unrows(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `rows`."""
        if self.channels:
            return rows.reshape(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1)
        return rows.reshape(like.shape)

    @property
    def width(self) -> int:
        """How many outputs share a row."""
        return int(self.module.out_features)

    def stored(self, weight: Tensor) -> Tensor:
        """(N, ...) the weights as the algebra wants them."""
        return weight.flatten(1)


class LinearLayer(Layer):
    """g = d^T a over the places of a trial."""

    channels = False

    def forward(self, x: Tensor) -> Tensor:
        """As the module."""
        return self.note(x, F.linear(x, self.module.weight, self.module.bias))

    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Products of rows."""
        inputs = a.reshape(trials, -1, a.shape[-1])
        return products(inputs, self.rows(d, trials), lambda rows: rows.reshape(a.shape))

    def stored(self, weight: Tensor) -> Tensor:
        """(N, out, in)."""
        return weight


class ConvLayer(Layer):
    """A linear layer on windows; or, where these are too many to copy, one convolution after another."""

    def __init__(self, module: nn.Conv2d, tape: Tape) -> None:
        super().__init__(module, tape)
        self.windows = Windows(module)

    def forward(self, x: Tensor) -> Tensor:
        """As the module; padding that is not zeros on both sides alike is put on before and is no part of it."""
        x = self.windows.padded(x)
        module, windows = self.module, self.windows
        z = F.conv2d(x, module.weight, module.bias, module.stride, windows.padding, module.dilation, module.groups)
        return self.note(x, z)

    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """By windows or by trials."""
        if a.device.type == "cpu" and self.windows.copied(a, d) // trials > LARGE:
            return self._by_trials(a, d, trials)
        windows = self.windows
        inputs, outputs = windows.rows(a, trials), windows.grouped(self.rows(d, trials))
        of = products(inputs, outputs, lambda rows: windows.unrows(rows, a, d))
        split = self.module.groups
        if split == 1:
            return of
        return Algebra(
            lambda: of.gradient().reshape(trials, -1, inputs.shape[-1]),
            lambda v: windows.ungrouped(of.along(v.reshape(trials * split, -1, inputs.shape[-1]))),
            lambda v: of.back(v.reshape(trials * split, -1, inputs.shape[-1])),
        )

    def _by_trials(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        conv, windows = self.module, self.windows
        shape = conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size
        parts = list(zip(a.chunk(trials), d.chunk(trials), strict=True))

        def backward(a: Tensor, d: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
                d, a, weight, None, conv.stride, windows.padding, conv.dilation, False, (0, 0), conv.groups, wanted
            )
            return found[0], found[1]

        def weights(v: Tensor) -> Tensor:
            return v.view(*v.shape[:2], *shape[2:], shape[1]).movedim(-1, 2)

        def gradient() -> Tensor:
            found = a.new_empty(trials, shape[0], shape[1] * shape[2] * shape[3])
            for into, (x, y) in zip(weights(found), parts, strict=True):
                into.copy_(backward(x, y, conv.weight, (False, True, False))[1])
            return found

        def along(v: Tensor) -> Tensor:
            options = None, conv.stride, windows.padding, conv.dilation, conv.groups
            found = [F.conv2d(x, w, *options) for (x, _), w in zip(parts, weights(v), strict=True)]
            return self.rows(torch.cat(found), trials)

        def back(v: Tensor) -> Tensor:
            found = [backward(x, y, w, (True, False, False))[0] for (x, y), w in zip(parts, weights(v), strict=True)]
            return torch.cat(found)

        return Algebra(gradient, along, back)

    def stored(self, weight: Tensor) -> Tensor:
        """(N, out, in / groups, h, w) -> (N, out, h * w * in / groups)."""
        return weight.movedim(2, -1).flatten(2)


def products(a: Tensor, d: Tensor, unrows: Callable[[Tensor], Tensor]) -> Algebra:
    """d^T a for rows a (N, places, in) and d (N, places, out)."""
    return Algebra(
        lambda: torch.bmm(d.mT, a),
        lambda v: torch.bmm(a, v.mT),
        lambda v: unrows(torch.bmm(d, v)),
        (a, d, unrows),
    )
