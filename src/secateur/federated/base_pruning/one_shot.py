"""Base prunings that are chosen once, before the first round: SNIP, GraSP, SynFlow, random, and none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.federated.base_pruning import BasePruning, drawn, every_so_often, pruned_once
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import prune_lowest, weights_of
from secateur.pruning.scores import Grasp, Random, Snip, SynFlow


@method("base-pruning", "snip", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class SnipOnce(BasePruning):
    """Removes the weights whose removal changes one batch's loss least, once, at the server (SNIP; priprune Table 1).

    `batch` is the server's or one client's; the score is taken at the model that round 1 begins with.
    """

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """The mask of the whole federation."""
        return pruned_once(Snip(), net, state, batch, self.rate, rng)


@method("base-pruning", "grasp", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class GraspOnce(BasePruning):
    """Removes the weights that carry the gradient flow least, once, at the server (GraSP; priprune Table 1).

    `batch` should hold ten examples of every class; the score is taken at the model that round 1 begins with.
    """

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """The mask of the whole federation."""
        return pruned_once(Grasp(), net, state, batch, self.rate, rng)


@method("base-pruning", "synflow", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class SynFlowOnce(BasePruning):
    """Removes the weights of least synaptic flow, without data, once, at the server (SynFlow; priprune Table 1).

    Its 100 rounds of scoring are all before round 1; of `batch` only the shape is used.
    """

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """The mask of the whole federation."""
        return pruned_once(SynFlow(), net, state, batch, self.rate, rng)


@method("base-pruning", "random", "priprune", cycles="iterative", at_client=True)
@dataclass(frozen=True)
class RandomPruning(BasePruning):
    """Removes weights at random over the whole network, drawn anew at each adjustment (Random; priprune Table 1).

    `fixed` keeps the first draw. The server draws and the clients prune by its mask; a weight that comes back resumes
    the value that it had at the server.
    """

    every: int = 50  # rounds; the paper does not say, so PruneFL's
    fixed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        every_so_often("every", self.every)

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """The first draw."""
        return pruned_once(Random(), net, state, batch, self.rate, rng)

    def adjusts(self, round: int) -> bool:
        """Every so many rounds."""
        return not self.fixed and round % self.every == 0

    @property
    def keeps_dropped(self) -> bool:
        """Yes."""
        return True

    def adjust(
        self, weights: Params, mask: Mask, squares: Params | None, round: int, rng: Generator
    ) -> tuple[Params, Mask]:
        """Another draw; the weights stay."""
        if not self.adjusts(round):
            return weights, mask
        return weights, prune_lowest(drawn(mask, rng), self.rate, "global")


@method("base-pruning", "none", "-", cycles="never", at_client=False)
@dataclass(frozen=True)
class NoPruning(BasePruning):
    """Keeps every weight: plain federated averaging."""

    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.rate != 0:
            raise WrongInput("rate", f"{self.rate} is not allowed; base pruning none removes nothing")

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """All of it."""
        return {name: torch.ones_like(state[name], dtype=torch.bool) for name in weights_of(net)}
