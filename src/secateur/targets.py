"""What `secateur invert` attacks, by its configuration: the client of a seed and the updates it makes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.catalogue import Defense
from secateur.chance import derive
from secateur.client import Client, Target, scale
from secateur.config import Invert
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.guard import guard_of, protected, transform_of
from secateur.interfaces import Batch, Gradient, Knowledge, Weights
from secateur.models.create import create, load_weights
from secateur.update_files import read_update


def stage_of(config: Invert) -> str:
    """How far the attacked model is trained: near its end gradients vanish, and attacks look weak."""
    return "untrained" if config.weights is None else "weights given"


def client_of(config: Invert, data: Dataset, device: torch.device, seed: int, defense: Defense) -> Client:
    """The client of one seed under a defense: a new model, or the one that was given."""
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "client"))
    net, precode = protected(net, defense, data.classes, derive(seed, "initialise", "defense"))
    net = (net if config.weights is None else load_weights(net, config.weights)).to(device)
    mean, std = scale(data.mean, data.std, data.inputs[: data.train_size])
    weights = isinstance(_update(config, net), Weights) if config.update else config.local_steps is not None
    knowledge = Knowledge(
        net,
        data.input_shape,
        data.classes,
        mean.to(device),
        std.to(device),
        batch_size=config.batch_size,
        batchnorm=config.batchnorm,
        local_steps=config.local_steps or 1,
        learning_rate=config.learning_rate or (None if config.update else 0.1),
        local_batch=config.local_batch,
    )
    guard = guard_of(defense, config.residual, seed, lambda number: _other(config, data, seed, number).to(device))
    return Client(
        net,
        tree.state_of(net),
        knowledge,
        weights,
        config.labels == "oracle",
        config.statistics,
        guard,
        transform_of(defense, knowledge.mean, knowledge.std),
        precode,
        seed,
    )


def rows_of(config: Invert, data: Dataset, seed: int) -> Tensor:
    """(targets, B) the training rows that each update is made of; more targets begin with the same."""
    if config.update is not None:
        return torch.empty(1, 0, dtype=torch.int64)
    return drawn_rows(data, seed)[: config.targets * config.batch_size].view(config.targets, config.batch_size)


def _other(config: Invert, data: Dataset, seed: int, number: int) -> Batch:
    """The batch of another user in a target's round: rows from the far end of those that targets are taken from."""
    size, end = config.batch_size, data.train_size - number * config.batch_size
    if 2 * config.targets * size > data.train_size:
        many = f"{config.targets} targets and as many other users of {size} examples each"
        raise WrongInput("targets", f"{many} need more than the {data.train_size} training rows; ask for fewer")
    return data.batch.take(drawn_rows(data, seed)[end - size : end])


def public_rows(config: Invert, data: Dataset, seed: int) -> Tensor:
    """Rows that an attacker may learn from: the test part, or training rows that no update is made of."""
    if data.train_size < len(data.inputs):
        return torch.arange(data.train_size, len(data.inputs))
    return drawn_rows(data, seed)[max(data.train_size // 2, config.targets * config.batch_size) :]


def drawn_rows(data: Dataset, seed: int) -> Tensor:
    """The training rows in the order in which targets are taken from them."""
    return torch.randperm(data.train_size, generator=derive(seed, "targets"))


def targets_of(config: Invert, data: Dataset, device: torch.device, seed: int) -> list[Target]:
    """What is attacked: batches of training rows, or the update that was captured elsewhere."""
    if config.update is not None:
        return [_update(config, client_of(config, data, device, seed, config.defense[0]).net)]
    return [data.batch.take(rows).to(device) for rows in rows_of(config, data, seed)]


def _update(config: Invert, net: nn.Module) -> Gradient | Weights:
    assert config.update is not None
    found = read_update(config.update, net, weights=config.local_steps is not None)
    given = [name for name in ("local_steps", "local_batch", "learning_rate") if getattr(config, name) is not None]
    if given and isinstance(found, Gradient):
        raise WrongInput(given[0], f"is of weights, and {config.update} is a gradient; leave it out")
    return found
