"""FedDST, a base pruning with masks that clients adjust (Bibikar et al. 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.catalogue import method
from secateur.defenses.selection import mask_largest
from secateur.errors import check_numbers
from secateur.federated.base_pruning import BasePruning, count_removed, draw_uniform
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import weights_of


@method("base-pruning", "feddst", "priprune", cycles="iterative", at_client=True)
@dataclass(frozen=True)
class FedDST(BasePruning):
    """Trains sparse from the start: clients drop small weights and grow steep ones (FedDST; Bibikar et al. 2022).

    The sparsity S is `rate`, spread over the layers by Erdos-Renyi-Kernel densities. Their counts are rounded so that
    the sum is exact. In a readjustment round each client prunes every layer to S + (1 - S) alpha by |w|. Then it grows
    every layer back to S by the |gradient| of its last batch; grown weights start at 0. So a local step must follow,
    because a weight that is still 0 when it is sent is pruned again. The caller averages by sum n m w / sum n m, and
    the server prunes every layer to S by |w|. So the rate is exact after every round, at clients and server.

    Equation: `prune to S + (1 - S) alpha by |w|; grow to S by |dL/dw|; average = sum n m w / sum n m`.
    """

    alpha: float = 0.01
    every: int = 15  # rounds

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "[0, 1]", "alpha")

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """Return a random mask with the Erdos-Renyi-Kernel densities."""
        dense = {name: torch.ones_like(state[name], dtype=torch.bool) for name in weights_of(net)}
        return _mask_largest(draw_uniform(dense, rng), erk(dense, self.rate))

    def adjust(
        self, weights: Params, mask: Mask, squares: Params | None, round: int, rng: Generator
    ) -> tuple[Params, Mask]:
        """Keep the largest weights of each layer, at the server."""
        if not self.adjusts(round):
            return weights, mask
        chosen = _mask_largest({name: weights[name].abs() for name in mask}, erk(mask, self.rate))
        return tree.mask_tree(weights, chosen), chosen

    def local(self, weights: Params, gradient: Params, mask: Mask, round: int, rng: Generator | None = None) -> Mask:
        """Prune and grow a client's mask; a weight that was just pruned may be grown again and then keeps its value."""
        if not self.adjusts(round):
            return mask
        chosen = {}
        for name, number in erk(mask, self.rate).items():
            fewer = number - round_down(self.alpha * number)
            keep = mask[name].flatten()
            stays = mask_largest(torch.where(keep, weights[name].abs().flatten(), -1), fewer)
            grown = mask_largest(torch.where(stays, -1, gradient[name].abs().flatten()), number - fewer)
            chosen[name] = (stays | grown).view(mask[name].shape)
        return chosen


def _mask_largest(values: Mapping[str, Tensor], numbers: Mapping[str, int]) -> Mask:
    return {name: mask_largest(value.flatten(), numbers[name]).view(value.shape) for name, value in values.items()}


def round_down(value: float) -> int:
    """Return the integer part of a product that may be inexact in binary: .01 * 300 must give 3."""
    return int(round(value, 9))


def erk(mask: Mask, rate: float) -> dict[str, int]:
    """Return the number of kept weights per layer, by Erdos-Renyi-Kernel densities (Evci et al. 2020).

    A layer's density is proportional to the sum of its dimensions over their product. Layers that would need more than
    all of their weights are dense, and the other layers share the rest. The largest remainders are rounded up, the
    first among ties, so that int(rate * total) weights are removed.

    Example:
        >>> erk({"a": torch.ones(2, 2), "b": torch.ones(10, 10)}, 0.5)
        {'a': 4, 'b': 48}
    """
    sides = {name: sum(keep.shape) for name, keep in mask.items()}
    sizes = {name: keep.numel() for name, keep in mask.items()}
    total = sum(sizes.values())
    wanted = total - count_removed(rate, total)
    dense: set[str] = set()
    while True:
        rest = wanted - sum(sizes[name] for name in dense)
        scale = rest / max(1, sum(sides[name] for name in sides if name not in dense))
        over = {name for name in sides if name not in dense and scale * sides[name] > sizes[name]}
        if not over:
            break
        dense |= over
    shares = {name: float(sizes[name]) if name in dense else scale * sides[name] for name in sides}
    counts = {name: math.floor(share) for name, share in shares.items()}
    order = sorted((name for name in sides if counts[name] < sizes[name]), key=lambda n: counts[n] - shares[n])
    for name in order[: wanted - sum(counts.values())]:
        counts[name] += 1
    return counts
