"""Distributed differential privacy: every client adds its share of the noise that the sum of all needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from secateur.catalogue import method
from secateur.defenses.dp_common import OPACUS, Guarantee, Phase, epsilon
from secateur.defenses.noise import draw_normal
from secateur.errors import WrongInput, check_number, check_whole
from secateur.interfaces import Params, Upload, UploadContext

NORM = 1e-12  # least norm to divide by


@method(
    "defense",
    "distributed-dp",
    "-",
    acts_on="upload",
    adaptive=(),
    requires=OPACUS,
    strongest="the plain attack on the sum (view: sum), bounded by epsilon",
    meanings={
        "noise_multiplier": "noise of the sum, in units of max_norm",
        "max_norm": "largest L2 norm of a client's update",
        "clients": "honest clients that answer in every round, at least",
    },
)
@dataclass(frozen=True)
class DistributedPrivacy(Upload):
    """Clips a client's whole update and adds its share of the noise of a sum (Kairouz et al. 2021, by Gaussian noise).

    Acts on: the upload: g min(1, C / ||g||) + N(0, (sigma C)^2 / n), for n honest clients that answer. So the sum has
    noise of at least sigma C. If the server sees no more than the sum (secure aggregation), there is an epsilon for
    adding or removing one client. With fewer answers the noise is less. The accountant takes real numbers: the rounding
    of secure aggregation is not in its epsilon. BatchNorm's statistics are not sent.

    Equation: `sent = g min(1, C / |g|) + N(0, (sigma C)^2 / n)`.
    """

    no_residual: ClassVar[bool] = True  # fed back, the noise would cancel

    noise_multiplier: float = 1.0  # sigma, of the sum
    max_norm: float = 1.0  # C
    clients: int = 10  # n
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_number("noise_multiplier", self.noise_multiplier, "[0, inf)")
        check_number("max_norm", self.max_norm, "(0, inf)")
        check_whole("clients", self.clients)
        check_number("delta", self.delta, "(0, 1)")

    def noise(self, params: Params, rng: Generator) -> Params:
        """Return standard normal draws, for a caller that must draw before the call."""
        return draw_normal(params, rng)

    def __call__(
        self, grads: Params, state: Params, context: UploadContext, noise: Params | None = None
    ) -> tuple[Params, Params]:
        """Return the clipped update with the client's share of the noise."""
        if not grads:
            return {}, state
        drawn = self.noise(grads, context.rng) if noise is None else noise
        norm = torch.stack([value.square().sum() for value in grads.values()]).sum().sqrt()
        factor = (self.max_norm / norm.clamp_min(NORM)).clamp_max(1)
        scale = self.noise_multiplier * self.max_norm / math.sqrt(self.clients)
        return {name: torch.add(factor * value, drawn[name], alpha=scale) for name, value in grads.items()}, state

    def guarantee(self, rounds: int, answered: int, weights: float = 1.0) -> Guarantee:
        """Return the guarantee of a client that takes part in so many rounds, for a server that sees sums alone.

        Args:
            rounds: rounds of the client.
            answered: honest clients in the smallest sum; 1: the server sees the client's own update.
            weights: the least weight of a client in the sum divided by the largest.
        """
        if not 0 < weights <= 1:
            raise WrongInput("weights", f"{weights} is not allowed; must be in (0, 1]")
        sigma = self.noise_multiplier * math.sqrt(min(1.0, answered / self.clients)) * weights
        spent = epsilon(sigma, [Phase(1.0, rounds)], self.delta)
        seen = f"the sum of at least {answered} honest clients" if answered > 1 else "each update alone"
        times = f"{rounds} round{'s' if rounds > 1 else ''}"
        return Guarantee(spent, self.delta, "rdp", f"a client's {times}, where the server sees {seen}")
