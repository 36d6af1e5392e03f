"""Federations inside Flower: defenses as one line in anybody's app, and our own federations, simulated and deployed.

    app = ClientApp(mods=[upload_mod(DualGradientPruning(k1=.05, k2=.75))])

Flower is an extra (pip install 'secateur[flower]'). Importing this package turns off what Flower and Ray report home,
unless the environment says otherwise.
"""

from __future__ import annotations

import os

from secateur.errors import require

require("flwr", "flower")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
QUIET |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
for _name, _value in QUIET.items():  # flwr reads them when it is imported
    os.environ.setdefault(_name, _value)

from secateur.federated.flower.audit import AuditedStrategy, Auditor  # noqa: E402
from secateur.federated.flower.decoding import DecodingStrategy  # noqa: E402
from secateur.federated.flower.mod import upload_mod  # noqa: E402

__all__ = ["AuditedStrategy", "Auditor", "DecodingStrategy", "upload_mod"]
