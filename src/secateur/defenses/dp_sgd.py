"""DP-SGD: per-example clipping and Gaussian noise, in fine-tuning (dp-sgd) or from the first step (dp-sgd-scratch).

The guarantee of dp-sgd covers fine-tuning only; that of dp-sgd-scratch covers the original's training too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor, nn, vmap
from torch.func import grad_and_value
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.catalogue import method
from secateur.defenses import AGAINST_PRIVACY
from secateur.defenses.dp_common import (
    AT_ONCE,
    OPACUS,
    Guarantee,
    PrivacySettings,
    count_steps,
    epsilon,
    freeze_norms,
    replace_batchnorm,
    root_logger_restored,
)
from secateur.errors import WrongInput, require
from secateur.interfaces import Loss, Params
from secateur.training.recipe import Fitted, Progress, Recipe, Row, Task
from secateur.training.trainer import TaskTraining, Trainer, train_many

ALONE = (
    "does not combine with another defense: its guarantee needs a loss that is a sum over examples, "
    "and ppb's pairs and adv's surrogate carry one example's data into another's gradient"
)


@method(
    "defense",
    "dp-sgd",
    "samia_ppb",
    acts_on="fine-tuning",
    combines=False,
    reason=ALONE,
    requires=OPACUS,
    strongest=AGAINST_PRIVACY,
)
@dataclass(frozen=True)
class DpSgd(PrivacySettings):
    """Clips every example's gradient and adds Gaussian noise to their sum (samia_ppb 6.3.1; Abadi et al. 2016).

    Equation: `gradient = (sum over i of g_i min(1, C / |g_i|) + N(0, (sigma C)^2)) / expected batch size`.

    Acts on: the loop of fine-tuning. Batches are drawn by Poisson sampling, each example with probability
    q = batch size / examples. The noisy sum, divided by the expected batch size, goes to the recipe's optimiser.
    BatchNorm is frozen: its statistics mix examples, and replacing it would break a trained model. Where a mask prunes,
    an example's gradient is set to zero before clipping, and the weights are set to zero after the noise.
    The guarantee covers fine-tuning only, because the same members trained the original without DP-SGD. It holds for
    the algorithm, not against attacks on floating-point noise, and does not cover the training loss in the history.
    """

    def fit_many(
        self,
        net: nn.Module,
        tasks: Sequence[Task],
        recipe: Recipe,
        *,
        loss: Loss = cross_entropy,
        execution: str = "auto",
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, Fitted]]:
        """Train as `trainer.fit_many`, one task at a time unless by ray; refuse a loss but cross-entropy."""
        if loss is not cross_entropy:
            raise WrongInput("defense", f"dp-sgd {ALONE}")
        self.check_network(net)
        require(*OPACUS)
        return train_many(partial(_PrivateTrainer, self, net, recipe), tasks, execution, progress)

    def check_network(self, net: nn.Module) -> None:
        """Refuse a network that cannot be trained; fine-tuning freezes BatchNorm, so all are allowed."""

    def guarantee(self, size: int, *recipes: Recipe) -> Guarantee:
        """Return the guarantee of fine-tuning by a recipe, or several in a row, on `size` examples.

        The guarantee is known before training. All of a recipe's epochs count. Early stopping depends on the weights of
        every epoch before, so an epsilon of the epochs that ran would be no bound.
        """
        delta = self.delta or 1 / size
        phases = [count_steps(size, recipe) for recipe in recipes]
        spent = epsilon(self.noise_multiplier, phases, delta, self.accountant)
        return Guarantee(spent, delta, self.accountant, self.covers, self.whole)

    @property
    def whole(self) -> bool:
        """True if the guarantee covers the original's training too."""
        return False

    @property
    def covers(self) -> str:
        """The phases that the guarantee covers, for the report."""
        return "fine-tuning only (the same members trained the original without it), with BatchNorm frozen"


@method(
    "defense",
    "dp-sgd-scratch",
    "samia_ppb",
    acts_on="training",
    combines=False,
    reason=ALONE,
    requires=OPACUS,
    strongest=AGAINST_PRIVACY,
)
@dataclass(frozen=True)
class DpSgdScratch(DpSgd):
    """Trains the original and fine-tunes it by DP-SGD, with GroupNorm for BatchNorm (beyond samia_ppb 6.3.1).

    Acts on: training and fine-tuning, both by `fit_many`, on the network that `structure` returns. The guarantee
    composes both phases. A mask computed from the weights alone has no privacy cost. A mask computed from members'
    gradients (snip, grasp) is not covered.
    """

    def structure(self, net: nn.Module) -> nn.Module:
        """Return the network with GroupNorm in place of BatchNorm; its other layers and weights are kept.

        `net` must be untrained: the guarantee does not cover weights that were trained on the members before.
        """
        return replace_batchnorm(net)

    def check_network(self, net: nn.Module) -> None:
        """Refuse BatchNorm, in the original and in the pruned model."""
        if any(isinstance(module, _BatchNorm) for module in net.modules()):
            raise WrongInput("model", "has BatchNorm, which dp-sgd-scratch cannot train; use structure(net)")

    @property
    def whole(self) -> bool:
        """True: the members are used in no other training."""
        return True

    @property
    def covers(self) -> str:
        """The phases that the guarantee covers, for the report."""
        return "training and fine-tuning, with GroupNorm in place of BatchNorm"


class _PrivateTrainer(Trainer):
    """Trainer that samples batches by Poisson sampling and steps by DP-SGD, one run at a time."""

    lockstep = False  # runs draw batches of different sizes

    def __init__(self, defense: DpSgd, net: nn.Module, recipe: Recipe, device: torch.device) -> None:
        super().__init__(freeze_norms(net), recipe, cross_entropy, None, None, device)
        self.defense = defense

    def choose_execution(self, execution: str, tasks: Sequence[Task]) -> str:
        return "sequential"

    def order(self, run: TaskTraining) -> list[Tensor]:
        """Return an epoch's batches by Poisson sampling: each holds an example with probability q and may be empty."""
        with root_logger_restored():
            from opacus.utils.uniform_sampler import UniformWithReplacementSampler

        size, device = run.train.size, run.train.inputs.device
        rate, steps = count_steps(size, self.recipe)
        sampler = UniformWithReplacementSampler(
            num_samples=size, sample_rate=rate, steps=steps // self.recipe.epochs, generator=run.rng
        )
        return [torch.tensor(rows, dtype=torch.long, device=device) for rows in sampler]

    def stepper(self, runs: Sequence[TaskTraining], execution: str) -> _PrivateStepper:
        return _PrivateStepper(self, runs[0])


class _PrivateStepper:
    """DP-SGD steps of one run."""

    def __init__(self, trainer: _PrivateTrainer, run: TaskTraining) -> None:
        with root_logger_restored():
            from opacus.optimizers import DPOptimizer

        self.learner, self.run = trainer.learner, run
        self.leaves = {name: value.clone().requires_grad_() for name, value in run.lane.params.items()}
        self.optimiser: Any = DPOptimizer(
            trainer.recipe.make_optimiser(list(self.leaves.values())),
            noise_multiplier=trainer.defense.noise_multiplier,
            max_grad_norm=trainer.defense.max_grad_norm,
            expected_batch_size=min(trainer.recipe.batch_size, run.train.size),
            generator=run.noise,
        )
        self.optimiser.attach_step_hook(_lay_out)
        self.asks = self.learner.asks(run.lane.params | run.lane.buffers, run.train.inputs[:1])
        self.gradients = vmap(grad_and_value(self._loss), in_dims=(None, 0, 0, *(0 for _ in self.asks)))
        self.kept = {name: kept.to(self.leaves[name].dtype) for name, kept in run.lane.mask.items()}
        self.at_once = max(8, AT_ONCE[run.train.inputs.device.type] // tree.count(self.leaves))

    def step(self, rows: Sequence[Tensor]) -> Tensor:
        """Clip, sum, add noise, step; a batch that is too large for the memory is split into parts."""
        parts = torch.split(rows[0], self.at_once)
        losses = []
        for number, part in enumerate(parts, 1):
            grads, values = self._per_example(part)
            for name, leaf in self.leaves.items():
                leaf.grad_sample = grads[name]  # type: ignore[attr-defined]
            losses.append(values)
            self.optimiser.signal_skip_step(number < len(parts))
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, kept in self.run.lane.mask.items():
                self.leaves[name].masked_fill_(~kept, 0)
        return torch.cat(losses).sum().reshape(1) / max(len(rows[0]), 1)

    def states(self) -> list[Params]:
        """Return the run's current tensors."""
        return [{name: value.detach() for name, value in (self.leaves | self.run.lane.buffers).items()}]

    def facts(self) -> list[Row]:
        """Return an empty row: the guarantee is known before training."""
        return [{}]

    def _per_example(self, rows: Tensor) -> tuple[Params, Tensor]:
        """Return every example's gradient, zero where the mask prunes, and every example's loss."""
        params = {name: leaf.detach() for name, leaf in self.leaves.items()}
        if not len(rows):
            empty = {name: value.new_zeros(0, *value.shape) for name, value in params.items()}
            return empty, next(iter(params.values())).new_zeros(0)
        inputs, labels = self.run.train.take(rows)
        noise = [ask._replace(shape=Size([len(rows), *ask.shape[1:]])).draw(self.run.noise) for ask in self.asks]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # pooling in vmap: a small one
            grads, losses = self.gradients(params, inputs, labels, *noise)
        for name, kept in self.kept.items():
            grads[name].mul_(kept)  # 10x faster than masked_fill_ on a CPU
        return grads, losses

    def _loss(self, params: Params, example: Tensor, label: Tensor, *noise: Tensor) -> Tensor:
        logits = self.learner(params | self.run.lane.buffers, example[None], [one[None] for one in noise])
        return cross_entropy(logits, label[None])


def _lay_out(optimiser: Any) -> None:
    """Copy gradients into their parameters' strides: fused optimisers read both as flat memory without a check."""
    for leaf in optimiser.params:
        leaf.grad = torch.empty_like(leaf).copy_(leaf.grad)
