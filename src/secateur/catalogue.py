"""`@method` makes a method known; everything that lists methods reads it from here.

A package (or module) listed in `PACKAGES` is imported whole the first time its kind is asked for, so that adding a
method touches its own file and its test and nothing else. No module in it may import Triton; kernels are in gpu/.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from secateur.errors import WrongInput, unknown

PACKAGES = {
    "attack": "secateur.attacks.membership",
    "inversion": "secateur.attacks.inversion",
    "defense": "secateur.defenses",
    "pruner": "secateur.pruning",
    "base-pruning": "secateur.federated.base_pruning",
    "submodel": "secateur.federated.submodels.rules",
    "model": "secateur.models",
    "dataset": "secateur.data",
    "study": "secateur.studies",
}
OTHERS = {  # attacks of the other kind, which a user may well ask for
    "attack": ("inversion", "attacks updates; use secateur invert"),
    "inversion": ("attack", "attacks trained models; use secateur audit, or --membership in secateur federate"),
}
PAPERS = ("samia_ppb", "dgp", "priprune", "mapp_fl")

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Method:
    """One method: what makes it, and what a list says of it."""

    kind: str
    name: str
    paper: str
    make: Callable[..., Any]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """The hyper-parameters and their defaults: a dataclass's fields or a function's keywords."""
        if dataclasses.is_dataclass(self.make):
            return {f.name: f.default for f in dataclasses.fields(self.make) if f.init}
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    def __call__(self, **arguments: Any) -> Any:
        """Make it, refusing hyper-parameters that it does not have."""
        for name in arguments:
            if name not in self.defaults:
                raise unknown(f"{self.kind} {self.name}", name, self.defaults or ["(no hyper-parameters)"])
        return self.make(**arguments)

    def describe(self) -> dict[str, Any]:
        """What `secateur list` prints."""
        row = {"name": self.name, "summary": self.summary, "paper": self.paper, "defaults": self.defaults}
        return row | {key: value() if callable(value) else value for key, value in self.info.items()}


_known: dict[str, dict[str, Method]] = {kind: {} for kind in PACKAGES}
_loaded: set[str] = set()


def method(kind: str, name: str, paper: str, **info: Any) -> Callable[[T], T]:
    """Make a function or a dataclass known under `name`; `info` is shown by `list` (callables are called then)."""
    if kind not in _known:
        raise unknown("kind", kind, _known)

    def register(make: T) -> T:
        entry = Method(kind, name, paper, make, info)
        earlier = _known[kind].get(name)
        if earlier is not None and earlier.make.__module__ != make.__module__:
            raise WrongInput(kind, f"{name!r} is defined in {earlier.make.__module__} and in {make.__module__}")
        _known[kind][name] = entry
        return make

    return register


def methods(kind: str) -> dict[str, Method]:
    """All methods of a kind by name, in alphabetical order."""
    if kind not in _known:
        raise unknown("kind", kind, _known)
    if kind not in _loaded:
        package = importlib.import_module(PACKAGES[kind])
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{PACKAGES[kind]}."):
            importlib.import_module(module.name)
        _loaded.add(kind)
    return dict(sorted(_known[kind].items()))


def find(kind: str, name: str) -> Method:
    """One method, or an error that names the nearest known one."""
    known = methods(kind)
    if name not in known:
        other = OTHERS.get(kind)
        if other and name in methods(other[0]):
            raise WrongInput("attack", f"{name} {other[1]}")
        raise unknown(kind, name, known)
    return known[name]


@dataclass(frozen=True)
class Choice:
    """A method by name with the hyper-parameters that differ from its defaults; as text `name:key=value:key=value`."""

    kind: str
    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def method(self) -> Method:
        """The catalogue's entry."""
        return find(self.kind, self.name)

    def make(self) -> Any:
        """The method itself."""
        return self.method(**dict(self.arguments))

    def __str__(self) -> str:
        values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in self.arguments)
        return ":".join([self.name, *(f"{key}={value}" for key, value in values)])


def split(text: str) -> list[str]:
    """A choice's text as its name and its `key=value` parts.

    Example:
        >>> split("ggl:generator=module:function:iterations=3")
        ['ggl', 'generator=module:function', 'iterations=3']
    """
    return re.split(r":(?=[^:=]*=)", text.strip())


@dataclass(frozen=True)
class Defense:
    """One defense, or several that act together: `ppb+adv`."""

    parts: tuple[Choice, ...]

    def acting_on(self, place: str) -> Choice | None:
        """The part that acts on a place, if there is one."""
        return next((part for part in self.parts if part.method.info["acts_on"] == place), None)

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


def users_own(field: str, reference: str) -> Callable[..., Any]:
    """The user's function that `module:function` names; the module may lie in the current folder."""
    module, _, function = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a user's file never hides an installed module
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the user's own code raises
        reason = f"{type(error).__name__}: {error}"
        raise WrongInput(field, f"{reference!r} cannot be imported ({reason}); give module:function") from error
    if not inspect.isroutine(found) and not inspect.isclass(found):
        raise WrongInput(field, f"{reference} is {type(found).__name__}; it must be a function")
    return found


def name_of(choice: str) -> str:
    """The name of a method that is written with its settings.

    Example:
        >>> name_of("samia:epochs=4")
        'samia'
    """
    return choice.partition(":")[0]
