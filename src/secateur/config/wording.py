"""YAML values, and pydantic's complaints as one clear sentence."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from secateur.errors import WrongInput, unknown


def plain(field: str, text: str) -> Any:
    """What a text means as YAML, for the field that it was given for."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise WrongInput(field, f"{text!r} is not readable; write a number, a word or a YAML list") from None


def sentence(error: ValidationError, prefix: str = "", model: type[BaseModel] | None = None) -> WrongInput:
    """The first of pydantic's complaints as one sentence that names the field and what is allowed."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if not str(part).startswith("function-")]
    field = ".".join([prefix, *where] if prefix else where)
    if first["type"] == "extra_forbidden":
        for part in where[:-1]:
            inner = model.model_fields[part].annotation if model else None
            model = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None
        known = [f.alias or name for name, f in model.model_fields.items()] if model else []
        wrong = unknown("field", where[-1], known)
        return WrongInput(field, wrong.message)
    if first["type"] == "missing":
        return WrongInput(field, "must be given")
    return WrongInput(field, f"{first['input']!r} is not allowed; {first['msg'].lower()}")
