"""Rounds of training before the attacked update: a client in mid-training, whose error feedback holds a residual.

In its first round a client's residual is empty, and an upload is the compressed gradient. Later it is the compressed
sum of gradient and residual, of which the server knows neither. So the client trains first with other users, by
collaborative SGD under the same defense (dgp Algorithm 2). The first user is the attacked client; the targets are of
its rows. The server keeps the positions that the client sent last, which an attacker that follows the client uses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from secateur import tree
from secateur.attacks.inversion.adaptive import support
from secateur.catalogue import Defense
from secateur.config import Invert
from secateur.data.dataset import Dataset
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.precode import with_divergence
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.evaluation.client import AttackedClient, UserMemory
from secateur.experiments.context import SeedContext, file_key
from secateur.experiments.invert_targets import draw_rows
from secateur.federated.collaborative.plan import Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeTraining, depends_of
from secateur.interfaces import Params
from secateur.progress import progress
from secateur.runs.artifacts import Result
from secateur.seeding import derive

RATE = 0.01  # the paper's learning rate for ResNet18


def split_rows(config: Invert, data: Dataset, seed: int) -> list[Tensor]:
    """Return the rows of every user; the attacked client's are the first, and begin with those of the targets."""
    shares = list(torch.tensor_split(draw_rows(data, seed), config.users))
    if config.targets * config.batch_size > len(shares[0]):
        many = f"{config.targets} updates of {config.batch_size}"
        raise WrongInput("targets", f"{many} are more than the client's {len(shares[0])} rows; use fewer of them")
    return shares


def train_before(client: AttackedClient, config: Invert, context: SeedContext, defense: Defense) -> AttackedClient:
    """Return the client after its rounds before the attacked update: with the trained model and its residual.

    The training is a stage of the run.
    """
    net, loss = client.net, client.truthful.loss
    if client.precode is not None:
        net, loss = with_divergence(net, loss, client.precode.beta)
    plan = Plan(
        config.users,
        upload_of(defense) or SendAll(),
        Schedule(1, ((1, config.learning_rate or RATE),)),
        config.batch_before,
        transform=client.transform,
        shares=split_rows(config, context.data, context.seed),
        loss=loss,
    )
    training = CollaborativeTraining(net, context.data, plan, derive(context.seed, "before"), context.device)
    depends = depends_of(training) | {"defense": str(defense), "rounds": config.rounds_before}
    depends["weights"] = None if config.weights is None else file_key(config.weights)
    stored = context.run.stage("before", depends, lambda: Result(_train(training, config.rounds_before, str(defense))))
    parts = {name: tree.to(values, context.device) for name, values in tree.parts(dict(stored.tensors)).items()}
    guard = client.guard
    if guard is not None:
        guard = replace(guard, round=config.rounds_before)
        if guard.feeds_back:
            colleague = UserMemory(parts["colleague"], parts["colleague_sent"]) if config.users > 1 else None
            guard = replace(guard, residual=parts["user"], sent=parts["sent"], colleague=colleague)
    return replace(client, state=client.state | parts["model"], guard=guard)


def _train(training: CollaborativeTraining, rounds: int, defense: str) -> Params:
    """Return the tensors after so many rounds: the model, the states of two users, and the entries they sent last."""
    done, epoch = 0, 0
    sent: list[Params] = []
    under = "" if defense == "none" else f" under {defense}"
    with progress(f"{rounds} rounds before the attacked one{under}", rounds, rate=True, unit="rounds") as advance:
        while done < rounds:
            epoch += 1
            for step in training.feed(epoch, training.rounds):
                sent = training.rounds(step).sent
                done += 1
                advance(1)
                if done == rounds:
                    break
    model = training.model()
    if not all(bool(value.isfinite().all()) for value in model.values()):
        raise WrongInput("rounds_before", "the model became NaN or infinite in these rounds; lower learning_rate")
    first, last = 0, training.plan.users - 1
    states = training.rounds.states
    parts = {"model": model, "user": tree.clone(states[first]), "colleague": tree.clone(states[last])}
    return tree.nest(parts | {"sent": support(sent[first]), "colleague_sent": support(sent[last])})
