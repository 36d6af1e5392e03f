"""Gaussian noise on a gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from secateur.catalogue import method
from secateur.defenses import NATURAL
from secateur.errors import check_number
from secateur.interfaces import Params, Upload, UploadContext
from secateur.seeding import spawn


@method(
    "defense",
    "noise",
    "dgp",
    acts_on="upload",
    adaptive=(),
    strongest=f"the plain attack, {NATURAL}, as entries are equally noisy; on repeated batches also rounds=N",
)
@dataclass(frozen=True)
class GaussianNoise(Upload):
    """Adds N(0, sigma^2) to every entry of a gradient, without clipping (dgp 6.1, where it is called DP).

    Acts on: the upload. Nothing bounds the contribution of one example, so there is no epsilon; `dp` has one.

    Equation: `sent = g + N(0, sigma^2)`.
    """

    sigma: float = 1e-2

    def __post_init__(self) -> None:
        check_number("sigma", self.sigma, "[0, inf)")

    def noise(self, params: Params, rng: Generator) -> Params:
        """Return standard normal draws, for a caller that must draw before the call."""
        return draw_normal(params, rng)

    def __call__(
        self, grads: Params, state: Params, context: UploadContext, noise: Params | None = None
    ) -> tuple[Params, Params]:
        """Return the gradient with added noise."""
        drawn = self.noise(grads, context.rng) if noise is None else noise
        return {name: torch.add(value, drawn[name], alpha=self.sigma) for name, value in grads.items()}, state


def draw_normal(params: Params, rng: Generator) -> Params:
    """Return standard normal draws with the names, shapes and device of `params`."""
    if not params:
        return {}
    draw = move_generator(next(iter(params.values())).device, rng)
    return {
        name: torch.randn(value.shape, generator=draw, device=value.device, dtype=value.dtype)
        for name, value in params.items()
    }


def move_generator(device: torch.device, rng: Generator) -> Generator:
    """Return the generator if it is on the device, else a new one on the device that it seeds."""
    return rng if device.type == rng.device.type else spawn(rng, device)
