"""Run files of `secateur audit` and `secateur prune`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from secateur.config import base
from secateur.config.base import Common, Limits, PrivacyClaim, Training, field, flag
from secateur.config.methods import check_together, choice
from secateur.errors import WrongInput, check_whole

if TYPE_CHECKING:
    from secateur.data.scaling import DataForm
    from secateur.training.recipe import Recipe

Protocol = Literal["known", "unknown-sparsity", "unknown", "select"]


class ModelTraining(Training):
    """Training of a model, by these fields or by a function of the user's."""

    function: str | None = field(None, "module:function that trains one model; no other field of train is used then.")

    def apply_to(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the fields that the user set; a function leaves it to fine-tuning as it is."""
        return recipe if self.function is not None else super().apply_to(recipe)


def read_training(value: Any) -> Any:
    """Return the fields of a training; text is the `module:function` of the user's."""
    fields = {"function": value} if isinstance(value, str) else value
    function = fields.get("function") if isinstance(fields, dict) else None
    if function is None:
        return fields
    if not isinstance(function, str) or not all(function.partition(":")):
        raise WrongInput("train", f"{function!r} is not allowed; use module:function, or fields such as epochs")
    if len(fields) > 1:
        others = ", ".join(name for name in fields if name != "function")
        raise WrongInput("train", f"the function sets the training, and {others} too; use one, or set finetune")
    return fields


class ModelRun(Common):
    """The fields of run files that train and prune models: `secateur audit` and `secateur prune`."""

    train: Annotated[ModelTraining, BeforeValidator(read_training)] = flag(
        ModelTraining, "Training of the models: module:function of yours, train(model, inputs, labels, generator)."
    )
    deterministic: bool = field(base.DETERMINISTIC, base.REPEATABLE)


class Audit(ModelRun):
    """`secateur audit`: membership leakage of pruned models."""

    model: str = flag(base.DEFAULT_MODEL, base.ASKED_MODEL)
    predictions: Path | None = flag(None, "Saved predictions (.npz, .csv, .parquet) to audit instead of a model.")
    before: str | None = flag(None, "The model before its compression: weights, or a file as --model takes.")
    pruner: Annotated[list[base.OneCompressor], *base.ANY] = flag(
        "l1-unstructured,l1-structured,l2-structured,slimming",
        "Compressors (secateur list pruners), or none; two are joined by +.",
        repeat=True,
    )
    sparsity: Annotated[list[base.Share], *base.MANY] = flag(0.7, "Shares to remove, in [0, 1).", repeat=True)
    defense: Annotated[list[base.OneDefense], *base.MANY] = flag(
        "basic", "Defenses (secateur list defenses).", repeat=True
    )
    attack: Annotated[list[base.OneAttack], *base.MANY] = flag(
        "conf,lira,rmia,samia", "Membership attacks (secateur list attacks).", repeat=True
    )
    adaptive: bool = flag(False, "The attacker's shadow models use the defense too.")
    protocol: Protocol = flag("known", "Pruning that the attacker knows: known, unknown-sparsity, unknown or select.")
    experiments: base.Count = field(20, "Random pairs of victim and attacker under protocol unknown.")
    shadows: base.Models = flag(5, "Number of the attacker's shadow models.")
    in_out: base.Models = flag(0, "Number of models with and without each example, for online LiRA and RMIA.")
    population: str | None = flag(
        None, "Data of the attacker, as --data: rows that are neither members nor candidates. Shadow models use them."
    )
    group: str | None = flag(
        None, "Column of yours by which leakage is compared: an array of an .npz file, or a column of a table."
    )
    canaries: base.FromZero = flag(0, "Canaries that bound the epsilon of a private training, such as dp-sgd-scratch.")
    seeds: base.Seeds = flag(1, base.NUMBER_OF_SEEDS)
    limits: Limits = field(Limits, "Upper limits on leakage; exit code 1 above one of them, 3 if it is inconclusive.")

    claim: PrivacyClaim | None = field(
        None, "Privacy that is claimed for the model or predictions that you bring: epsilon, delta and unit."
    )

    @property
    def form(self) -> DataForm:
        """The user's description of the data, with the column of groups."""
        return dataclasses.replace(super().form, group=self.group)

    @property
    def trains_shadows(self) -> bool:
        """True if shadow models can be trained. A file of weights without a recipe does not define their training."""
        return self.weights is None or "train" in self.model_fields_set

    def list_changed(self, *names: str) -> list[str]:
        """Return those of the fields whose values are not the defaults; a run's config.yaml writes defaults out."""
        plain = Audit.model_validate({})
        return [name for name in names if getattr(self, name) != getattr(plain, name)]

    def with_default_attacks(self, *attacks: str) -> Audit:
        """Return the configuration with these attacks, unless the user chose attacks.

        The default attacks need shadow models, which not every audit has.
        """
        if "attack" in self.model_fields_set:
            return self
        return self.model_copy(update={"attack": [choice("attack", name) for name in attacks]})

    @model_validator(mode="before")
    @classmethod
    def _train_three_times(cls, fields: Any) -> Any:
        """Take three seeds where limits decide: one training alone may leak more or less by chance."""
        if not isinstance(fields, dict) or {"seeds", "predictions", "weights"} & fields.keys():
            return fields
        limits = fields.get("limits") or {}
        decides = isinstance(limits, dict) and limits.keys() - {"decide", "attacker"}
        return fields | {"seeds": 3} if decides else fields

    @model_validator(mode="after")
    def _check(self) -> Audit:
        if self.protocol == "select" and self.shadows < 2:
            raise WrongInput("shadows", f"{self.shadows} is not allowed; protocol select needs at least 2")
        if self.canaries:
            check_whole("canaries", self.canaries, 4)  # a quarter is guessed to be in
            private = any(defense.find_part("training") for defense in self.defense)
            if not private or self.weights is not None or self.train.function is not None:
                raise WrongInput("canaries", "need a private training; set the defense dp-sgd-scratch, without weights")
        check_whole("in_out", self.in_out, 0, even=True)  # every example is in half of these models
        if self.protocol != "known" and not self.pruner:
            raise WrongInput("pruner", f"is missing; protocol {self.protocol} needs at least one")
        if self.protocol == "unknown-sparsity" and (fixed := [x for x in self.pruner if not x.uses_sparsity]):
            raise WrongInput(
                "pruner", f"{fixed[0]} has no sparsity to guess; leave it out under protocol {self.protocol}"
            )
        check_together(self.pruner, self.defense)
        return self


class Prune(ModelRun):
    """`secateur prune`: one pruned, fine-tuned model."""

    pruner: base.OneCompressor = flag("l1-unstructured", "Compressor (secateur list pruners); two are joined by +.")
    sparsity: base.Share = flag(0.7, "Share to remove, in [0, 1).")
    defense: base.OneDefense = flag("basic", "Defense (secateur list defenses).")
    rows: Literal["audited", "all"] = flag(
        "audited", "Rows of the training: audited, as in secateur audit, or all; no audit attacks a model of all rows."
    )
    remove: bool = flag(False, "Remove dead channels from the layers.")
    seed: base.FromZero = flag(0, "Seed of all random draws.")
    deterministic: bool = field(base.DETERMINISTIC, base.REPEATABLE)

    @model_validator(mode="after")
    def _check(self) -> Prune:
        check_together([self.pruner], [self.defense])
        if self.remove and not self.pruner.only_masks:
            raise WrongInput("remove", f"{self.pruner} removes by itself what it can; leave --remove out")
        return self
