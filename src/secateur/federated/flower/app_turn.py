"""One client's turn of an audited app: the server's view of it, and the attacker's knowledge of the training.

`AppTurn.imitate` repeats the training by this knowledge on the client's own examples. Its error says how well an
attacker can imitate the app at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.attacks.inversion.updates import gradient_update
from secateur.errors import WrongInput
from secateur.evaluation.client import check_shape, scale
from secateur.federated.attacks.observer import ClientView
from secateur.federated.flower.probe import ClientTraining
from secateur.interfaces import Batch, Knowledge, Params, ServerView, Weights
from secateur.training.optimisers import START, take_step, write_optimiser

LEAST = 1e-300  # below any norm of an update


@dataclass(frozen=True, eq=False)
class AppTurn:
    """One client's turn in an attacked round."""

    round: int
    sent: Params  # the arrays of the server's message
    answer: Params  # those of the client's
    training: ClientTraining  # as a probe saw it; its examples are the evaluator's

    def show(self, device: torch.device) -> ClientView:
        """Return the turn as the attacks of a federation take it, with the examples of all steps as the truth."""
        client, net = self.training.client, self.training.net
        sent, answer = (
            {name: value.to(device) for name, value in name_arrays(arrays, net).items()}
            for arrays in (self.sent, self.answer)
        )
        view = ServerView(sent, Weights({name: answer[name] for name, _ in net.named_parameters()}))
        truth = join_steps(self.training.steps).to(device)
        marks = torch.tensor(mark_examples(truth))
        return ClientView(self.round, client, view, truth, marks, {}, (client,))

    def compare(self) -> tuple[float, float, float]:
        """Return the relative difference, the cosine and the ratio of norms of the sent and the trained update."""
        net, trained = self.training.net, self.training.trained
        sent, answer = name_arrays(self.sent, net), name_arrays(self.answer, net)
        update = torch.cat([(value - sent[name]).double().flatten() for name, value in trained.items()])
        shown = torch.cat([(answer[name] - sent[name]).double().flatten() for name in trained])
        norm = update.norm().clamp_min(LEAST)
        cosine = update @ shown / (norm * shown.norm()).clamp_min(LEAST)
        return float((shown - update).norm() / norm), float(cosine), float(shown.norm() / norm)

    def imitate(self) -> float:
        """Return the relative error of the training, repeated by its settings on its own examples."""
        training = self.training
        net, optimiser, loss = training.net, training.optimiser, training.loss
        check_steps(training)
        state = {name: value.detach().cpu() for name, value in net.state_dict().items()} | name_arrays(self.sent, net)
        params, moments = {name: state[name] for name in training.trained}, START
        for batch, rate in zip(training.steps, training.rates, strict=True):
            grads = gradient_update(net, state | params, batch, mode_of(net), loss).values
            direction, moments = take_step(optimiser, params, grads, moments)
            params |= {name: params[name] - rate * value for name, value in direction.items()}
        gap = torch.cat([(params[name] - value).double().flatten() for name, value in training.trained.items()])
        update = torch.cat([(state[name] - value).double().flatten() for name, value in training.trained.items()])
        return float(gap.norm() / update.norm().clamp_min(LEAST))

    def know(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> Knowledge:
        """Return the attacker's knowledge of the turn; refuse a turn that no attack can imitate."""
        training = self.training
        net, optimiser, loss = training.net, training.optimiser, training.loss
        check_steps(training)
        epochs, truth = fold_epochs(training.steps)
        check_shape("app", "an example of a client", truth.inputs.shape[1:])
        centre, spread = scale_of(mean, std, truth.inputs)
        return Knowledge(
            net.to(device),
            tuple(truth.inputs.shape[1:]),
            training.classes,
            centre.to(device),
            spread.to(device),
            batch_size=truth.size,
            loss=loss,
            batchnorm=mode_of(net),
            local_steps=len(training.rates),
            learning_rate=training.rates[0],
            local_batch=training.steps[0].size,
            local_epochs=epochs,
            optimiser=optimiser,
        )


def describe_training(training: ClientTraining) -> str:
    """Return in words what a client did in a round."""
    if not training.steps:
        return "No step of an optimiser of torch was seen in a client."
    steps, sizes = len(training.rates), sorted({batch.size for batch in training.steps})
    epochs, truth = fold_epochs(training.steps)
    size = "1 example" if sizes == [1] else f"{' or '.join(map(str, sizes))} examples"
    many = f"{steps} step{'s' if steps > 1 else ''} of {size}"
    passes = f"{epochs} pass{'es' if epochs > 1 else ''} over {truth.size:,}"
    try:
        rule = write_optimiser(training.optimiser)
    except WrongInput:
        rule = " and ".join(dict.fromkeys(name for name, _ in training.optimisers))
    weights = sum(value.numel() for value in training.trained.values())
    return f"A client trains {weights:,} weights in {many} ({passes}) by {rule}, learning rate {training.rates[0]:g}."


def check_steps(training: ClientTraining) -> None:
    """Refuse a training of which a step was not seen whole."""
    missed = len(training.rates) - len(training.steps)
    if missed or not training.steps:
        problem = f"the examples of {missed} of its {len(training.rates)} steps were not seen"
        raise WrongInput("app", f"{problem}: attacks need a step to be one loss of one forward pass")


def mode_of(net: nn.Module) -> Literal["eval", "batch"]:
    """Return the statistics by which BatchNorm normalises in training; "eval" for a network without it."""
    return "batch" if any(isinstance(module, _BatchNorm) for module in net.modules()) else "eval"


def name_arrays(values: Params, net: nn.Module) -> Params:
    """Return the arrays of a message by the names of the network's tensors; some apps send them in order only."""
    if all(name in values for name, _ in net.named_parameters()):
        return values
    state = net.state_dict()
    if [tuple(value.shape) for value in values.values()] == [tuple(value.shape) for value in state.values()]:
        return dict(zip(state, values.values(), strict=True))
    raise WrongInput("app", "its messages hold other arrays than the trained network; attacks need all of its weights")


def fold_epochs(steps: Sequence[Batch]) -> tuple[int, Batch]:
    """Return the number of passes over the same examples, and the examples of the first pass in their order.

    Example:
        >>> first, second = Batch(torch.zeros(1, 1), torch.zeros(1)), Batch(torch.ones(1, 1), torch.ones(1))
        >>> [fold_epochs(steps)[0] for steps in ([first, second], [first, second, second, first])]
        [1, 2]
    """
    marks = [mark_examples(batch) for batch in steps]
    for length in (n for n in range(1, len(steps) + 1) if len(steps) % n == 0):
        parts = [marks[first : first + length] for first in range(0, len(steps), length)]
        if len({tuple(sorted(mark for step in part for mark in step)) for part in parts}) == 1:
            break
    return len(steps) // length, join_steps(steps[:length])


def mark_examples(batch: Batch) -> list[int]:
    """Return a number for each example, equal for equal ones in this process."""
    return [hash(row.numpy().tobytes()) for row in batch.inputs.cpu().contiguous()]


def join_steps(steps: Sequence[Batch]) -> Batch:
    """Return the examples of all steps in their order."""
    return Batch(*(torch.cat(tensors) for tensors in zip(*steps, strict=True)))


def scale_of(mean: Sequence[float], std: Sequence[float], inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and deviation by which pixels in [0, 1] became inputs.

    Where the user states none, they follow from the range of the inputs: [0, 1], [-1, 1], or that of each channel.
    """
    low, high = float(inputs.min()), float(inputs.max())
    if mean or (low >= 0 and high <= 1):
        return scale(mean, std, inputs)
    channels = inputs.shape[1]
    if low >= -1 and high <= 1:
        return scale([0.5] * channels, [0.5] * channels, inputs)
    lows = inputs.amin((0, 2, 3))
    widths = (inputs.amax((0, 2, 3)) - lows).clamp_min(1e-6)
    return scale((-lows / widths).tolist(), (1 / widths).tolist(), inputs)
