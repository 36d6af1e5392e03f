"""Withholding rules at a fixed rate: largest gradients, random, and a mix of both (priprune Section 5.1).

Conv and Linear weights that the base pruning kept can be withheld; biases and BatchNorm are sent whole. A withheld
weight is sent as 0, whatever its value, so that an upload does not depend on it. Real pruning discards the value.
Pseudo-pruning keeps the value in the client's state and puts it back into the weights that the client receives next.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor

from secateur import tree
from secateur.catalogue import method
from secateur.defenses import AGAINST_WITHHOLDING
from secateur.defenses.selection import mask_largest
from secateur.errors import check_number
from secateur.gpu.client_ops import intersect, magnitudes, mix, split_where
from secateur.interfaces import Mask, Params
from secateur.pruning.masks import Scope, check_name

Of = Literal["all", "kept"]
WITHHELD, SAVED = "withheld.", "saved."  # prefixes of the names in a client's state


class Rates(NamedTuple):
    """Shares of weights that a client withholds, () each."""

    of_kept: Tensor  # of those that the base pruning kept
    of_all: Tensor  # of all that can be pruned


@dataclass(frozen=True)
class Withholding:
    """Withholding rule with a fixed rate; subclasses choose the weights.

    `of` is the denominator of `rate`. "all": all weights that can be pruned, including those that the base pruned, as
    in the paper. "kept": the weights that the base kept. Exactly int(rate * of) weights are withheld, or all that the
    base kept if these are fewer. `scope`: over the whole network, as in the paper, or in every layer by itself.
    """

    rate: float = 0.3
    pseudo: bool = False
    of: Of = "all"
    scope: Scope = "global"

    def __post_init__(self) -> None:
        check_number("rate", self.rate, "[0, 1)")
        check_name("of", self.of, get_args(Of))
        check_name("scope", self.scope, get_args(Scope))

    def noise(self, weights: Params, rng: Generator) -> Params:
        """Return the random numbers of `withheld`, on the generator's device; empty if the rule draws nothing."""
        return {}

    def withheld(
        self, weights: Params, gradient: Params, mask: Mask, rng: Generator | None = None, noise: Params | None = None
    ) -> Mask:
        """Return the mask of a client's weights that are not sent (True).

        With `noise` nothing is drawn, so that the function runs under vmap.
        """
        if noise is None:
            noise = self.noise(weights, rng) if rng is not None else {}
        whole = whole_mask(weights, mask) if mask else {}
        prunable = [name for name, value in weights.items() if value.ndim > 1]
        hidden: Mask = {}
        for names in [[name] for name in prunable] if self.scope == "layer" else [prunable]:
            like, kept = ([part[name] for name in names if name in part] for part in (weights, whole))
            inputs = ([part[name].to(like[0].device) for name in names if name in part] for part in (gradient, noise))
            steepness, chance = (magnitudes(values, kept) if values else torch.empty(0) for values in inputs)
            keep, sizes = torch.cat([where.flatten() for where in kept]) if kept else None, [v.numel() for v in like]
            chosen = self.choose(steepness, chance, self.number(sum(sizes), keep))
            parts = torch.split_with_sizes(chosen if keep is None else intersect(chosen, keep), sizes)
            hidden |= {name: part.view(weights[name].shape) for name, part in zip(names, parts, strict=True)}
        return hidden

    @abstractmethod
    def choose(self, steepness: Tensor, chance: Tensor, number: int | Tensor) -> Tensor:
        """Return the mask (n,) of the entries to withhold, by |gradient| or by uniform draws.

        Both are -1 where the base pruned. If the base kept fewer than `number`, pruned entries may be chosen too; the
        caller drops them.
        """

    def number(self, size: int, keep: Tensor | None) -> int | Tensor:
        """Return the number of withheld weights of `size`; `keep` (n,) is the base's mask, None if it kept all."""
        return whole_part(self.rate * (size if keep is None or self.of == "all" else keep.sum().double()))


@method(
    "defense",
    "largest",
    "priprune",
    acts_on="client",
    adaptive=("support+follows", "fill"),
    strongest=AGAINST_WITHHOLDING,
)
@dataclass(frozen=True)
class Largest(Withholding):
    """Prunes the weights with the largest gradients before they are sent (Largest; priprune Section 5.1, Insight 1).

    Equation: `withheld = the int(rate N) weights of largest |gradient|; sent = w * (1 - withheld)`.

    Acts on: a federation's client, on top of any base pruning.
    """

    def choose(self, steepness: Tensor, chance: Tensor, number: int | Tensor) -> Tensor:
        """Choose by |gradient|."""
        return mask_largest(steepness, number)


@method(
    "defense",
    "pseudo-largest",
    "priprune",
    acts_on="client",
    adaptive=("support+follows", "fill"),
    strongest=AGAINST_WITHHOLDING,
)
@dataclass(frozen=True)
class PseudoLargest(Largest):
    """Withholds the weights with the largest gradients, and trains on with them (Largest (Pseudo); priprune Fig. 7).

    Acts on: a federation's client, on top of any base pruning.
    """

    pseudo: bool = True


@method(
    "defense",
    "random",
    "priprune",
    acts_on="client",
    adaptive=("support+follows", "fill"),
    strongest=AGAINST_WITHHOLDING,
)
@dataclass(frozen=True)
class RandomShare(Withholding):
    """Prunes weights drawn at random before they are sent, anew in every round (Random; priprune Section 5.1).

    Equation: `withheld = int(rate N) weights, each equally likely; sent = w * (1 - withheld)`.

    Acts on: a federation's client, on top of any base pruning.
    """

    def noise(self, weights: Params, rng: Generator) -> Params:
        """Return uniform draws."""
        return uniform(weights, rng)

    def choose(self, steepness: Tensor, chance: Tensor, number: int | Tensor) -> Tensor:
        """Choose by the draws."""
        return mask_largest(chance, number)


@method(
    "defense",
    "pseudo-random",
    "priprune",
    acts_on="client",
    adaptive=("support+follows", "fill"),
    strongest=AGAINST_WITHHOLDING,
)
@dataclass(frozen=True)
class PseudoRandomShare(RandomShare):
    """Withholds weights drawn at random, and trains on with them (Random (Pseudo); priprune Fig. 6).

    Acts on: a federation's client, on top of any base pruning.
    """

    pseudo: bool = True


@method(
    "defense", "mix", "priprune", acts_on="client", adaptive=("support+follows", "fill"), strongest=AGAINST_WITHHOLDING
)
@dataclass(frozen=True)
class Mix(Withholding):
    """Prunes half of its rate by the largest gradients and half at random before sending (Mix; priprune Section 5.1).

    Acts on: a federation's client, on top of any base pruning. `largest` is the share of the rate that goes to the
    largest gradients (Fig. A4 has 0, 1/3, 2/3 and 1); the others are drawn among the remaining weights.

    Equation: `withheld = int(largest rate N) weights of largest |gradient|, the rest of int(rate N) at random`.
    """

    largest: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("largest", self.largest, "[0, 1]")

    def noise(self, weights: Params, rng: Generator) -> Params:
        """Return uniform draws."""
        return uniform(weights, rng)

    def choose(self, steepness: Tensor, chance: Tensor, number: int | Tensor) -> Tensor:
        """Choose by |gradient|, then by the draws."""
        first = whole_part(self.largest * number)
        steepest = mask_largest(steepness, first)
        return steepest | mask_largest(torch.where(steepest, -1, chance), number - first)


@method(
    "defense",
    "pseudo-mix",
    "priprune",
    acts_on="client",
    adaptive=("support+follows", "fill"),
    strongest=AGAINST_WITHHOLDING,
)
@dataclass(frozen=True)
class PseudoMix(Mix):
    """Withholds half of its rate by the largest gradients and half at random, and trains on with them (Mix (Pseudo)).

    Acts on: a federation's client, on top of any base pruning.
    """

    pseudo: bool = True


def uniform(weights: Params, rng: Generator) -> Params:
    """Return a uniform draw for every weight that can be withheld."""
    return {
        name: torch.rand(value.shape, generator=rng, device=rng.device)
        for name, value in weights.items()
        if value.ndim > 1
    }


def whole_part(value: float | Tensor) -> int | Tensor:
    """Return the whole part of a product with a rate that is not exact in binary: .3 * 10 must count as 3."""
    return (value + 1e-9).floor().long() if isinstance(value, Tensor) else int(value + 1e-9)


def whole_mask(weights: Params, mask: Mask) -> Mask:
    """Return the base pruning's mask of every weight that can be withheld; True where the base has no mask."""
    return {
        name: mask[name] if name in mask else torch.ones_like(value, dtype=torch.bool)
        for name, value in weights.items()
        if value.ndim > 1
    }


def divide(weights: Params, withheld: Mask, keeps: bool) -> tuple[Params, Params]:
    """Return the part of the weights that is sent, and the client's state, empty unless `keeps`.

    The sent part is exactly 0 where withheld. The state is the mask of withheld weights, and their values. The weights
    must be 0 where the base prunes. They belong to one client, or to many stacked.
    """
    parts = {name: split_where(where, weights[name], keeps) for name, where in withheld.items()}
    shared = weights | {name: outside for name, (_, outside) in parts.items()}
    if not keeps:
        return shared, {}
    state = {WITHHELD + name: where for name, where in withheld.items()}
    return shared, state | {SAVED + name: inside for name, (inside, _) in parts.items()}


def mask_sent(withheld: Mask, mask: Mask) -> Mask:
    """Return the mask of the entries that are sent: kept by the base pruning and not withheld."""
    return mask | {
        name: intersect(where, mask[name], inverted=True) if name in mask else ~where
        for name, where in withheld.items()
    }


def empty_state(weights: Params) -> Params:
    """Return the state before a client's first round."""
    names = [name for name, value in weights.items() if value.ndim > 1]
    flags = {WITHHELD + name: torch.zeros_like(weights[name], dtype=torch.bool) for name in names}
    return flags | {SAVED + name: torch.zeros_like(weights[name]) for name in names}


def reload(received: Params, state: Params, mask: Mask) -> Params:
    """Return the weights at the start of a client's round: those received, with the last withheld ones put back.

    The mask that mixes the two is the last round's, so that only saved values are taken from the state. Weights that
    the base prunes by now are 0.
    """
    return tree.mask_tree(received | put_back(received, state), mask)


def put_back(received: Params, state: Params, mask: Mask | None = None) -> Params:
    """Return the tensors with withheld entries, these put back; for one client or many stacked.

    With `mask` the entries that it drops are 0.
    """
    return {
        name: mix(state[WITHHELD + name], state[SAVED + name], value, mask.get(name) if mask else None)
        for name, value in received.items()
        if WITHHELD + name in state
    }


def rates(withheld: Mask, mask: Mask) -> Rates:
    """Return the share of withheld weights by both denominators."""
    total = sum(where.numel() for where in withheld.values())
    number = torch.stack([where.sum() for where in withheld.values()]).sum().double()
    kept = torch.stack([mask[name].sum() if name in mask else (where | True).sum() for name, where in withheld.items()])
    return Rates(number / kept.sum().clamp_min(1), number / total)
