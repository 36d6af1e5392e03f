"""Specifications of federations, which clients and server agree on before round 1.

`RoundsSpec` has the fields of every federation. In a `FederationSpec` all clients train the whole model, in a
`SubmodelSpec` they train parts of it (mapp_fl Section 5.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.dp import PrivateTurn
from secateur.defenses.noise import GaussianNoise
from secateur.defenses.soteria import Soteria
from secateur.defenses.top_k import TopK
from secateur.defenses.uploads import check_alone, inner_of, makes_anew, promises_epsilon
from secateur.defenses.withholding import Withholding
from secateur.errors import WrongInput, check_number, check_numbers, check_whole, check_wholes
from secateur.federated.augment import CropAndFlip
from secateur.federated.averaging import AVERAGINGS
from secateur.federated.base_pruning import BasePruning
from secateur.federated.base_pruning.one_shot import NoPruning
from secateur.federated.client_training import LocalTraining
from secateur.federated.faults import Faults
from secateur.federated.submodels.rules import Rule
from secateur.interfaces import CustomTurn, Upload
from secateur.pruning.channels import NORMS
from secateur.pruning.masks import check_name

UPLOADS = (DualGradientPruning, TopK, GaussianNoise)  # uploads that need only the update; error feedback may wrap them
NOT_HERE = "cannot be combined with sub-models; use dgp, top-k, noise, or a rule that withholds, such as pseudo-largest"


@dataclass(frozen=True, eq=False)
class RoundsSpec:
    """Specification of clients, rounds, defense and faults."""

    shares: Sequence[Tensor]  # rows of the train part, one tensor a client
    _: KW_ONLY
    rounds: int = 100
    per_round: int | None = None  # clients, drawn without replacement; None: all
    averaging: str = "uniform"
    withholding: Withholding | None = None
    upload: Upload | None = None
    faults: Faults = field(default_factory=Faults)
    evaluate_every: int = 10

    def __post_init__(self) -> None:
        check_wholes(self, "rounds", "evaluate_every")
        if self.per_round is not None:
            check_number("per_round", self.per_round, f"[1, {len(self.shares)}]")

    @property
    def description(self) -> dict[str, Any]:
        """The specification in words and numbers, for readers of the result."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "shares"}
        return {n: v if isinstance(v, str | int | float | None) else repr(v) for n, v in values.items()}


@dataclass(frozen=True, eq=False)
class FederationSpec(RoundsSpec):
    """Specification of federated averaging, or of federated SGD if clients send gradients (McMahan et al. 2017).

    At most one of `withholding`, `custom_turn` and `upload` is set, or `withholding` and an upload dp.
    """

    _: KW_ONLY
    per_round: int = 10
    method: Literal["fedavg", "fedsgd"] = "fedavg"
    local: LocalTraining = field(default_factory=LocalTraining)
    averaging: str = "coverage"
    broadcast: Literal["masked", "dense"] = "masked"  # dense: the server also sends dropped weights
    base: BasePruning = field(default_factory=NoPruning)
    custom_turn: CustomTurn | None = None
    server_rate: float = 1.0  # of the step towards the average
    server_momentum: float = 0.0
    fixed_batches: bool = False  # a client takes the same rows in the same order in every round
    view: Literal["update", "sum"] = "update"  # sum: the server sees only the average (secure aggregation)

    @property
    def sampled_clients(self) -> int:
        """The largest number of clients that rounds can sample, which keep a state each."""
        return min(len(self.shares), self.rounds * self.per_round)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("averaging", self.averaging, AVERAGINGS)
        check_name("broadcast", self.broadcast, ("masked", "dense"))
        check_name("view", self.view, ("update", "sum"))
        check_numbers(self, "(0, inf)", "server_rate")
        check_numbers(self, "[0, 1)", "server_momentum")
        self._check_sending()

    def _check_sending(self) -> None:
        recomputes = self.upload is not None and makes_anew(self.upload)
        private = recomputes or isinstance(self.custom_turn, PrivateTurn)
        plain = self.local.is_plain
        rewriting = [self.custom_turn, self.withholding, None if recomputes and not self.custom_turn else self.upload]
        if sum(rule is not None for rule in rewriting) > 1:
            raise WrongInput("defense", "two that rewrite a client's update cannot be combined; use one of them")
        if self.method == "fedsgd" and self.local.steps != 1:
            raise WrongInput("local_steps", "must be 1 for fedsgd, whose clients send one gradient; or use fedavg")
        if self.method == "fedsgd" and self.withholds:
            raise WrongInput("method", "fedsgd sends gradients, and this defense withholds weights; use fedavg")
        if self.sends_gradients and self.at_client:
            raise WrongInput("base_pruning", "its clients choose masks for weights, but here they send gradients")
        check_alone(self.upload)
        reads_batch = private or (self.upload is not None and isinstance(inner_of(self.upload), Soteria))
        if reads_batch and self.local.steps != 1:
            raise WrongInput("local_steps", "must be 1 for a defense that reads the batch of its gradient")
        if private and not plain:
            raise WrongInput("momentum", "must be 0, as weight_decay, for a defense that computes its own gradient")
        promises = private or (self.upload is not None and promises_epsilon(self.upload))
        if promises and (self.at_client or self.base.wants_squares):
            sends = "choose masks by" if self.at_client else "also send squares of"
            raise WrongInput("base_pruning", f"its clients {sends} their own gradients, which no epsilon covers")
        if self.custom_turn is not None and not (plain and self.local.steps is not None):
            raise WrongInput("momentum", "must be 0, as weight_decay, for this defense; and local_steps must be set")

    @property
    def withholds(self) -> bool:
        """True if clients withhold entries of their weights."""
        return self.withholding is not None or self.custom_turn is not None

    @property
    def counts_sent(self) -> bool:
        """True if the server must know the sent entries: clients withhold entries, and the average omits those."""
        return self.averaging == "coverage" and self.withholds

    @property
    def sends_gradients(self) -> bool:
        """True if clients send gradients; otherwise they send weights."""
        return self.method == "fedsgd" or (self.upload is not None and self.withholding is None)

    @property
    def at_client(self) -> bool:
        """True if clients choose their own masks in rounds that adjust."""
        return type(self.base).local is not BasePruning.local

    @property
    def leak_note(self) -> str | None:
        """The leak about withheld weights that this specification allows, in words; None: no leak."""
        if not self.withholds or not self.base.wants_squares or self.base.spares_withheld:
            return None
        return "clients send the squares of their dense gradients, of what they withhold too; no attack reads these"

    @property
    def description(self) -> dict[str, Any]:
        """The specification in words and numbers, for readers of the result."""
        return super().description | {"loss": name_function(self.local.loss)}


@dataclass(frozen=True)
class Adam:
    """Local training of a client: Adam, with fresh moments in every round (Kingma and Ba 2015)."""

    epochs: int = 1
    batch_size: int = 128
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    augment: CropAndFlip | None = field(default=None, repr=False)  # of every step's inputs; the paper mentions none
    steps: int | None = None  # of a turn, instead of whole epochs

    def __post_init__(self) -> None:
        check_wholes(self, "epochs", "batch_size", *(["steps"] if self.steps is not None else []))
        check_numbers(self, "(0, inf)", "learning_rate")

    def count_steps(self, rows: int) -> int:
        """Return the steps of a turn on so many rows."""
        return self.steps or -(-rows // self.batch_size) * self.epochs

    def order_rows(self, rows: Tensor, rng: Generator, epochs: int | None = None) -> list[Tensor]:
        """Return the rows of each epoch in random order, or as one epoch those of the `steps`; rows may repeat."""
        wanted = None if self.steps is None or epochs else self.steps * self.batch_size
        passes = epochs or self.epochs if wanted is None else -(-wanted // len(rows))
        orders = [rows[torch.randperm(len(rows), generator=rng)] for _ in range(passes)]
        return orders if wanted is None else [torch.cat(orders)[:wanted]]


@dataclass(frozen=True, eq=False)
class SubmodelSpec(RoundsSpec):
    """Specification of federated averaging over sub-models; a cell is averaged over the clients that trained it.

    At most one of `withholding` and `upload` is set.
    """

    rule: Rule
    rates: Sequence[float]  # each client's share of the server's channels; 1 = the full model
    _: KW_ONLY
    rounds: int = 150
    local: Adam = field(default_factory=Adam)
    averaging: str = "uniform"  # or weighted: by rows
    uncovered: Literal["keep", "zero"] = "keep"  # the value of cells that nobody trained; zero as in mapp_fl's code
    batchnorm: Literal["static", "reestimated"] = "static"  # BatchNorm statistics used in tests
    scaler: bool = True
    own_labels: bool = False  # HeteroFL: a client trains and sends only the classifier rows of its labels
    test_batch: int = 128  # under static BatchNorm a prediction depends on its batch

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("test_batch", self.test_batch, 2)
        if len(self.rates) != len(self.shares):
            raise WrongInput("client_widths", f"{len(self.rates)} are set for {len(self.shares)} clients")
        check_name("averaging", self.averaging, ("uniform", "weighted"))
        check_name("uncovered", self.uncovered, ("keep", "zero"))
        check_name("batchnorm", self.batchnorm, ("static", "reestimated"))
        if self.upload is not None and not isinstance(inner_of(self.upload), UPLOADS):
            raise WrongInput("defense", f"{type(inner_of(self.upload)).__name__} {NOT_HERE}")
        if self.rule.alone and (self.upload is not None or self.withholding is not None or self.faults.any):
            raise WrongInput("submodels", "local sends nothing; leave the defense and the faults out")

    @property
    def used_rates(self) -> list[float]:
        """The share of channels of each client; 1 for all clients if the rule cuts nothing."""
        return [1.0] * len(self.rates) if self.rule.whole else list(self.rates)

    @property
    def description(self) -> dict[str, Any]:
        """The specification in words and numbers, for readers of the result."""
        augmented = {} if self.local.augment is None else {"augment": repr(self.local.augment)}
        return super().description | {"rates": self.used_rates, **augmented}

    def check_rows(self, net: nn.Module) -> None:
        """Raise WrongInput for clients with too few rows for BatchNorm, or for a validation split."""
        norms = any(isinstance(module, NORMS) for module in net.modules())
        needed, why = (4, "to train and to stop by") if self.rule.alone else (2 if norms else 1, "for BatchNorm")
        for client, rows in enumerate(self.shares):
            if len(rows) < needed:
                few = f"client {client} has {len(rows)}, and needs {needed} rows {why}"
                raise WrongInput("clients", f"{few}; use more rows or fewer clients")


def name_function(function: Callable[..., Any] | None) -> str:
    """Return a function by its name, a dataclass by its fields: never by an address, which differs from run to run."""
    if function is None:
        return "none"
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}.{function.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(function))
