"""What a run file says of sub-models: a federation whose smaller clients train parts of the server's model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from secateur.catalogue import Choice
from secateur.config.choices import choice
from secateur.config.common import Common
from secateur.config.fields import MANY, OneAttack, default, none_or_many
from secateur.errors import WrongInput


def submodel(value: Any) -> Choice:
    """Read a channel rule."""
    try:
        return choice("submodel", value)
    except WrongInput as error:  # a user knows the flag
        raise WrongInput(error.field.replace("submodel", "submodels", 1), error.message) from None


OneSubmodel = Annotated[Choice, BeforeValidator(submodel), PlainSerializer(str)]

# What is not given is mapp_fl's (Section 5.2).
PAPER: dict[str, Any] = {
    "model": "mapp-cnn-16",
    "rounds": 150,
    "partition": "dirichlet-sizes",
    "local_epochs": 1,
    "batch_size": 128,
    "learning_rate": 1e-3,
    "averaging": "uniform",
}
CLIENTS = 10
USUAL = {  # what sub-models know nothing of must be left as it is
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
    "attack_every": None,  # everybody is attacked by the last update
    "attack_at": [],
    "attack_clients": 1,
    "iterations": None,
    "labels": "inferred",
    "view": "update",
    "fixed_batches": False,
}

PILOTS = 10  # rounds of a pilot
INSTEAD = {"membership": "give attack, for example yeom", "local_steps": "give local_epochs"}


def unless_empty(value: Any) -> Any:
    """Rules, comma-separated; `none` is one of them (FedAvg)."""
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts:
        raise WrongInput("submodels", "nothing is given; give rules such as mapp-fl, or none for FedAvg")
    return parts


class Submodels(Common):
    """The fields of sub-models; without any rule they mean nothing and are refused."""

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
    exposure: Annotated[list[OneAttack], BeforeValidator(none_or_many)] = default("none")  # attacks on who was in
    shadow_clients: Annotated[int, Field(ge=2)] = 8  # the attacker's own, for lira and rmia
    scoring: Literal["mixed", "apart", "fixed"] = "mixed"  # with whom an example is scored under static BatchNorm
    knowledge: Literal["max", "min"] = "max"  # of 3 and 1 %: how many members the attacker knows; the paper prints min
    asks_known: bool = False  # the attacker is asked about known members too, as in the paper
    advise: bool = False  # pilots in which every client has every size, and advice; nothing else is run
    pilot_rounds: Annotated[int, Field(ge=1)] = PILOTS  # at most those of the federation, unless they are given
    pilot_draws: Annotated[int, Field(ge=1)] = 2  # deals of the sizes

    @model_validator(mode="before")
    @classmethod
    def _as_the_paper(cls, given: Any) -> Any:
        """Lay the paper's values under what was given, where there are sub-models."""
        return _laid(_attacked(given)) if isinstance(given, dict) and given.get("submodels") else given

    @model_validator(mode="after")
    def _fitting(self) -> Submodels:
        if not self.submodels:
            for name, field in Submodels.model_fields.items():
                own = name not in Common.model_fields and name != "submodels"
                usual = {"client_widths": [0.5], "exposure": []}.get(name, field.default)
                if own and getattr(self, name) != usual:
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


def _attacked(given: dict[str, Any]) -> dict[str, Any]:
    """With sub-models an attack asks who was in the training; Yeom's does where nothing is said."""
    asked = given.get("attack")
    if asked not in (None, []):
        return {key: value for key, value in given.items() if key != "attack"} | {"exposure": asked}
    return {"exposure": "yeom"} | given


def _laid(given: dict[str, Any]) -> dict[str, Any]:
    under = dict(PAPER)
    if "local_steps" in given:
        under.pop("local_epochs")
    if not str(given.get("partition")).startswith("writer"):
        under |= {"clients": CLIENTS, "per_round": given.get("clients", CLIENTS)}
    if isinstance(rounds := given.get("rounds"), int):
        under["pilot_rounds"] = max(1, min(PILOTS, rounds))
    return under | given
