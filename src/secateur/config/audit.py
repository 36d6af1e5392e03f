"""Run files of `secateur audit` and `secateur prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from secateur.config.base import (
    MANY,
    Common,
    OneAttack,
    OneDefense,
    OnePruner,
    Seeds,
    Sparsity,
    default,
    none_or_many,
)
from secateur.config.methods import choice
from secateur.config.policy import Limits
from secateur.errors import WrongInput

Protocol = Literal["known", "unknown-sparsity", "unknown", "select"]


class Audit(Common):
    """`secateur audit`: membership leakage of pruned models."""

    predictions: Path | None = None  # saved predictions (.npz or .csv), audited without a model
    pruner: Annotated[list[OnePruner], BeforeValidator(none_or_many)] = default(
        "l1-unstructured,l1-structured,l2-structured,slimming"
    )
    sparsity: Annotated[list[Sparsity], *MANY] = default(0.7)
    defense: Annotated[list[OneDefense], *MANY] = default("basic")
    attack: Annotated[list[OneAttack], *MANY] = default("conf,lira,rmia,samia")
    adaptive: bool = False  # the attacker's shadow models use the defense too
    protocol: Protocol = "known"  # the attacker's knowledge of the pruning
    experiments: Annotated[int, Field(ge=1)] = 20  # random pairs of the protocol `unknown`
    shadows: Annotated[int, Field(ge=0)] = 5
    in_out: Annotated[int, Field(ge=0)] = 0  # models over the victim's own pool, for online LiRA and RMIA
    seeds: Seeds = default(1)
    limits: Limits = Limits()

    @property
    def trains_shadows(self) -> bool:
        """True if shadow models can be trained. A file of weights without a recipe does not define their training."""
        return self.weights is None or "train" in self.model_fields_set

    def unaided(self, *attacks: str) -> Audit:
        """Return the configuration with these attacks, which need no shadow models, unless the user chose attacks.

        The default attacks need shadow models, and would not run.
        """
        if "attack" in self.model_fields_set:
            return self
        return self.model_copy(update={"attack": [choice("attack", name) for name in attacks]})

    @model_validator(mode="before")
    @classmethod
    def _with_three_trainings(cls, fields: Any) -> Any:
        """Train three times where limits decide: one training alone may leak more or less by chance."""
        if not isinstance(fields, dict) or "seeds" in fields or fields.get("predictions") or fields.get("weights"):
            return fields
        limits = fields.get("limits") or {}
        decides = isinstance(limits, dict) and limits.keys() - {"decide", "attacker"}
        return fields | {"seeds": 3} if decides else fields

    @model_validator(mode="after")
    def _checked(self) -> Audit:
        if self.protocol == "select" and self.shadows < 2:
            raise WrongInput("shadows", f"{self.shadows} is not allowed; protocol select needs at least 2")
        if self.in_out % 2:
            raise WrongInput("in_out", f"{self.in_out} is not allowed; give an even number: each example is in half")
        if self.protocol != "known" and not self.pruner:
            raise WrongInput("pruner", f"protocol {self.protocol} needs at least one pruner")
        return self


class Prune(Common):
    """`secateur prune`: one pruned, fine-tuned model."""

    pruner: OnePruner = default("l1-unstructured")
    sparsity: Sparsity = 0.7
    defense: OneDefense = default("basic")
    remove: bool = False  # remove dead channels from the layers
    seed: Annotated[int, Field(ge=0)] = 0
