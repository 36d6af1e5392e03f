"""The run file of `secateur federate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from secateur.catalogue import Choice
from secateur.config.choices import inversion
from secateur.config.common import Common
from secateur.config.fields import (
    MANY,
    Fields,
    OneBasePruning,
    OneClientDefense,
    OneInversion,
    Seeds,
    default,
    none_or_many,
)
from secateur.errors import WrongInput


class Faulty(Fields):
    """What goes wrong in the rounds of a federation (federated/faults.py)."""

    drop_out: float = 0.0
    nan: float = 0.0
    shape: float = 0.0
    deadline: float | None = None
    step_seconds: float = 1.0
    spread: float = 0.5


class Federate(Common):
    """`secateur federate`: a federation that prunes, defends itself, and is attacked from inside."""

    model: str = "conv-2"
    rounds: Annotated[int, Field(ge=1)] = 100
    clients: Annotated[int, Field(ge=1)] | None = None  # None: 20, or one a writer
    per_round: Annotated[int, Field(ge=1)] = 10
    partition: Literal["iid", "dirichlet-labels", "dirichlet-sizes", "writer"] = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.85  # of either Dirichlet
    method: Literal["fedavg", "fedsgd"] = "fedavg"
    local_steps: Annotated[int, Field(ge=1)] | None = None  # None: 5, or epochs
    local_epochs: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 20
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    loss: Literal["cross-entropy", "binary"] = "cross-entropy"  # binary: PruneFL's, on one-hot labels
    averaging: Literal["weighted", "uniform", "coverage"] = "weighted"
    broadcast: Literal["masked", "dense"] = "masked"
    base_pruning: Annotated[list[OneBasePruning], *MANY] = default("none")
    defense: Annotated[list[OneClientDefense], *MANY] = default("none")
    server_rate: Annotated[float, Field(gt=0)] = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    faults: Faulty = Faulty()
    evaluate_every: Annotated[int, Field(ge=1)] = 10
    attack: Annotated[list[OneInversion], BeforeValidator(none_or_many)] = default("none")
    attack_every: Annotated[int, Field(ge=1)] | None = None  # rounds; None: the last one
    iterations: Annotated[int, Field(ge=1)] | None = None  # of each attack; None: its own
    labels: Literal["inferred", "oracle"] = "inferred"  # whether the attacker is told them
    images: bool = True
    seeds: Seeds = default(1)

    @property
    def steps(self) -> int | None:
        """Local steps; None where there are epochs."""
        if self.local_steps is None and self.local_epochs is None:
            return 1 if self.method == "fedsgd" else 5
        return self.local_steps

    @property
    def attacks(self) -> list[Choice]:
        """The attacks, each with the iterations that were asked of all."""
        over = {} if self.iterations is None else {"iterations": self.iterations}
        return list(dict.fromkeys(inversion(attack, **over) for attack in self.attack))

    @model_validator(mode="after")
    def _checked(self) -> Federate:
        if {"train", "finetune"} & self.model_fields_set:
            raise WrongInput("train", "a federation trains by its own fields; set learning_rate, batch_size and others")
        if self.way == "ray":
            raise WrongInput("way", "ray is not possible here; give auto, sequential or stacked")
        if self.local_steps is not None and self.local_epochs is not None:
            raise WrongInput("local_steps", "give either local_steps or local_epochs, and not both")
        if self.partition == "writer" and self.clients is not None:
            raise WrongInput("clients", "partition writer makes one a writer; leave clients out")
        if self.attack_every is not None and not self.attack:
            raise WrongInput("attack", "must be given with attack_every, for example ig")
        if self.attack_every is not None and self.attack_every > self.rounds:
            raise WrongInput("attack_every", f"{self.attack_every} is not allowed; there are {self.rounds} rounds")
        _ = self.attacks  # what an attack does not have is refused now
        return self
