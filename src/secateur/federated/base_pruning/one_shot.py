"""Base prunings chosen by one score before the first round: SNIP, GraSP, SynFlow, random, and none.

Random may draw another mask later (`every`); the others keep the mask of the first round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, nn

from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.federated.base_pruning import BasePruning, draw_uniform
from secateur.interfaces import Batch, Mask, Params, Pruner
from secateur.pruning.masks import prune_lowest, weights_of
from secateur.pruning.scores import Grasp, Random, Snip, SynFlow


@dataclass(frozen=True)
class OneShot(BasePruning):
    """A base pruning whose first mask is that of a one-shot pruner, at the model that round 1 begins with."""

    pruner: ClassVar[Callable[[], Pruner]]

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """Return the pruner's mask, for all clients."""
        twin = copy.deepcopy(net).to(next(iter(state.values())).device)
        twin.load_state_dict(state)
        return type(self).pruner()(twin, batch, self.rate, rng)


@method("base-pruning", "snip", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class SnipOnce(OneShot):
    """Removes the weights whose removal changes one batch's loss least, once, at the server (SNIP; priprune Table 1).

    `batch` is the server's or one client's; the score is taken at the model that round 1 begins with.

    Equation: `mask = the share 1 - rate of largest |w * dL/dw|`.
    """

    pruner = Snip


@method("base-pruning", "grasp", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class GraspOnce(OneShot):
    """Removes the weights that carry the gradient flow least, once, at the server (GraSP; priprune Table 1).

    `batch` should hold ten examples of every class; the score is taken at the model that round 1 begins with.

    Equation: `mask = the share 1 - rate of smallest -w * (H g)`.
    """

    pruner = Grasp


@method("base-pruning", "synflow", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class SynFlowOnce(OneShot):
    """Removes the weights of least synaptic flow, without data, once, at the server (SynFlow; priprune Table 1).

    All 100 rounds of scoring come before round 1; only the shape of `batch` is used.

    Equation: `mask = the share 1 - rate of largest |w * dR/dw|; R = sum of f(ones; |w|)`.
    """

    pruner = SynFlow


@method("base-pruning", "random", "priprune", cycles="iterative", at_client=True)
@dataclass(frozen=True)
class RandomPruning(OneShot):
    """Removes weights at random over the whole network, drawn anew at each adjustment (Random; priprune Table 1).

    `fixed` keeps the first mask. The server draws the mask and the clients prune by it. A weight that comes back
    resumes its value at the server.

    Equation: `mask = a share 1 - rate of the weights, each equally likely`.
    """

    pruner = Random
    keeps_dropped = True
    every: int = 50  # rounds, as in PruneFL; the paper gives no number
    fixed: bool = False

    def adjusts(self, round: int) -> bool:
        """Return True in every `every`-th round, unless the mask is fixed."""
        return not self.fixed and super().adjusts(round)

    def adjust(
        self, weights: Params, mask: Mask, squares: Params | None, round: int, rng: Generator
    ) -> tuple[Params, Mask]:
        """Return the weights as they are, and another random mask in rounds that adjust."""
        if not self.adjusts(round):
            return weights, mask
        return weights, prune_lowest(draw_uniform(mask, rng), self.rate, "global")


@method("base-pruning", "none", "-", cycles="never", at_client=False)
@dataclass(frozen=True)
class NoPruning(BasePruning):
    """Keeps every weight: plain federated averaging.

    Equation: `mask = 1; w = sum n w_client / sum n`.
    """

    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.rate != 0:
            raise WrongInput("rate", f"{self.rate} is not allowed; base pruning none removes nothing")

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """Return a mask that keeps every weight."""
        return {name: torch.ones_like(state[name], dtype=torch.bool) for name in weights_of(net)}
