"""Construction of a federation from a run file: its data, its network, its terms."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from secateur.catalogue import Choice, Defense
from secateur.config import Federate
from secateur.data.dataset import Dataset
from secateur.data.partition import FEMNIST_GROUPS, by_writer, dirichlet_labels, dirichlet_sizes, iid, writer_groups
from secateur.defenses.uploads import protection_of
from secateur.errors import WrongInput
from secateur.evaluation.setup import prepare
from secateur.federated.client_training import LOSSES, LocalTraining
from secateur.federated.faults import Faults
from secateur.federated.spec import FederationSpec
from secateur.models.create import create, load_weights
from secateur.seeding import derive

CLIENTS = 20  # the default


def loaded(config: Federate) -> tuple[Dataset, torch.device]:
    """Return the data and the device; data without a test part gets one of a random fifth of the rows."""
    data, device = prepare(config)
    rows = len(data.inputs)
    if data.train_size < rows or rows < 5:
        return data, device
    order = torch.randperm(rows, generator=derive(0, "held out"))
    writers = None if data.writers is None else data.writers[order]
    shuffled = replace(data, inputs=data.inputs[order], labels=data.labels[order], writers=writers)
    return replace(shuffled, train_size=rows - rows // 5), device


def terms_of(
    config: Federate, data: Dataset, seed: int, base: Choice, defense: Defense, shares: list[Tensor] | None = None
) -> FederationSpec:
    """Return the terms of one federation; `shares` defaults to those of the configuration."""
    local = LocalTraining(
        config.steps,
        config.local_epochs,
        config.batch_size,
        config.learning_rate,
        config.momentum,
        config.weight_decay,
        LOSSES[config.loss],
    )
    names = ["rounds", "per_round", "method", "averaging", "broadcast", "server_rate", "server_momentum"]
    names += ["evaluate_every", "fixed_batches", "view"]
    return FederationSpec(
        shares_of(config, data, seed) if shares is None else shares,
        **{name: getattr(config, name) for name in names},
        local=local,
        base=base.make(),
        faults=Faults(**config.faults.model_dump()),
        **protection_of(defense),
    )


def shares_of(config: Federate, data: Dataset, seed: int) -> list[Tensor]:
    """Return the training rows of each client."""
    labels, clients, rng = data.labels[: data.train_size], config.clients or CLIENTS, derive(seed, "partition")
    if config.partition.startswith("writer"):
        if data.writers is None:
            raise WrongInput("partition", f"{data.name} does not know its writers; take iid or a dirichlet")
        writers = data.writers[: data.train_size]
        return by_writer(writers) if config.partition == "writer" else writer_groups(writers, FEMNIST_GROUPS, rng)
    if config.partition == "iid":
        return iid(data.train_size, clients, rng)
    if config.partition == "dirichlet-labels":
        return dirichlet_labels(labels, clients, config.alpha, rng)
    if config.submodels and not config.redraw_sizes:
        return dirichlet_sizes(labels, clients, config.alpha, deal=seed)
    return dirichlet_sizes(labels, clients, config.alpha, 41 + seed)


def network_of(config: Federate, data: Dataset, seed: int) -> nn.Module:
    """Return the model of round 1: newly initialised, or with the configured weights."""
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "server"))
    return net if config.weights is None else load_weights(net, config.weights)
