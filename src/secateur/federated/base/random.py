"""Random pruning in a federation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, nn

from secateur.catalogue import method
from secateur.federated.base import BasePruning, drawn, every_so_often, pruned_once
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import prune_lowest
from secateur.pruning.random import Random


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
