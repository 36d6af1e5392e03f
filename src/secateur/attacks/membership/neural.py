"""Neural membership attacks: a network trained on the shadow models' answers about their own examples.

NN sees the probabilities, NNcls also the true label, Top3-NN the three largest probabilities. `train` is the training
loop of them all, a binary classifier of members and non-members.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.optim import SGD

from secateur.attacks.membership.thresholds import shadow_sides
from secateur.catalogue import method
from secateur.errors import WrongInput, check_number, check_numbers, check_whole, check_wholes
from secateur.gpu.graphs import Captured
from secateur.inference import probabilities
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow
from secateur.seeding import draw_seed, initialise, spawn

BYTE = 2**8  # an entry of a dropout mask takes 8 random bits, so that one draw of 64 bits serves eight
HELD_OUT = 0.1  # share of the rows for early stopping
RATES = 3  # number of learning rates, each a tenth of the one before

Drop = Callable[[Tensor], Tensor]


def keep(x: Tensor) -> Tensor:
    """Return `x` unchanged: no dropout."""
    return x


@dataclass(frozen=True)
class Dropout:
    """Dropout whose mask comes from a generator on the tensors' device, eight entries from one draw.

    The rate is rounded to the nearest multiple of 1/256 (51/256 for .2), and the scale is that of the rounded rate.
    """

    rate: float
    rng: Generator

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` with a share `rate` of its entries zero and the others scaled up."""
        dropped = round(self.rate * BYTE)
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64, device=x.device)
        drawn = words.random_(-(2**63), None, generator=self.rng).view(torch.uint8)[: x.numel()]
        # twice as fast as a conversion from bool
        mask = torch.ge(drawn.view(x.shape), dropped, out=torch.empty_like(x))
        return x * mask.mul_(BYTE / (BYTE - dropped))


@dataclass(frozen=True)
class NeuralSchedule:
    """Training settings; the defaults are samia_ppb's (5.1.5), except for early stopping.

    The learning rate drops to a tenth after half of the epochs, and again after three quarters. With `early_stopping`
    it drops when the loss on held-out rows stops decreasing. Training ends at the third such point, and the best
    weights are restored; `epochs` is then an upper limit.
    """

    epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    dropout: float = 0.2
    early_stopping: bool = True
    patience: int = 10  # epochs without a better held-out loss before the rate drops; reasons in docs/notebook.md

    def __post_init__(self) -> None:
        check_wholes(self, "epochs", "patience", prefix="attack ")
        check_whole("attack batch_size", self.batch_size, 2)
        check_number("attack learning_rate", self.learning_rate, "(0, inf)")
        check_numbers(self, "[0, 1)", "momentum", "dropout", prefix="attack ")


@dataclass(frozen=True)
class NetworkAttack(NeuralSchedule, ABC):
    """A network over features of the model's answers."""

    fitted: Any = field(default=None, init=False, repr=False, compare=False)  # (network, seed of the queries)

    @abstractmethod
    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return the network's inputs (N, F), one row an example; `rng` begins anew for every set of examples."""

    def network(self, features: int) -> nn.Module:
        """Return the network, called as `network(features, drop)`."""
        return Mlp(features)

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Query every shadow once, and train the network on the answers."""
        sides = shadow_sides(shadows)
        seed = draw_seed(rng)
        seen = torch.cat([self._extract_features(box, batch, seed) for box, batch, _ in sides])
        truths = torch.cat([torch.full_like(batch.labels, truth) for _, batch, truth in sides])
        network = initialise(lambda: self.network(seen.shape[1]), rng).to(seen.device)
        train(network, Batch(seen, truths), self, rng)
        fitted = copy.copy(self)
        object.__setattr__(fitted, "fitted", (network, seed))
        return fitted

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Rank by the logit of member, decide by its sign."""
        if self.fitted is None:
            raise WrongInput("attack", "fit it on shadow models first")
        network, seed = self.fitted
        outside, member = logits(network, self._extract_features(box, candidates.batch, seed)).unbind(1)
        return Guesses(member - outside, member > outside)

    def _extract_features(self, box: BlackBox, batch: Batch, seed: int) -> Tensor:
        """Return the features of a batch, with the queries' own generator."""
        return self.features(box, batch, Generator().manual_seed(seed)).float()


class Mlp(nn.Module):
    """An MLP 512-256-128-2 with ReLU and dropout."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((features, 512, 256, 128, 2)))

    def forward(self, x: Tensor, drop: Drop = keep) -> Tensor:
        """Return the logits (N, 2) of non-member and member for features (N, F)."""
        *hidden, last = self.layers
        for layer in hidden:
            x = drop(layer(x).relu())
        return last(x)  # type: ignore[no-any-return]


@method("attack", "nn", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class Nn(NetworkAttack):
    """An MLP tells members by all probabilities (Shokri et al. 2017; samia_ppb 5.1, NN).

    Equation: `score = h(p_1, ..., p_K)`.
    """

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return p (N, K)."""
        return probabilities(box, batch.inputs)


@method("attack", "nn-cls", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class NnCls(NetworkAttack):
    """An MLP tells members by all probabilities and the true label (Nasr et al. 2018; samia_ppb 5.1, NNcls).

    Equation: `score = h(p_1, ..., p_K, y)`.
    """

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return p and the one-hot label (N, 2K)."""
        p = probabilities(box, batch.inputs)
        return torch.cat([p, one_hot(batch.labels, p.shape[1]).to(p)], 1)


@method("attack", "top3-nn", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class Top3Nn(NetworkAttack):
    """An MLP tells members by the three largest probabilities (Salem et al. 2019; samia_ppb 5.1, Top3-NN).

    Equation: `score = h(the three largest of p_1, ..., p_K)`.
    """

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return the largest p (N, 3), in falling order; (N, 2) where there are two classes."""
        p = probabilities(box, batch.inputs)
        return p.topk(min(3, p.shape[1]), 1).values


def train(network: nn.Module, rows: Batch, schedule: NeuralSchedule, rng: Generator) -> int:
    """Train `network(inputs, drop)` in place on rows labelled 1 = member, and return the number of epochs.

    The held-out rows, the order of the others and the dropout masks come from `rng`.
    """
    device = rows.inputs.device
    masks = spawn(rng, device)
    drop = Dropout(schedule.dropout, masks) if schedule.dropout else keep
    order = torch.randperm(rows.size, generator=rng).to(device)
    held_out = rows.take(order[: int(HELD_OUT * rows.size) if schedule.early_stopping else 0])
    rows = rows.take(order[held_out.size :])
    decay = schedule.weight_decay
    optimiser = SGD(network.parameters(), schedule.learning_rate, schedule.momentum, weight_decay=decay, fused=True)
    drop_epochs = (schedule.epochs // 2, schedule.epochs * 3 // 4)
    plateau, steps = _Plateau(network, schedule.patience), _Steps(network, optimiser, drop, schedule.batch_size)
    epoch = 0
    while epoch < schedule.epochs and plateau.count < RATES:
        _train_epoch(steps, rows, rng)
        epoch += 1
        if plateau.is_reached(network, held_out) if held_out.size else epoch in drop_epochs:
            optimiser.param_groups[0]["lr"] /= 10
            steps.renew()
    if held_out.size:
        network.load_state_dict(plateau.best)
    if not all(bool(value.isfinite().all()) for value in network.parameters()):
        rate = schedule.learning_rate
        raise WrongInput("attack learning_rate", f"{rate} makes the attack's network diverge; use a lower one")
    return epoch


@torch.no_grad()
def logits(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the logits (N, 2) in eval mode, computed in batches."""
    network.eval()
    return torch.cat([network(part) for part in torch.split(inputs, 256)])


class _Plateau:
    """Best weights so far, and the number of times that the held-out loss has stopped decreasing."""

    def __init__(self, network: nn.Module, patience: int) -> None:
        self.patience = patience
        self.best, self.loss = copy.deepcopy(network.state_dict()), float("inf")
        self.waited = self.count = 0

    def is_reached(self, network: nn.Module, held_out: Batch) -> bool:
        """Return True if the patience is exhausted after an epoch; the network is then reset to the best weights."""
        loss = float(cross_entropy(logits(network, held_out.inputs), held_out.labels))
        self.waited += 1
        if loss < self.loss:
            self.best, self.loss, self.waited = copy.deepcopy(network.state_dict()), loss, 0
        if self.waited < self.patience:
            return False
        network.load_state_dict(self.best)
        self.waited, self.count = 0, self.count + 1
        return True


class _Steps:
    """Optimiser steps: eager on a CPU, replayed from a CUDA graph on a GPU, where kernel launches dominate the time."""

    def __init__(self, network: nn.Module, optimiser: SGD, drop: Drop, size: int) -> None:
        self.network, self.optimiser, self.size = network, optimiser, size
        self.generators = [drop.rng] if isinstance(drop, Dropout) else []
        self.descend = partial(_descend, network, optimiser, drop)
        self.renew()

    def renew(self) -> None:
        """Discard the graph, because it contains the learning rate of its capture."""
        self.captured: Captured[Batch, None] | None = None

    def step(self, rows: Batch) -> None:
        """Step the optimiser on one batch."""
        if rows.size != self.size or not rows.inputs.is_cuda:
            self.descend(rows)
            return
        if self.captured is None:
            self.captured = Captured(self.descend, rows.inputs.device, required=True, generators=self.generators)
        self.captured(rows)


def _descend(network: nn.Module, optimiser: SGD, drop: Drop, rows: Batch) -> None:
    optimiser.zero_grad(set_to_none=True)
    torch.autograd.backward(cross_entropy(network(rows.inputs, drop), rows.labels))
    optimiser.step()


def _train_epoch(steps: _Steps, rows: Batch, rng: Generator) -> None:
    steps.network.train()
    batches = list(torch.split(torch.randperm(rows.size, generator=rng).to(rows.inputs.device), steps.size))
    if len(batches) > 1 and len(batches[-1]) == 1:  # BatchNorm needs at least two rows
        batches[-2:] = [torch.cat(batches[-2:])]
    for batch in batches:
        steps.step(rows.take(batch))
