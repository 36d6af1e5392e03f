"""Privacy accounting of DP-SGD: (epsilon, delta) of Poisson-sampled Gaussian steps, by Opacus' accountants."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from secateur.errors import WrongInput, require, unknown
from secateur.training.recipe import Recipe

ACCOUNTANTS = ("rdp", "prv")  # Opacus' third, GDP, can report less than was spent
LARGE_ORDERS = tuple(2**k for k in range(6, 13))  # beyond Opacus' own orders: best for much noise


class Phase(NamedTuple):
    """Steps of DP-SGD with one sampling rate."""

    sample_rate: float  # q
    steps: int


class Guarantee(NamedTuple):
    """(epsilon, delta)-differential privacy, when one example is added or removed."""

    epsilon: float
    delta: float
    accountant: str
    covers: str

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:.3g} ({self.accountant}) for {self.covers}"


def sampling(size: int, recipe: Recipe) -> Phase:
    """Return the sampling rate of DP-SGD and its steps by a recipe: one step per batch of every epoch.

    Example:
        >>> sampling(1000, Recipe(epochs=2, batch_size=128))
        Phase(sample_rate=0.128, steps=16)
    """
    batch = min(recipe.batch_size, size)
    return Phase(batch / size, math.ceil(size / batch) * recipe.epochs)


@contextmanager
def logs_as_they_are() -> Iterator[None]:
    """Restore the handlers and the level of the root logger, which importing Opacus changes."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def epsilon(noise_multiplier: float, phases: Iterable[Phase], delta: float, accountant: str = "rdp") -> float:
    """Return the composed epsilon of the phases, an upper bound; infinite without noise."""
    if accountant not in ACCOUNTANTS:
        raise unknown("accountant", accountant, ACCOUNTANTS)
    require("opacus", "dp")
    with logs_as_they_are():
        from opacus.accountants import PRVAccountant, RDPAccountant

    if noise_multiplier == 0:
        return math.inf
    rdp, prv = RDPAccountant(), PRVAccountant()
    rdp.history = prv.history = [(noise_multiplier, *phase) for phase in phases]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that other orders could be tighter; the bound still holds
        bound = float(rdp.get_epsilon(delta, alphas=[*RDPAccountant.DEFAULT_ALPHAS, *LARGE_ORDERS]))
        if accountant == "rdp":
            return bound
        if bound > 100:  # the grid of privacy losses grows with epsilon: minutes, then out of memory
            message = f"prv is not allowed where epsilon is above 100, and here it is about {bound:.3g}; use rdp"
            raise WrongInput("accountant", message)
        return float(prv.get_epsilon(delta))
