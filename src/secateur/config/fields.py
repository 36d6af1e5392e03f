"""The types of fields that run files share."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from secateur.catalogue import Choice, Defense
from secateur.config.choices import (
    base_pruning,
    choice,
    defense_of_clients,
    defense_of_models,
    defense_of_updates,
    inversion,
)


class Fields(BaseModel):
    """Fields that are fixed once read; others than these are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=True)


def none_or_many(value: Any) -> Any:
    """`none` means none of them."""
    return [] if value in ("none", ["none"]) else listed(value)


def listed(value: Any) -> Any:
    """Lists are comma-separated in text, and one value is a list of one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def default(text: str | float) -> Any:
    """A default in the form a user writes; pydantic validates it like any other value."""
    return Field(default=text)


def seeds_of(value: Any) -> Any:
    """A number N means the seeds 0 to N - 1."""
    if isinstance(value, str) and value.strip().removeprefix("-").isdigit():
        value = int(value)
    return list(range(value)) if isinstance(value, int) else listed(value)


OnePruner = Annotated[Choice, BeforeValidator(partial(choice, "pruner")), PlainSerializer(str)]
OneDefense = Annotated[Defense, BeforeValidator(defense_of_models), PlainSerializer(str)]
OneUpdateDefense = Annotated[Defense, BeforeValidator(defense_of_updates), PlainSerializer(str)]
OneClientDefense = Annotated[Defense, BeforeValidator(defense_of_clients), PlainSerializer(str)]
OneBasePruning = Annotated[Choice, BeforeValidator(base_pruning), PlainSerializer(str)]
OneAttack = Annotated[Choice, BeforeValidator(partial(choice, "attack")), PlainSerializer(str)]
OneInversion = Annotated[Choice, BeforeValidator(inversion), PlainSerializer(str)]
Sparsity = Annotated[float, Field(ge=0, lt=1)]
SEEDS = "how many seeds, from 1, or a list of them such as 0,3,4"
MANY = (BeforeValidator(listed), Field(min_length=1))
Seeds = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(seeds_of), Field(min_length=1, description=SEEDS)]
