"""The run file of `secateur federate`, with the fields of sub-models.

With sub-models, smaller clients train parts of the server's model (mapp_fl), and other defaults apply.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from secateur.catalogue import Choice
from secateur.config.base import (
    MANY,
    Common,
    Fields,
    OneAttack,
    OneBasePruning,
    OneClientDefense,
    OneInversion,
    Seeds,
    default,
    none_or_many,
)
from secateur.config.messages import plain
from secateur.config.methods import choice, of_all
from secateur.errors import WrongInput

PAPER: dict[str, Any] = {  # the defaults with sub-models: mapp_fl's setting (Section 5.2)
    "model": "mapp-cnn-16",
    "rounds": 150,
    "partition": "dirichlet-sizes",
    "local_epochs": 1,
    "batch_size": 128,
    "learning_rate": 1e-3,
    "averaging": "uniform",
}
CLIENTS = 10
PILOTS = 10  # rounds of a pilot
USUAL = {  # fields that do not go with sub-models must keep these values
    "method": "fedavg",
    "local_steps": None,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "loss": "cross-entropy",
    "broadcast": "masked",
    "base_pruning": [Choice("base-pruning", "none")],
    "server_rate": 1.0,
    "server_momentum": 0.0,
    "attack": [],
    "membership": [],
    "attack_every": None,  # every client is attacked by its last update
    "attack_at": [],
    "attack_clients": 1,
    "iterations": None,
    "labels": "inferred",
    "view": "update",
    "fixed_batches": False,
}
INSTEAD = {"membership": "give attack, for example yeom", "local_steps": "give local_epochs"}


def submodel(value: Any) -> Choice:
    """Read a channel rule; an error names the field as the flag does, submodels."""
    try:
        return choice("submodel", value)
    except WrongInput as error:
        raise WrongInput(error.field.replace("submodel", "submodels", 1), error.message) from None


def unless_empty(value: Any) -> Any:
    """Return comma-separated rules as a list, in which `none` (FedAvg) is a rule too; refuse an empty one."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts:
        raise WrongInput("submodels", "nothing is given; give rules such as mapp-fl, or none for FedAvg")
    return parts


def attacked(value: Any) -> Any:
    """Read the attacked clients: `2` is how many of a round's clients, `2,7` or `[2]` are which of them."""
    if isinstance(value, str) and value != "all":
        value = plain("attack_clients", f"[{value}]" if "," in value and not value.startswith("[") else value)
    if isinstance(value, bool) or not (isinstance(value, int | list) or value == "all"):
        raise WrongInput(
            "attack_clients", f"{value!r} is not allowed; give how many, all, or a list such as [3] or 3,7"
        )
    return value


OneSubmodel = Annotated[Choice, BeforeValidator(submodel), PlainSerializer(str)]
Attacked = Annotated[int, Field(ge=1)] | Literal["all"] | Annotated[list[int], Field(min_length=1)]


class Faulty(Fields):
    """The faults in the rounds of a federation (federated/faults.py)."""

    drop_out: float = 0.0
    nan: float = 0.0
    shape: float = 0.0
    deadline: float | None = None
    step_seconds: float = 1.0
    spread: float = 0.5


class Submodels(Common):
    """The fields of sub-models; without any rule they have no effect, so they are refused."""

    submodels: Annotated[list[OneSubmodel], BeforeValidator(unless_empty)] = Field(default=[])
    large_clients: Annotated[int, Field(ge=0)] = 2  # those with most data train the whole model
    client_widths: Annotated[list[float], *MANY] = default(0.5)  # of the others: the share of channels
    uncovered: Literal["keep", "zero"] = "keep"
    batchnorm: Literal["static", "reestimated"] = "static"
    scaler: bool = True
    own_labels: bool = False
    augment: bool = False  # crops and flips of what clients train with; the paper names none
    test_batch: Annotated[int, Field(ge=2)] = 128
    redraw_sizes: bool = False  # a Dirichlet draw of the clients' sizes for every seed; else the paper's for all
    exposure: Annotated[list[OneAttack], BeforeValidator(none_or_many)] = default("none")  # membership attacks
    shadow_clients: Annotated[int, Field(ge=2)] = 8  # the attacker's own, for lira and rmia
    scoring: Literal["mixed", "apart", "fixed"] = "mixed"  # batches that score examples under static BatchNorm
    knowledge: Literal["max", "min"] = "max"  # members that the attacker knows, of 3 and 1 %; the paper prints min
    asks_known: bool = False  # the attacker is asked about known members too, as in the paper
    advise: bool = False  # only pilots, in which every client has every size, and advice
    pilot_rounds: Annotated[int, Field(ge=1)] = PILOTS  # at most those of the federation, unless they are given
    pilot_draws: Annotated[int, Field(ge=1)] = 2  # deals of the sizes

    @model_validator(mode="before")
    @classmethod
    def _as_the_paper(cls, fields: Any) -> Any:
        """Lay the paper's values under those given, if there are sub-models."""
        if not isinstance(fields, dict) or not fields.get("submodels"):
            return fields
        return _with_paper_defaults(_with_exposure(fields))

    @model_validator(mode="after")
    def _fitting(self) -> Submodels:
        """Refuse fields of sub-models without a rule, and with one the fields that do not go with sub-models."""
        if not self.submodels:
            for name, field in Submodels.model_fields.items():
                of_submodels = name not in Common.model_fields and name != "submodels"
                usual = {"client_widths": [0.5], "exposure": []}.get(name, field.default)
                if of_submodels and getattr(self, name) != usual:
                    raise WrongInput("submodels", f"must be given with {name}, for example mapp-fl")
            return self
        if self.advise and len(self.exposure) != 1:
            several = f"advice is by one, and {len(self.exposure)} are given; give one" if self.exposure else ""
            raise WrongInput("attack", f"{several or 'must be given with advise'}, for example yeom")
        if self.shadow_clients % 2:
            raise WrongInput("shadow_clients", f"{self.shadow_clients} is not allowed; give an even number")
        for name, usual in USUAL.items():
            if getattr(self, name) != usual:
                instead = INSTEAD.get(name, "leave it out")
                raise WrongInput(name, f"does not go with submodels; {instead}")
        return self


class Federate(Submodels):
    """`secateur federate`: a federation that prunes, defends itself, and is attacked from inside."""

    model: str = "conv-2"
    rounds: Annotated[int, Field(ge=1)] = 100
    clients: Annotated[int, Field(ge=1)] | None = None  # None: 20, or one a writer
    per_round: Annotated[int, Field(ge=1)] = Field(default_factory=lambda fields: min(10, fields.get("clients") or 10))
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
    attack_clients: Annotated[Attacked, BeforeValidator(attacked)] = 1  # how many of a round's, all, or a list of them
    attack_history: Annotated[int, Field(ge=1)] = 1  # a client's last rounds that an attack uses together
    fixed_batches: bool = False  # a client takes the same rows in the same order in every round
    view: Literal["update", "sum"] = "update"  # sum: all that secure aggregation shows
    iterations: Annotated[int, Field(ge=1)] | None = None  # of each attack; None: its own
    labels: Literal["inferred", "oracle"] = "inferred"  # oracle: the attacker is given them
    generator_steps: Annotated[int, Field(ge=1)] = 2000  # of training the generator that an attack such as ggl needs
    generator_width: Annotated[int, Field(ge=1)] = 64
    images: bool = True
    seeds: Seeds = default(1)

    @property
    def steps(self) -> int | None:
        """Local steps; None if local epochs are given."""
        if self.local_steps is None and self.local_epochs is None:
            return 1 if self.method == "fedsgd" else 5
        return self.local_steps

    @property
    def attacks(self) -> list[Choice]:
        """The attacks, with `iterations` laid over each attack that has them."""
        return of_all(self.attack, **({} if self.iterations is None else {"iterations": self.iterations}))

    @model_validator(mode="after")
    def _checked(self) -> Federate:
        """Refuse fields that contradict one another."""
        if {"train", "finetune"} & self.model_fields_set:
            raise WrongInput("train", "a federation trains by its own fields; set learning_rate, batch_size and others")
        if self.way == "ray":
            raise WrongInput("way", "ray is not possible here; give auto, sequential or stacked")
        if self.local_steps is not None and self.local_epochs is not None:
            raise WrongInput("local_steps", "give either local_steps or local_epochs, and not both")
        if self.partition.startswith("writer") and self.clients is not None:
            raise WrongInput("clients", f"partition {self.partition} makes them; leave clients out")
        for name in ("attack_every", "attack_at", "attack_clients", "attack_history"):
            usual = type(self).model_fields[name].get_default(call_default_factory=True)  # a run's own file gives all
            watched = self.attack or self.membership or self.exposure
            if getattr(self, name) not in (usual, []) and not watched:
                raise WrongInput(
                    "attack", f"must be given with {name}, for example ig; or membership, for example yeom"
                )
        if self.attack_at and self.attack_every is not None:
            raise WrongInput("attack_at", "give either attack_at or attack_every, and not both")
        if self.attack_every is not None and self.attack_every > self.rounds:
            raise WrongInput("attack_every", f"{self.attack_every} is not allowed; there are {self.rounds} rounds")
        _ = self.attacks  # refuses iterations if no attack has them
        return self


def _with_exposure(fields: dict[str, Any]) -> dict[str, Any]:
    """Rename attack to exposure: with sub-models attacks are membership attacks, by default Yeom's."""
    asked = fields.get("attack")
    if asked not in (None, []):
        return {key: value for key, value in fields.items() if key != "attack"} | {"exposure": asked}
    return {"exposure": "yeom"} | fields


def _with_paper_defaults(fields: dict[str, Any]) -> dict[str, Any]:
    """Lay the paper's values under those given; clients of a writer partition are the writers."""
    under = dict(PAPER)
    if "local_steps" in fields:
        under.pop("local_epochs")
    if not str(fields.get("partition")).startswith("writer"):
        under |= {"clients": CLIENTS, "per_round": fields.get("clients", CLIENTS)}
    if isinstance(rounds := fields.get("rounds"), int):
        under["pilot_rounds"] = max(1, min(PILOTS, rounds))
    return under | fields
