"""Secateur: measurements of the training data that a compressed neural network leaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secateur.api.audit import Report, audit
    from secateur.api.audit_app import AuditedApp, audit_app
    from secateur.api.federate import Federated, federate
    from secateur.api.invert import Inversion, invert
    from secateur.api.recommend import Recommended, recommend
    from secateur.errors import WrongInput
    from secateur.experiments.prune import load_pruned
    from secateur.models.wrap import wrap

__all__ = [
    "AuditedApp",
    "Federated",
    "Inversion",
    "Recommended",
    "Report",
    "WrongInput",
    "audit",
    "audit_app",
    "federate",
    "invert",
    "load_pruned",
    "recommend",
    "wrap",
]
_MODULES = {
    "AuditedApp": "api.audit_app",
    "Federated": "api.federate",
    "Inversion": "api.invert",
    "Recommended": "api.recommend",
    "Report": "api.audit",
    "WrongInput": "errors",
    "audit": "api.audit",
    "audit_app": "api.audit_app",
    "federate": "api.federate",
    "invert": "api.invert",
    "load_pruned": "experiments.prune",
    "recommend": "api.recommend",
    "wrap": "models.wrap",
}


def __dir__() -> list[str]:
    """Return the public names, imported or not, and the names of every module."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that the command line starts fast."""
    if name not in _MODULES:
        raise AttributeError(f"module 'secateur' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"secateur.{_MODULES[name]}"), name)
