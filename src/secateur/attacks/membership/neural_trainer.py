"""Training loop of the neural attacks: a binary classifier of members and non-members."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from secateur.errors import WrongInput, check_number, check_numbers, check_whole, check_wholes
from secateur.gpu.graphs import recorded
from secateur.interfaces import Batch

BYTE = 2**8  # an entry of a dropout mask takes 8 random bits, so that one draw of 64 bits serves eight
HELD_OUT = 0.1  # share of the rows for early stopping
WARM_UP = 3  # steps before a CUDA graph is captured
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
        mask = torch.ge(
            drawn.view(x.shape), dropped, out=torch.empty_like(x)
        )  # twice as fast as a conversion from bool
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


def initialised(build: Callable[[], nn.Module], rng: Generator) -> nn.Module:
    """Return a module whose initial weights depend on `rng` alone."""
    with torch.random.fork_rng(devices=[]):  # layers draw their weights from the global generator
        torch.default_generator.manual_seed(int(torch.randint(2**62, (), generator=rng)))
        return build()


def train(network: nn.Module, rows: Batch, schedule: NeuralSchedule, rng: Generator) -> int:
    """Train `network(inputs, drop)` in place on rows labelled 1 = member, and return the number of epochs.

    The held-out rows, the order of the others and the dropout masks come from `rng`.
    """
    device = rows.inputs.device
    masks = Generator(device).manual_seed(int(torch.randint(2**62, (), generator=rng)))
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
        if plateau.reached(network, held_out) if held_out.size else epoch in drop_epochs:
            optimiser.param_groups[0]["lr"] /= 10
            steps.renew()
    if held_out.size:
        network.load_state_dict(plateau.best)
    if not all(bool(value.isfinite().all()) for value in network.parameters()):
        raise WrongInput(
            "attack learning_rate", f"{schedule.learning_rate} makes the attack's network diverge; lower it"
        )
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

    def reached(self, network: nn.Module, held_out: Batch) -> bool:
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
    """Optimiser steps: eager on a CPU, replayed from a CUDA graph on a GPU, where kernel launches dominate the time.

    The first batches of a learning rate are stepped eagerly, which is the warm-up that a graph needs.
    """

    def __init__(self, network: nn.Module, optimiser: SGD, drop: Drop, size: int) -> None:
        self.network, self.optimiser, self.drop, self.size = network, optimiser, drop, size
        self.renew()

    def renew(self) -> None:
        """Discard the graph, because it contains the learning rate of its capture."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = 0

    def step(self, rows: Batch) -> None:
        """Step the optimiser on one batch."""
        if rows.size != self.size or not rows.inputs.is_cuda:
            self._step(rows)
            return
        if self.graph is None and self.warm < WARM_UP:
            self.warm += 1
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(rows)
            torch.cuda.current_stream().wait_stream(side)
            return
        if self.graph is None:
            self.static_batch = Batch(rows.inputs.clone(), rows.labels.clone())
            self.graph = torch.cuda.CUDAGraph()
            if isinstance(self.drop, Dropout):
                self.graph.register_generator_state(self.drop.rng)
            self.optimiser.zero_grad(set_to_none=True)
            with recorded(self.graph, torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                self._step(self.static_batch)
        self.static_batch.inputs.copy_(rows.inputs)
        self.static_batch.labels.copy_(rows.labels)
        self.graph.replay()

    def _step(self, rows: Batch) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(cross_entropy(self.network(rows.inputs, self.drop), rows.labels))
        self.optimiser.step()


def _train_epoch(steps: _Steps, rows: Batch, rng: Generator) -> None:
    steps.network.train()
    batches = list(torch.split(torch.randperm(rows.size, generator=rng).to(rows.inputs.device), steps.size))
    if len(batches) > 1 and len(batches[-1]) == 1:  # BatchNorm needs at least two rows
        batches[-2:] = [torch.cat(batches[-2:])]
    for batch in batches:
        steps.step(rows.take(batch))
