"""The job of `secateur federate`: a federation trains and prunes, its clients withhold, its server looks closer.

Read `run_federate` first. federated/federation.py has the rounds, federated/checkpoint.py what a killed run goes on
from. `observers_of` makes the attackers that a run file puts into a federation: who they are and what they are told.
"""

from __future__ import annotations

import logging
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
from secateur.experiments.generators import needs_generator, stored, untrained
from secateur.federated.attacks.inversion import Attacker
from secateur.federated.attacks.knowledge import check_attacks, is_active, knowledge_of
from secateur.federated.attacks.membership import Asker, check_membership
from secateur.federated.attacks.memory import follows, turns_back
from secateur.federated.attacks.observer import Observer
from secateur.federated.attacks.schedule import Orders, check_orders
from secateur.federated.build import loaded, network_of, shares_of, terms_of
from secateur.federated.checkpoint import Story, depends_of, federated
from secateur.federated.client_training import check_network, turn_caution
from secateur.federated.federation import Federation
from secateur.federated.privacy_budget import check_spending
from secateur.federated.result_rows import labels_of, row_of, teller
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import Terms
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


def run_federate(config: Federate, out: Path, link: Link | None = None) -> list[Row]:
    """Every base pruning under every defense, for every seed, into the folder `out`; over a link to Flower's nodes."""
    if config.engine == "flower" and link is None:
        return _simulated(config, out)
    if config.submodels:
        from secateur.experiments.federate_submodels import run_submodels

        return run_submodels(config, out, link)
    data, device = loaded(config)
    check_federate(config, data, device)
    for told in cautions(config, data):
        log.warning("%s", told)
    with page_afterwards(out), open_run(out, "federate", dump(config), device=str(device), seeds=config.seeds) as run:
        for seed in config.seeds:
            for base in config.base_pruning:
                for defense in config.defense:
                    measure(config, run, data, device, seed, base, defense, link)
    return run.rows


def _simulated(config: Federate, out: Path) -> list[Row]:
    """The same in Flower's simulation; what would be refused in it is refused before it begins."""
    from secateur.federated.flower.simulation import simulated

    plan(config)
    data, device = loaded(config)
    clients, gpu = len(shares_of(config, data, config.seeds[0])), device.type == "cuda"
    return simulated(lambda link: run_federate(config, out, link), clients, config.deadline, gpu)


def check_federate(config: Federate, data: Dataset, device: torch.device) -> None:
    """Refuse what cannot be run before any work."""
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


def _agreed(config: Federate, data: Dataset, seed: int, base: Choice, defense: Defense) -> Terms:
    """The terms; where a base pruning and a defense do not go together it is said which ones."""
    try:
        return terms_of(config, data, seed, base, defense)
    except WrongInput as error:
        if error.field not in ("base_pruning", "defense"):
            raise
        raise WrongInput(error.field, f"{base} with {defense}: {error.message}") from None


def cautions(config: Federate, data: Dataset) -> list[str]:
    """What a reader must know of the defenses beforehand."""
    told = [found] if (found := zeros_count(config)) is not None else []
    net = network_of(config, data, config.seeds[0])
    for each in config.defense:
        if (found := turn_caution(net, protection_of(each).get("own"))) is not None:
            told.append(f"{each}: {found}")
    return told


def zeros_count(config: Federate) -> str | None:
    """What a reader must know of withheld weights: by the average that priprune prints little or nothing is learnt."""
    some = [str(each) for each in config.defense if protection_of(each).keys() & {"withholding", "own"}]
    if not some or config.averaging == "coverage":
        return None
    how = "counts as 0 in the average, as priprune prints it, which may leave nothing learnt"
    return f"what {', '.join(some)} withholds {how}; --averaging coverage, the default, leaves it out"


def plan(config: Federate) -> list[str]:
    """What the job would do, a line each; what it would refuse before it begins is refused here too."""
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
    lines += [f"  {told}" for told in cautions(config, data)]
    return lines + told_orders(config, terms)


def _check_deadline(terms: Terms, seed: int) -> None:
    steps, deadline = terms.local.steps or 1, terms.faults.deadline or 0.0
    if all(terms.faults.seconds(client, steps, seed) > deadline for client in range(len(terms.shares))):
        raise WrongInput("faults.deadline", f"{deadline} is before every client is done; give more seconds")


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
    """One federation from its first round to its last, and its rows."""
    let_go(device)
    terms, net = terms_of(config, data, seed, base, defense), network_of(config, data, seed).to(device)
    labels, story = labels_of(config.model, data.name, seed, base, defense, terms), Story()
    observers = observers_of(config, run, Watched(net, data, terms, labels, story, device))
    made = _engine(config, link, seed, base, defense)
    federation = made(net, data, terms, seed, device, observers=observers, way=config.way)
    depends = depends_of(federation, data) | {"threads": config.threads, "way": config.way} | attack_key(config)
    depends |= {} if link is None else {"engine": config.engine}
    try:
        with progress(f"{base}, {defense}, seed {seed}", terms.rounds, rate=True) as advance:
            tell = teller(labels, story, observers, advance)
            _, told = federated(run, federation, story, tell, depends, federation.every)
    except KeyboardInterrupt:
        _add(run, story)  # so that the page shows how far it was
        raise
    _add(run, told)
    run.add([row_of(labels, Measure("seconds", told.seconds, terms.rounds), timing=True)])


def _engine(
    config: Federate, link: Link | None, seed: int, base: Choice, defense: Defense
) -> Callable[..., Federation]:
    """What makes a federation: in process, or over a link."""
    if link is None:
        return Federation
    from secateur.federated.flower.app import over

    return over(link, config, seed, base, defense)


def _add(run: Run, story: Story) -> None:
    gallery.save(run.folder / "pictures", story.figures)
    run.show(story.figures)
    run.add(story.rows)
