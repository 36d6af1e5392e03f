"""The job of `secateur federate`: a federation trains and prunes, its clients withhold, its server looks closer.

Read `run_federate` first. federated/federation.py has the rounds, federated/observers.py the attackers inside them,
federated/checkpoint.py what a killed run goes on from.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from secateur import gallery
from secateur.bench import prepare
from secateur.catalogue import Choice, Defense
from secateur.chance import derive
from secateur.config import Federate, dump
from secateur.data.dataset import Dataset
from secateur.data.partition import FEMNIST_GROUPS, by_writer, dirichlet_labels, dirichlet_sizes, iid, writer_groups
from secateur.errors import WrongInput, require
from secateur.federated.checkpoint import Story, depends_of, federated
from secateur.federated.crowd import caution, check_network
from secateur.federated.faults import Faults
from secateur.federated.federation import Federation
from secateur.federated.ledger import Measure
from secateur.federated.local import LOSSES, Local
from secateur.federated.observers import Watched, attack_key, check_observers, observers_of, told_orders
from secateur.federated.spending import check_spending
from secateur.federated.telling import labels_of, row_of, teller
from secateur.federated.terms import Terms, protection_of
from secateur.models.create import create, load_weights
from secateur.needs import check_installed
from secateur.paging import page_afterwards
from secateur.progress import progress
from secateur.runs import Row, Run, open_run

if TYPE_CHECKING:
    from secateur.federated.flower.link import Link

log = logging.getLogger(__name__)

CLIENTS = 20  # where nothing else is said


def run_federate(config: Federate, out: Path, link: Link | None = None) -> list[Row]:
    """Every base pruning under every defense, for every seed, into the folder `out`; over a link to Flower's nodes."""
    if config.engine == "flower" and link is None:
        return _simulated(config, out)
    if config.submodels:
        from secateur.federated.submodels.running import run_submodels

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


def loaded(config: Federate) -> tuple[Dataset, torch.device]:
    """The data and the device; of data without a test part a fifth of the rows, drawn at random, is held out."""
    data, device = prepare(config)
    rows = len(data.inputs)
    if data.train_size < rows or rows < 5:
        return data, device
    order = torch.randperm(rows, generator=derive(0, "held out"))
    writers = None if data.writers is None else data.writers[order]
    mixed = replace(data, inputs=data.inputs[order], labels=data.labels[order], writers=writers)
    return replace(mixed, train_size=rows - rows // 5), device


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
        if (found := caution(net, protection_of(each).get("own"))) is not None:
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
        from secateur.federated.submodels.running import plan_submodels

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


def terms_of(
    config: Federate, data: Dataset, seed: int, base: Choice, defense: Defense, shares: list[Tensor] | None = None
) -> Terms:
    """The terms of one federation; shares that are not given are those of the configuration."""
    local = Local(
        config.steps,
        config.local_epochs,
        config.batch_size,
        config.learning_rate,
        config.momentum,
        config.weight_decay,
        LOSSES[config.loss],
    )
    names = ["rounds", "per_round", "method", "averaging", "broadcast", "server_rate", "server_momentum"]
    names += ["evaluate_every", "fixed_batches", "view"]
    return Terms(
        shares_of(config, data, seed) if shares is None else shares,
        **{name: getattr(config, name) for name in names},
        local=local,
        base=base.make(),
        faults=Faults(**config.faults.model_dump()),
        **protection_of(defense),
    )


def shares_of(config: Federate, data: Dataset, seed: int) -> list[Tensor]:
    """Which training rows each client holds."""
    labels, clients, rng = data.labels[: data.train_size], config.clients or CLIENTS, derive(seed, "partition")
    if config.partition.startswith("writer"):
        if data.writers is None:
            raise WrongInput("partition", f"{data.name} does not know its writers; take iid or a dirichlet")
        writers = data.writers[: data.train_size]
        return by_writer(writers) if config.partition == "writer" else writer_groups(writers, FEMNIST_GROUPS, rng)
    if config.partition == "iid":
        return iid(data.train_size, clients, rng)
    if config.partition == "dirichlet-labels":
        return dirichlet_labels(labels, clients, config.alpha, rng)
    if config.submodels and not config.redraw_sizes:
        return dirichlet_sizes(labels, clients, config.alpha, deal=seed)
    return dirichlet_sizes(labels, clients, config.alpha, 41 + seed)


def network_of(config: Federate, data: Dataset, seed: int) -> nn.Module:
    """The model of round 1: new, or the one that was given."""
    net = create(config.model, data.input_shape, data.classes, derive(seed, "initialise", "server"))
    return net if config.weights is None else load_weights(net, config.weights)


def let_go(device: torch.device) -> None:
    """Free what the federation before this one held: it and its observers hold each other, so it is not gone by itself.

    Its clients' states may fill half of the memory, and nothing else makes the collector look in time.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
