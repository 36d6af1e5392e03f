"""Run files of `secateur audit` and `secateur prune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from secateur.config import base
from secateur.config.base import Common, Fields, field, flag
from secateur.config.methods import choice
from secateur.errors import WrongInput, check_whole

Protocol = Literal["known", "unknown-sparsity", "unknown", "select"]
Limit = Annotated[float, Field(ge=0, le=1)] | None


class Limits(Fields):
    """Upper limits on the leakage of pruned and defended models, under every attack; None: no limit."""

    auc: Limit = None
    attack_accuracy: Limit = None
    balanced_accuracy: Limit = None
    advantage: Annotated[float, Field(ge=-1, le=1)] | None = None
    tpr_at_fpr_10: Limit = Field(None, alias="tpr_at_fpr_0.1")
    tpr_at_fpr_1: Limit = Field(None, alias="tpr_at_fpr_0.01")
    tpr_at_fpr_01: Limit = Field(None, alias="tpr_at_fpr_0.001")
    accuracy_drop: Limit = None

    def by_measure(self) -> dict[str, float]:
        """Return the limits that are set, by the name of the measure."""
        return self.model_dump(by_alias=True, exclude_none=True)


class Audit(Common):
    """`secateur audit`: membership leakage of pruned models."""

    predictions: Path | None = flag(None, "Saved predictions (.npz, .csv) to audit instead of a model.")
    pruner: Annotated[list[base.OnePruner], *base.ANY] = flag(
        "l1-unstructured,l1-structured,l2-structured,slimming", "Pruners (secateur list pruners), or none.", repeat=True
    )
    sparsity: Annotated[list[base.Share], *base.MANY] = flag(0.7, "Shares to remove, in [0, 1).", repeat=True)
    defense: Annotated[list[base.OneDefense], *base.MANY] = flag(
        "basic", "Defenses (secateur list defenses).", repeat=True
    )
    attack: Annotated[list[base.OneAttack], *base.MANY] = flag(
        "conf,mentr", "Membership attacks (secateur list attacks).", repeat=True
    )
    adaptive: bool = flag(False, "The attacker's shadow models use the defense too.")
    protocol: Protocol = flag("known", "Pruning that the attacker knows: known, unknown-sparsity, unknown or select.")
    experiments: base.Count = field(20, "Random pairs of victim and attacker under protocol unknown.")
    shadows: base.Count = flag(5, "Number of the attacker's shadow models.")
    in_out: base.FromZero = flag(0, "Number of models with and without each example, for online LiRA and RMIA.")
    seeds: base.Seeds = flag(1, base.NUMBER_OF_SEEDS)
    limits: Limits = field(Limits, "Upper limits on leakage; exit code 1 if one is passed.")

    @property
    def trains_shadows(self) -> bool:
        """True if shadow models can be trained. A file of weights without a recipe does not define their training."""
        return self.weights is None or "train" in self.model_fields_set

    def with_default_attacks(self, *attacks: str) -> Audit:
        """Return the configuration with these attacks, unless the user chose attacks.

        The default attacks need shadow models, which not every audit has.
        """
        if "attack" in self.model_fields_set:
            return self
        return self.model_copy(update={"attack": [choice("attack", name) for name in attacks]})

    @model_validator(mode="after")
    def _check(self) -> Audit:
        if self.protocol == "select" and self.shadows < 2:
            raise WrongInput("shadows", f"{self.shadows} is not allowed; protocol select needs at least 2")
        check_whole("in_out", self.in_out, 0, even=True)  # every example is in half of these models
        if self.protocol != "known" and not self.pruner:
            raise WrongInput("pruner", f"is missing; protocol {self.protocol} needs at least one")
        return self


class Prune(Common):
    """`secateur prune`: one pruned, fine-tuned model."""

    pruner: base.OnePruner = flag("l1-unstructured", "Pruner (secateur list pruners).")
    sparsity: base.Share = flag(0.7, "Share to remove, in [0, 1).")
    defense: base.OneDefense = flag("basic", "Defense (secateur list defenses).")
    remove: bool = flag(False, "Remove dead channels from the layers.")
    seed: base.FromZero = flag(0, "Seed of all random draws.")
