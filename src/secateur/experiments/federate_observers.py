"""The attackers of `secateur federate`, as a run file names them, each with the knowledge that it may have.

`observers_of` builds the attackers of a plain federation, `exposer_of` that of a federation over sub-models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from secateur.catalogue import Choice
from secateur.config import Federate, defense_of_clients
from secateur.data.dataset import Dataset, fingerprint
from secateur.defenses.uploads import inner_of
from secateur.errors import WrongInput
from secateur.evaluation.client import caution
from secateur.evaluation.reconstruction import Scoring
from secateur.experiments.invert_targets import build_generator, needs_generator, train_stored
from secateur.federated.attacks.inversion import InversionObserver
from secateur.federated.attacks.knowledge import check_attacks, is_active, knowledge_of
from secateur.federated.attacks.membership import MembershipObserver, check_membership
from secateur.federated.attacks.observer import Observer
from secateur.federated.attacks.schedule import AttackSchedule, check_orders, follows, turns_back
from secateur.federated.checkpoint import FederationLog
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import FederationSpec, SubmodelSpec
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.membership_attacks import Asking
from secateur.gpu.determinism import device_key
from secateur.interfaces import Knowledge
from secateur.metrics.lpips import load_weights as load_lpips
from secateur.runs.folder import Run


class ObservedFederation(NamedTuple):
    """One federation of a run, as its attackers need it."""

    net: nn.Module
    data: Dataset
    terms: FederationSpec
    labels: dict[str, Any]  # of its rows
    log: FederationLog
    device: torch.device

    @property
    def seed(self) -> int:
        """The seed of the federation."""
        return int(self.labels["seed"])


def observers_of(config: Federate, run: Run, watched: ObservedFederation) -> list[Observer]:
    """Return the attackers that a run file names, each with its knowledge."""
    known = _knowledge(config, run, watched) if config.attacks else None
    options: dict[str, Any] = {"tells_labels": config.labels == "oracle", "images": config.images}
    options |= {"scoring": Scoring(load_lpips(config.data_folder))}
    return attackers(watched, orders_of(config), config.attacks, config.membership, known, **options)


def _knowledge(config: Federate, run: Run, watched: ObservedFederation) -> Knowledge:
    """Return the attacker's knowledge; a generator is trained on the test part, which no client has, as a stage."""
    net, data, terms, _, _, device = watched
    known = knowledge_of(net, data, terms, device)
    if not any(map(needs_generator, config.attacks)):
        return known
    public, seed = torch.arange(data.train_size, len(data.inputs)), watched.seed
    depends = {"data": data.key, "rows": fingerprint(public), "device": device_key(device), "threads": config.threads}
    depends |= {"seed": seed, "steps": config.generator_steps, "width": config.generator_width}
    generator = train_stored(run, depends, known, data.batch.take(public), device)
    return replace(known, generator=generator.requires_grad_(False))


def attackers(
    watched: ObservedFederation,
    orders: AttackSchedule,
    attacks: Sequence[Choice],
    membership: Sequence[str],
    known: Knowledge | None,
    **options: Any,
) -> list[Observer]:
    """Return the attacker that inverts updates and the one that asks about members; `options` go to the first."""
    net, data, terms, labels, log, device = watched
    drawn = sampler_of(terms, watched.seed).clients
    kept = orders.plan_memory(terms.rounds, drawn)
    observers: list[Observer] = []
    if known is not None:
        if any(follows(attack.make()) for attack in attacks):
            options["followed"] = orders.plan_memory(terms.rounds, drawn, turns_back(terms))
        notes = filter(None, (caution(defense_of_clients(labels["defense"]), attacks), terms.leak_note))
        options["compress"] = None if terms.upload is None else getattr(inner_of(terms.upload), "compress", None)
        observers.append(
            InversionObserver(attacks, known, labels, log, orders, kept, caution="; ".join(notes) or None, **options)
        )
    if membership:
        observers.append(MembershipObserver(membership, net, data, terms, labels, log, orders, kept, device))
    return observers


def orders_of(config: Federate) -> AttackSchedule:
    """Return the rounds and the clients that a run attacks."""
    who = tuple(config.attack_clients) if isinstance(config.attack_clients, list) else config.attack_clients
    return AttackSchedule(config.attack_every or config.rounds, tuple(config.attack_at), who, config.attack_history)


def describe_attacks(config: Federate, terms: FederationSpec) -> list[str]:
    """Describe the attacked rounds and clients, a line an attack."""
    orders = orders_of(config)
    when = f"in round {', '.join(map(str, orders.at))}" if orders.at else f"every {orders.every} rounds"
    counted = f"{orders.who} of a round's clients" if orders.who != 1 else "the first client that answers"
    whom = f"client {', '.join(map(str, orders.who))}" if isinstance(orders.who, tuple) else counted
    whom = "the sum of a round's clients" if terms.view == "sum" else whom
    whom += f", its last {orders.history} rounds together" if orders.history > 1 else ""
    return [f"attack with {attack} {when}: {whom}" for attack in [*config.attacks, *config.membership]]


def attack_key(config: Federate) -> dict[str, Any]:
    """Return the attack settings that a federation's rows depend on."""
    if config.submodels:
        return {"exposure": list(map(str, config.exposure)), "asking": repr(settings_of_membership(config))}
    names = ["labels", "images", "attack_every", "attack_at", "attack_clients", "attack_history", "membership"]
    names += ["generator_steps", "generator_width"] if any(map(needs_generator, config.attacks)) else []
    return {name: getattr(config, name) for name in names} | {"attacks": [str(attack) for attack in config.attacks]}


def check_observers(config: Federate, net: nn.Module, data: Dataset, terms: FederationSpec, seed: int) -> None:
    """Refuse, before any work, attacks that cannot be mounted."""
    known = knowledge_of(net, data, terms, next(net.parameters()).device) if config.attacks else None
    if known is not None and any(map(needs_generator, config.attacks)):
        if data.train_size == len(data.inputs):
            raise WrongInput("data", f"{data.name} has no test part, so there are no public examples to learn from")
        known = replace(known, generator=build_generator(known, config.generator_width))
    check_attackers(orders_of(config), config.attacks, config.membership, known, data, terms, seed)


def check_attackers(
    orders: AttackSchedule,
    attacks: Sequence[Choice],
    membership: Sequence[str],
    known: Knowledge | None,
    data: Dataset,
    terms: FederationSpec,
    seed: int,
) -> None:
    """Refuse arguments of `attackers` that cannot be mounted."""
    if attacks or membership:
        check_orders(orders, terms, seed)
    if membership:
        check_membership(membership, data, terms)
        if active := [attack for attack in attacks if is_active(attack)]:
            raise WrongInput("membership", f"cannot be combined with {active[0].name}, which changes clients' updates")
    if known is not None:
        check_attacks(attacks, known, data, terms)


def settings_of_membership(config: Federate) -> Asking:
    """Return the settings of the attacks on sub-models."""
    return Asking(
        printed=config.knowledge == "min",
        whole=config.asks_known,
        batches=config.scoring,
        size=config.test_batch,
        updates=config.attack_history,
        shadows=config.shadow_clients,
    )


def exposer_of(
    config: Federate,
    data: Dataset,
    labels: dict[str, Any],
    log: FederationLog,
    terms: SubmodelSpec,
    device: torch.device,
    loses: bool = False,
) -> ExposureObserver:
    """Return the attacker of the clients and the server of one federation over sub-models."""
    near = replace(data, inputs=data.inputs.to(device), labels=data.labels.to(device))
    asking = settings_of_membership(config)
    return ExposureObserver(config.exposure, near, labels, log, terms, asking=asking, device=device, loses=loses)
