"""The attackers of `secateur federate`, as a run file names them, each with the knowledge that it may have.

`observers_of` builds the attackers of a plain federation, `exposer_of` that of a federation over sub-models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from secateur import tree
from secateur.catalogue import Choice
from secateur.config import Federate, defense_of_clients
from secateur.data.dataset import Dataset, fingerprint
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.uploads import inner_of, makes_anew
from secateur.errors import WrongInput
from secateur.evaluation.calibration import UPDATES, Calibration, Stage, calibrate, effort_of, is_open, list_weights
from secateur.evaluation.client import AttackedClient, UploadDefense, caution
from secateur.evaluation.reconstruction import Scoring
from secateur.experiments.invert_targets import build_generator, needs_generator, train_stored
from secateur.federated.attacks.inversion import InversionObserver
from secateur.federated.attacks.knowledge import check_attacks, is_active, knowledge_of, reads_squares
from secateur.federated.attacks.membership import MembershipObserver, check_membership
from secateur.federated.attacks.observer import Observer
from secateur.federated.attacks.schedule import AttackSchedule, check_orders, count_rounds, follows, turns_back
from secateur.federated.checkpoint import FederationLog, depends_of
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import FederationSpec, SubmodelSpec
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.inversion import SubmodelInversion, submodel_knowledge
from secateur.federated.submodels.membership_attacks import Asking
from secateur.gpu.determinism import device_key
from secateur.interfaces import Batch, Knowledge
from secateur.metrics.lpips import load_weights as load_lpips
from secateur.runs.artifacts import Result
from secateur.runs.folder import Run
from secateur.seeding import derive


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
    net, data, terms, _, _, device = watched

    def keep(trial: Mapping[str, object], compute: Callable[[], Result]) -> Result:
        depends = depends_of(terms, net, data, watched.seed, device) | {"threads": config.threads}
        return run.stage("calibration", depends | {"labels": config.labels, **trial}, compute)

    return attackers(watched, orders_of(config), config.attacks, config.membership, known, stage=keep, **options)


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
    stage: Stage = lambda trial, compute: compute(),
    **options: Any,
) -> list[Observer]:
    """Return the attacker that inverts updates and the one that asks about members; `options` go to the first.

    `stage` computes the trials of a calibration, or reads them from the run.
    """
    net, data, terms, labels, log, device = watched
    drawn = sampler_of(terms, watched.seed).clients
    kept = orders.plan_memory(terms.rounds, drawn)
    observers: list[Observer] = []
    if known is not None:
        targets = sum(len(orders.select_clients(drawn(number))) for number in orders.rounds(terms.rounds))
        attacks, options["calibrations"] = tune_attacks(
            attacks, watched, known, max(1, targets), stage, bool(options.get("tells_labels"))
        )
        mounted = [attack.make() for attack in attacks]
        rounds = max(count_rounds(attack, orders) for attack in mounted)
        if any(map(follows, mounted)):
            options["feeds_back"] = isinstance(terms.upload, ErrorFeedback)
            options["followed"] = orders.plan_memory(terms.rounds, drawn, max(turns_back(terms), rounds))
        joined = orders.plan_memory(terms.rounds, drawn, rounds - 1)
        unread = None if any(reads_squares(attack) for attack in attacks) else terms.leak_note
        notes = filter(None, (caution(defense_of_clients(labels["defense"]), attacks), unread))
        options["compress"] = None if terms.upload is None else getattr(inner_of(terms.upload), "compress", None)
        observers.append(
            InversionObserver(attacks, known, labels, log, orders, joined, caution="; ".join(notes) or None, **options)
        )
    if membership:
        observers.append(MembershipObserver(membership, net, data, terms, labels, log, orders, kept, device))
    return observers


def tune_attacks(
    attacks: Sequence[Choice],
    watched: ObservedFederation,
    known: Knowledge,
    targets: int,
    stage: Stage,
    tells_labels: bool,
) -> tuple[list[Choice], dict[Choice, Calibration]]:
    """Return the attacks, and the calibrations of those whose weight of total variation is open.

    The attacker imitates a client that receives the first model, on rows of the test part, which no client has. Without
    such rows an attack is mounted with every weight, each under its own name.
    """
    net, data, terms, _, _, device = watched
    public = torch.arange(data.train_size, len(data.inputs))
    public = public[torch.randperm(len(public), generator=derive(watched.seed, "calibrate", "rows"))]
    parts = public[: len(public) // known.batch_size * known.batch_size].view(-1, known.batch_size)[:UPDATES]
    batches = [data.batch.take(rows).to(device) for rows in parts]
    examples = [Batch(batch.inputs.to(known.mean), batch.labels) for batch in batches]
    gradient = terms.sends_gradients and terms.local.steps == 1
    upload = terms.upload if gradient and terms.upload is not None and not makes_anew(terms.upload) else None
    guard = None if upload is None else UploadDefense(upload)
    client = AttackedClient(net, tree.state_of(net), known, not gradient, tells_labels, guard=guard, seed=watched.seed)
    mounted: list[Choice] = []
    calibrations: dict[Choice, Calibration] = {}
    for attack in attacks:
        if is_open(attack) and not examples:
            mounted += list_weights(attack)
            continue
        if is_open(attack):
            effort = effort_of(attack, targets)
            effort = replace(effort, updates=min(effort.updates, len(examples)))
            calibrations[attack] = calibrate(attack, client, examples, effort, stage)
        mounted.append(attack)
    return mounted, calibrations


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
    names = ["labels", "images", "attack_every", "attack_at", "attack_clients", "attack_history", "membership"]
    if config.submodels:
        key: dict[str, Any] = {"exposure": list(map(str, config.exposure))}
        key |= {"asking": repr(settings_of_membership(config))}
        inverted = {name: getattr(config, name) for name in names[:4]} | {"attacks": list(map(str, config.attacks))}
        return key | (inverted if config.attacks else {})
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
        if long := [attack for attack in attacks if count_rounds(attack.make(), orders) > terms.rounds]:
            raise WrongInput("attack", f"{long[0]} joins more rounds than the {terms.rounds} of the federation")


def settings_of_membership(config: Federate) -> Asking:
    """Return the settings of the attacks on sub-models."""
    return Asking(
        printed=config.knowledge == "min",
        whole=config.asks_known,
        batches=config.scoring,
        size=config.test_batch,
        updates=config.attack_history,
        shadows=config.shadow_clients,
        federations=config.shadow_federations,
    )


def inverter_of(
    config: Federate, data: Dataset, labels: dict[str, Any], log: FederationLog, terms: SubmodelSpec, net: nn.Module
) -> SubmodelInversion:
    """Return the attacker of the updates of sub-model clients; an open weight of total variation is tried in full."""
    known = submodel_knowledge(net, data, terms, next(net.parameters()).device)
    attacks = [one for attack in config.attacks for one in (list_weights(attack) if is_open(attack) else [attack])]
    unmet = caution(defense_of_clients(labels["defense"]), attacks)
    orders = replace(orders_of(config), history=1)
    options: dict[str, Any] = {"tells_labels": config.labels == "oracle", "images": config.images, "caution": unmet}
    options |= {"scoring": Scoring(load_lpips(config.data_folder))}
    return SubmodelInversion(terms, attacks, known, labels, log, orders, {}, **options)


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
