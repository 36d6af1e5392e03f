"""Gaussian noise on a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator

from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.interfaces import Params, Turning


@method("defense", "noise", "dgp", acts_on="upload", adaptive=())
@dataclass(frozen=True)
class GaussianNoise:
    """Adds N(0, sigma^2) to every entry of a gradient, without clipping (dgp 6.1, where it is called DP).

    Acts on: the upload. Nothing bounds what one example contributes, so there is no epsilon: `dp` is the one that has.
    """

    sigma: float = 1e-2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise WrongInput("sigma", f"{self.sigma} is not allowed; give a number from 0")

    def init(self, params: Params) -> Params:
        """Nothing is kept."""
        return {}

    def noise(self, params: Params, rng: Generator) -> Params:
        """Standard normal draws, for a caller that must draw before it calls."""
        return normal(params, rng)

    def __call__(
        self, grads: Params, state: Params, turning: Turning, noise: Params | None = None
    ) -> tuple[Params, Params]:
        """The gradient with noise on it."""
        drawn = self.noise(grads, turning.rng) if noise is None else noise
        return {name: torch.add(value, drawn[name], alpha=self.sigma) for name, value in grads.items()}, state


def normal(params: Params, rng: Generator) -> Params:
    """Standard normal draws in the form of `params`, on their device."""
    if not params:
        return {}
    draw = on_device(next(iter(params.values())).device, rng)
    return {
        name: torch.randn(value.shape, generator=draw, device=value.device, dtype=value.dtype)
        for name, value in params.items()
    }


def on_device(device: torch.device, rng: Generator) -> Generator:
    """The generator itself where it is on the device; else one that it seeds."""
    if device.type == rng.device.type:
        return rng
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=rng)))
