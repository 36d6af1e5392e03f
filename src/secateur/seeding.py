"""Random generators, each derived from a seed and the labels of its purpose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


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


def draw_seed(rng: torch.Generator, below: int = 2**62) -> int:
    """Draw the seed of another generator."""
    return int(torch.randint(below, (), generator=rng, device=rng.device))


def spawn(rng: torch.Generator, device: torch.device | str) -> torch.Generator:
    """Return a new generator on a device, seeded by one draw of `rng`."""
    return torch.Generator(device).manual_seed(draw_seed(rng))


def initialise(build: Callable[[], T], rng: torch.Generator, below: int = 2**62) -> T:
    """Return modules whose initial weights depend on `rng` alone; the global generator is restored."""
    with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global generator
        torch.default_generator.manual_seed(draw_seed(rng, below))
        return build()
