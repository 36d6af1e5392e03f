"""The fields that every run file may set, and the field types that run files share."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from secateur.catalogue import Choice, Defense
from secateur.config.methods import (
    base_pruning,
    choice,
    defense_of_clients,
    defense_of_models,
    defense_of_updates,
    inversion,
)
from secateur.training.recipe import Recipe

DEVICES = "auto, cpu, cuda or cuda:NUMBER"
SEEDS = "how many seeds, from 1, or a list of them such as 0,3,4"


def listed(value: Any) -> Any:
    """Return a value as a list: text is split at commas, and one value is a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def none_or_many(value: Any) -> Any:
    """Return the empty list for `none`, else the value as a list."""
    return [] if value in ("none", ["none"]) else listed(value)


def seeds_of(value: Any) -> Any:
    """Return a list of seeds; a number N means the seeds 0 to N - 1."""
    if isinstance(value, str) and value.strip().removeprefix("-").isdigit():
        value = int(value)
    return list(range(value)) if isinstance(value, int) else listed(value)


def default(text: str | float) -> Any:
    """Return a default in the form that a user writes; pydantic validates it like any other value."""
    return Field(default=text)


OnePruner = Annotated[Choice, BeforeValidator(partial(choice, "pruner")), PlainSerializer(str)]
OneDefense = Annotated[Defense, BeforeValidator(defense_of_models), PlainSerializer(str)]
OneUpdateDefense = Annotated[Defense, BeforeValidator(defense_of_updates), PlainSerializer(str)]
OneClientDefense = Annotated[Defense, BeforeValidator(defense_of_clients), PlainSerializer(str)]
OneBasePruning = Annotated[Choice, BeforeValidator(base_pruning), PlainSerializer(str)]
OneAttack = Annotated[Choice, BeforeValidator(partial(choice, "attack")), PlainSerializer(str)]
OneInversion = Annotated[Choice, BeforeValidator(inversion), PlainSerializer(str)]
Sparsity = Annotated[float, Field(ge=0, lt=1)]
MANY = (BeforeValidator(listed), Field(min_length=1))
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(seeds_of), Field(min_length=1, description=SEEDS)]


class Fields(BaseModel):
    """A frozen record of fields, which refuses fields that it does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)


class Training(Fields):
    """The training of a model; the defaults are the paper's (samia_ppb 5.1)."""

    epochs: Annotated[int, Field(ge=1)] = 100
    batch_size: Annotated[int, Field(ge=1)] = 128
    optimiser: Literal["adam", "sgd"] = "adam"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 5e-4
    patience: Annotated[int, Field(ge=1)] | None = 5

    def over(self, base: Recipe) -> Recipe:
        """Return the base recipe with the fields that were given laid over it."""
        return dataclasses.replace(base, **{name: getattr(self, name) for name in self.model_fields_set})


class Common(Fields):
    """The fields that every run file may set."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    model: str = "digits-cnn"  # a name of ours, or module:function
    weights: Path | None = None  # .safetensors of a trained model
    data: str = "digits"  # a name, an .npz, an image folder, or module:function
    data_folder: Path | None = None  # of the data set's files; else SECATEUR_DATA, else the cache
    download: bool = True
    examples: Annotated[int, Field(ge=1)] | None = None  # at most so many rows of the data set, drawn at random
    train: Training = Training()
    finetune: Training = Training()
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description=DEVICES)] = "auto"
    threads: Annotated[int, Field(ge=1)] = 1  # results are equal bit for bit only at one thread count
    way: Literal["auto", "sequential", "stacked", "ray"] = "auto"

    def recipes(self, tabular: bool) -> tuple[Recipe, Recipe]:
        """Return the recipes of training and fine-tuning.

        Training takes at most 100 epochs for images and 50 for tables; fine-tuning takes half of that (samia_ppb 5.1).
        """
        train = self.train.over(Recipe(epochs=50 if tabular else 100))
        return train, self.finetune.over(dataclasses.replace(train, epochs=max(1, train.epochs // 2)))
