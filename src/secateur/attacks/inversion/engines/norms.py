"""The norms as the layer-wise engine sees them: what is normalised, times a weight, plus a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secateur.attacks.inversion.engines.layers import Algebra, Layer, Tape


class NormLayer(Layer):
    """g = the sum of normalised inputs times d; the normalising itself is left to autograd."""

    def __init__(self, module: Any, tape: Tape) -> None:
        super().__init__(module, tape)
        self.channels = not isinstance(module, nn.LayerNorm)

    @property
    def width(self) -> int:
        """How many outputs share a row."""
        return int(self.module.weight.numel())

    def forward(self, x: Tensor) -> Tensor:
        """As the module."""
        module, normal = self.module, self.normalised(x)
        if module.weight is None:
            return normal
        weight = self.spread(module.weight, x)
        return self.note(
            normal,
            normal * weight if module.bias is None else torch.addcmul(self.spread(module.bias, x), normal, weight),
        )

    def normalised(self, x: Tensor) -> Tensor:
        """Before weight and bias."""
        module = self.module
        if isinstance(module, nn.GroupNorm):
            return F.group_norm(x, module.num_groups, None, None, module.eps)
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)

    def spread(self, value: Tensor, x: Tensor) -> Tensor:
        """So that it lies along its axis of x."""
        return value.view(-1, *[1] * (x.ndim - 2)) if self.channels else value

    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Products entry by entry."""
        inputs, outputs = self.rows(a, trials), self.rows(d, trials)
        return Algebra(
            lambda: (inputs * outputs).sum(1),
            lambda v: inputs * v[:, None],
            lambda v: self.unrows(outputs * v[:, None], a),
        )


class BatchNormLayer(NormLayer):
    """A norm by the statistics of each trial's own batch, as if it were alone."""

    def normalised(self, x: Tensor) -> Tensor:
        """Before weight and bias."""
        mean, variance = self.moments(x)
        normal: Tensor = (self.apart(x) - mean) * (variance + self.module.eps).rsqrt()
        return normal.flatten(0, 1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of each trial's batch; noted, if they are wanted."""
        dims = [1, *range(3, x.ndim + 1)]
        variance, mean = torch.var_mean(self.apart(x), dims, correction=0, keepdim=True)
        if self.tape.wanted:
            self.tape.statistics.append((mean.flatten(1), variance.flatten(1)))
        return mean, variance

    def apart(self, x: Tensor) -> Tensor:
        """(N, B, ...)."""
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
        """As the module."""
        if self.tape.wanted:
            self.moments(x)
        z = torch.addcmul(self.spread(self.start, x), x, self.spread(self.slope, x))
        return z if self.module.weight is None else self.note(x, z)

    def algebra(self, a: Tensor, d: Tensor, trials: int) -> Algebra:
        """Products entry by entry, of what the norm makes of its inputs."""
        of = super().algebra((a - self.spread(self.module.running_mean, a)) * self.spread(self.scale, a), d, trials)
        return of._replace(back=lambda v: of.back(v * self.scale))


def batchnorm_layer(module: Any, tape: Tape) -> Layer:
    """By whose statistics it normalises."""
    of_batch = module.training or module.running_mean is None
    return (BatchNormLayer if of_batch else FixedNormLayer)(module, tape)
