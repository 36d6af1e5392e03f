"""The specification of a sub-model federation, which clients and server agree on (mapp_fl Section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from secateur.catalogue import Choice, Defense
from secateur.config import Federate
from secateur.data.dataset import Dataset
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.noise import GaussianNoise
from secateur.defenses.top_k import TopK
from secateur.defenses.uploads import inner_of, protection_of
from secateur.errors import WrongInput
from secateur.federated.augment import CropAndFlip, crop_and_flip
from secateur.federated.build import shares_of
from secateur.federated.faults import Faults
from secateur.federated.spec import WithholdingRule
from secateur.federated.submodels.rules import Rule
from secateur.interfaces import Upload
from secateur.pruning.channels import NORMS
from secateur.pruning.masks import one_of

UPLOADS = (DualGradientPruning, TopK, GaussianNoise)  # uploads that need only the update; error feedback may wrap them


@dataclass(frozen=True)
class Adam:
    """Local training of a client: Adam, with fresh moments in every round (Kingma and Ba 2015)."""

    epochs: int = 1
    batch_size: int = 128
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    augment: CropAndFlip | None = field(default=None, repr=False)  # of every step's inputs; the paper mentions none

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise WrongInput(name, f"{getattr(self, name)} is not allowed; give a whole number from 1")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise WrongInput("learning_rate", f"{self.learning_rate} is not allowed; give a number above 0")


@dataclass(frozen=True, eq=False)
class SubmodelSpec:
    """Specification of federated averaging over sub-models; a cell is averaged over the clients that trained it."""

    shares: Sequence[Tensor]  # rows of the train part, one tensor a client
    rule: Rule
    rates: Sequence[float]  # each client's share of the server's channels; 1 = the full model
    rounds: int = 150
    per_round: int | None = None  # clients, drawn without replacement; None: all
    local: Adam = field(default_factory=Adam)
    averaging: Literal["uniform", "weighted"] = "uniform"  # weighted: by rows
    uncovered: Literal["keep", "zero"] = "keep"  # the value of cells that nobody trained; zero as in mapp_fl's code
    batchnorm: Literal["static", "reestimated"] = "static"  # BatchNorm statistics used in tests
    scaler: bool = True
    own_labels: bool = False  # HeteroFL: a client trains and sends only the classifier rows of its labels
    upload: Upload | None = None  # at most one of these two
    withholding: WithholdingRule | None = None
    faults: Faults = field(default_factory=Faults)
    evaluate_every: int = 10
    test_batch: int = 128  # under static BatchNorm a prediction depends on its batch

    def __post_init__(self) -> None:
        for name in ("rounds", "evaluate_every"):
            if getattr(self, name) < 1:
                raise WrongInput(name, f"{getattr(self, name)} is not allowed; give a whole number from 1")
        if self.test_batch < 2:
            raise WrongInput("test_batch", f"{self.test_batch} is not allowed; give a whole number from 2")
        if len(self.rates) != len(self.shares):
            raise WrongInput("client_widths", f"{len(self.rates)} are given for {len(self.shares)} clients")
        if self.per_round is not None and not 1 <= self.per_round <= len(self.shares):
            raise WrongInput("per_round", f"{self.per_round} is not allowed; give 1 to {len(self.shares)} clients")
        for name, allowed in (
            ("averaging", ("uniform", "weighted")),
            ("uncovered", ("keep", "zero")),
            ("batchnorm", ("static", "reestimated")),
        ):
            one_of(name, getattr(self, name), allowed)
        if self.upload is not None and not isinstance(inner_of(self.upload), UPLOADS):
            raise WrongInput("defense", f"{type(inner_of(self.upload)).__name__} {NOT_HERE}")
        if self.rule.alone and (self.upload is not None or self.withholding is not None or self.faults.any):
            raise WrongInput("submodels", "local sends nothing; leave the defense and the faults out")

    @property
    def used_rates(self) -> list[float]:
        """The share of channels of each client; 1 for all clients if the rule cuts nothing."""
        return [1.0] * len(self.rates) if self.rule.whole else list(self.rates)

    @property
    def stated(self) -> dict[str, Any]:
        """The specification in words and numbers, for readers of the result."""
        names = ("rounds", "per_round", "averaging", "uncovered", "batchnorm", "scaler", "own_labels", "evaluate_every")
        augmented = {} if self.local.augment is None else {"augment": repr(self.local.augment)}
        return {name: getattr(self, name) for name in (*names, "test_batch")} | {
            "rule": repr(self.rule),
            "rates": self.used_rates,
            "local": repr(self.local),
            "defense": repr(self.withholding or self.upload),
            "faults": repr(self.faults),
            **augmented,
        }


NOT_HERE = "cannot be joined with sub-models; give dgp, top-k, noise, or a rule that withholds, such as pseudo-largest"


def joined_of(defense: Defense) -> dict[str, Any]:
    """Return a defense as fields of SubmodelSpec; raise WrongInput for one that sub-models do not support."""
    fields = protection_of(defense)
    if "own" in fields:
        raise WrongInput("defense", f"{defense} {NOT_HERE}")
    return fields


def check_rows(net: nn.Module, terms: SubmodelSpec) -> None:
    """Raise WrongInput for clients with too few rows for BatchNorm, or for a validation split."""
    norms = any(isinstance(module, NORMS) for module in net.modules())
    needed, why = (4, "to train and to stop by") if terms.rule.alone else (2 if norms else 1, "for BatchNorm")
    for client, rows in enumerate(terms.shares):
        if len(rows) < needed:
            few = f"client {client} has {len(rows)}, and needs {needed} rows {why}"
            raise WrongInput("clients", f"{few}; give more rows or fewer clients")


def rates_of(shares: Sequence[Tensor], large: int, widths: Sequence[float] = (0.5,)) -> list[float]:
    """Return each client's share of channels: 1 for the `large` clients with most data, `widths` for the others.

    Several widths are assigned in equal parts, the widest to the clients with most data. Among clients with equal
    data the first counts as larger.

    Example:
        >>> import torch
        >>> rates_of([torch.arange(n) for n in (3, 9, 5, 4, 2)], 1, (0.25, 0.5))
        [0.25, 1.0, 0.5, 0.5, 0.25]
    """
    if not 0 <= large <= len(shares):
        raise WrongInput("large_clients", f"{large} is not allowed; give 0 to {len(shares)}, as many as there are")
    if not widths or not all(0 < width <= 1 for width in widths):
        listed = ", ".join(map(str, widths)) or "nothing"
        raise WrongInput("client_widths", f"{listed} is not allowed; give shares above 0 and up to 1")
    order = sorted(range(len(shares)), key=lambda client: -len(shares[client]))
    ranked = sorted(widths, reverse=True)
    small = len(shares) - large
    by_rank = [1.0] * large + [float(ranked[rank * len(ranked) // small]) for rank in range(small)]
    return [rate for _, rate in sorted(zip(order, by_rank, strict=True))]


def terms_of(config: Federate, data: Dataset, seed: int, rule: Choice, defense: Defense) -> SubmodelSpec:
    """Return the specification of one federation of a run file."""
    shares = shares_of(config, data, seed)
    augment = crop_and_flip(data) if config.augment else None
    names = ("rounds", "averaging", "uncovered", "batchnorm", "scaler", "own_labels", "evaluate_every", "test_batch")
    return SubmodelSpec(
        shares,
        rule.make(),
        rates_of(shares, config.large_clients, config.client_widths),
        **{name: getattr(config, name) for name in names},
        per_round=min(config.per_round, len(shares)) if config.clients is None else config.per_round,
        local=Adam(config.local_epochs or 1, config.batch_size, config.learning_rate, augment=augment),
        faults=Faults(**config.faults.model_dump()),
        **joined_of(defense),
    )
