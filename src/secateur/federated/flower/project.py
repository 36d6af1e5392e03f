"""A Flower app as its author wrote it: a folder whose pyproject.toml names two components and their settings."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from secateur.errors import WrongInput, unknown

PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")  # as `flwr run --run-config` takes them
SKIPPED = {".git", ".venv", "__pycache__", "node_modules"}


@dataclass(frozen=True)
class AppProject:
    """A Flower app in a folder, and the settings that it is run with."""

    folder: Path
    name: str
    client: str  # module:attribute
    server: str
    config: Mapping[str, Any]  # flat, as an app reads it from its context

    def load_client(self) -> ClientApp:
        """Return the app of the clients."""
        return self._load(self.client, ClientApp)  # type: ignore[no-any-return]

    def load_server(self) -> ServerApp:
        """Return the app of the server."""
        return self._load(self.server, ServerApp)  # type: ignore[no-any-return]

    def _load(self, reference: str, kind: type) -> Any:
        """Import a component; refuse one that cannot be imported, or that is none."""
        self.add_to_path()
        module, _, names = reference.partition(":")
        try:
            component: Any = importlib.import_module(module)
            for name in names.split("."):
                component = getattr(component, name)
        except Exception as error:  # whatever the app's own code raises
            problem = f"{reference} of {self.folder} cannot be imported ({type(error).__name__}: {error})"
            raise WrongInput("app", f"{problem}; install what the app needs beside secateur") from error
        if not isinstance(component, kind):
            raise WrongInput("app", f"{reference} is {type(component).__name__}; must be a {kind.__name__} of Flower")
        return component

    def add_to_path(self) -> None:
        """Let this process, and those that it starts, import the app's modules."""
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))

    @property
    def key(self) -> dict[str, Any]:
        """The content that a result depends on: the settings, and the hash of all code in the folder."""
        files = [*self.folder.rglob("*.py"), self.folder / "pyproject.toml"]
        digest = hashlib.sha256()
        for file in sorted(file for file in files if not SKIPPED & set(file.relative_to(self.folder).parts)):
            digest.update(f"{file.relative_to(self.folder)}\0".encode() + file.read_bytes() + b"\0")
        return {"app": self.name, "code": digest.hexdigest(), "config": dict(self.config)}


def read_project(folder: Path, run_config: str = "") -> AppProject:
    """Return the app in a folder; `run_config` changes settings of it, written as for `flwr run`.

    Refuse a folder without an app, and settings that the app does not have.
    """
    file = folder.expanduser() / "pyproject.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        advice = "name the folder of a Flower app, which has a pyproject.toml"
        raise WrongInput("app", f"{file} cannot be read ({error.strerror}); {advice}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongInput("app", f"{file} is not TOML ({error})") from None
    app = content.get("tool", {}).get("flwr", {}).get("app", {})
    parts = app.get("components", {})
    if not all(isinstance(parts.get(name), str) and ":" in parts[name] for name in ("clientapp", "serverapp")):
        needs = "must name clientapp and serverapp as module:attribute in [tool.flwr.app.components]"
        raise WrongInput("app", f"{file} is of no Flower app; it {needs}")
    config = _flatten(app.get("config", {}))
    for key, value in read_run_config(run_config).items():
        if key not in config:
            raise unknown("run_config", key, config or ["(the app has no settings)"])
        config[key] = value
    root = file.parent.resolve()
    name = str(content.get("project", {}).get("name", root.name))
    return AppProject(root, name, parts["clientapp"], parts["serverapp"], config)


def read_run_config(text: str) -> dict[str, Any]:
    """Return settings of a text such as `batch-size=8 name="a b"`, whose values are those of TOML.

    Example:
        >>> read_run_config("batch-size=8 lr=0.1 name='a b' fast=true")
        {'batch-size': 8, 'lr': 0.1, 'name': 'a b', 'fast': True}
    """
    pairs = PAIR.findall(text)
    if PAIR.sub("", text).strip():
        raise WrongInput("run_config", f"{text!r} is not readable; write key=value pairs, with spaces between them")
    settings = {}
    for key, value in pairs:
        try:
            settings[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            advice = 'a number, true, false, or a text in quotes such as key="value"'
            raise WrongInput("run_config", f"{key}={value} is not readable; write {advice}") from None
    return settings


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings flat, as Flower does: parts of a name are joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
