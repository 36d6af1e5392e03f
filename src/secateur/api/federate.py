"""`secateur.federate(...)`: federated training of any nn.Module on any tensors, with pruning, defenses and attacks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from secateur.api import Examples, Printable, read_batch
from secateur.config import base_pruning as read_base
from secateur.config import choice, defense_of_clients, inversion
from secateur.data.dataset import Dataset
from secateur.data.partition import iid
from secateur.defenses.uploads import protection_of
from secateur.errors import WrongInput
from secateur.experiments.federate_observers import ObservedFederation, attackers, check_attackers
from secateur.federated.attacks.knowledge import knowledge_of
from secateur.federated.attacks.observer import ClientView, Every, Observer
from secateur.federated.attacks.schedule import AttackSchedule, Who
from secateur.federated.augment import crop_and_flip
from secateur.federated.build import rates_of, submodel_protection
from secateur.federated.checkpoint import FederationLog, Resumable
from secateur.federated.client_training import LocalTraining, check_network, turn_caution
from secateur.federated.faults import Faults
from secateur.federated.federation import Federation
from secateur.federated.result_rows import RecordedFederation, labels_of, record_rounds
from secateur.federated.spec import Adam, FederationSpec, SubmodelSpec
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import SubmodelFederation, SubmodelView
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.membership_attacks import Asking
from secateur.interfaces import Params
from secateur.progress import progress
from secateur.runs.rows import Row
from secateur.seeding import derive

log = logging.getLogger(__name__)

Spec = TypeVar("Spec", FederationSpec, SubmodelSpec)


@dataclass(frozen=True, eq=False)
class Federated(Printable):
    """Result of a federation: the server's model, the rows and the figures."""

    kind = "federate"
    state: Params  # the server's model, a state_dict: exactly 0 where it is pruned
    rows: list[Row]
    figures: list[dict[str, Any]]


def federate(
    model: nn.Module,
    train: Examples,
    test: Examples | None = None,
    *,
    clients: int | Sequence[Tensor] = 10,
    per_round: int | None = None,
    rounds: int = 100,
    local: LocalTraining | Adam | None = None,
    base_pruning: str = "none",
    submodels: str | None = None,
    defense: str = "none",
    attack: str | Sequence[str] = (),
    membership: str | Sequence[str] = (),
    attack_every: int | None = None,
    attack_at: Sequence[int] = (),
    attack_clients: int | Literal["all"] | Sequence[int] = 1,
    attack_history: int = 1,
    labels: Literal["inferred", "oracle"] = "inferred",
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    faults: Faults | None = None,
    observers: Sequence[tuple[int, Callable[[ClientView], None]]] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
    name: str = "model",
    **terms: Any,
) -> Federated:
    """Train a copy of `model` by federated averaging, and measure how much each client's update reveals.

    With `submodels`, clients train parts of the model. The `large_clients` (2) with most data train all of it, the
    others `client_widths` (.5,) of its channels. `local` is then an Adam(), and `attack` is a membership attack such
    as "yeom". `terms` are then fields of federated.spec.SubmodelSpec. `augment=True` trains on crops and
    flips.

    Args:
        model: The network; it is copied.
        train: Inputs and labels of all clients.
        test: Inputs and labels for the evaluation.
        clients: The number of clients that share the training rows equally, or the rows of each client.
        per_round: The number of clients in a round; None: at most 10.
        rounds: The number of rounds.
        local: The clients' training.
        base_pruning: The federation's pruning, as in `secateur list`.
        submodels: A channel rule such as "mapp-fl".
        defense: The clients' defense, as in `secateur list`.
        attack: Inversion attacks on updates; the inputs must be pictures.
        membership: Membership attacks (yeom, lira, rmia) on the same clients; non-members are the examples of `test`.
        attack_every: Attack every so many rounds; None: in the last round only.
        attack_at: The rounds to attack, instead of `attack_every`.
        attack_clients: The number of attacked clients in a round, "all", or a list of clients.
        attack_history: The number of a client's last rounds that an attack uses.
        labels: "oracle" if the attacker knows the labels, else they are inferred.
        mean: By channel, subtracted from pixels in [0, 1] to make the inputs.
        std: By channel, the divisor after that.
        faults: Lost, late and damaged updates.
        observers: Pairs (every, function). The function is called every so many rounds, once a client. Its argument
            holds the server's view of the client and the truth.
        seed: The seed of all random draws.
        device: The device to train on.
        name: The model's name in the rows.
        terms: Further fields of federated.spec.FederationSpec, such as averaging="weighted", broadcast="dense",
            method="fedsgd", server_momentum=.9, evaluate_every=50.
    """
    settings: dict[str, Any]
    data = _dataset(train, test, model, mean, std)
    shares = iid(data.train_size, clients, derive(seed, "partition")) if isinstance(clients, int) else list(clients)
    if submodels is not None:
        if base_pruning != "none" or membership:
            raise WrongInput("submodels", "cannot be combined with base_pruning or membership; use attack='yeom'")
        attacks = [attack] if isinstance(attack, str) else attack
        settings = {"shares": shares, "rounds": rounds, "per_round": per_round, "faults": faults or Faults()}
        others: dict[str, Any] = {"defense": defense, "attacks": attacks, "observers": observers, "seed": seed}
        others |= {"device": torch.device(device), "name": name}
        return _federate_submodels(model, data, submodels, local, settings, **others, **terms)
    if isinstance(local, Adam):
        raise WrongInput("local", "Adam is for submodels; use a federated.client_training.LocalTraining")
    base, client_defense = read_base(base_pruning), defense_of_clients(defense)
    settings = {"shares": shares, "rounds": rounds, "base": base.make()}
    settings |= {"local": local or LocalTraining(), "faults": faults or Faults()}
    settings |= {"per_round": min(10, len(shares)) if per_round is None else per_round}
    spec = spec_of(FederationSpec, settings | protection_of(client_defense), terms)
    net, device = copy.deepcopy(model).to(device), torch.device(device)
    check_network(net, spec.custom_turn, data.inputs)
    if (warning := turn_caution(net, spec.custom_turn)) is not None:
        log.warning("%s: %s", client_defense, warning)
    inversions = [inversion(attack_name) for attack_name in ([attack] if isinstance(attack, str) else attack)]
    row_labels = labels_of(name, data.name, seed, base, client_defense, spec)
    story = FederationLog()
    who: Who = attack_clients if isinstance(attack_clients, int | str) else tuple(attack_clients)
    orders = AttackSchedule(attack_every or rounds, tuple(attack_at), who, attack_history)
    knowledge = knowledge_of(net, data, spec, device) if inversions else None
    asked = [membership] if isinstance(membership, str) else list(membership)
    check_attackers(orders, inversions, asked, knowledge, data, spec, seed)
    watching: list[Observer] = [Every(every, function) for every, function in observers]
    watched = ObservedFederation(net, data, spec, row_labels, story, device)
    watching += attackers(watched, orders, inversions, asked, knowledge, tells_labels=labels == "oracle")
    federation = Federation(net, data, spec, seed, device, observers=watching)
    recorded = RecordedFederation(federation, row_labels, story, watching)
    return _run(federation, recorded, f"{base}, {client_defense}", rounds)


def _dataset(
    train: Examples, test: Examples | None, model: nn.Module, mean: Sequence[float], std: Sequence[float]
) -> Dataset:
    """Return the data set: the examples of all clients first, then the test examples."""
    parts = [read_batch("train", train), *([] if test is None else [read_batch("test", test)])]
    inputs, labels = (torch.cat([part[i].detach().cpu() for part in parts]) for i in range(2))
    with torch.no_grad():
        first = next(model.parameters())
        classes = copy.deepcopy(model).eval()(inputs[:2].to(first)).shape[-1]
    return Dataset("given", inputs.float(), labels, classes, parts[0].size, mean=tuple(mean), std=tuple(std))


def spec_of(kind: type[Spec], settings: dict[str, Any], terms: dict[str, Any]) -> Spec:
    """Return a specification of settings and of the user's further terms; refuse terms that are no field of it."""
    allowed = [field.name for field in fields(kind) if field.name not in settings]
    for name in terms:
        if name not in allowed:
            raise WrongInput(name, f"is not a parameter of federate; further ones here: {', '.join(allowed)}")
    return kind(**settings, **terms)


def _federate_submodels(
    model: nn.Module,
    data: Dataset,
    submodels: str,
    local: Any,
    settings: dict[str, Any],
    *,
    defense: str,
    attacks: Sequence[str],
    observers: Sequence[tuple[int, Callable[[SubmodelView], None]]],
    seed: int,
    device: torch.device,
    name: str,
    large_clients: int = 2,
    client_widths: Sequence[float] = (0.5,),
    augment: bool = False,
    **terms: Any,
) -> Federated:
    """Train sub-models, and return the server's model with all rows and figures.

    `settings` and `terms` are fields of federated.spec.SubmodelSpec; the user named the `terms`.
    """
    if not isinstance(local, Adam | None):
        raise WrongInput("local", "must be a federated.spec.Adam for sub-models")
    local = local or Adam()
    if augment:
        local = replace(local, augment=crop_and_flip(data))
    rule, client_defense = choice("submodel", submodels), defense_of_clients(defense)
    rates = rates_of(settings["shares"], large_clients, client_widths)
    settings = settings | {"rule": rule.make(), "rates": rates, "local": local}
    spec = spec_of(SubmodelSpec, settings | submodel_protection(client_defense), terms)
    story, labels = FederationLog(), labels_of(name, data.name, seed, rule, client_defense, spec)
    memberships, asking = [choice("attack", attack) for attack in attacks], Asking(size=spec.test_batch)
    watching: list[Observer] = [Every(every, function) for every, function in observers]
    if memberships:
        watching.append(ExposureObserver(memberships, data, labels, story, spec, asking=asking, device=device))
    federation = SubmodelFederation(copy.deepcopy(model), data, spec, seed, device, observers=watching)
    training = LocalBaseline(federation) if spec.rule.alone else federation
    recorded = RecordedFederation(federation, labels, story, watching)
    return _run(training, recorded, f"{rule}, {client_defense}", spec.rounds)


def _run(training: Resumable, recorded: RecordedFederation, title: str, rounds: int) -> Federated:
    """Run all rounds of a federation, and return its model, rows and figures."""
    with progress(title, rounds, rate=True, unit="rounds") as advance:
        record = record_rounds([recorded], advance, title)
        for done in training.rounds():
            record(done)
    return Federated(training.model(), recorded.log.rows, recorded.log.figures)
