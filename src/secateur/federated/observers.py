"""The attackers that a run file puts into a federation: who they are, what they are told, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from secateur.catalogue import Choice
from secateur.config import Federate, defense_of_clients
from secateur.data.dataset import Dataset, fingerprint
from secateur.errors import WrongInput
from secateur.federated.attacker import Attacker
from secateur.federated.captions import is_active
from secateur.federated.checkpoint import Story
from secateur.federated.following import follows, turns_back
from secateur.federated.knowing import check_attacks, knowledge_of
from secateur.federated.membership import Asker, check_membership
from secateur.federated.observing import Observer
from secateur.federated.orders import Orders, check_orders
from secateur.federated.sampling import sampler_of
from secateur.federated.sending import inner_of
from secateur.federated.terms import Terms
from secateur.generators import needs_generator, stored, untrained
from secateur.guard import caution
from secateur.interfaces import Knowledge
from secateur.likeness import Scoring
from secateur.metrics.lpips import load_weights as load_lpips
from secateur.runs import Run


class Watched(NamedTuple):
    """One federation of a run, as those that attack it need it."""

    net: nn.Module
    data: Dataset
    terms: Terms
    labels: dict[str, Any]  # of its rows
    story: Story
    device: torch.device

    @property
    def seed(self) -> int:
        """Of the federation."""
        return int(self.labels["seed"])


def orders_of(config: Federate) -> Orders:
    """When and whom a run attacks."""
    who = tuple(config.attack_clients) if isinstance(config.attack_clients, list) else config.attack_clients
    return Orders(config.attack_every or config.rounds, tuple(config.attack_at), who, config.attack_history)


def observers_of(config: Federate, run: Run, watched: Watched) -> list[Observer]:
    """Those that a run asks for, each told what it may know."""
    known = _knowledge(config, run, watched) if config.attacks else None
    options: dict[str, Any] = {"tells_labels": config.labels == "oracle", "images": config.images}
    options |= {"scoring": Scoring(load_lpips(config.data_folder))}
    return attackers(watched, orders_of(config), config.attacks, config.membership, known, **options)


def attackers(
    watched: Watched,
    orders: Orders,
    attacks: Sequence[Choice],
    membership: Sequence[str],
    known: Knowledge | None,
    **options: Any,
) -> list[Observer]:
    """Who inverts updates, and who asks about members; `options` are the first one's."""
    net, data, terms, labels, story, device = watched
    drawn = sampler_of(terms, watched.seed).clients
    kept = orders.remembered(terms.rounds, drawn)
    found: list[Observer] = []
    if known is not None:
        if any(follows(attack.make()) for attack in attacks):
            options["followed"] = orders.remembered(terms.rounds, drawn, turns_back(terms))
        said = filter(None, (caution(defense_of_clients(labels["defense"]), attacks), terms.given_away))
        options["compress"] = None if terms.upload is None else getattr(inner_of(terms.upload), "compress", None)
        found.append(Attacker(attacks, known, labels, story, orders, kept, caution="; ".join(said) or None, **options))
    if membership:
        found.append(Asker(membership, net, data, terms, labels, story, orders, kept, device))
    return found


def told_orders(config: Federate, terms: Terms) -> list[str]:
    """What is attacked, in words, a line an attack."""
    orders = orders_of(config)
    when = f"in round {', '.join(map(str, orders.at))}" if orders.at else f"every {orders.every} rounds"
    counted = f"{orders.who} of a round's clients" if orders.who != 1 else "the first client that answers"
    whom = f"client {', '.join(map(str, orders.who))}" if isinstance(orders.who, tuple) else counted
    whom = "the sum of a round's clients" if terms.view == "sum" else whom
    whom += f", its last {orders.history} rounds together" if orders.history > 1 else ""
    return [f"  attack with {attack} {when}: {whom}" for attack in [*config.attacks, *config.membership]]


def attack_key(config: Federate) -> dict[str, Any]:
    """What a federation's rows depend on by who attacks it."""
    names = ["labels", "images", "attack_every", "attack_at", "attack_clients", "attack_history", "membership"]
    names += ["generator_steps", "generator_width"] if any(map(needs_generator, config.attacks)) else []
    return {name: getattr(config, name) for name in names} | {"attacks": [str(attack) for attack in config.attacks]}


def check_observers(config: Federate, net: nn.Module, data: Dataset, terms: Terms, seed: int) -> None:
    """Refuse, before any work, attacks that cannot be mounted."""
    known = knowledge_of(net, data, terms, next(net.parameters()).device) if config.attacks else None
    if known is not None and any(map(needs_generator, config.attacks)):
        _check_public(data)
        known = replace(known, generator=untrained(known, config.generator_width))
    check_attackers(orders_of(config), config.attacks, config.membership, known, data, terms, seed)


def check_attackers(
    orders: Orders,
    attacks: Sequence[Choice],
    membership: Sequence[str],
    known: Knowledge | None,
    data: Dataset,
    terms: Terms,
    seed: int,
) -> None:
    """The same of what `attackers` is given."""
    if attacks or membership:
        check_orders(orders, terms, seed)
    if membership:
        check_membership(membership, data, terms)
        if active := [attack for attack in attacks if is_active(attack)]:
            raise WrongInput(
                "membership", f"asks what clients send, and {active[0].name} has it changed; run them apart"
            )
    if known is not None:
        check_attacks(attacks, known, data, terms)


def _knowledge(config: Federate, run: Run, watched: Watched) -> Knowledge:
    """What the attacker knows; a generator is trained on the test part, which no client has, as a stage of the run."""
    net, data, terms, _, _, device = watched
    known = knowledge_of(net, data, terms, device)
    if not any(map(needs_generator, config.attacks)):
        return known
    public, seed = torch.arange(data.train_size, len(data.inputs)), watched.seed
    depends = {"data": data.key, "rows": fingerprint(public), "device": device.type, "threads": config.threads}
    depends |= {"seed": seed, "steps": config.generator_steps, "width": config.generator_width}
    made = stored(run, depends, known, data.batch.take(public), device)
    return replace(known, generator=made.requires_grad_(False))


def _check_public(data: Dataset) -> None:
    if data.train_size == len(data.inputs):
        raise WrongInput("data", f"{data.name} has no test part, so there are no public examples to learn from")
