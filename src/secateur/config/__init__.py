"""Schema of run files: fields, allowed values, and one clear sentence for each error.

This package is the only importer of pydantic. A run file is YAML, and the flags of the command line override its
fields, so that both share one schema.
"""

from __future__ import annotations

from secateur.config.audit import Audit, ModelRun, Protocol, Prune
from secateur.config.audit_app import AuditApp
from secateur.config.base import Common, Fields, Limits, PolicyFile, PrivacyClaim, Training, flags_of
from secateur.config.federate import Federate
from secateur.config.files import dump, dump_recipes, list_code, parse_fields, put, read, read_limits
from secateur.config.invert import Invert
from secateur.config.methods import (
    FEDERATED,
    TRAINED,
    UPDATES,
    base_pruning,
    check_together,
    choice,
    compressor,
    defense,
    defense_of_clients,
    defense_of_models,
    defense_of_updates,
    inversion,
)
from secateur.config.recommend import Recommend, RecommendFederation, RecommendUpdates, SearchFields, schema_of
from secateur.config.sweep import Reproduce, Sweep, Work

__all__ = [
    "FEDERATED",
    "TRAINED",
    "UPDATES",
    "Audit",
    "AuditApp",
    "Common",
    "Federate",
    "Fields",
    "Invert",
    "Limits",
    "ModelRun",
    "PolicyFile",
    "PrivacyClaim",
    "Protocol",
    "Prune",
    "Recommend",
    "RecommendFederation",
    "RecommendUpdates",
    "Reproduce",
    "SearchFields",
    "Sweep",
    "Training",
    "Work",
    "base_pruning",
    "check_together",
    "choice",
    "compressor",
    "defense",
    "defense_of_clients",
    "defense_of_models",
    "defense_of_updates",
    "dump",
    "dump_recipes",
    "flags_of",
    "inversion",
    "list_code",
    "parse_fields",
    "put",
    "read",
    "read_limits",
    "schema_of",
]
