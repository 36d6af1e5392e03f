"""Secateur measures what a compressed neural network gives away about its training data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from secateur.api.audit import Report, audit
    from secateur.api.federate import Federated, federate
    from secateur.api.invert import Inversion, invert
    from secateur.errors import WrongInput
    from secateur.experiments.prune import load_pruned

__all__ = ["Federated", "Inversion", "Report", "WrongInput", "audit", "federate", "invert", "load_pruned"]
_HOMES = {
    "Federated": "api.federate",
    "Inversion": "api.invert",
    "Report": "api.audit",
    "WrongInput": "errors",
    "audit": "api.audit",
    "federate": "api.federate",
    "invert": "api.invert",
    "load_pruned": "experiments.prune",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that the command line starts at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'secateur' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"secateur.{_HOMES[name]}"), name)
