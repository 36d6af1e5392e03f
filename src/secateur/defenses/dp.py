"""Differential privacy of an update: per-example clipping and Gaussian noise."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Generator, Tensor, vmap
from torch.func import functional_call, grad

from secateur import tree
from secateur.catalogue import method
from secateur.defenses.dp_accounting import ACCOUNTANTS, Guarantee, Phase, epsilon
from secateur.defenses.dp_norms import frozen
from secateur.defenses.dp_sgd import AT_ONCE, OPACUS
from secateur.defenses.noise import normal
from secateur.errors import WrongInput, unknown
from secateur.functional import noise_asks
from secateur.interfaces import Batch, LossOf, Params, UploadContext


@method("defense", "dp", "dgp", acts_on="upload", adaptive=(), requires=OPACUS)
@dataclass(frozen=True)
class DifferentialPrivacy:
    """Clips every example's gradient and adds Gaussian noise to their sum, so there is an epsilon (Abadi et al. 2016).

    Acts on: the upload, which is computed anew from the client's examples: (sum of clipped + N(0, (sigma C)^2)) / B.
    BatchNorm normalises by running statistics, because batch statistics mix the examples. B is public. The epsilon is
    for adding or removing one example. dgp uses the name DP for the defense `noise`.
    """

    anew: ClassVar[bool] = True  # only the names of the incoming gradient are used, so error feedback cannot wrap it

    noise_multiplier: float = 1.0  # sigma, in units of max_grad_norm
    max_grad_norm: float = 1.0  # C
    delta: float = 1e-5
    accountant: str = "rdp"  # or prv, tighter but only for epsilon up to 100

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise WrongInput("noise_multiplier", f"{self.noise_multiplier} is not allowed; give a number from 0")
        if not (math.isfinite(self.max_grad_norm) and self.max_grad_norm > 0):
            raise WrongInput("max_grad_norm", f"{self.max_grad_norm} is not allowed; give a number above 0")
        if not 0 < self.delta < 1:
            raise WrongInput("delta", f"{self.delta} is not allowed; give a number between 0 and 1")
        if self.accountant not in ACCOUNTANTS:
            raise unknown("accountant", self.accountant, ACCOUNTANTS)

    def init(self, params: Params) -> Params:
        """Return an empty state."""
        return {}

    def noise(self, params: Params, rng: Generator) -> Params:
        """Return standard normal draws, for a caller that must draw before the call."""
        return normal(params, rng)

    def __call__(
        self, grads: Params, state: Params, turning: UploadContext, noise: Params | None = None
    ) -> tuple[Params, Params]:
        """Return the noisy mean of the clipped gradients of the client's examples."""
        if not grads:
            return {}, state
        drawn = self.noise(grads, turning.rng) if noise is None else noise
        return self.noisy(per_example(turning, grads), drawn, turning.batch.size), state

    def noisy(self, parts: list[Params], noise: Params, size: int) -> Params:
        """Return (sum of clipped + sigma C * noise) / B, from the gradients of each example."""
        total = reduce(_plus, (_clipped_sum(part, self.max_grad_norm) for part in parts))
        scale = self.noise_multiplier * self.max_grad_norm
        return {name: (value + scale * noise[name]) / size for name, value in total.items()}

    def guarantee(self, rounds: int = 1, sample_rate: float = 1.0) -> Guarantee:
        """Return the guarantee after `rounds` updates, whose examples are Poisson-sampled at `sample_rate`.

        One update whose examples are not sampled has 1 round at rate 1.
        """
        spent = epsilon(self.noise_multiplier, [Phase(sample_rate, rounds)], self.delta, self.accountant)
        times = f"{rounds} update{'s' if rounds > 1 else ''}"
        covers = f"{times}, each example taken with probability {sample_rate:.4g}, BatchNorm by running statistics"
        return Guarantee(spent, self.delta, self.accountant, covers)


def per_example(turning: UploadContext, names: Params) -> list[Params]:
    """Return the gradients of each example's loss, (examples, ...) per tensor, in parts that fit in memory."""
    if noise_asks(turning.net, 1):
        problem = "takes the gradient of every example alone, and the noise inside a network is drawn for batches"
        raise WrongInput("defense", f"dp {problem}; leave out precode")
    net = frozen(turning.net).to(turning.batch.inputs.device).eval()
    params = {name: turning.sent[name].detach() for name in names}
    others = {name: value.detach() for name, value in turning.sent.items() if name not in names}

    def loss(params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        return turning.loss(functional_call(net, {**params, **others}, (inputs,)), labels)

    return gradients(loss, params, turning.batch)


def gradients(loss: LossOf, params: Params, batch: Batch) -> list[Params]:
    """Return the gradients of the loss of each example as a batch of one, (examples, ...) per tensor.

    The list has one part per chunk of examples. The function runs under vmap.
    """
    of_one = grad(lambda params, example, label: loss(params, example[None], label[None]))
    of_many = vmap(of_one, in_dims=(None, 0, 0))
    at_once = max(8, AT_ONCE[batch.inputs.device.type] // tree.count(params))
    parts = zip(*(torch.split(part, at_once) for part in batch), strict=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")  # small: pooling under vmap
        return [of_many(params, *Batch(inputs, labels)) for inputs, labels in parts]


def _clipped_sum(grads: Params, bound: float) -> Params:
    """Return the sum over examples of g * min(1, C / ||g||), with the norm over all tensors."""
    squares = [value.flatten(1).square().sum(1) for value in grads.values()]
    norms = torch.stack(squares).sum(0).sqrt()  # (examples,)
    factors = (bound / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)
    return {name: torch.tensordot(factors, value, 1) for name, value in grads.items()}


def _plus(first: Params, second: Params) -> Params:
    return {name: value + second[name] for name, value in first.items()}
