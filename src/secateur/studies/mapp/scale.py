"""Scales of mapp_fl studies, and the specification of their federations.

The paper's setting (Section 5.2): ten clients; the server's network has u = 16, and small clients have half of its
channels. Clients use Adam at rate .001, reset in every round, for one local epoch with batches of 128. There are 150
rounds, three repeats, and a plain average.

Cells that no client trained become zero, as in the paper's code, or keep their value if a case sets `uncovered`.
Repeats share the dataset sizes and redistribute the images; those of Fig. 1 and Table 3 redraw the sizes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from secateur.config.methods import choice, defense_of_clients
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.data.partition import FEMNIST_GROUPS, dirichlet_sizes, writer_groups
from secateur.evaluation.client import check_pictures
from secateur.federated.augment import crop_and_flip
from secateur.federated.build import rates_of, submodel_protection
from secateur.federated.spec import Adam, SubmodelSpec
from secateur.seeding import derive
from secateur.studies.study import read_scales

SIZES_SEED = 41  # with this seed ten clients of CIFAR-10 have the sizes of Table 2
CLIENTS = 10
UNITS = (8, 16, 32, 64)  # u of the available networks
TESTED = 0.2  # test share of a data set without a test part


@dataclass(frozen=True)
class Case:
    """A federation: channel rule, the server's network, number of clients with the full network, and a defense."""

    submodels: str
    unit: int = 16  # u of the paper's network
    large: int = 2
    defense: str = "none"
    fresh: bool = False  # every repeat redraws the clients' dataset sizes
    uncovered: Literal["zero", "keep"] = "zero"  # treatment of cells that no client trained

    @property
    def model(self) -> str:
        """The server's network."""
        return f"mapp-cnn-{self.unit}"


@dataclass(frozen=True)
class MappScale:
    """The size of a study; the defaults are the paper's setting."""

    data: str = "cifar10"
    units: tuple[int, ...] = field(default=UNITS, metadata={"among": UNITS})  # network sizes of Fig. 1 and Table 3
    large: tuple[int, ...] = field(default=tuple(range(10)), metadata={"among": range(CLIENTS + 1)})  # large clients
    examples: int | None = None  # upper limit on the rows of the data set
    rounds: int = 150
    repeats: int = 3
    draws: int = 5  # repeats of Fig. 1 and Table 3
    batch_size: int = 128  # small: 32, or a client with a tenth of the data would take a single step
    updates: int = 3  # held by the stateful attacker
    shuffles: int = 2  # of the batches in which examples are scored
    shadows: int = field(default=16, metadata={"least": 2, "even": True})  # shadow clients of LiRA and RMIA
    smallest: int = 400  # least number of examples of a client that counts in a correlation
    patience: int = 5  # early stopping of clients that train alone, in epochs
    at_once: int = 12  # federations stacked on a GPU
    threads: int = 1
    augment: bool | None = None  # crops and flips of training pictures; None: on CIFAR-10, as in the public code


SCALES = read_scales(MappScale, "mapp")


def load_data(scale: MappScale, options: Mapping[str, Any]) -> Dataset:
    """Load the data of a study; a data set without a test part gets a fifth of its rows as test part."""
    data = load(options.get("data") or scale.data, options.get("data_folder"), True)
    check_pictures(data)
    data = data if scale.examples is None else data.limit_rows(scale.examples, derive(0, "examples"))
    if data.train_size < len(data.inputs):
        return data
    order = torch.randperm(len(data.inputs), generator=derive(0, "held out"))
    writers = None if data.writers is None else data.writers[order]
    mixed = replace(data, inputs=data.inputs[order], labels=data.labels[order], writers=writers)
    return replace(mixed, train_size=int((1 - TESTED) * len(order)))


def with_augmentation(scale: MappScale, data: Dataset) -> MappScale:
    """Return the scale with `augment` set: by default True for CIFAR-10, as in the public code.

    The paper does not mention crops and flips.
    """
    return scale if scale.augment is not None else replace(scale, augment=data.name == "cifar10")


def shares_of(case: Case, data: Dataset, seed: int) -> list[Tensor]:
    """Return the rows of each of ten clients, largest client first; rows of a known writer stay together."""
    labels = data.labels[: data.train_size]
    if data.writers is not None:
        return writer_groups(data.writers[: data.train_size], FEMNIST_GROUPS, derive(seed, "writers"))
    if case.fresh:
        return dirichlet_sizes(labels, CLIENTS, seed=SIZES_SEED + seed)
    return dirichlet_sizes(labels, CLIENTS, seed=SIZES_SEED, deal=seed)


def terms_of(case: Case, scale: MappScale, data: Dataset, seed: int) -> SubmodelSpec:
    """Return the specification of one federation."""
    shares = shares_of(case, data, seed)
    chosen = choice("submodel", case.submodels)
    rule = choice("submodel", f"local:patience={scale.patience}") if chosen.name == "local" else chosen
    return SubmodelSpec(
        shares,
        rule=rule.make(),
        rates=rates_of(shares, case.large),
        rounds=scale.rounds,
        local=Adam(batch_size=scale.batch_size, augment=crop_and_flip(data) if scale.augment else None),
        uncovered=case.uncovered,
        evaluate_every=max(1, scale.rounds // 10),
        **submodel_protection(defense_of_clients(case.defense)),
    )
