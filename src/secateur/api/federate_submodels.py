"""`secateur.federate(..., submodels=...)`: federated training of sub-models of any nn.Module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from secateur.config import choice, defense_of_clients
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.federated.attacks.observer import Every, Observer
from secateur.federated.augment import crop_and_flip
from secateur.federated.build import rates_of, submodel_protection
from secateur.federated.checkpoint import FederationLog
from secateur.federated.faults import Faults
from secateur.federated.result_rows import RecordedFederation, labels_of, record_rounds
from secateur.federated.spec import Adam, FederationSpec, SubmodelSpec
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import SubmodelFederation, SubmodelView
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.membership_attacks import Asking
from secateur.interfaces import Params
from secateur.progress import progress

Spec = TypeVar("Spec", FederationSpec, SubmodelSpec)


def spec_of(kind: type[Spec], settings: dict[str, Any], terms: dict[str, Any]) -> Spec:
    """Return a specification of settings and of the user's further terms; refuse terms that are no field of it."""
    allowed = [field.name for field in fields(kind) if field.name not in settings]
    for name in terms:
        if name not in allowed:
            raise WrongInput(name, f"is not a parameter of federate; further ones here: {', '.join(allowed)}")
    return kind(**settings, **terms)


def federate_submodels(
    model: nn.Module,
    data: Dataset,
    shares: Sequence[Tensor],
    submodels: str,
    *,
    rounds: int,
    per_round: int | None,
    local: Any,
    defense: str,
    attacks: Sequence[str],
    faults: Faults | None,
    observers: Sequence[tuple[int, Callable[[SubmodelView], None]]],
    seed: int,
    device: torch.device,
    name: str,
    large_clients: int = 2,
    client_widths: Sequence[float] = (0.5,),
    augment: bool = False,
    **terms: Any,
) -> tuple[Params, FederationLog]:
    """Return the server's model and all rows and figures; `terms` are further fields of federated.spec.SubmodelSpec."""
    if not isinstance(local, Adam | None):
        raise WrongInput("local", "sub-models are trained by federated.spec.Adam(...)")
    local = local or Adam()
    if augment:
        local = replace(local, augment=crop_and_flip(data))
    rule, client_defense = choice("submodel", submodels), defense_of_clients(defense)
    settings = {"shares": shares, "rule": rule.make(), "rates": rates_of(shares, large_clients, client_widths)}
    settings |= {"rounds": rounds, "per_round": per_round, "local": local, "faults": faults or Faults()}
    federation_terms = spec_of(SubmodelSpec, settings | submodel_protection(client_defense), terms)
    story = FederationLog()
    labels = labels_of(name, data.name, seed, rule, client_defense, federation_terms)
    memberships = [choice("attack", attack) for attack in attacks]
    asking = Asking(size=federation_terms.test_batch)
    watching: list[Observer] = [Every(every, function) for every, function in observers]
    if memberships:
        watching.append(
            ExposureObserver(memberships, data, labels, story, federation_terms, asking=asking, device=device)
        )
    federation = SubmodelFederation(model, data, federation_terms, seed, device, observers=watching)
    followed = LocalBaseline(federation) if federation_terms.rule.alone else federation
    with progress(f"{rule}, {client_defense}", rounds, rate=True) as advance:
        recorded = [RecordedFederation(federation, labels, story, watching)]
        record = record_rounds(recorded, advance, f"{rule}, {client_defense}")
        for done in followed.rounds():
            record(done)
    return followed.model(), story
