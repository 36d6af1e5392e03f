"""The job of `secateur federate`: federations train and prune, clients defend their updates, attackers observe rounds.

federated/federation.py runs the rounds, federated/checkpoint.py lets a killed run continue. `observers_of` makes the
attackers that a run file names, each with the knowledge that it may have.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from secateur.catalogue import Choice, Defense
from secateur.config import Federate, defense_of_clients, dump
from secateur.data.dataset import Dataset, fingerprint
from secateur.defenses.uploads import inner_of, protection_of
from secateur.errors import WrongInput, require
from secateur.evaluation import gallery
from secateur.evaluation.client import caution
from secateur.evaluation.reconstruction import Scoring
from secateur.experiments.context import check_installed
from secateur.experiments.invert_targets import needs_generator, stored, untrained
from secateur.federated.attacks.inversion import InversionObserver
from secateur.federated.attacks.knowledge import check_attacks, is_active, knowledge_of
from secateur.federated.attacks.membership import MembershipObserver, check_membership
from secateur.federated.attacks.memory import follows, turns_back
from secateur.federated.attacks.observer import Observer
from secateur.federated.attacks.schedule import AttackSchedule, check_orders
from secateur.federated.build import loaded, network_of, shares_of, terms_of
from secateur.federated.checkpoint import FederationLog, depends_of, federated
from secateur.federated.client_training import check_network, turn_caution
from secateur.federated.federation import Federation
from secateur.federated.privacy_budget import check_spending
from secateur.federated.result_rows import labels_of, row_of, teller
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import FederationSpec
from secateur.federated.traffic import Measure
from secateur.gpu.memory import let_go
from secateur.interfaces import Knowledge
from secateur.metrics.lpips import load_weights as load_lpips
from secateur.progress import progress
from secateur.report import page_afterwards
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row

if TYPE_CHECKING:
    from secateur.federated.flower.link import Link

log = logging.getLogger(__name__)


class ObservedFederation(NamedTuple):
    """One federation of a run, as its attackers need it."""

    net: nn.Module
    data: Dataset
    terms: FederationSpec
    labels: dict[str, Any]  # of its rows
    story: FederationLog
    device: torch.device

    @property
    def seed(self) -> int:
        """The seed of the federation."""
        return int(self.labels["seed"])


def run_federate(config: Federate, out: Path, link: Link | None = None) -> list[Row]:
    """Run every base pruning under every defense, for every seed, into `out`; a link leads to Flower's nodes."""
    if config.engine == "flower" and link is None:
        return _simulated(config, out)
    if config.submodels:
        from secateur.experiments.federate_submodels import run_submodels

        return run_submodels(config, out, link)
    data, device = loaded(config)
    check_federate(config, data, device)
    for caution_text in cautions(config, data):
        log.warning("%s", caution_text)
    with page_afterwards(out), open_run(out, "federate", dump(config), device=str(device), seeds=config.seeds) as run:
        for seed in config.seeds:
            for base in config.base_pruning:
                for defense in config.defense:
                    measure(config, run, data, device, seed, base, defense, link)
    return run.rows


def _simulated(config: Federate, out: Path) -> list[Row]:
    """Run the federations in Flower's simulation; refuse wrong input before the simulation begins."""
    from secateur.federated.flower.app import simulate

    plan(config)
    data, device = loaded(config)
    clients, gpu = len(shares_of(config, data, config.seeds[0])), device.type == "cuda"
    return simulate(lambda link: run_federate(config, out, link), clients, config.deadline, gpu)


def measure(
    config: Federate,
    run: Run,
    data: Dataset,
    device: torch.device,
    seed: int,
    base: Choice,
    defense: Defense,
    link: Link | None = None,
) -> None:
    """Run one federation from its first round to its last, and add its rows."""
    let_go(device)
    terms, net = terms_of(config, data, seed, base, defense), network_of(config, data, seed).to(device)
    labels, story = labels_of(config.model, data.name, seed, base, defense, terms), FederationLog()
    observers = observers_of(config, run, ObservedFederation(net, data, terms, labels, story, device))
    build = _engine(config, link, seed, base, defense)
    federation = build(net, data, terms, seed, device, observers=observers, way=config.way)
    if federation.room is not None and federation.room.size:
        print(federation.room, file=sys.stderr)
    depends = depends_of(federation, data) | {"threads": config.threads, "way": config.way} | attack_key(config)
    depends |= {} if link is None else {"engine": config.engine}
    try:
        with progress(f"{base}, {defense}, seed {seed}", terms.rounds, rate=True) as advance:
            tell = teller(labels, story, observers, advance)
            _, finished = federated(run, federation, story, tell, depends, federation.every)
    except KeyboardInterrupt:
        _add(run, story)  # the page then shows the rounds that finished
        raise
    _add(run, finished)
    run.add([row_of(labels, Measure("seconds", finished.seconds, terms.rounds), timing=True)])


def _engine(
    config: Federate, link: Link | None, seed: int, base: Choice, defense: Defense
) -> Callable[..., Federation]:
    """Return the constructor of a federation: in this process, or over a link."""
    if link is None:
        return Federation
    from secateur.federated.flower.app import engine_over

    return engine_over(link, config, seed, base, defense)


def _add(run: Run, story: FederationLog) -> None:
    gallery.save(run.folder / "pictures", story.figures)
    run.show(story.figures)
    run.add(story.rows)


def plan(config: Federate) -> list[str]:
    """Describe the steps of the job, a line each; refuse the configurations that the job refuses."""
    if config.engine == "flower":
        require("flwr", "flower")
        require("ray", "flower")
    if config.submodels:
        from secateur.experiments.federate_submodels import plan_submodels

        return plan_submodels(config)
    data, device = loaded(config)
    check_federate(config, data, device)
    terms = terms_of(config, data, config.seeds[0], config.base_pruning[0], config.defense[0])
    sizes = [len(rows) for rows in terms.shares]
    turn = f"{terms.local.steps} local steps" if terms.local.steps else f"{terms.local.epochs} local epochs"
    lines = [f"{config.model} on {data.name}, seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    lines.append(f"  {len(sizes)} clients ({config.partition}) with {min(sizes)} to {max(sizes)} examples each")
    lines.append(f"  {terms.rounds} rounds of {terms.per_round} clients, {turn} of {terms.local.batch_size} examples")
    lines.append(f"  {terms.method}, {terms.averaging} average, the model is broadcast {terms.broadcast}")
    lines.append(f"  prune with {', '.join(map(str, config.base_pruning))}")
    lines.append(f"  defend with {', '.join(map(str, config.defense))}")
    lines += [f"  {text}" for text in cautions(config, data)]
    return lines + told_orders(config, terms)


def cautions(config: Federate, data: Dataset) -> list[str]:
    """Return the cautions that a reader needs about the defenses before the run."""
    texts = [text] if (text := zeros_count(config)) is not None else []
    net = network_of(config, data, config.seeds[0])
    for defense in config.defense:
        if (text := turn_caution(net, protection_of(defense).get("own"))) is not None:
            texts.append(f"{defense}: {text}")
    return texts


def zeros_count(config: Federate) -> str | None:
    """Return the caution for withheld weights: with the average as priprune prints it, little or nothing is learnt."""
    defenses = [str(defense) for defense in config.defense if protection_of(defense).keys() & {"withholding", "own"}]
    if not defenses or config.averaging == "coverage":
        return None
    how = "counts as 0 in the average, as priprune prints it, which may leave nothing learnt"
    return f"what {', '.join(defenses)} withholds {how}; --averaging coverage, the default, leaves it out"


def check_federate(config: Federate, data: Dataset, device: torch.device) -> None:
    """Refuse, before any work, a configuration that cannot be run."""
    check_installed(config.defense)
    seed = config.seeds[0]
    for base in config.base_pruning:
        for defense in config.defense:
            terms = _agreed(config, data, seed, base, defense)
            if terms.faults.deadline is not None and terms.local.steps is not None:
                _check_deadline(terms, seed)
            net = network_of(config, data, seed).to(device)
            check_network(net, terms.own, data.inputs)
            check_spending(terms)
            check_observers(config, net, data, terms, seed)


def _agreed(config: Federate, data: Dataset, seed: int, base: Choice, defense: Defense) -> FederationSpec:
    """Return the terms; an error names the base pruning and the defense that do not go together."""
    try:
        return terms_of(config, data, seed, base, defense)
    except WrongInput as error:
        if error.field not in ("base_pruning", "defense"):
            raise
        raise WrongInput(error.field, f"{base} with {defense}: {error.message}") from None


def _check_deadline(terms: FederationSpec, seed: int) -> None:
    """Refuse a deadline before which no client can finish."""
    steps, deadline = terms.local.steps or 1, terms.faults.deadline or 0.0
    if all(terms.faults.seconds(client, steps, seed) > deadline for client in range(len(terms.shares))):
        raise WrongInput("faults.deadline", f"{deadline} is before every client is done; give more seconds")


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
    depends = {"data": data.key, "rows": fingerprint(public), "device": device.type, "threads": config.threads}
    depends |= {"seed": seed, "steps": config.generator_steps, "width": config.generator_width}
    generator = stored(run, depends, known, data.batch.take(public), device)
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
    net, data, terms, labels, story, device = watched
    drawn = sampler_of(terms, watched.seed).clients
    kept = orders.remembered(terms.rounds, drawn)
    observers: list[Observer] = []
    if known is not None:
        if any(follows(attack.make()) for attack in attacks):
            options["followed"] = orders.remembered(terms.rounds, drawn, turns_back(terms))
        notes = filter(None, (caution(defense_of_clients(labels["defense"]), attacks), terms.given_away))
        options["compress"] = None if terms.upload is None else getattr(inner_of(terms.upload), "compress", None)
        observers.append(
            InversionObserver(attacks, known, labels, story, orders, kept, caution="; ".join(notes) or None, **options)
        )
    if membership:
        observers.append(MembershipObserver(membership, net, data, terms, labels, story, orders, kept, device))
    return observers


def orders_of(config: Federate) -> AttackSchedule:
    """Return the rounds and the clients that a run attacks."""
    who = tuple(config.attack_clients) if isinstance(config.attack_clients, list) else config.attack_clients
    return AttackSchedule(config.attack_every or config.rounds, tuple(config.attack_at), who, config.attack_history)


def told_orders(config: Federate, terms: FederationSpec) -> list[str]:
    """Describe the attacked rounds and clients, a line an attack."""
    orders = orders_of(config)
    when = f"in round {', '.join(map(str, orders.at))}" if orders.at else f"every {orders.every} rounds"
    counted = f"{orders.who} of a round's clients" if orders.who != 1 else "the first client that answers"
    whom = f"client {', '.join(map(str, orders.who))}" if isinstance(orders.who, tuple) else counted
    whom = "the sum of a round's clients" if terms.view == "sum" else whom
    whom += f", its last {orders.history} rounds together" if orders.history > 1 else ""
    return [f"  attack with {attack} {when}: {whom}" for attack in [*config.attacks, *config.membership]]


def attack_key(config: Federate) -> dict[str, Any]:
    """Return the attack settings that a federation's rows depend on."""
    names = ["labels", "images", "attack_every", "attack_at", "attack_clients", "attack_history", "membership"]
    names += ["generator_steps", "generator_width"] if any(map(needs_generator, config.attacks)) else []
    return {name: getattr(config, name) for name in names} | {"attacks": [str(attack) for attack in config.attacks]}


def check_observers(config: Federate, net: nn.Module, data: Dataset, terms: FederationSpec, seed: int) -> None:
    """Refuse, before any work, attacks that cannot be mounted."""
    known = knowledge_of(net, data, terms, next(net.parameters()).device) if config.attacks else None
    if known is not None and any(map(needs_generator, config.attacks)):
        _check_public(data)
        known = replace(known, generator=untrained(known, config.generator_width))
    check_attackers(orders_of(config), config.attacks, config.membership, known, data, terms, seed)


def _check_public(data: Dataset) -> None:
    """Refuse data without a test part, the public examples of a generator."""
    if data.train_size == len(data.inputs):
        raise WrongInput("data", f"{data.name} has no test part, so there are no public examples to learn from")


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
            raise WrongInput(
                "membership", f"asks what clients send, and {active[0].name} has it changed; run them apart"
            )
    if known is not None:
        check_attacks(attacks, known, data, terms)
