"""Construction of a federation from a run file: its data, its network, its specification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from secateur.catalogue import Choice, Defense
from secateur.config import Federate
from secateur.data.dataset import Dataset
from secateur.data.partition import (
    FEMNIST_GROUPS,
    by_writer,
    dirichlet_labels,
    dirichlet_sizes,
    draw_shared,
    iid,
    writer_groups,
)
from secateur.defenses.uploads import protection_of
from secateur.errors import WrongInput, check_number
from secateur.evaluation.setup import prepare
from secateur.federated.augment import crop_and_flip
from secateur.federated.client_training import LOSSES, LocalTraining
from secateur.federated.faults import Faults
from secateur.federated.spec import NOT_HERE, Adam, FederationSpec, SubmodelSpec
from secateur.models.create import create, load_weights
from secateur.seeding import derive

CLIENTS = 20  # the default


def load_data(config: Federate) -> tuple[Dataset, torch.device]:
    """Return the data and the device; data without a test part gets one of a random fifth of the rows."""
    data, device = prepare(config)
    return hold_out(data), device


def hold_out(data: Dataset) -> Dataset:
    """Return the data with a test part; without one it is a random fifth of the rows."""
    rows = len(data.inputs)
    if data.train_size < rows or rows < 5:
        return data
    order = torch.randperm(rows, generator=derive(0, "held out"))
    writers = None if data.writers is None else data.writers[order]
    shuffled = replace(data, inputs=data.inputs[order], labels=data.labels[order], writers=writers)
    return replace(shuffled, train_size=rows - rows // 5)


def build_spec(
    config: Federate, data: Dataset, seed: int, base: Choice, defense: Defense, shares: Sequence[Tensor] | None = None
) -> FederationSpec:
    """Return the specification of one federation of a run file; `shares` defaults to those of the configuration."""
    training = ("steps", "batch_size", "learning_rate", "momentum", "weight_decay")
    names = ["rounds", "per_round", "method", "averaging", "broadcast", "server_rate", "server_momentum"]
    names += ["evaluate_every", "fixed_batches", "view"]
    return FederationSpec(
        shares_of(config, data, seed) if shares is None else shares,
        **{name: getattr(config, name) for name in names},
        local=LocalTraining(
            epochs=config.local_epochs, loss=LOSSES[config.loss], **{name: getattr(config, name) for name in training}
        ),
        base=base.make(),
        faults=Faults(**config.faults.model_dump()),
        **protection_of(defense),
    )


def build_submodel_spec(config: Federate, data: Dataset, seed: int, rule: Choice, defense: Defense) -> SubmodelSpec:
    """Return the specification of one federation over sub-models of a run file."""
    shares = shares_of(config, data, seed)
    rates = config.client_rates or rates_of(shares, config.large_clients, config.client_widths)
    if len(rates) != len(shares):
        raise WrongInput("client_rates", f"has {len(rates)} numbers for {len(shares)} clients; write one for each")
    augment = crop_and_flip(data) if config.augment else None
    names = ("rounds", "averaging", "uncovered", "batchnorm", "scaler", "own_labels", "evaluate_every", "test_batch")
    return SubmodelSpec(
        shares,
        rule.make(),
        rates,
        **{name: getattr(config, name) for name in names},
        per_round=min(config.per_round, len(shares)) if config.clients is None else config.per_round,
        local=Adam(
            config.local_epochs or 1, config.batch_size, config.learning_rate, augment=augment, steps=config.local_steps
        ),
        faults=Faults(**config.faults.model_dump()),
        **submodel_protection(defense),
    )


def submodel_protection(defense: Defense) -> dict[str, Any]:
    """Return a defense as fields of SubmodelSpec; raise WrongInput for one that sub-models do not support."""
    fields = protection_of(defense)
    if "custom_turn" in fields:
        raise WrongInput("defense", f"{defense} {NOT_HERE}")
    return fields


def rates_of(shares: Sequence[Tensor], large: int, widths: Sequence[float] = (0.5,)) -> list[float]:
    """Return each client's share of channels: 1 for the `large` clients with most data, `widths` for the others.

    Several widths are assigned in equal parts, the widest to the clients with most data. Among clients with equal
    data the first counts as larger.

    Example:
        >>> import torch
        >>> rates_of([torch.arange(n) for n in (3, 9, 5, 4, 2)], 1, (0.25, 0.5))
        [0.25, 1.0, 0.5, 0.5, 0.25]
    """
    check_number("large_clients", large, f"[0, {len(shares)}]")
    for width in widths or (0.0,):
        check_number("client_widths", width, "(0, 1]")
    order = sorted(range(len(shares)), key=lambda client: -len(shares[client]))
    ranked = sorted(widths, reverse=True)
    small = len(shares) - large
    by_rank = [1.0] * large + [float(ranked[rank * len(ranked) // small]) for rank in range(small)]
    return [rate for _, rate in sorted(zip(order, by_rank, strict=True))]


def shares_of(config: Federate, data: Dataset, seed: int) -> Sequence[Tensor]:
    """Return the training rows of each client."""
    labels, clients, rng = data.labels[: data.train_size], config.clients or CLIENTS, derive(seed, "partition")
    if config.partition.startswith("writer"):
        if data.writers is None:
            raise WrongInput("partition", f"{data.name} has no writers; use iid or a dirichlet")
        writers = data.writers[: data.train_size]
        return by_writer(writers) if config.partition == "writer" else writer_groups(writers, FEMNIST_GROUPS, rng)
    if config.partition == "iid":
        return iid(data.train_size, clients, rng)
    if config.partition == "shared":
        return draw_shared(data.train_size, clients, config.client_rows, rng)
    if config.partition == "dirichlet-labels":
        return dirichlet_labels(labels, clients, config.alpha, rng)
    if config.submodels and not config.redraw_sizes:
        return dirichlet_sizes(labels, clients, config.alpha, deal=seed)
    return dirichlet_sizes(labels, clients, config.alpha, 41 + seed)


def network_of(config: Federate, data: Dataset, seed: int) -> nn.Module:
    """Return the model of round 1: newly initialised, or with the configured weights."""
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "server"))
    return net if config.weights is None else load_weights(net, config.weights)
