"""Catalogue of methods: `@method` registers a method, and every list of methods is read from this module.

The first request for a kind imports all modules of its package in `PACKAGES`. A new method therefore changes only its
file and its test. No module in these packages may import Triton; kernels are in gpu/.
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
FIELDS = {"inversion": "attack", "base-pruning": "base_pruning", "submodel": "submodels"}  # names in flags and files
OTHER_KIND = {  # `--attack` takes one of two kinds, and users easily confuse them
    "attack": (
        "inversion",
        "is an inversion attack, and a membership attack is expected here; "
        "inversion attacks are for secateur invert, and for --attack of secateur federate",
    ),
    "inversion": (
        "attack",
        "is a membership attack, and an inversion attack is expected here; "
        "membership attacks are for secateur audit, and in federate for --membership or for --attack with --submodels",
    ),
}
PAPERS = ("samia_ppb", "dgp", "priprune", "mapp_fl")

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Method:
    """Catalogue entry of a method: its factory, and the facts that a list shows."""

    kind: str
    name: str
    paper: str
    make: Callable[..., Any]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first line of the factory's docstring."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """The hyper-parameters and their defaults: a dataclass's fields or a function's keywords."""
        if dataclasses.is_dataclass(self.make):
            return {f.name: f.default for f in dataclasses.fields(self.make) if f.init}
        parameters = inspect.signature(self.make).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}

    def __call__(self, **arguments: Any) -> Any:
        """Create the method; raise WrongInput for unknown hyper-parameters."""
        for name in arguments:
            if name not in self.defaults:
                raise unknown(f"{self.kind} {self.name}", name, self.defaults or ["(no hyper-parameters)"])
        return self.make(**arguments)

    def describe(self) -> dict[str, Any]:
        """Return the row that `secateur list` prints."""
        row = {"name": self.name, "summary": self.summary, "paper": self.paper, "defaults": self.defaults}
        return row | {key: value() if callable(value) else value for key, value in self.info.items()}


_known: dict[str, dict[str, Method]] = {kind: {} for kind in PACKAGES}
_loaded: set[str] = set()


def method(kind: str, name: str, paper: str, **info: Any) -> Callable[[T], T]:
    """Register a function or a dataclass under `name`.

    `secateur list` shows `info`; its callables are called at that time.
    """
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
    """Return all methods of a kind by name, in alphabetical order."""
    if kind not in _known:
        raise unknown("kind", kind, _known)
    if kind not in _loaded:
        package = importlib.import_module(PACKAGES[kind])
        for module in pkgutil.walk_packages(getattr(package, "__path__", []), f"{PACKAGES[kind]}."):
            importlib.import_module(module.name)
        _loaded.add(kind)
    return dict(sorted(_known[kind].items()))


def find(kind: str, name: str) -> Method:
    """Return a method by name; the error for an unknown name suggests the nearest known one."""
    known = methods(kind)
    if name not in known:
        check_attack_kind(FIELDS.get(kind, kind), kind, name)
        raise unknown(FIELDS.get(kind, kind), name, known)
    return known[name]


def check_attack_kind(field: str, kind: str, name: str) -> None:
    """Refuse an attack of the other kind: a membership attack (`attack`), or an attack on updates (`inversion`)."""
    other, sentence = OTHER_KIND.get(kind, ("", ""))
    if other and name in methods(other):
        raise WrongInput(field, f"{name} {sentence}")


@dataclass(frozen=True)
class Choice:
    """Method name with the hyper-parameters that differ from the defaults; as text `name:key=value:key=value`."""

    kind: str
    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def method(self) -> Method:
        """The entry in the catalogue."""
        return find(self.kind, self.name)

    def make(self) -> Any:
        """Create the method with these hyper-parameters."""
        return self.method(**dict(self.arguments))

    def __str__(self) -> str:
        values = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in self.arguments)
        return ":".join([self.name, *(f"{key}={value}" for key, value in values)])


def split(text: str) -> list[str]:
    """Split the text of a choice into its name and its `key=value` parts.

    Example:
        >>> split("ggl:generator=module:function:iterations=3")
        ['ggl', 'generator=module:function', 'iterations=3']
    """
    return re.split(r":(?=[^:=]*=)", text.strip())


@dataclass(frozen=True)
class Joined:
    """Choices that are joined by `+`."""

    parts: tuple[Choice, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


@dataclass(frozen=True)
class Compressor(Joined):
    """Compressor of one part, or of two in a row: `l1-structured+int8`."""

    @property
    def uses_sparsity(self) -> bool:
        """True if a part removes a share of the network."""
        return any(getattr(part.method.make, "uses_sparsity", True) for part in self.parts)

    @property
    def finetunes(self) -> bool:
        """True if the model is fine-tuned; int8 alone leaves nothing to tune."""
        return not hasattr(self.parts[0].method.make, "convert")

    @property
    def only_masks(self) -> bool:
        """True if the network keeps its form: no part reshapes or converts it."""
        return not any(hasattr(part.method.make, act) for part in self.parts for act in ("reshape", "convert"))

    def find_part(self, protocol: type) -> Choice | None:
        """Return the part whose method follows a protocol, or None."""
        return next((part for part in self.parts if isinstance(part.make(), protocol)), None)


@dataclass(frozen=True)
class Defense(Joined):
    """Defense of one part, or of several that act together: `ppb+adv`."""

    def find_part(self, target: str) -> Choice | None:
        """Return the part whose `acts_on` equals `target`, or None."""
        return next((part for part in self.parts if part.method.info["acts_on"] == target), None)


def is_reference(text: str) -> bool:
    """Return True if a text is `module:function`.

    Example:
        >>> is_reference("my.models:net"), is_reference("folder/a:b"), is_reference("digits")
        (True, False, False)
    """
    module, colon, function = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), function])


def users_own(field: str, reference: str) -> Callable[..., Any]:
    """Import the user's function named by `module:function`; the module may be in the current folder."""
    module, _, function = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a user's file never hides an installed module
    try:
        target = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's code may raise anything
        reason = f"{type(error).__name__}: {error}"
        absent = isinstance(error, ModuleNotFoundError) and error.name == module
        advice = f"start secateur in the folder of {module}.py" if absent else "use module:function"
        raise WrongInput(field, f"{reference!r} cannot be imported ({reason}); {advice}") from error
    if not inspect.isroutine(target) and not inspect.isclass(target):
        raise WrongInput(field, f"{reference} is {type(target).__name__}; it must be a function")
    return target


def name_of(choice: str) -> str:
    """Return the method name of a choice that is written with its settings.

    Example:
        >>> name_of("samia:epochs=4")
        'samia'
    """
    return choice.partition(":")[0]
