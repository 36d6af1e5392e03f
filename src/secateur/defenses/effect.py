"""The effect of a defense on an update: how much it changed, and whether the update can come from it at all."""

from __future__ import annotations

import math

import torch
from torch import Generator

from secateur.defenses.noise import GaussianNoise
from secateur.defenses.uploads import inner_of
from secateur.interfaces import Mask, Params, Upload

IDLE = 0.999  # a defense whose output has this cosine with its input changed nothing that an attacker would miss
SIGMAS = 5  # a noisy update that is so many deviations too small has no such noise


def cosine(update: Params, sent: Params) -> float:
    """Return the cosine of two updates; 1 if they are equal, 0 if only one of them is zero.

    Example:
        >>> cosine({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
        0.6
    """
    before, after = (torch.cat([value.flatten().double() for value in part.values()]) for part in (update, sent))
    if torch.equal(before, after):
        return 1.0
    norms = float(before.norm() * after.norm())
    return float(before @ after) / norms if norms else 0.0


def find_contradiction(defense: Upload, update: Params, mask: Mask | None = None) -> str | None:
    """Return the reason why an update cannot come from a defense; None if there is none, or nothing can be seen.

    Top-k and DGP send a fixed number of entries of every tensor, so more of them are a contradiction. Noise has a
    least norm, inside the mask of a pruned model. One update of Outpost, or of DGP with `release`, shows nothing.

    Example:
        >>> from secateur.defenses.top_k import TopK
        >>> find_contradiction(TopK(keep=0.25), {"w": torch.tensor([0.0, 1.0, 2.0, 0.0])})
        'w has 2 entries that are not 0, and TopK(keep=0.25) sends 1 at most'
    """
    inner = inner_of(defense)
    if hasattr(inner, "compress") and getattr(inner, "release", None) is None:
        rng = Generator().manual_seed(0)
        for name, value in update.items():
            filled = torch.rand(value.shape, generator=rng) + 1  # no entry is 0: what is left is the rule's number
            most = int((inner.compress({name: filled})[name] != 0).sum())
            if (number := int((value != 0).sum())) > most:
                return f"{name} has {number} entries that are not 0, and {inner} sends {most} at most"
    if isinstance(inner, GaussianNoise):
        entries = sum(int((mask or {}).get(name, value.new_ones(value.shape)).sum()) for name, value in update.items())
        least = inner.sigma**2 * (entries - SIGMAS * math.sqrt(2 * entries) - SIGMAS**2)
        if sum(float(value.double().square().sum()) for value in update.values()) < least:
            return f"it is smaller than the noise of {inner} alone"
    return None
