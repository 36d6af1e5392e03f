"""Differential privacy of an update: per-example clipping and Gaussian noise.

`PrivateTurn` gives a client that trains by itself local differential privacy: PriPrune with dp, future work in the
paper. In a turn of one step PriPrune reads a client's examples twice. One read gives the gradient of the weights, the
other the gradient of the values to be sent, by which the mask learns. Both return clipped and noised gradients only.
The weights, alpha, the withheld mask and the values that stay on the client depend on nothing else. So the epsilon of
two reads per turn covers the choice of the mask as well as the values.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Generator, Tensor, vmap
from torch.func import functional_call, grad

from secateur import tree
from secateur.catalogue import method
from secateur.defenses import NATURAL
from secateur.defenses.dp_common import AT_ONCE, OPACUS, Guarantee, Phase, PrivacySettings, epsilon, freeze_norms
from secateur.defenses.noise import draw_normal
from secateur.errors import WrongInput
from secateur.functional import noise_asks
from secateur.interfaces import Batch, ClientResult, CustomTurn, LossOf, Mask, Params, Upload, UploadContext

LOOKS = 2  # reads of the examples in a turn of one local step
LOOK = "look/"  # prefix of the noise's names; no parameter has it


@method(
    "defense",
    "dp",
    "dgp",
    acts_on="upload",
    adaptive=(),
    requires=OPACUS,
    strongest=f"the plain attack, {NATURAL}, bounded by epsilon; where batches repeat, rounds=N averages noise",
)
@dataclass(frozen=True)
class DifferentialPrivacy(PrivacySettings, Upload):
    """Clips every example's gradient and adds Gaussian noise to their sum, so there is an epsilon (Abadi et al. 2016).

    Acts on: the upload, which is computed anew from the client's examples: (sum of clipped + N(0, (sigma C)^2)) / B.
    BatchNorm normalises by running statistics, because batch statistics mix the examples. B is public. The epsilon is
    for adding or removing one example. dgp uses the name DP for the defense `noise`.

    Equation: `sent = (sum over i of g_i min(1, C / |g_i|) + N(0, (sigma C)^2)) / B`.
    """

    anew: ClassVar[bool] = True  # only the names of the incoming gradient are used, so error feedback cannot wrap it

    delta: float = 1e-5

    def noise(self, params: Params, rng: Generator) -> Params:
        """Return standard normal draws, for a caller that must draw before the call."""
        return draw_normal(params, rng)

    def __call__(
        self, grads: Params, state: Params, context: UploadContext, noise: Params | None = None
    ) -> tuple[Params, Params]:
        """Return the noisy mean of the clipped gradients of the client's examples."""
        if not grads:
            return {}, state
        drawn = self.noise(grads, context.rng) if noise is None else noise
        return self.add_noise(per_example(context, grads), drawn, context.batch.size), state

    def add_noise(self, parts: list[Params], noise: Params, size: int) -> Params:
        """Return (sum of clipped + sigma C * noise) / B, from the gradients of each example."""
        total = reduce(_add, (_sum_clipped(part, self.max_grad_norm) for part in parts))
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


def per_example(context: UploadContext, names: Params) -> list[Params]:
    """Return the gradients of each example's loss, (examples, ...) per tensor, in parts that fit in memory."""
    if noise_asks(context.net, 1):
        problem = "takes the gradient of every example alone, and the noise inside a network is drawn for batches"
        raise WrongInput("defense", f"dp {problem}; leave out precode")
    net = freeze_norms(context.net).to(context.batch.inputs.device).eval()
    params = {name: context.sent[name].detach() for name in names}
    others = {name: value.detach() for name, value in context.sent.items() if name not in names}

    def loss(params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        return context.loss(functional_call(net, {**params, **others}, (inputs,)), labels)

    return gradients(loss, params, context.batch)


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


def _sum_clipped(grads: Params, bound: float) -> Params:
    """Return the sum over examples of g * min(1, C / ||g||), with the norm over all tensors."""
    squares = [value.flatten(1).square().sum(1) for value in grads.values()]
    norms = torch.stack(squares).sum(0).sqrt()  # (examples,)
    factors = (bound / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1)
    return {name: torch.tensordot(factors, value, 1) for name, value in grads.items()}


def _add(first: Params, second: Params) -> Params:
    return {name: value + second[name] for name, value in first.items()}


@dataclass(frozen=True)
class PrivateTurn:
    """A client's own turn that reads the examples through `private` alone."""

    inner: CustomTurn
    private: DifferentialPrivacy

    def init(self, params: Params) -> Params:
        """Return a client's state before its first round."""
        return self.inner.init(params)

    def caution(self, weights: int) -> str | None:
        """Return the inner turn's warning, or None."""
        return self.inner.caution(weights)

    def noise(self, params: Params, steps: int, rng: Generator) -> Params:
        """Return the inner turn's draws, and standard normal draws for every read."""
        drawn = self.inner.noise(params, steps, rng)
        for look in range(LOOKS):
            drawn |= {f"{LOOK}{look}.{name}": value for name, value in self.private.noise(params, rng).items()}
        return drawn

    def turn(
        self,
        loss: LossOf,
        received: Params,
        mask: Mask,
        state: Params,
        batches: Batch,
        noise: Params,
        learning_rate: float,
    ) -> ClientResult:
        """Run the turn with a loss whose gradient is private; a third read has no noise left and fails."""
        looks = [{name: noise[f"{LOOK}{look}.{name}"] for name in received} for look in range(LOOKS)]

        def private(params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
            """Return 0 with the noisy gradient at `params`: the value of the loss would be one more read."""
            here = {name: value.detach() for name, value in params.items()}
            slopes = self.private.add_noise(gradients(loss, here, Batch(inputs, labels)), looks.pop(0), len(labels))
            return torch.stack([((value - here[name]) * slopes[name]).sum() for name, value in params.items()]).sum()

        inner_noise = {name: value for name, value in noise.items() if not name.startswith(LOOK)}
        return self.inner.turn(private, received, mask, state, batches, inner_noise, learning_rate)
