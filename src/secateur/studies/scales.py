"""How large a study is run: a scale by its name, with `--set field=value` laid over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from secateur.errors import WrongInput, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")


def laid_over(
    scales: Mapping[str, S], name: str, overrides: Sequence[str] | None, fixed: Sequence[str], zero: bool
) -> S:
    """A scale with numbers laid over its fields, those that are `fixed` left alone; `zero` says whether 0 is one."""
    if name not in scales:
        raise unknown("scale", name, scales)
    full = scales["full"]
    known = {each.name: getattr(full, each.name) for each in fields(full) if each.name not in fixed}
    given: dict[str, Any] = {}
    for text in overrides or []:
        key, found, value = text.partition("=")
        if not found or key not in known:
            raise WrongInput("set", f"{text!r} is not possible in this study; allowed: {', '.join(known)}")
        given[key] = yaml.safe_load(value)
        whole = not isinstance(known[key], float | bool)
        right = isinstance(given[key], int if whole else float | int)
        if not right or given[key] < 0 or (given[key] == 0 and not zero):
            least = "from 0" if zero else "above 0"
            raise WrongInput("set", f"{text!r} is not allowed; give a {'whole ' if whole else ''}number {least}")
    return replace(scales[name], **given)


def plain(value: Any) -> Any:
    """As YAML has it: tuples are lists."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value
