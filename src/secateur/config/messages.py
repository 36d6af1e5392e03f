"""YAML values of fields, and pydantic's validation errors in the sentences of `secateur.errors`."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from secateur.errors import WrongInput, allowed_numbers, allowed_wholes, unknown

LIMITS = ("ge", "gt", "le", "lt")
SIMPLE = {bool: "must be true or false", str: "must be a word", Path: "must be a path", dict: "must be fields"}


class Allowed(NamedTuple):
    """Annotation of a field: its allowed values in words, for error messages."""

    words: str


def yaml_value(field: str, text: str) -> Any:
    """Return the value of a text as YAML; `field` is named in the error."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise WrongInput(field, f"{text!r} is not readable; write a number, a word or a YAML list") from None


def explain(error: ValidationError, prefix: str = "", kind: Any = None) -> WrongInput:
    """Return pydantic's first error as one sentence that names the field and the allowed values.

    Args:
        error: The error of pydantic.
        prefix: Name of the value that was validated; fields inside it follow after a dot.
        kind: The expected type: a model, or the annotation of the one value that `prefix` names.
    """
    first = error.errors()[0]
    inner, names = _locate(kind, first["loc"])
    field = ".".join([prefix, *names] if prefix else names)
    if first["type"] == "extra_forbidden":
        extra = str(first["loc"][-1])
        known = [f.alias or name for name, f in inner.model_fields.items()] if _is_model(inner) else []
        return WrongInput(".".join([field, extra] if field else [extra]), unknown("field", extra, known).message)
    wanted = allowed(inner) or first["msg"][:1].lower() + first["msg"][1:]
    problem = "is missing" if first["type"] == "missing" else f"{first['input']!r} is not allowed"
    return WrongInput(field, f"{problem}; {wanted}")


def allowed(kind: Any) -> str | None:
    """Return the values that an annotation allows, in words; None if there are no words for the type.

    Example:
        >>> from pydantic import Field
        >>> allowed(Annotated[float, Field(ge=0, lt=1)]), allowed(Literal["eval", "batch"])
        ('must be in [0, 1)', 'allowed: eval, batch')
        >>> allowed(Annotated[int, Field(ge=1)] | None), allowed(float)
        ('must be a whole number, at least 1', 'must be a number')
    """
    bare, limits, words = read_annotation(kind)
    if words is not None:
        return words
    if get_origin(bare) is Literal:
        return f"allowed: {', '.join(map(str, get_args(bare)))}"
    if get_origin(bare) is list:
        return "; ".join(filter(None, ["use at least one value", allowed(get_args(bare)[0])]))
    if bare is int:
        return allowed_wholes(int(limits["ge"])) if "ge" in limits else "must be a whole number"
    if bare is float:
        return allowed_numbers(_interval(limits)) if limits else "must be a number"
    if _is_model(bare):
        return f"must be fields and values; allowed: {', '.join(bare.model_fields)}"
    return SIMPLE.get(bare)


def read_annotation(kind: Any) -> tuple[Any, dict[str, float], str | None]:
    """Return a type without None and without annotations, then its numeric limits and its words (`Allowed`)."""
    limits: dict[str, float] = {}
    words: str | None = None
    while True:
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
            for extra in extras:
                words = words or (extra.words if isinstance(extra, Allowed) else None)
                for limit in extra.metadata if isinstance(extra, FieldInfo) else [extra]:
                    limits |= {name: getattr(limit, name) for name in LIMITS if hasattr(limit, name)}
        elif get_origin(kind) in (Union, types.UnionType):
            kind, *others = [member for member in get_args(kind) if member is not type(None)]
            if others:
                return None, {}, words  # no one sentence describes several types
        else:
            return kind, limits, words


def _interval(limits: dict[str, float]) -> str:
    """Return numeric limits as an interval, such as [0, 1)."""
    low = f"({limits['gt']:g}" if "gt" in limits else f"[{limits.get('ge', float('-inf')):g}"
    return f"{low}, " + (f"{limits['le']:g}]" if "le" in limits else f"{limits.get('lt', float('inf')):g})")


def _locate(kind: Any, path: tuple[int | str, ...]) -> tuple[Any, list[str]]:
    """Return the annotation that the error at `path` is about, and the names of the fields that lead there."""
    names: list[str] = []
    for part in path:
        bare, _, _ = read_annotation(kind)
        if _is_model(bare):
            by_alias = {field.alias or name: name for name, field in bare.model_fields.items()}
            if str(part) not in by_alias:
                return bare, names
            kind = get_type_hints(bare, include_extras=True)[by_alias[str(part)]]
            names.append(str(part))
        elif get_origin(bare) is list and isinstance(part, int):
            (kind,) = get_args(bare)
    return kind, names


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
