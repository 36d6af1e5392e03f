"""Run file of `secateur recommend`: the recipes to search, the limits, and the effort."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from secateur.config import base
from secateur.config.audit import Audit, ModelRun
from secateur.config.base import Limit, Limits, field, flag
from secateur.config.federate import FOR_INVERSION, NOT_WITH_SUBMODELS, Federate, FederationFields, split_membership
from secateur.config.invert import Invert
from secateur.config.messages import Allowed
from secateur.errors import WrongInput

DURATION = "must be a time such as 90s, 45m, 2h or 1h30m"
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0}
FLAGS = {
    "max_accuracy_drop": "accuracy_drop",
    "max_tpr_at_1": "tpr_at_fpr_0.01",
    "max_auc": "auc",
    "max_psnr": "psnr",
    "max_recognisable": "recognisable",
}
CANDIDATES = 20  # if neither a number nor a budget is set


def read_duration(value: Any) -> Any:
    """Return seconds; text has hours, minutes and seconds.

    Example:
        >>> read_duration("1h30m"), read_duration("45s"), read_duration(20)
        (5400.0, 45.0, 20)
    """
    if not isinstance(value, str):
        return value
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", value.strip())
    if not parts or "".join(number + unit for number, unit in parts) != value.strip():
        raise WrongInput("budget", f"{value!r} is not readable; it {DURATION}")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


Duration = Annotated[base.Positive, BeforeValidator(read_duration), Allowed(DURATION)]


class KnownRecipe(base.Fields):
    """A recipe of the user's, which stands beside the recommended one."""

    pruner: base.OneCompressor = field(..., "Compressor.")
    sparsity: base.Share = field(..., "Share to remove, in [0, 1).")
    defense: base.OneDefense = field("basic", "Defense.")
    epochs: base.Count | None = field(None, "Largest number of fine-tuning epochs. By default that of finetune.")
    learning_rate: base.Positive | None = field(None, "Learning rate of fine-tuning. By default that of finetune.")


class SearchFields(base.Fields):
    """The fields of every search for a recipe: its limits and its effort."""

    seed: base.FromZero = flag(0, "Seed of all random draws.")
    max_accuracy_drop: Limit = flag(None, "Limit on the loss of accuracy. By default the search accepts 0.02.")
    max_bytes: base.Positive | None = flag(None, "Limit on the bytes, as a share of those without a recipe.")
    limits: Limits = field(Limits, "Limits on the recommended recipe; max_ flags set some of them.")
    budget: Duration | None = flag(None, "Time of one start, such as 2h; the search ends in time for the last audit.")
    candidates: base.Count | None = flag(None, f"Largest number of recipes. By default {CANDIDATES}, or by the budget.")
    finalists: base.Count = flag(5, "Largest number of recipes that the strongest attackers meet in the search.")
    generation: base.Count = field(4, "Recipes that are drawn at once; the better half goes on to the next rung.")

    @model_validator(mode="before")
    @classmethod
    def _collect_limits(cls, fields: Any) -> Any:
        """Move the flags of limits into `limits`; a flag overrides the run file."""
        if not isinstance(fields, dict):
            return fields
        limits = fields.get("limits") or {}
        named = {key: name for key, name in FLAGS.items() if key in cls.model_fields}
        moved = {name: fields[key] for key, name in named.items() if fields.get(key) is not None}
        if not moved or not isinstance(limits, dict):
            return fields
        return {name: value for name, value in fields.items() if name not in named} | {"limits": limits | moved}

    @property
    def most_candidates(self) -> int | None:
        """The largest number of recipes; None if the budget alone ends the search."""
        return self.candidates or (None if self.budget is not None else CANDIDATES)

    @property
    def shares(self) -> dict[str, float]:
        """The limits on sizes, as shares of those without a recipe."""
        named = {"bytes": self.max_bytes, "latency": getattr(self, "max_latency", None)}
        return {name: limit for name, limit in named.items() if limit is not None}


class Recommend(SearchFields, ModelRun):
    """`secateur recommend`: a search for the recipe that leaks least within limits."""

    pruner: Annotated[list[base.OneCompressor], *base.MANY] = flag(
        "l1-unstructured,l1-unstructured:scope=global,l1-structured,l2-structured,int8,l1-unstructured+int8,"
        "l1-structured+int8",
        "Compressors to search; two are joined by +.",
        repeat=True,
    )
    sparsity: Annotated[list[base.Share], *base.MANY] = flag(
        ".5,.6,.7,.8,.9", "Shares to remove to search, in [0, 1).", repeat=True
    )
    defense: Annotated[list[base.OneDefense], *base.MANY] = flag(
        "basic,ppb:strength=1,ppb:strength=4,ppb:strength=16,adv,mixed-distil,relaxed-loss",
        "Defenses to search, with strengths.",
        repeat=True,
    )
    epochs: Annotated[list[base.Count], *base.ANY] = flag(
        "none", "Largest numbers of fine-tuning epochs to search. By default a quarter, a half and all of finetune."
    )
    learning_rate: Annotated[list[base.Positive], *base.ANY] = flag(
        "none", "Learning rates of fine-tuning to search. By default that of finetune, and 0.3 of it."
    )
    attack: Annotated[list[base.OneAttack], *base.MANY] = flag(
        "conf,mentr,lira,rmia,samia", "Membership attacks on the recommended model.", repeat=True
    )
    shadows: base.Count = flag(5, "Shadow models of the search; as many fresh ones attack the recommended model.")
    population: str | None = flag(None, "Data of the attacker, as --data: shadow models use them too.")
    max_tpr_at_1: Limit = flag(None, "Limit on the TPR at 1 % FPR, under every attack.")
    max_auc: Limit = flag(None, "Limit on the AUC, under every attack.")
    max_latency: base.Positive | None = flag(None, "Limit on the latency, as a share of the original's.")
    beat: list[KnownRecipe] = field(
        list,
        "Recipes of yours to beat: the best of them within the limits stays, unless another one is shown to be at "
        "least as accurate and small, and to leak less (decide: value: by values).",
    )
    compare: list[KnownRecipe] = field(
        list, "Recipes of yours: the search begins with them, and they are audited beside the recommended one."
    )

    @model_validator(mode="after")
    def _check(self) -> Recommend:
        for defense in self.defense:
            if (part := defense.find_part("training")) is not None:
                problem = f"{part.name} acts on the training, which all recipes share"
                raise WrongInput("defense", f"{problem}; leave it out, or audit it by secateur audit")
        if self.weights is not None and "train" not in self.model_fields_set:
            raise WrongInput("train", "is missing; shadow models are trained by the recipe of the given weights")
        return self

    @property
    def known(self) -> list[KnownRecipe]:
        """The user's recipes, those to beat first."""
        return [*self.beat, *self.compare]

    def to_audit(self, **fields: Any) -> Audit:
        """Return the audit of one recipe, by an attacker that knows it: the shared fields, and `fields`."""
        names = (self.model_fields_set & Audit.model_fields.keys()) - {"limits", "defense", "sparsity"}
        shared = {name: getattr(self, name) for name in names if name != "schema_version"}
        shared |= {"pruner": self.pruner, "attack": self.attack, "shadows": self.shadows, "seeds": [self.seed]}
        return Audit.model_validate(shared | {"adaptive": True} | fields)


class RecommendUpdates(SearchFields, Invert):
    """`secateur recommend --updates`: a search for the defense of an update that shows least within limits."""

    recommends: Literal["updates"] = field("updates", "What is searched: a defense of updates.")
    defense: base.UpdateDefenses = flag(
        "none,noise:sigma=0.001,noise:sigma=0.01,noise:sigma=0.1,top-k:keep=0.2,top-k:keep=0.05,dgp,dgp:k1=0.1:k2=0.8,"
        "dgp:k1=0.2:k2=0.7,soteria,outpost,precode",
        "Defenses to search, with strengths.",
        repeat=True,
    )
    targets: base.Count = flag(8, "Number of updates to attack on each half of the rows.")
    seeds: base.Seeds = field(1, "Not used here; set seed.")
    max_psnr: base.Positive | None = flag(None, "Limit on the mean PSNR, under every attack.")
    max_recognisable: Limit = flag(None, "Limit on the share of recognisable pictures, under every attack.")
    training_epochs: base.Count = field(3, "Epochs of the training under a defense that shows its accuracy.")
    training_rate: base.Positive = field(0.05, "Learning rate of this training.")

    @model_validator(mode="after")
    def _check_search(self) -> RecommendUpdates:
        for name in ("update", "residual", "local_steps"):
            if getattr(self, name) not in (None, []):
                raise WrongInput(name, "is of one update as it is; leave it out of a search, or use secateur invert")
        return self

    def to_invert(self, **fields: Any) -> Invert:
        """Return the run file of the attacks on one defense: the shared fields, and `fields`.

        Iterations, restarts and modes are in the attacks themselves (`attacks`).
        """
        searched = {"limits", "seeds", "attack", "defense", "iterations", "restarts", "adaptive"}
        names = (self.model_fields_set & Invert.model_fields.keys()) - searched
        shared = {name: getattr(self, name) for name in names if name != "schema_version"}
        shared |= {"targets": self.targets, "seeds": [self.seed]}
        return Invert.model_validate(shared | fields)


class RecommendFederation(SearchFields, FederationFields):
    """`secateur recommend --federation`: a search for pruning, withholding and model sizes of a federation's clients.

    A recipe is a base pruning or a rule of sub-models with its widths, and a defense of the clients.
    """

    recommends: Literal["federation"] = field("federation", "What is searched: the terms of a federation.")
    base_pruning: Annotated[list[base.OneBasePruning], *base.MANY] = flag(
        "none,snip,prunefl", "Base prunings to search.", repeat=True
    )
    submodels: Annotated[list[base.OneSubmodel], *base.ANY] = flag(
        "mapp-fl,heterofl", "Rules that cut sub-models to search, or none of them: none.", repeat=True
    )
    client_widths: Annotated[list[float], *base.MANY] = flag(
        ".5,.25", "Shares of channels of the smaller clients to search.", repeat=True
    )
    large_clients: base.FromZero = field(2, "Number of clients, those with most data, that train the whole model.")
    advise: bool = flag(True, "Search the widths that pilots advise for every client too.")
    defense: base.ClientDefenses = flag(
        "none,pseudo-largest:rate=0.3,pseudo-random:rate=0.3,dgp", "Defenses of the clients to search.", repeat=True
    )
    membership: Annotated[list[Literal["yeom", "lira", "rmia"]], BeforeValidator(split_membership)] = flag(
        "yeom,lira,rmia", "Membership attacks on the clients.", repeat=True
    )
    seeds: base.Seeds = field(1, "Not used here; set seed.")
    max_auc: Limit = flag(None, "Limit on the AUC over the clients, under every membership attack.")
    max_psnr: base.Positive | None = flag(None, "Limit on the mean PSNR, under every inversion attack.")
    max_recognisable: Limit = flag(None, "Limit on the share of recognisable pictures, under every inversion.")

    @model_validator(mode="after")
    def _check_search(self) -> RecommendFederation:
        if not self.membership and not self.attack:
            raise WrongInput("membership", "is none, and so is attack; a search needs an attacker")
        return self

    def to_federate(self, **fields: Any) -> Federate:
        """Return the run file of one federation: the shared fields, and `fields`; refuse terms that cannot be."""
        searched = {"limits", "seeds", "attack", "defense", "base_pruning", "membership", "attack_clients"}
        names = (self.model_fields_set & FederationFields.model_fields.keys()) - searched
        if fields.get("submodels"):
            names -= set(NOT_WITH_SUBMODELS) | set(FOR_INVERSION) | {"learning_rate"}
        if not (fields.get("attack") or fields.get("membership")):
            names -= {*FOR_INVERSION, "attack_history", "iterations"}
        shared = {name: getattr(self, name) for name in names if name != "schema_version"}
        shared |= {"model": self.model, "rounds": self.rounds, "seeds": [self.seed], "images": self.images}
        return Federate.model_validate(shared | fields)


def schema_of(updates: bool, federation: bool) -> type[Recommend | RecommendUpdates | RecommendFederation]:
    """Return the schema of a search: of models, of updates or of a federation."""
    if updates and federation:
        raise WrongInput("federation", "cannot be combined with updates; search one of them")
    return RecommendUpdates if updates else RecommendFederation if federation else Recommend
