"""Outpost: pruning, and noise where the Fisher information is high."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.catalogue import method
from secateur.defenses import NATURAL
from secateur.defenses.noise import draw_normal
from secateur.defenses.selection import mask_between, mask_largest
from secateur.errors import check_number, check_numbers
from secateur.interfaces import Mask, Params, Upload, UploadContext

CHANCE = "."  # name of the draw that decides if the defense is applied; no parameter can have it


@method(
    "defense",
    "outpost",
    "dgp",
    acts_on="upload",
    adaptive=("mask", "support"),
    strongest=f"adaptive=mask or support, {NATURAL}, which leave out entries that were dropped or hold noise",
)
@dataclass(frozen=True)
class Outpost(Upload):
    """Prunes small entries and adds noise where the Fisher information is high, ever more rarely (Wang et al. 2023).

    Acts on: the upload. In every tensor the entries below the rho-th percentile of its magnitudes become zero. Then
    N(0, (strength * risk)^2) is added where the Fisher information is among the highest phi of all tensors together.
    The risk is min(variance of the tensor's weights, 1). The Fisher information is g^2 averaged over the first axis.
    The noise also fills pruned entries, so more than 1 - rho is sent. In round t the defense is applied with
    probability 1 / (1 + beta t); otherwise the gradient is sent unchanged.

    Equation: `sent = [|g| >= percentile rho] g + [Fisher >= top phi] N(0, (strength min(Var w, 1))^2)`.
    """

    strength: float = 0.8  # lambda
    phi: float = 0.4
    beta: float = 0.1
    rho: float = 0.8

    def __post_init__(self) -> None:
        check_number("rho", self.rho, "[0, 1)")
        check_number("phi", self.phi, "[0, 1]")
        check_numbers(self, "[0, inf)", "strength", "beta")

    def noise(self, params: Params, rng: Generator) -> Params:
        """Return standard normal draws and one draw from [0, 1), for a caller that must draw before the call."""
        draw = torch.rand((), generator=rng, device=rng.device)
        return {CHANCE: draw.to(next(iter(params.values())).device)} | draw_normal(params, rng)

    def __call__(
        self, grads: Params, state: Params, context: UploadContext, noise: Params | None = None
    ) -> tuple[Params, Params]:
        """Return the perturbed or the unchanged gradient."""
        if not grads:
            return {}, state
        drawn = self.noise(grads, context.rng) if noise is None else noise
        applies = drawn[CHANCE] < 1 / (1 + self.beta * context.round)
        informative = self.mask_informative(grads)
        sent = {}
        for name, value in grads.items():
            kept = torch.where(mask_between(value, 0, self.rho), value, 0)
            scale = self.strength * risk(context.sent[name])
            sent[name] = torch.where(applies, kept + scale * informative[name] * drawn[name], value)
        return sent, state

    def mask_informative(self, grads: Params) -> Mask:
        """Return a mask of the entries whose Fisher information is among the highest phi of all tensors."""
        fisher = {name: _fisher(value) for name, value in grads.items()}
        together = torch.cat([value.flatten() for value in fisher.values()])
        highest = mask_largest(together, round(self.phi * together.numel()))
        parts = torch.split(highest, [value.numel() for value in fisher.values()])
        return {
            name: part.view_as(value).expand_as(grads[name])
            for (name, value), part in zip(fisher.items(), parts, strict=True)
        }


def risk(weights: Tensor) -> Tensor:
    """Return min(variance, 1) of a tensor's weights."""
    return weights.detach().var(correction=0).clamp_max(1)


def _fisher(grad: Tensor) -> Tensor:
    return grad.square().mean(0) if grad.ndim else grad.square()
