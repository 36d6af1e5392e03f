"""Input and output of run files: YAML fields, overridden by flags."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from secateur.catalogue import Choice, is_reference, split
from secateur.config.audit import ModelRun
from secateur.config.base import Fields, Limits, Training
from secateur.config.messages import explain, load_yaml, yaml_value
from secateur.errors import WrongInput

C = TypeVar("C", bound=Fields)


def read(kind: type[C], file: Path | None, flags: Mapping[str, Any], overrides: list[str] | None = None) -> C:
    """Return the fields of the run file, overridden by the flags, then by `a.b=value` overrides.

    Raise WrongInput with one sentence about the first error.
    """
    fields = _load(file) if file is not None else {}
    fields |= {key: value for key, value in flags.items() if value is not None}
    for text in overrides or []:
        path, separator, value = text.partition("=")
        if not separator:
            raise WrongInput("set", f"{text!r} is not readable; write field=value or field.part=value")
        put(fields, path, yaml_value(path, value))
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise explain(error, kind=kind) from None


def list_code(config: Fields) -> dict[str, str]:
    """Return the code that a configuration names, by field: `module:function` is imported and called.

    An address that a model is asked at is listed too, because the data are sent there.
    """
    code = {}
    for name, value in config:
        if name in ("model", "before") and isinstance(value, str):
            is_code = ":" in value and not value.startswith(("timm:", "hf:"))
        elif name in ("data", "population"):
            is_code = isinstance(value, str) and is_reference(value)
        else:
            is_code = name == "transform" and value is not None
        if is_code:
            code[name] = value
        if (function := getattr(value, "function", None)) is not None:
            code[name] = function
        if name == "set_":  # of a study, which checks its fields later
            code |= {f"set.{key}": str(item) for key, item in value.items() if _names_code(str(item))}
        for choice in value if isinstance(value, list) else ():
            if isinstance(choice, Choice) and _names_code(str(choice)):
                code[name] = str(choice)
    return code


def _names_code(text: str) -> bool:
    """Return True if a value, or a hyper-parameter of a method as text, may be `module:function` or an address."""
    return any(":" in part for part in split(text))


def put(fields: dict[str, Any], path: str, value: Any) -> None:
    """Set the field at `path`, which is `field` or `field.part`; a dot between digits belongs to a name."""
    *parents, last = re.split(r"(?<!\d)\.|\.(?!\d)", path)
    for parent in parents:
        fields = fields.setdefault(parent, {})
        if not isinstance(fields, dict):
            raise WrongInput("set", f"{path!r} is not possible: {parent} has no parts")
    fields[last] = value


def dump(config: Fields) -> dict[str, Any]:
    """Return plain values that start the same run again, with the defaults written out.

    `train` and `finetune` hold only the fields that the user set. Their defaults depend on the kind of data, and those
    of fine-tuning on training.
    """
    left_out = {"train", "finetune", *getattr(config, "unused_fields", ())}
    values = config.model_dump(mode="json", by_alias=True, exclude=left_out)
    for name in ("train", "finetune"):
        if name in config.model_fields_set:
            values[name] = getattr(config, name).model_dump(mode="json", exclude_unset=True)
    return values


def dump_recipes(config: ModelRun, tabular: bool) -> dict[str, Any]:
    """Return `dump` with the effective values of training and fine-tuning.

    Weights without a recipe stay so: with one, a repeated run would train shadow models. So does a user's function.
    """
    values = dump(config)
    has_recipe = config.weights is None or "train" in config.model_fields_set
    for name, recipe in zip(("train", "finetune"), config.recipes(tabular), strict=True):
        if name == "finetune" or (has_recipe and config.train.function is None):
            values[name] = {field: getattr(recipe, field) for field in Training.model_fields}
    return values


def _load(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise WrongInput("config", f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise WrongInput("config", f"{file} is not YAML: {error}") from None
    return parse_fields("config", text, str(file))


def parse_fields(field: str, text: str, name: str = "config.yaml") -> dict[str, Any]:
    """Return the fields of a YAML text, unchecked; `field` and `name` are named in the error."""
    try:
        fields = load_yaml(text)
    except yaml.YAMLError as error:
        raise WrongInput(field, f"{name} is not YAML: {' '.join(str(error).split())}") from None
    if fields is None:
        return {}
    if not isinstance(fields, dict):
        raise WrongInput(field, f"{name} must hold fields and values, not a {type(fields).__name__}")
    return fields


@functools.lru_cache(maxsize=16)  # runs of one page often have one configuration
def read_limits(text: str) -> Limits:
    """Return the limits of the text of a run file."""
    try:
        return Limits.model_validate(parse_fields("run", text).get("limits") or {})
    except ValidationError as error:
        raise explain(error, prefix="limits", kind=Limits) from None
