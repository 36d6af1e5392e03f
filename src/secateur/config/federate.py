"""The run file of `secateur federate`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from secateur.catalogue import Choice
from secateur.config.choices import of_all
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
from secateur.config.submodels import Submodels
from secateur.config.wording import plain
from secateur.errors import WrongInput


class Faulty(Fields):
    """What goes wrong in the rounds of a federation (federated/faults.py)."""

    drop_out: float = 0.0
    nan: float = 0.0
    shape: float = 0.0
    deadline: float | None = None
    step_seconds: float = 1.0
    spread: float = 0.5


Attacked = Annotated[int, Field(ge=1)] | Literal["all"] | Annotated[list[int], Field(min_length=1)]


def attacked(value: Any) -> Any:
    """`2` is how many of a round's clients, `2,7` or `[2]` are which of them."""
    if isinstance(value, str) and value != "all":
        value = plain("attack_clients", f"[{value}]" if "," in value and not value.startswith("[") else value)
    if isinstance(value, bool) or not (isinstance(value, int | list) or value == "all"):
        raise WrongInput(
            "attack_clients", f"{value!r} is not allowed; give how many, all, or a list such as [3] or 3,7"
        )
    return value


class Federate(Submodels):
    """`secateur federate`: a federation that prunes, defends itself, and is attacked from inside."""

    model: str = "conv-2"
    rounds: Annotated[int, Field(ge=1)] = 100
    clients: Annotated[int, Field(ge=1)] | None = None  # None: 20, or one a writer
    per_round: Annotated[int, Field(ge=1)] = Field(default_factory=lambda given: min(10, given.get("clients") or 10))
    partition: Literal["iid", "dirichlet-labels", "dirichlet-sizes", "writer", "writer-groups"] = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.85  # of either Dirichlet
    method: Literal["fedavg", "fedsgd"] = "fedavg"
    local_steps: Annotated[int, Field(ge=1)] | None = None  # None: 5, or epochs
    local_epochs: Annotated[int, Field(ge=1)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 20
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    loss: Literal["cross-entropy", "binary"] = "cross-entropy"  # binary: PruneFL's, on one-hot labels
    averaging: Literal["coverage", "weighted", "uniform"] = "coverage"
    broadcast: Literal["masked", "dense"] = "masked"
    base_pruning: Annotated[list[OneBasePruning], *MANY] = default("none")
    defense: Annotated[list[OneClientDefense], *MANY] = default("none")
    server_rate: Annotated[float, Field(gt=0)] = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    faults: Faulty = Faulty()
    engine: Literal["here", "flower"] = "here"  # flower: its simulation; deployed as docs/deploy.md shows
    deadline: Annotated[float, Field(gt=0)] = 300.0  # seconds that a round of flower waits for answers
    evaluate_every: Annotated[int, Field(ge=1)] = 10
    attack: Annotated[list[OneInversion], BeforeValidator(none_or_many)] = default("none")
    membership: Annotated[list[Literal["yeom", "lira"]], BeforeValidator(none_or_many)] = default("none")
    attack_every: Annotated[int, Field(ge=1)] | None = None  # rounds; None: the last one
    attack_at: Annotated[list[Annotated[int, Field(ge=1)]], BeforeValidator(none_or_many)] = default("none")  # or these
    attack_clients: Annotated[Attacked, BeforeValidator(attacked)] = 1  # so many of a round's, all, or a list of which
    attack_history: Annotated[int, Field(ge=1)] = 1  # a client's last rounds that an attack uses together
    fixed_batches: bool = False  # a client takes the same rows in the same order in every round
    view: Literal["update", "sum"] = "update"  # sum: what secure aggregation shows, no client's own update
    iterations: Annotated[int, Field(ge=1)] | None = None  # of each attack; None: its own
    labels: Literal["inferred", "oracle"] = "inferred"  # whether the attacker is told them
    generator_steps: Annotated[int, Field(ge=1)] = 2000  # of training the generator that an attack such as ggl needs
    generator_width: Annotated[int, Field(ge=1)] = 64
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
        """The attacks, each with the iterations that were asked of all, where it has any."""
        return of_all(self.attack, **({} if self.iterations is None else {"iterations": self.iterations}))

    @model_validator(mode="after")
    def _checked(self) -> Federate:
        if {"train", "finetune"} & self.model_fields_set:
            raise WrongInput("train", "a federation trains by its own fields; set learning_rate, batch_size and others")
        if self.way == "ray":
            raise WrongInput("way", "ray is not possible here; give auto, sequential or stacked")
        if self.local_steps is not None and self.local_epochs is not None:
            raise WrongInput("local_steps", "give either local_steps or local_epochs, and not both")
        if self.partition.startswith("writer") and self.clients is not None:
            raise WrongInput("clients", f"partition {self.partition} makes them; leave clients out")
        for name in ("attack_every", "attack_at", "attack_clients", "attack_history"):
            usual = type(self).model_fields[name].get_default(call_default_factory=True)  # a run's own file has all
            watched = self.attack or self.membership or self.exposure
            if getattr(self, name) not in (usual, []) and not watched:
                raise WrongInput(
                    "attack", f"must be given with {name}, for example ig; or membership, for example yeom"
                )
        if self.attack_at and self.attack_every is not None:
            raise WrongInput("attack_at", "give either attack_at or attack_every, and not both")
        if self.attack_every is not None and self.attack_every > self.rounds:
            raise WrongInput("attack_every", f"{self.attack_every} is not allowed; there are {self.rounds} rounds")
        _ = self.attacks  # what an attack does not have is refused now
        return self
