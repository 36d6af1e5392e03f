"""Estimate of a client's optimiser from its updates, with the attacker's certainty.

Steps of Adam change all weights by similar amounts, those of gradient descent by amounts of many sizes. So the sizes of
the changes tell the kind. Adam's largest change is its learning rate times the steps. Weights without a gradient show a
weight decay: they shrink by one common share. The rate and the momentum of gradient descent cannot be read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from secateur.errors import WrongInput
from secateur.interfaces import Knowledge, Optimiser, Params, ServerView, Weights
from secateur.training.optimisers import list_batches

# The spread of changes in orders of magnitude. 256 updates of four networks on digits had, after one step, at most 0.06
# with Adam and at least 1.41 with SGD. After 5 and 10 steps they had at most 1.04 and at least 1.29.
ADAM_BELOW, SGD_ABOVE = {"one": 0.5, "several": 1.05}, {"one": 1.2, "several": 1.28}
TOP = 0.999  # quantile that stands for the largest change
WIDTH = math.log10(1.01)  # of a bin of shares by which weights shrink
PEAK = 0.02  # share of the weights in one bin from which on it shows a weight decay
EXPLAINED = 0.5  # share of the variance that a decay explains
MOST = 1_000_000  # changes that are sorted


@dataclass(frozen=True)
class OptimiserEstimate:
    """Estimate of an optimiser; None stands for what the updates do not show."""

    kind: Literal["sgd", "adam", "adamw"] | None
    learning_rate: float | None
    weight_decay: float | None  # of sgd it is known only together with the rate
    spread: float  # of the changes, in orders of magnitude
    certainty: float  # 0 at the middle between the kinds, 1 beyond the updates that the limits were read from

    @property
    def optimiser(self) -> Optimiser:
        """The optimiser as an attacker unrolls it; refuse one that is not determined."""
        if self.kind is None:
            seen = f"the updates lie between those of SGD and of Adam (spread {self.spread:.2f})"
            raise WrongInput("optimiser", f"cannot be told: {seen}; write the client's own")
        return Optimiser(self.kind, weight_decay=(self.weight_decay or 0.0) if self.kind == "adamw" else 0.0)

    def __str__(self) -> str:
        if self.kind is None:
            return f"undetermined (spread {self.spread:.2f})"
        rate = "rate not shown" if self.learning_rate is None else f"rate {self.learning_rate:.3g}"
        decay = "decay not shown" if self.weight_decay is None else f"weight decay {self.weight_decay:.2g}"
        unseen = ", momentum not shown" if self.kind == "sgd" else ""
        return f"{self.kind}, {rate}, {decay}{unseen}; certainty {self.certainty:.2f}"


def estimate_optimiser(views: Sequence[ServerView], knowledge: Knowledge) -> OptimiserEstimate:
    """Return the estimate from one update or several, of one client or of clients with the same settings.

    Args:
        views: updates that are weights.
        knowledge: the numbers of steps or epochs and of examples are used; the optimiser and its rate are not.
    """
    if not views or not all(isinstance(view.update, Weights) for view in views):
        raise WrongInput("optimiser", "is estimated from weights, and this update is a gradient; leave it out")
    steps = len(
        list_batches(knowledge.batch_size, knowledge.local_batch, knowledge.local_steps, knowledge.local_epochs)
    )
    changes = [_read_changes(view) for view in views]
    decays = [_find_shrinkage(weights, change) for weights, change, _ in changes]
    kept = [_drop_shrinking(*one, decay) for one, decay in zip(changes, decays, strict=True)]
    spreads = [_measure_spread(sizes) + tops for (sizes, (_, _, tops)) in zip(kept, changes, strict=True)]
    spread = sum(spreads) / len(spreads)
    which = "one" if steps == 1 else "several"
    low, high = ADAM_BELOW[which], SGD_ABOVE[which]
    certainty = min(1.0, abs(spread - (low + high) / 2) / ((high - low) / 2))
    shrinkage = _mean([decay for decay in decays if decay is not None])
    if low <= spread <= high:
        return OptimiserEstimate(None, None, None, spread, certainty)
    if spread > high:
        return OptimiserEstimate("sgd", None, None, spread, certainty)
    rate = sum(float(_quantile(sizes, TOP)) for sizes in kept) / len(kept) / steps
    if shrinkage is None and steps == 1:
        shrinkage = _mean([decay for one in changes if (decay := _regress_decay(*one[:2], rate)) is not None])
    decay = None if shrinkage is None else shrinkage / (rate * steps)
    return OptimiserEstimate("adam" if decay is None else "adamw", rate, decay, spread, certainty)


def _read_changes(view: ServerView) -> tuple[Tensor, Tensor, float]:
    """Return all weights and their changes as vectors, and the spread of the tensors' largest changes."""
    values: Params = view.update.values
    change = {name: (view.sent[name] - value).double() for name, value in values.items()}
    tops = [float(part.abs().max()) for part in change.values() if part.numel() > 1 and bool(part.any())]
    if not tops:
        raise WrongInput("update", "has no change, so its optimiser cannot be estimated")
    spread = float(torch.tensor(tops).log10().std()) if len(tops) > 1 else 0.0
    weights = torch.cat([view.sent[name].double().flatten() for name in change])
    return weights, torch.cat([part.flatten() for part in change.values()]), spread


def _find_shrinkage(weights: Tensor, change: Tensor) -> float | None:
    """Return the share by which many weights shrink alike; None if there is none."""
    shares = change / weights
    shares = shares[(shares > 0) & shares.isfinite()]
    if not len(shares):
        return None
    bins = torch.floor(shares.log10() / WIDTH)
    values, counts = torch.unique(bins, return_counts=True)
    if int(counts.max()) < PEAK * len(weights):
        return None
    return float(shares[bins == values[counts.argmax()]].median())


def _drop_shrinking(weights: Tensor, change: Tensor, _: float, shrinkage: float | None) -> Tensor:
    """Return the sizes of the changes of weights that have a gradient."""
    sizes = change.abs()
    if shrinkage is not None:
        decayed = shrinkage * weights
        sizes = torch.where((change - decayed).abs() < 0.02 * decayed.abs(), 0, sizes)
    nonzero = sizes[sizes > 0]
    return nonzero if len(nonzero) else change.abs()


def _measure_spread(sizes: Tensor) -> float:
    """Return the orders of magnitude between the largest and the median size."""
    return float((_quantile(sizes, TOP) / _quantile(sizes, 0.5)).log10())


def _quantile(sizes: Tensor, share: float) -> Tensor:
    """Return a quantile; of many sizes, that of evenly chosen ones."""
    return sizes[:: -(-len(sizes) // MOST)].quantile(share)


def _regress_decay(weights: Tensor, change: Tensor, rate: float) -> float | None:
    """Return the share by which weights shrink beside a step of exactly the rate; None if that explains little."""
    rest = change - rate * change.sign()
    size = weights.square().sum()
    slope = float((rest * weights).sum() / size)
    left = (rest - slope * weights).square().sum()
    return slope if slope > 0 and left < (1 - EXPLAINED) * rest.square().sum() else None


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values."""
    return sum(values) / len(values) if values else None
