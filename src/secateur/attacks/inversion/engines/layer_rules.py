"""Rules of the layer-wise engine for each kind of layer: the parameters' gradient in every trial, and its adjoint.

A layer's weight gradient g(a, d) is bilinear in its inputs a and in the gradient d of the loss by its outputs.
So a rule gives g, or its inner products, and carries a direction v of the weights back to a and d. The result is
the gradient of <v, g(a, d)>.

Rows are (trials, positions, channels). Pictures are channels_last, so that rows are views and a window is copied in
runs. A convolution is a linear layer on its windows. A norm is its normalised inputs times a weight, plus a bias.
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

LARGE = 2**18  # entries of a trial's windows; a CPU copies more of them slower than it convolves trial by trial


class Note(NamedTuple):
    """Record of one call of a layer."""

    layer: MatchedLayer
    inputs: Tensor
    output: GradientEdge  # not the tensor, which the network may overwrite


@dataclass
class Tape:
    """Record of one forward pass."""

    trials: int = 0
    notes: list[Note] = field(default_factory=list)
    statistics: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    wanted: bool = False  # True if the statistics are noted

    def begin(self, trials: int) -> None:
        """Forget the last pass and start one of `trials` trials."""
        self.trials = trials
        self.notes, self.statistics = [], []


class Algebra(NamedTuple):
    """The weight gradient of every trial as a function of a layer's inputs a and of the loss's gradient d."""

    gradient: Callable[[], Tensor]  # (N, ...)
    along: Callable[[Tensor], Tensor]  # a direction (N, ...) -> its gradient by d, as rows
    back: Callable[[Tensor], Tensor]  # a direction (N, ...) -> its gradient by a
    rows: tuple[Tensor, Tensor, Callable[[Tensor], Tensor]] | None = None  # of a and d, and rows of a as a, for Gram


class MatchedLayer(ABC):
    """A module whose parameters are matched."""

    channels = True  # True if the parameters lie along axis 1, False if along the last axes

    def __init__(self, module: Any, tape: Tape) -> None:
        self.module, self.tape = module, tape

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the module's output, and note its inputs and output."""

    @abstractmethod
    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Return the weight gradient of every trial; autograd records nothing here."""

    def note(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Keep one call, and return its output."""
        self.tape.notes.append(Note(self, inputs, get_gradient_edge(output)))
        return output

    def rows(self, x: Tensor, trials: int) -> Tensor:
        """Return x as (trials, positions, channels)."""
        if self.channels:
            return x.movedim(1, -1).reshape(trials, -1, x.shape[1])
        return x.reshape(trials, -1, self.width)

    def from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return rows in the shape of `like`: the inverse of `rows`."""
        if self.channels:
            return rows.reshape(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1)
        return rows.reshape(like.shape)

    @property
    def width(self) -> int:
        """Number of outputs that share a row."""
        return int(self.module.out_features)

    def reshape_weight(self, weight: Tensor) -> Tensor:
        """Return the weights (N, ...) in the shape that the algebra uses."""
        return weight.flatten(1)


class LinearLayer(MatchedLayer):
    """A linear layer: g = d^T a over the positions of a trial."""

    channels = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module, and note the call."""
        return self.note(x, F.linear(x, self.module.weight, self.module.bias))

    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Return products of rows."""
        inputs = a.reshape(trials, -1, a.shape[-1])
        return products(inputs, self.rows(d, trials), lambda rows: rows.reshape(a.shape))

    def reshape_weight(self, weight: Tensor) -> Tensor:
        """Return the weights (N, out, in) unchanged."""
        return weight


class ConvLayer(MatchedLayer):
    """A convolution as a linear layer on windows, or one trial after another where the windows are too many."""

    def __init__(self, module: nn.Conv2d, tape: Tape) -> None:
        super().__init__(module, tape)
        self.windows = Windows(module)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module, and note the call.

        Padding other than equal zeros on both sides is added before the convolution and is not part of its inputs.
        """
        x = self.windows.pad(x)
        module, windows = self.module, self.windows
        z = F.conv2d(x, module.weight, module.bias, module.stride, windows.padding, module.dilation, module.groups)
        return self.note(x, z)

    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Return products of windows, or one convolution a trial where a CPU would copy too much."""
        if a.device.type == "cpu" and self.windows.count_copied(a, d) // trials > LARGE:
            return self._convolve_trials(a, d, trials)
        windows = self.windows
        inputs, outputs = windows.rows(a, trials), windows.group(self.rows(d, trials))
        algebra = products(inputs, outputs, lambda rows: windows.from_rows(rows, a, d))
        groups = self.module.groups
        if groups == 1:
            return algebra
        return Algebra(
            lambda: algebra.gradient().reshape(trials, -1, inputs.shape[-1]),
            lambda v: windows.ungroup(algebra.along(v.reshape(trials * groups, -1, inputs.shape[-1]))),
            lambda v: algebra.back(v.reshape(trials * groups, -1, inputs.shape[-1])),
        )

    def _convolve_trials(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Return the algebra by one convolution a trial, without copying windows."""
        conv, windows = self.module, self.windows
        shape = conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size
        parts = list(zip(a.chunk(trials), d.chunk(trials), strict=True))

        def backward(a: Tensor, d: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> tuple[Tensor, Tensor]:
            slopes: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
                d, a, weight, None, conv.stride, windows.padding, conv.dilation, False, (0, 0), conv.groups, wanted
            )
            return slopes[0], slopes[1]

        def weights(v: Tensor) -> Tensor:
            return v.view(*v.shape[:2], *shape[2:], shape[1]).movedim(-1, 2)

        def gradient() -> Tensor:
            gradients = a.new_empty(trials, shape[0], shape[1] * shape[2] * shape[3])
            for into, (x, y) in zip(weights(gradients), parts, strict=True):
                into.copy_(backward(x, y, conv.weight, (False, True, False))[1])
            return gradients

        def along(v: Tensor) -> Tensor:
            options = None, conv.stride, windows.padding, conv.dilation, conv.groups
            outputs = [F.conv2d(x, w, *options) for (x, _), w in zip(parts, weights(v), strict=True)]
            return self.rows(torch.cat(outputs), trials)

        def back(v: Tensor) -> Tensor:
            slopes = [backward(x, y, w, (True, False, False))[0] for (x, y), w in zip(parts, weights(v), strict=True)]
            return torch.cat(slopes)

        return Algebra(gradient, along, back)

    def reshape_weight(self, weight: Tensor) -> Tensor:
        """Return the weights (N, out, in / groups, h, w) as (N, out, h * w * in / groups)."""
        return weight.movedim(2, -1).flatten(2)


class Windows:
    """Inputs of a convolution at each position of its output: rows of (kernel height, width, channels of a group)."""

    def __init__(self, conv: nn.Conv2d) -> None:
        self.conv = conv
        reach = [(size - 1) * step for size, step in zip(conv.kernel_size, conv.dilation, strict=True)]
        if conv.padding == "same":
            before = [(total // 2, total - total // 2) for total in reach]
        else:
            before = [(0, 0)] * 2 if isinstance(conv.padding, str) else [(size, size) for size in conv.padding]
        plain = conv.padding_mode == "zeros" and all(one == other for one, other in before)
        self.padding = [one for one, _ in before] if plain else [0, 0]  # added by the convolution itself
        self._outside = None if plain else [*before[1], *before[0]]

    def pad(self, x: Tensor) -> Tensor:
        """Return x with the padding that the convolution itself does not add."""
        if self._outside is None:
            return x
        mode = self.conv.padding_mode
        return F.pad(x, self._outside, "constant" if mode == "zeros" else mode)

    def count_copied(self, a: Tensor, d: Tensor) -> int:
        """Return the number of entries of the rows."""
        height, width = self.conv.kernel_size
        return d[:, 0].numel() * a.shape[1] * height * width

    def rows(self, a: Tensor, trials: int) -> Tensor:
        """Return (trials * groups, positions, ...) of (trials * B, channels, height, width)."""
        tall, wide = self.padding
        x = F.pad(a.movedim(1, -1), (0, 0, wide, wide, tall, tall)) if tall or wide else a.movedim(1, -1)
        for axis, (size, step, apart) in enumerate(self._sides(), start=1):
            x = x.unfold(axis, (size - 1) * apart + 1, step)[..., ::apart]
        # (N * B, positions down, positions across, channels, kernel height, kernel width)
        x = x.permute(0, 1, 2, 4, 5, 3)
        if self.conv.groups == 1:
            return x.reshape(trials, -1, x.shape[3:].numel())
        x = x.reshape(trials, -1, *x.shape[1:5], self.conv.groups, x.shape[5] // self.conv.groups)
        x = x.permute(0, 6, 1, 2, 3, 4, 5, 7)
        return x.reshape(trials * self.conv.groups, -1, x.shape[5:].numel())

    def from_rows(self, rows: Tensor, a: Tensor, d: Tensor) -> Tensor:
        """Apply the adjoint of `rows`: add every entry to the input from which it was copied."""
        positions, kernel, groups = d.shape[2:], self.conv.kernel_size, self.conv.groups
        if groups > 1:
            batch = a.shape[0] * groups // len(rows)
            parts = rows.reshape(-1, groups, batch, *positions, *kernel, a.shape[1] // groups)
            rows = parts.permute(0, 2, 3, 4, 5, 6, 1, 7)
        rows = rows.reshape(a.shape[0], *positions, *kernel, a.shape[1])
        tall, wide = self.padding
        whole = rows.new_zeros(a.shape[0], a.shape[2] + 2 * tall, a.shape[3] + 2 * wide, a.shape[1])
        (high, step, apart), (broad, step_across, apart_across) = self._sides()
        for i in range(high):
            down = slice(i * apart, i * apart + (positions[0] - 1) * step + 1, step)
            for j in range(broad):
                start = j * apart_across
                across = slice(start, start + (positions[1] - 1) * step_across + 1, step_across)
                whole[:, down, across] += rows[:, :, :, i, j]
        return whole[:, tall : tall + a.shape[2], wide : wide + a.shape[3]].movedim(-1, 1)

    def group(self, rows: Tensor) -> Tensor:
        """Return rows (N, positions, out) as (N * groups, positions, out / groups)."""
        trials, positions, width = rows.shape
        groups = self.conv.groups
        return rows.view(trials, positions, groups, width // groups).transpose(1, 2).flatten(0, 1)

    def ungroup(self, rows: Tensor) -> Tensor:
        """Apply the inverse of `group`."""
        return rows.view(-1, self.conv.groups, *rows.shape[1:]).transpose(1, 2).flatten(2)

    def _sides(self) -> list[tuple[int, int, int]]:
        """Return kernel size, stride and dilation, down and across."""
        conv = self.conv
        return list(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True))


def products(a: Tensor, d: Tensor, unrows: Callable[[Tensor], Tensor]) -> Algebra:
    """Return the algebra of d^T a for rows a (N, positions, in) and d (N, positions, out)."""
    return Algebra(
        lambda: torch.bmm(d.mT, a),
        lambda v: torch.bmm(a, v.mT),
        lambda v: unrows(torch.bmm(d, v)),
        (a, d, unrows),
    )


class NormLayer(MatchedLayer):
    """A norm: g = the sum of normalised inputs times d. Autograd handles the normalisation itself."""

    def __init__(self, module: Any, tape: Tape) -> None:
        super().__init__(module, tape)
        self.channels = not isinstance(module, nn.LayerNorm)

    @property
    def width(self) -> int:
        """Number of outputs that share a row."""
        return int(self.module.weight.numel())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module, and note the call if the module has a weight."""
        module, normal = self.module, self.normalise(x)
        if module.weight is None:
            return normal
        weight = self.spread(module.weight, x)
        return self.note(
            normal,
            normal * weight if module.bias is None else torch.addcmul(self.spread(module.bias, x), normal, weight),
        )

    def normalise(self, x: Tensor) -> Tensor:
        """Return x normalised, before weight and bias."""
        module = self.module
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(x, module.num_groups, None, None, module.eps)
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)

    def spread(self, value: Tensor, x: Tensor) -> Tensor:
        """Return `value` shaped to lie along its axis of x."""
        return value.view(-1, *[1] * (x.ndim - 2)) if self.channels else value

    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Return products entry by entry."""
        inputs, outputs = self.rows(a, trials), self.rows(d, trials)
        return Algebra(
            lambda: (inputs * outputs).sum(1),
            lambda v: inputs * v[:, None],
            lambda v: self.from_rows(outputs * v[:, None], a),
        )


class BatchNormLayer(NormLayer):
    """A BatchNorm by the statistics of each trial's own batch, as if the trial were alone."""

    def normalise(self, x: Tensor) -> Tensor:
        """Return x normalised by each trial's statistics, before weight and bias."""
        mean, variance = self.moments(x)
        normal: Tensor = (self.split_trials(x) - mean) * (variance + self.module.eps).rsqrt()
        return normal.flatten(0, 1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each trial's batch, and note them if the tape wants them."""
        dims = [1, *range(3, x.ndim + 1)]
        variance, mean = torch.var_mean(self.split_trials(x), dims, correction=0, keepdim=True)
        if self.tape.wanted:
            self.tape.statistics.append((mean.flatten(1), variance.flatten(1)))
        return mean, variance

    def split_trials(self, x: Tensor) -> Tensor:
        """Return x as (N, B, ...)."""
        return x.view(self.tape.trials, -1, *x.shape[1:])


class FixedNormLayer(BatchNormLayer):
    """A BatchNorm by its running statistics: one product and one sum, so the layer's inputs are x themselves."""

    def __init__(self, module: Any, tape: Tape) -> None:
        super().__init__(module, tape)
        self.scale = (module.running_var + module.eps).rsqrt()
        self.slope = self.scale if module.weight is None else self.scale * module.weight
        self.start = -module.running_mean * self.slope
        self.start = self.start if module.bias is None else self.start + module.bias

    def forward(self, x: Tensor) -> Tensor:
        """Apply the module, and note the call if the module has a weight."""
        if self.tape.wanted:
            self.moments(x)
        z = torch.addcmul(self.spread(self.start, x), x, self.spread(self.slope, x))
        return z if self.module.weight is None else self.note(x, z)

    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Return products entry by entry, of the normalised inputs."""
        algebra = super().algebra(
            (a - self.spread(self.module.running_mean, a)) * self.spread(self.scale, a), d, trials
        )
        return algebra._replace(back=lambda v: algebra.back(v * self.scale))


def batchnorm_layer(module: Any, tape: Tape) -> MatchedLayer:
    """Return the rule of a BatchNorm: by each batch's statistics, or by the running ones."""
    of_batch = module.training or module.running_mean is None
    return (BatchNormLayer if of_batch else FixedNormLayer)(module, tape)
