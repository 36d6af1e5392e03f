"""Reading a run file with flags laid over it, and writing one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from secateur.config.base import Common, Fields
from secateur.config.messages import plain, sentence
from secateur.errors import WrongInput

C = TypeVar("C", bound=Fields)


def read(kind: type[C], file: Path | None, flags: Mapping[str, Any], overrides: list[str] | None = None) -> C:
    """The run file with the flags laid over it, then `a.b=value` overrides; WrongInput says what is wrong."""
    given = _load(file) if file is not None else {}
    given |= {key: value for key, value in flags.items() if value is not None}
    for text in overrides or []:
        path, found, value = text.partition("=")
        if not found:
            raise WrongInput("set", f"{text!r} is not readable; write field=value or field.part=value")
        put(given, path, plain(path, value))
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise sentence(error, kind=kind) from None


def put(given: dict[str, Any], path: str, value: Any) -> None:
    """Set the field that `field` or `field.part` names."""
    *parents, last = path.split(".")
    for parent in parents:
        given = given.setdefault(parent, {})
        if not isinstance(given, dict):
            raise WrongInput("set", f"{path!r} is not possible: {parent} has no parts")
    given[last] = value


def dump(config: Common) -> dict[str, Any]:
    """Plain values from which the same run can be started again, with the defaults written out.

    Of training and fine-tuning only what was given: the rest follows the kind of data and one from the other.
    """
    left_out = {"train", "finetune", *getattr(config, "meaningless", ())}
    values = config.model_dump(mode="json", by_alias=True, exclude=left_out)
    for name in ("train", "finetune"):
        if name in config.model_fields_set:
            values[name] = getattr(config, name).model_dump(mode="json", exclude_unset=True)
    return values


def _load(file: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongInput("config", f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise WrongInput("config", f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise WrongInput("config", f"{file} must hold fields and values, not a {type(given).__name__}")
    return given
