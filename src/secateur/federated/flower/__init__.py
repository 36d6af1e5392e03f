"""Federations over Flower: defenses as one line in any Flower app, and Secateur's federations, simulated and deployed.

    app = ClientApp(mods=[upload_mod(DualGradientPruning(k1=.05, k2=.75))])

Flower is an extra (pip install 'secateur-audit[flower]'). Importing this package turns off the telemetry of
Flower and Ray, unless the environment sets it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from secateur.errors import require

if TYPE_CHECKING:
    from secateur.federated.flower.agreement import AgreedStrategy
    from secateur.federated.flower.mod import download_mod, upload_mod
    from secateur.federated.flower.partial_models import PrunedStrategy, SubmodelStrategy, network_of
    from secateur.federated.flower.secure_sum import AuditedSum
    from secateur.federated.flower.strategies import AuditedStrategy, Auditor, DecodingStrategy

HOMES = {
    "agreement": ("AgreedStrategy",),
    "mod": ("download_mod", "upload_mod"),
    "partial_models": ("PrunedStrategy", "SubmodelStrategy", "network_of"),
    "secure_sum": ("AuditedSum",),
    "strategies": ("AuditedStrategy", "Auditor", "DecodingStrategy"),
}
__all__ = [
    "AgreedStrategy",
    "AuditedStrategy",
    "AuditedSum",
    "Auditor",
    "DecodingStrategy",
    "PrunedStrategy",
    "SubmodelStrategy",
    "download_mod",
    "network_of",
    "upload_mod",
]

require("flwr", "flower")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
QUIET |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
for _name, _value in QUIET.items():  # flwr reads them at import
    os.environ.setdefault(_name, _value)


def __getattr__(name: str) -> Any:
    """Import lazily, because a deployed client is a new process for every message."""
    for module, names in HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
