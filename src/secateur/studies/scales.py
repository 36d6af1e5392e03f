"""How large a study is run: a scale by its name, with `--set field=value` laid over it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from secateur.config.wording import plain as yaml_value
from secateur.errors import WrongInput, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")


def laid_over(
    scales: Mapping[str, S], name: str, overrides: Sequence[str] | None, fixed: Sequence[str], zero: Sequence[str] = ()
) -> S:
    """A scale with numbers laid over its fields, those that are `fixed` left alone; only those of `zero` may be 0."""
    if name not in scales:
        raise unknown("scale", name, scales)
    full = scales["full"]
    known = {each.name: getattr(full, each.name) for each in fields(full) if each.name not in fixed}
    given: dict[str, Any] = {}
    for text in overrides or []:
        key, found, value = text.partition("=")
        if not found or key not in known:
            raise WrongInput("set", f"{text!r} is not possible in this study; allowed: {', '.join(known)}")
        given[key] = _read(text, value, known[key], 0 if key in zero else 1)
    return replace(scales[name], **given)


def _read(text: str, value: str, like: Any, least: int) -> bool | int | float:
    """The value of a field that is like another: true or false, a number above 0, or a whole one from `least`."""
    if isinstance(like, float):
        with suppress(ValueError):
            if 0 < (number := float(value)) < math.inf:  # YAML takes 1e-2 for a word
                return number
        raise WrongInput("set", f"{text!r} is not allowed; give a number above 0")
    found = yaml_value("set", value)
    if isinstance(like, bool) and isinstance(found, bool):
        return found
    if not isinstance(like, bool) and type(found) is int and found >= least:
        return found
    wanted = "true or false" if isinstance(like, bool) else f"a whole number from {least}"
    raise WrongInput("set", f"{text!r} is not allowed; give {wanted}")


def plain(value: Any) -> Any:
    """As YAML has it: tuples are lists."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value
