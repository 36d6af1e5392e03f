"""YAML values of fields, and pydantic's validation errors in the sentences of `secateur.errors`."""

from __future__ import annotations

import reprlib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from secateur.errors import WrongInput, describe_interval, describe_wholes, unknown

LIMITS = ("ge", "gt", "le", "lt")
DEPTH = 20  # levels of a run file
SIZE = 2**20  # characters of a run file
MOST = 10**12  # of a whole number: no torch tensor has as many rows
VALUES = 100_000  # of a run file, aliases written out
_SHORT = reprlib.Repr()  # Python 3.11 takes no arguments here
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120
SIMPLE = {bool: "must be true or false", str: "must be a word", Path: "must be a path", dict: "must be fields"}


class Allowed(NamedTuple):
    """Annotation of a field: its allowed values in words, for error messages."""

    words: str


class _Loader(yaml.SafeLoader):
    """Loader of YAML that may come from somebody else: bounded in depth and in values, no repeated key.

    A few hundred bytes of nested aliases stand for gigabytes. A repeated key would silently hide the first one.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}  # by node: its values, those behind aliases counted each time

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > DEPTH:
            raise yaml.YAMLError(f"more than {DEPTH} levels are not allowed")
        is_alias = self.check_event(yaml.AliasEvent)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not is_alias:
            pairs = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = [part for pair in pairs for part in (pair if isinstance(pair, tuple) else (pair,))]
            self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in parts)
        elif id(node) not in self._sizes:
            raise yaml.YAMLError("an alias to its own value is not allowed")
        if self._sizes[id(node)] > VALUES:
            raise yaml.YAMLError(f"more than {VALUES} values are not allowed")
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"{twice!r} is there twice")
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text; raise yaml.YAMLError for any that cannot be read safely.

    Example:
        >>> load_yaml("sparsity: [.5, .7]")
        {'sparsity': [0.5, 0.7]}
    """
    if len(text) > SIZE:
        raise yaml.YAMLError(f"more than {SIZE} characters are not allowed")
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # of 2001-13-45, !!int abc, !!int ""
        raise yaml.YAMLError(f"a value cannot be read ({error})") from None


def yaml_value(field: str, text: str) -> Any:
    """Return the value of a text as YAML; `field` is named in the error."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        raise WrongInput(field, f"{shorten(text)} is not readable; write a number, a word or a YAML list") from None


def shorten(value: Any) -> str:
    """Return a value as Python writes it, at most a line of it."""
    return _SHORT.repr(value)


def explain(error: ValidationError, prefix: str = "", kind: Any = None) -> WrongInput:
    """Return pydantic's first error as one sentence that names the field and the allowed values.

    An error that a validator raised by accident is raised again: it is a fault of the code, not of the value.

    Args:
        error: The error of pydantic.
        prefix: Name of the value that was validated; fields inside it follow after a dot.
        kind: The expected type: a model, or the annotation of the one value that `prefix` names.
    """
    first = error.errors()[0]
    if isinstance(fault := first.get("ctx", {}).get("error"), Exception):
        raise fault
    inner, names = _locate(kind, first["loc"])
    field = ".".join([prefix, *names] if prefix else names)
    if first["type"] == "extra_forbidden":
        extra = str(first["loc"][-1])
        known = [f.alias or name for name, f in inner.model_fields.items()] if _is_model(inner) else []
        return WrongInput(".".join([field, extra] if field else [extra]), unknown("field", extra, known).message)
    wanted = describe_allowed(inner) or first["msg"][:1].lower() + first["msg"][1:]
    problem = "is missing" if first["type"] == "missing" else f"{shorten(first['input'])} is not allowed"
    return WrongInput(field, f"{problem}; {wanted}")


def describe_allowed(kind: Any) -> str | None:
    """Return the values that an annotation allows, in words; None if there are no words for the type.

    Example:
        >>> from pydantic import Field
        >>> describe_allowed(Annotated[float, Field(ge=0, lt=1)]), describe_allowed(Literal["eval", "batch"])
        ('must be in [0, 1)', 'allowed: eval, batch')
        >>> describe_allowed(Annotated[int, Field(ge=1)] | None), describe_allowed(float)
        ('must be a whole number, at least 1', 'must be a number')
    """
    bare, limits, words = read_annotation(kind)
    if words is not None:
        return words
    if get_origin(bare) is Literal:
        return f"allowed: {', '.join(map(str, get_args(bare)))}"
    if get_origin(bare) is list:
        return "; ".join(filter(None, ["use at least one value", describe_allowed(get_args(bare)[0])]))
    if bare is int:
        most = int(limits["le"]) if limits.get("le", MOST) != MOST else None
        return describe_wholes(int(limits["ge"]), most=most) if "ge" in limits else "must be a whole number"
    if bare is float:
        return describe_interval(_interval(limits)) if limits else "must be a number"
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
