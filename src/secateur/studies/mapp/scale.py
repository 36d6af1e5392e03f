"""Scales of mapp_fl studies, and the specification of their federations.

The paper's setting (Section 5.2): ten clients; the server's network has u = 16, and small clients have half of its
channels. Clients use Adam at rate .001, reset in every round, for one local epoch with batches of 128. There are 150
rounds, three repeats, and a plain average.

Cells that no client trained become zero, as in the paper's code, or keep their value if a case sets `uncovered`.
Repeats share the dataset sizes and redistribute the images; those of Fig. 1 and Table 3 redraw the sizes too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from secateur.config.methods import choice, defense_of_clients
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.data.partition import FEMNIST_GROUPS, dirichlet_sizes, writer_groups
from secateur.errors import WrongInput, unknown
from secateur.evaluation.client import check_pictures
from secateur.federated.augment import crop_and_flip
from secateur.federated.build import rates_of, submodel_protection
from secateur.federated.spec import Adam, SubmodelSpec
from secateur.seeding import derive

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
    units: tuple[int, ...] = UNITS  # network sizes of Fig. 1 and Table 3
    large: tuple[int, ...] = tuple(range(10))  # numbers of large clients in Fig. 3 and Table 4
    examples: int | None = None  # upper limit on the rows of the data set
    rounds: int = 150
    repeats: int = 3
    draws: int = 5  # repeats of Fig. 1 and Table 3
    batch_size: int = 128
    updates: int = 3  # held by the stateful attacker
    shuffles: int = 2  # of the batches in which examples are scored
    shadows: int = 16  # shadow clients of LiRA and RMIA
    smallest: int = 400  # least number of examples of a client that counts in a correlation
    patience: int = 5  # early stopping of clients that train alone, in epochs
    at_once: int = 12  # federations stacked on a GPU
    threads: int = 1
    augment: bool | None = None  # crops and flips of training pictures; None: on CIFAR-10, as in the public code


TINY = MappScale(
    data="digits",
    units=(8, 16),
    large=(0, 2),
    rounds=2,
    repeats=1,
    draws=1,
    examples=1000,
    batch_size=32,
    updates=2,
    shuffles=1,
    shadows=4,
    smallest=20,
    patience=1,
)
SMALL = MappScale(
    units=(8, 16, 32),
    large=(0, 2, 5, 9),
    examples=6000,
    rounds=30,
    repeats=1,
    draws=2,
    batch_size=32,  # with a tenth of the data, a client of 49 examples would else take a single step
    shadows=8,
    smallest=40,
    threads=2,
)
SCALES = {"tiny": TINY, "small": SMALL, "full": MappScale()}


def scale_of(name: str, overrides: list[str] | None) -> MappScale:
    """Return a scale by its name with `field=value` overrides; `large=0+1+2` sets numbers of large clients."""
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    known = [field.name for field in fields(MappScale) if field.name != "data"]
    changes: dict[str, Any] = {}
    for text in overrides or []:
        key, separator, value = text.partition("=")
        if not separator or key not in known:
            raise WrongInput("set", f"{text!r} is not possible in this study; allowed: {', '.join(known)}")
        numbers = [yaml.safe_load(part) for part in value.split("+")]
        fits, wanted = _allowed(key)
        several = key in ("units", "large")
        if not all(map(fits, numbers)) or (len(numbers) > 1 and not several):
            raise WrongInput("set", f"{text!r} is not allowed; give {wanted}")
        changes[key] = tuple(numbers) if several else numbers[0]
    return replace(SCALES[name], **changes)


def _allowed(key: str) -> tuple[Callable[[Any], bool], str]:
    """Return a test for values of a field of a scale, and the allowed values in words."""
    if key == "augment":
        return lambda value: isinstance(value, bool), "true or false"
    if key == "units":
        return lambda value: type(value) is int and value in UNITS, "8, 16, 32 or 64, several joined by +"
    if key == "large":
        wanted = f"whole numbers from 0 to {CLIENTS}, several joined by +"
        return lambda value: type(value) is int and 0 <= value <= CLIENTS, wanted
    if key == "shadows":
        return lambda value: type(value) is int and value >= 2 and value % 2 == 0, "an even number from 2"
    return lambda value: type(value) is int and value >= 1, "a whole number from 1"


def loaded(scale: MappScale, options: Mapping[str, Any]) -> Dataset:
    """Load the data of a study; a data set without a test part gets a fifth of its rows as test part."""
    data = load(options.get("data") or scale.data, options.get("data_folder"), True)
    check_pictures(data)
    data = data if scale.examples is None else data.at_most(scale.examples, derive(0, "examples"))
    if data.train_size < len(data.inputs):
        return data
    order = torch.randperm(len(data.inputs), generator=derive(0, "held out"))
    writers = None if data.writers is None else data.writers[order]
    mixed = replace(data, inputs=data.inputs[order], labels=data.labels[order], writers=writers)
    return replace(mixed, train_size=int((1 - TESTED) * len(order)))


def settled(scale: MappScale, data: Dataset) -> MappScale:
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
