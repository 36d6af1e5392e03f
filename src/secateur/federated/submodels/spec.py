"""What the clients and the server of a sub-model federation agree on before it begins (mapp_fl Section 5.2)."""

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
from secateur.federated.spec import Withholding
from secateur.federated.submodels.rules import Rule
from secateur.interfaces import Upload
from secateur.pruning.channels import NORMS
from secateur.pruning.masks import one_of

UPLOADS = (DualGradientPruning, TopK, GaussianNoise)  # that need nothing but the update; error feedback goes around


@dataclass(frozen=True)
class Adam:
    """How a client trains in its turn: Adam, begun anew in every round (Kingma and Ba 2015)."""

    epochs: int = 1
    batch_size: int = 128
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    augment: CropAndFlip | None = field(default=None, repr=False)  # of every step's pictures; the paper names none

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise WrongInput(name, f"{getattr(self, name)} is not allowed; give a whole number from 1")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise WrongInput("learning_rate", f"{self.learning_rate} is not allowed; give a number above 0")


@dataclass(frozen=True, eq=False)
class Terms:
    """Rounds of federated averaging over sub-models; a cell is averaged over the clients that trained it."""

    shares: Sequence[Tensor]  # rows of the train part, a client each
    rule: Rule
    rates: Sequence[float]  # the share of the server's channels that each client has; 1 = the whole model
    rounds: int = 150
    per_round: int | None = None  # clients, drawn without replacement; None: all
    local: Adam = field(default_factory=Adam)
    averaging: Literal["uniform", "weighted"] = "uniform"  # weighted: by rows
    uncovered: Literal["keep", "zero"] = "keep"  # what becomes of cells that nobody trained; zero as in mapp_fl's code
    batchnorm: Literal["static", "reestimated"] = "static"  # by which statistics models are tested
    scaler: bool = True
    own_labels: bool = False  # HeteroFL: a client trains and sends the classifier's rows of its own labels alone
    upload: Upload | None = None  # at most one of these two
    withholding: Withholding | None = None
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
        """The share of channels of each client; all have the whole where the rule cuts nothing."""
        return [1.0] * len(self.rates) if self.rule.whole else list(self.rates)

    @property
    def stated(self) -> dict[str, Any]:
        """The terms in words and numbers, for whoever reads the result."""
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
    """A defense as fields of Terms; what a client with a sub-model cannot do is refused."""
    found = protection_of(defense)
    if "own" in found:
        raise WrongInput("defense", f"{defense} {NOT_HERE}")
    return found


def check_rows(net: nn.Module, terms: Terms) -> None:
    """Refuse clients with fewer rows than a BatchNorm can normalise, or than can be split to stop by a part."""
    norms = any(isinstance(module, NORMS) for module in net.modules())
    needed, why = (4, "to train and to stop by") if terms.rule.alone else (2 if norms else 1, "for BatchNorm")
    for client, rows in enumerate(terms.shares):
        if len(rows) < needed:
            few = f"client {client} has {len(rows)}, and needs {needed} rows {why}"
            raise WrongInput("clients", f"{few}; give more rows or fewer clients")


def rates_of(shares: Sequence[Tensor], large: int, widths: Sequence[float] = (0.5,)) -> list[float]:
    """The share of channels of each client: 1 for the `large` with most data, the widths for the others.

    Several widths are dealt in equal parts, the widest to those with most data. Of equal clients the first counts as
    bigger.

    Example:
        >>> import torch
        >>> rates_of([torch.arange(n) for n in (3, 9, 5, 4, 2)], 1, (0.25, 0.5))
        [0.25, 1.0, 0.5, 0.5, 0.25]
    """
    if not 0 <= large <= len(shares):
        raise WrongInput("large_clients", f"{large} is not allowed; give 0 to {len(shares)}, as many as there are")
    if not widths or not all(0 < width <= 1 for width in widths):
        given = ", ".join(map(str, widths)) or "nothing"
        raise WrongInput("client_widths", f"{given} is not allowed; give shares above 0 and up to 1")
    order = sorted(range(len(shares)), key=lambda client: -len(shares[client]))
    ranked = sorted(widths, reverse=True)
    small = len(shares) - large
    dealt = [1.0] * large + [float(ranked[place * len(ranked) // small]) for place in range(small)]
    return [rate for _, rate in sorted(zip(order, dealt, strict=True))]


def terms_of(config: Federate, data: Dataset, seed: int, rule: Choice, defense: Defense) -> Terms:
    """The terms of one federation."""
    shares = shares_of(config, data, seed)
    augment = crop_and_flip(data) if config.augment else None
    names = ("rounds", "averaging", "uncovered", "batchnorm", "scaler", "own_labels", "evaluate_every", "test_batch")
    return Terms(
        shares,
        rule.make(),
        rates_of(shares, config.large_clients, config.client_widths),
        **{name: getattr(config, name) for name in names},
        per_round=min(config.per_round, len(shares)) if config.clients is None else config.per_round,
        local=Adam(config.local_epochs or 1, config.batch_size, config.learning_rate, augment=augment),
        faults=Faults(**config.faults.model_dump()),
        **joined_of(defense),
    )
