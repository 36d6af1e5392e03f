"""Random generators, each derived from a seed and the labels of its purpose."""

from __future__ import annotations

import hashlib
import json

import torch


def derive(seed: int, *labels: str | int | float | None) -> torch.Generator:
    """Return a CPU generator for one purpose.

    Equal seeds and labels give equal draws, independent of all other draws.

    Example:
        >>> a, b = derive(0, "shadow", 1), derive(0, "shadow", 1)
        >>> bool(torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b)))
        True
    """
    digest = hashlib.sha256(json.dumps([seed, *labels]).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def derive_on(device: torch.device, seed: int, *labels: str | int | float | None) -> torch.Generator:
    """Return a generator on a device, with the seed of `derive`."""
    return torch.Generator(device).manual_seed(derive(seed, *labels).initial_seed())
