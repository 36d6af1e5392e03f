"""The specification of a federation, which clients and server agree on before round 1."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Generator, Tensor

from secateur.defenses.dp import PrivateTurn
from secateur.defenses.soteria import Soteria
from secateur.defenses.uploads import _check_alone, inner_of, makes_anew
from secateur.errors import WrongInput, unknown
from secateur.federated.averaging import AVERAGINGS
from secateur.federated.base_pruning import BasePruning
from secateur.federated.base_pruning.one_shot import NoPruning
from secateur.federated.client_training import LocalTraining
from secateur.federated.faults import Faults
from secateur.interfaces import CustomTurn, Mask, Params, Upload


class WithholdingRule(Protocol):
    """A defense that withholds entries of the trained weights."""

    pseudo: bool  # True: the client keeps the withheld values and restores them next time; False: they are lost

    def noise(self, weights: Params, rng: Generator) -> Params:
        """Return the random draws of `withheld`, on the generator's device; empty if the rule draws nothing."""
        ...

    def withheld(
        self, weights: Params, gradient: Params, mask: Mask, rng: Generator | None = None, noise: Params | None = None
    ) -> Mask:
        """Return a mask that is True at entries not sent; `gradient` is the dense mean over the local steps.

        Entries that the base pruning drops are never withheld. Parameters without a mask are not pruned.
        With `noise` the rule draws nothing itself, and runs under vmap.
        """
        ...


@dataclass(frozen=True, eq=False)
class FederationSpec:
    """Specification of federated averaging, or of federated SGD if clients send gradients (McMahan et al. 2017)."""

    shares: Sequence[Tensor]  # rows of the train part, one tensor a client
    rounds: int = 100
    per_round: int = 10  # clients, drawn without replacement
    method: Literal["fedavg", "fedsgd"] = "fedavg"
    local: LocalTraining = field(default_factory=LocalTraining)
    averaging: str = "coverage"
    broadcast: Literal["masked", "dense"] = "masked"  # dense: the server also sends dropped weights
    base: BasePruning = field(default_factory=NoPruning)
    withholding: WithholdingRule | None = None  # at most one of these three, or this one and dp
    own: CustomTurn | None = None
    upload: Upload | None = None
    server_rate: float = 1.0  # of the step towards the average
    server_momentum: float = 0.0
    faults: Faults = field(default_factory=Faults)
    evaluate_every: int = 10
    fixed_batches: bool = False  # a client takes the same rows in the same order in every round
    view: Literal["update", "sum"] = "update"  # sum: the server sees only the average (secure aggregation)

    def __post_init__(self) -> None:
        for name in ("rounds", "evaluate_every"):
            if getattr(self, name) < 1:
                raise WrongInput(name, f"{getattr(self, name)} is not allowed; give a whole number from 1")
        if not 1 <= self.per_round <= len(self.shares):
            raise WrongInput("per_round", f"{self.per_round} is not allowed; give 1 to {len(self.shares)} clients")
        if self.averaging not in AVERAGINGS:
            raise unknown("averaging", self.averaging, AVERAGINGS)
        if self.broadcast not in ("masked", "dense"):
            raise unknown("broadcast", self.broadcast, ("masked", "dense"))
        if self.view not in ("update", "sum"):
            raise unknown("view", self.view, ("update", "sum"))
        if not (math.isfinite(self.server_rate) and self.server_rate > 0):
            raise WrongInput("server_rate", f"{self.server_rate} is not allowed; give a number above 0")
        if not 0 <= self.server_momentum < 1:
            raise WrongInput("server_momentum", f"{self.server_momentum} is not allowed; give 0 to below 1")
        self._check_sending()

    def _check_sending(self) -> None:
        recomputes = self.upload is not None and makes_anew(self.upload)
        private = recomputes or isinstance(self.own, PrivateTurn)
        rewriting = [self.own, self.withholding, None if recomputes and self.own is None else self.upload]
        if sum(rule is not None for rule in rewriting) > 1:
            raise WrongInput("defense", "two that rewrite what a client sends do not act together; give one")
        if self.method == "fedsgd" and self.local.steps != 1:
            raise WrongInput("local_steps", "must be 1 for fedsgd, whose clients send one gradient; or take fedavg")
        if self.method == "fedsgd" and (self.withholding is not None or self.own is not None):
            raise WrongInput("method", "fedsgd sends gradients, and this defense withholds weights; take fedavg")
        if self.sends_gradients and self.at_client:
            raise WrongInput("base_pruning", "its clients choose masks for weights, and here they send gradients")
        _check_alone(self.upload)
        reads_batch = private or (self.upload is not None and isinstance(inner_of(self.upload), Soteria))
        if reads_batch and self.local.steps != 1:
            raise WrongInput("local_steps", "must be 1 for a defense that looks at the batch of its gradient")
        if private and not self.local.plain:
            raise WrongInput("momentum", "must be 0, as weight_decay, for a defense that makes its gradient anew")
        if private and (self.at_client or self.base.wants_squares):
            sends = "choose masks by" if self.at_client else "also send squares of"
            raise WrongInput("base_pruning", f"its clients {sends} their own gradients, which no epsilon covers")
        if self.own is not None and not (self.local.plain and self.local.steps is not None):
            raise WrongInput("momentum", "must be 0, as weight_decay, and local_steps given, for this defense")

    @property
    def counts_sent(self) -> bool:
        """True if the server must know the sent entries: clients withhold entries, and the average omits those."""
        return self.averaging == "coverage" and (self.withholding is not None or self.own is not None)

    @property
    def sends_gradients(self) -> bool:
        """True if clients send gradients; otherwise they send weights."""
        return self.method == "fedsgd" or (self.upload is not None and self.withholding is None)

    @property
    def at_client(self) -> bool:
        """True if clients choose their own masks in rounds that adjust."""
        return type(self.base).local is not BasePruning.local

    @property
    def given_away(self) -> str | None:
        """The leak about withheld weights that this specification allows, in words; None: no leak."""
        base = self.base
        if (self.withholding is None and self.own is None) or not base.wants_squares or base.spares_withheld:
            return None
        return "clients send the squares of their dense gradients, of what they withhold too; no attack reads these"

    @property
    def stated(self) -> dict[str, Any]:
        """The specification in words and numbers, for readers of the result."""
        plain = {name: getattr(self, name) for name in ("rounds", "per_round", "method", "averaging", "broadcast")}
        local = {name: getattr(self.local, name) for name in ("steps", "epochs", "batch_size", "learning_rate")}
        local |= {name: getattr(self.local, name) for name in ("momentum", "weight_decay")}
        return plain | {
            "clients": len(self.shares),
            "local": local | {"loss": name_function(self.local.loss)},
            "base": repr(self.base),
            "defense": repr([self.withholding or self.own, self.upload]),
            "server": [self.server_rate, self.server_momentum],
            "faults": repr(self.faults),
            "evaluate_every": self.evaluate_every,
            "fixed_batches": self.fixed_batches,
            "view": self.view,
        }


def name_function(function: Callable[..., Any] | None) -> str:
    """Return a function by its name, a dataclass by its fields: never by an address, which differs from run to run."""
    if function is None:
        return "none"
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}.{function.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(function))
