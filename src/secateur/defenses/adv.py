"""ADV: adversarial regularisation, a game between the classifier and an attack on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, linear, logsigmoid, relu

from secateur.catalogue import method
from secateur.defenses import AGAINST_TRAINING
from secateur.errors import WrongInput, check_number, check_whole
from secateur.inference import outputs
from secateur.interfaces import Batch, Loss, Params
from secateur.training.execution import Lane, Lanes
from secateur.training.recipe import Fitted, Progress, Recipe, Row, Task
from secateur.training.trainer import TaskTraining, Trainer, train_many


@method("defense", "adv", "samia_ppb", acts_on="fine-tuning", strongest=AGAINST_TRAINING)
@dataclass(frozen=True)
class AdversarialRegularisation:
    """Fine-tunes against a surrogate attack that is trained at the same time (samia_ppb 6.3.1; Nasr et al. 2018).

    Acts on: the loop of fine-tuning. The surrogate attack h is trained first, for `warm_up` epochs. Without a warm-up,
    early stopping ends the game before h is any good. Then every training step is `attack_steps` steps of h and one
    step of the classifier (Algorithm 1 of Nasr et al.). h maximises its gain (mean log h over the batch's members +
    mean log(1 - h) over as many reference examples) / 2. The classifier minimises loss + alpha * mean log h over the
    same members.

    h is an MLP with ReLU on the posterior and the one-hot label, trained by Adam. Its inputs are the answers that an
    attacker would see, in eval mode. The reference set is the validation split, which early stopping uses too. So the
    validation loss (without the adversarial term) is no fresh estimate. Neither h nor the classifier sees a test split.

    Each epoch's row of the history has the surrogate's mean loss as `attack_loss`: log 2 = 0.693 is blind guessing.

    Equation: `h: max mean log h(members) + mean log(1 - h(others)); classifier: min CE + alpha mean log h(members)`.
    """

    alpha: float = 1.0  # the paper tries .5, 1, 2, 4, 8, 16
    warm_up: int = 10
    attack_steps: int = 1  # k
    attack_learning_rate: float = 1e-3
    hidden: tuple[int, ...] = (512, 256, 128)

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, "[0, inf)")
        check_whole("warm_up", self.warm_up, 0)
        check_whole("attack_steps", self.attack_steps)

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
        """Fine-tune like `trainer.fit_many`; the adversarial term is added to `loss`, so PPB's gives ppb+adv."""
        if any(not task.validation.size for task in tasks):
            raise WrongInput("data", "adv needs a validation split: its reference set is drawn from it")
        return train_many(partial(_Adversarial, self, net, recipe, loss), tasks, execution, progress)

    def surrogate(self, classes: int, rng: Generator, dtype: torch.dtype) -> Params:
        """Return the attack's initial weights, uniform within 1 / sqrt(inputs) like those of torch's layers."""
        params: Params = {}
        for layer, (inputs, units) in enumerate(pairwise([2 * classes, *self.hidden, 1])):
            for name, shape in (("weight", (units, inputs)), ("bias", (units,))):
                drawn = torch.rand(shape, generator=rng, dtype=dtype)
                params[f"{layer}.{name}"] = (2 * drawn - 1) / math.sqrt(inputs)
        return params


def membership(attack: Params, logits: Tensor, labels: Tensor) -> Tensor:
    """Return (N,) logits of the surrogate h for posteriors and labels; high = member."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    x = torch.cat([logits.softmax(1), (labels[:, None] == classes).to(logits.dtype)], 1)
    layers = len(attack) // 2
    for layer in range(layers):
        x = linear(x, attack[f"{layer}.weight"], attack[f"{layer}.bias"])
        x = relu(x) if layer < layers - 1 else x
    return x[:, 0]


class _Adversarial(Trainer):
    """Trainer of the runs of one structure."""

    def __init__(
        self, defense: AdversarialRegularisation, net: nn.Module, recipe: Recipe, loss: Loss, device: torch.device
    ) -> None:
        super().__init__(net, recipe, loss, None, None, device)
        self.defense = defense

    def stepper(self, runs: Sequence[TaskTraining], execution: str) -> _Game:
        return _Game(self, runs, execution)


class _Game:
    """The classifiers and their surrogates, with separate optimisers."""

    def __init__(self, trainer: _Adversarial, runs: Sequence[TaskTraining], execution: str) -> None:
        self.trainer, self.defense, self.runs = trainer, trainer.defense, runs
        lanes = [run.lane for run in runs]
        self.classifiers = Lanes(self._classifier_loss, lanes, trainer.recipe.make_optimiser, execution)
        # Separate generators, so that the classifier sees the same batches and noise as without a surrogate.
        self.rngs = [torch.Generator().manual_seed(run.noise.initial_seed() + 1) for run in runs]
        states = self.classifiers.states()
        members = [self._replace_inputs(state, run.train) for state, run in zip(states, runs, strict=True)]
        reference = [self._replace_inputs(state, run.validation) for state, run in zip(states, runs, strict=True)]
        surrogates = [self._surrogate(side, rng) for side, rng in zip(members, self.rngs, strict=True)]
        self.names = list(surrogates[0])
        rate = self.defense.attack_learning_rate
        make = replace(trainer.recipe, optimiser="adam", learning_rate=rate, weight_decay=0.0).make_optimiser
        self.attacks = Lanes(_attack_loss, [Lane(params, {}) for params in surrogates], make, execution)
        self._warm_up(members, reference)
        self.losses: list[Tensor] = []

    def step(self, rows: Sequence[Tensor]) -> Tensor:
        """Step the surrogates, then the classifiers."""
        batches = [run.tensors(indices) for run, indices in zip(self.runs, rows, strict=True)]
        for _ in range(self.defense.attack_steps):
            drawn = [self._draw(run.validation, rng) for run, rng in zip(self.runs, self.rngs, strict=True)]
            sides = zip(self.classifiers.states(), batches, drawn, strict=True)
            self.losses.append(self.attacks.step([self._answer_together(s, Batch(*b[:2]), r) for s, b, r in sides]))
        attacks = [tuple(attack[name] for name in self.names) for attack in self.attacks.states()]
        inputs_of_lanes = [(*batch[:2], *attack, *batch[2:]) for batch, attack in zip(batches, attacks, strict=True)]
        return self.classifiers.step(inputs_of_lanes)

    def states(self) -> list[Params]:
        """Return the classifiers' tensors."""
        return self.classifiers.states()

    def facts(self) -> list[Row]:
        """Return the surrogates' mean losses over the epoch."""
        means, self.losses = torch.stack(self.losses).mean(0).tolist(), []
        return [{"attack_loss": mean} for mean in means]

    def _warm_up(self, members: Sequence[Batch], reference: Sequence[Batch]) -> None:
        """Train the surrogates alone, on the classifiers' answers before fine-tuning."""
        size = self.trainer.recipe.batch_size
        for _ in range(self.defense.warm_up):
            orders = [torch.randperm(m.size, generator=rng) for m, rng in zip(members, self.rngs, strict=True)]
            for rows in zip(*(torch.split(order, size) for order in orders), strict=True):
                sides = zip(members, rows, reference, self.rngs, strict=True)
                self.attacks.step([(*m.take(at.to(m.labels.device)), *self._draw(r, g)) for m, at, r, g in sides])

    def _classifier_loss(
        self, params: Params, buffers: Params, inputs: Tensor, labels: Tensor, *rest: Tensor
    ) -> Tensor:
        """Return the loss + alpha * the surrogate's gain on the members."""
        count = len(self.names)
        attack = dict(zip(self.names, rest[:count], strict=True))
        logits = self.trainer.learner(params | buffers, inputs, rest[count:])
        gain = logsigmoid(membership(attack, logits, labels)).mean()
        return self.trainer.loss(logits, labels) + self.defense.alpha * gain

    def _replace_inputs(self, state: Params, batch: Batch) -> Batch:
        """Return the examples with the classifier's answers instead of the inputs, as an attacker sees them."""
        return Batch(outputs(self.trainer.judge, state, batch.inputs), batch.labels)

    def _answer_together(self, state: Params, members: Batch, reference: Batch) -> tuple[Tensor, ...]:
        """Return the answers and labels of members and reference, from one forward pass."""
        answers = self._replace_inputs(state, Batch(*map(torch.cat, zip(members, reference, strict=True)))).inputs
        return answers[: members.size], members.labels, answers[members.size :], reference.labels

    def _draw(self, pool: Batch, rng: Generator) -> Batch:
        """Draw a batch from a pool; a smaller pool is returned whole."""
        rows = torch.randperm(pool.size, generator=rng)[: self.trainer.recipe.batch_size]
        return pool.take(rows.to(pool.labels.device))

    def _surrogate(self, members: Batch, rng: Generator) -> Params:
        answers = members.inputs  # (N, K)
        params = self.defense.surrogate(answers.shape[1], rng, answers.dtype)
        return {name: value.to(answers.device) for name, value in params.items()}


def _attack_loss(attack: Params, _: Params, inside: Tensor, labels: Tensor, outside: Tensor, others: Tensor) -> Tensor:
    """Return -gain of a surrogate on the answers for members and for the reference set."""
    members, nonmembers = membership(attack, inside, labels), membership(attack, outside, others)
    return -(logsigmoid(members).mean() + logsigmoid(-nonmembers).mean()) / 2
