"""Mixed distillation: a pruned model learns the unpruned one's answers about mixtures, never about a member."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from secateur.catalogue import method
from secateur.defenses import AGAINST_TRAINING
from secateur.errors import WrongInput, check_number
from secateur.inference import outputs
from secateur.interfaces import Loss, Params
from secateur.pruning.distillation import divergence
from secateur.training.aided_trainer import AidedTrainer, train_aided
from secateur.training.recipe import Fitted, Progress, Recipe, Task
from secateur.training.trainer import TaskTraining, Trainer


@method(
    "defense",
    "mixed-distil",
    "-",
    acts_on="fine-tuning",
    strongest=AGAINST_TRAINING,
    meanings={"strength": "largest share of the other example in a mixture", "temperature": "divisor of the logits"},
)
@dataclass(frozen=True)
class MixedDistillation:
    """Fine-tunes on the unpruned model's answers about mixtures of two members (our own; not a method of a paper).

    Acts on: fine-tuning. Hypothesis: fine-tuning shows every member and its label a second time, and this second look
    makes a pruned model surer of its members. Here neither a member nor a label is shown. A mixture is x' = (1 - u) x_i
    + u x_j, of a random pair of the batch, with u uniform in [0, `strength`). The loss is T^2 KL(f(x') / T || g(x') /
    T): f is the unpruned model, g the pruned one, T the `temperature`. Labels of the validation rows
    still say when to stop. `strength` 0 is the ablation: the members themselves, without their labels.

    Equation: `x' = (1 - u) x_i + u x_j, u ~ U[0, strength); L = T^2 KL(f(x') / T || g(x') / T)`.
    """

    strength: float = 0.5
    temperature: float = 4.0

    def __post_init__(self) -> None:
        check_number("strength", self.strength, "[0, 1]")
        check_number("temperature", self.temperature, "(0, inf)")

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
        """Fine-tune like `trainer.fit_many`; `loss` is only that of the validation rows."""
        if self.strength and any(not task.train.inputs.is_floating_point() for task in tasks):
            raise WrongInput("defense", "mixed-distil mixes inputs, which whole numbers cannot be; use strength=0")

        def make(starts: Sequence[Params]) -> partial[AidedTrainer]:
            transform = self.mix if self.strength else None
            return partial(AidedTrainer, answer_unpruned, self.compare, starts, net, recipe, loss, transform)

        return train_aided(make, tasks, execution, progress)

    def mix(self, inputs: Tensor, rng: Generator) -> Tensor:
        """Return every example mixed with a random one of the batch, in shares of its own."""
        others = inputs[torch.randperm(len(inputs), generator=rng, device=inputs.device)]
        shape = (len(inputs), *[1] * (inputs.ndim - 1))
        shares = self.strength * torch.rand(shape, generator=rng, device=inputs.device, dtype=inputs.dtype)
        return torch.lerp(inputs, others, shares)

    def compare(self, logits: Tensor, labels: Tensor, wanted: Tensor) -> Tensor:
        """Return the divergence from the unpruned model's answers; labels are not used."""
        return divergence(wanted, logits, self.temperature)


def answer_unpruned(trainer: Trainer, start: Params, run: TaskTraining, inputs: Tensor) -> Tensor:
    """Return the unpruned model's logits (N, K), in eval mode."""
    return outputs(trainer.judge, start, inputs)
