"""YAML values of fields, and pydantic's validation errors as one clear sentence."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from secateur.errors import WrongInput, unknown

PLAIN = {bool: "give true or false", str: "give a word", Path: "give a path", dict: "give fields and values"}
NUMBERS = {int: "give a whole number", float: "give a number"}
ENDS = {"ge": " from {}", "gt": " above {}", "le": " up to {}", "lt": " up to, not including, {}"}


def plain(field: str, text: str) -> Any:
    """Return the value of a text as YAML; `field` is named in the error."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise WrongInput(field, f"{text!r} is not readable; write a number, a word or a YAML list") from None


def sentence(error: ValidationError, prefix: str = "", kind: Any = None) -> WrongInput:
    """Return pydantic's first error as one sentence that names the field and the allowed values.

    `kind` is the expected type: a model, or the annotation of the one value that `prefix` names.
    """
    first = error.errors()[0]
    inner, where = _at(kind, first["loc"])
    field = ".".join([prefix, *where] if prefix else where)
    if first["type"] == "extra_forbidden":
        extra = str(first["loc"][-1])
        names = [f.alias or name for name, f in inner.model_fields.items()] if _is_model(inner) else []
        return WrongInput(".".join([field, extra] if field else [extra]), unknown("field", extra, names).message)
    if first["type"] == "missing":
        return WrongInput(".".join([*where, str(first["loc"][-1])]), "must be given")
    wanted = allowed(inner) or first["msg"][:1].lower() + first["msg"][1:]
    return WrongInput(field, f"{first['input']!r} is not allowed; {wanted}")


def allowed(kind: Any) -> str | None:
    """Return the values that an annotation allows, in words; None if there are no words for the type.

    Example:
        >>> from pydantic import Field
        >>> allowed(Annotated[float, Field(ge=0, lt=1)]), allowed(Literal["eval", "batch"])
        ('give a number from 0 up to, not including, 1', 'allowed: eval, batch')
        >>> allowed(Annotated[int, Field(ge=1)] | None)
        'give a whole number from 1'
    """
    bare, limits = _bare(kind)
    if limits.words is not None:
        return f"give {limits.words}"
    if get_origin(bare) is Literal:
        return f"allowed: {', '.join(map(str, get_args(bare)))}"
    if get_origin(bare) is list:
        (item,) = get_args(bare)
        item_words = allowed(item)
        return f"{item_words}, or several" if item_words else "give at least one"
    if bare in NUMBERS:
        ends = (ENDS[name].format(f"{limits.ends[name]:g}") for name in ENDS if name in limits.ends)
        return NUMBERS[bare] + "".join(ends)
    if _is_model(bare):
        return f"give fields and values; allowed: {', '.join(bare.model_fields)}"
    return PLAIN.get(bare)


class ValueLimits(NamedTuple):
    """Limits of a type's values, from its annotation."""

    ends: dict[str, float]  # ge, gt, le, lt
    words: str | None  # the description of the field


def _bare(kind: Any) -> tuple[Any, ValueLimits]:
    """Return a type without None and without its annotations, and the limits from these annotations."""
    ends: dict[str, float] = {}
    words: str | None = None
    while True:
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
            for extra in extras:
                words = words or (extra.description if isinstance(extra, FieldInfo) else None)
                for limit in extra.metadata if isinstance(extra, FieldInfo) else [extra]:
                    ends |= {name: getattr(limit, name) for name in ENDS if hasattr(limit, name)}
        elif get_origin(kind) in (Union, types.UnionType):
            kind, *others = [member for member in get_args(kind) if member is not type(None)]
            if others:
                return None, ValueLimits({}, words)  # no one sentence describes several types
        else:
            return kind, ValueLimits(ends, words)


def _at(kind: Any, path: tuple[int | str, ...]) -> tuple[Any, list[str]]:
    """Return the annotation that the error at `path` is about, and the names of the fields that lead there."""
    names: list[str] = []
    for part in path:
        bare, _ = _bare(kind)
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
