"""The job of `secateur federate`: federations train and prune, clients defend their updates, attackers observe rounds.

federated/federation.py runs the rounds, federated/submodels/federation.py those over sub-models. A killed run
continues by federated/checkpoint.py. On a GPU the seeds of a channel rule run together, as lanes of one stack.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from secateur.catalogue import Choice, Defense
from secateur.config import Federate, dump
from secateur.data.dataset import Dataset
from secateur.data.partition import count_rows
from secateur.defenses.uploads import protection_of
from secateur.errors import WrongInput, require
from secateur.evaluation import gallery
from secateur.evaluation.submodel_advice import describe_size
from secateur.experiments.context import check_installed
from secateur.experiments.federate_observers import (
    ObservedFederation,
    attack_key,
    check_observers,
    describe_attacks,
    exposer_of,
    inverter_of,
    observers_of,
    orders_of,
)
from secateur.experiments.submodel_pilots import check_pilots, run_pilots, sizes_of
from secateur.federated.attacks.observer import Observer
from secateur.federated.build import build_spec, build_submodel_spec, load_data, network_of, shares_of
from secateur.federated.checkpoint import FederationLog, Resumable, depends_of, run_or_resume
from secateur.federated.client_training import check_network, turn_caution
from secateur.federated.client_turn import initial_state
from secateur.federated.federation import Federation
from secateur.federated.result_rows import RecordedFederation, labels_of, record_rounds, row_of
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import FederationSpec, SubmodelSpec
from secateur.federated.stacked_rounds import room_for
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import StackedFederations, SubmodelFederation
from secateur.federated.submodels.inversion import check_submodel_attacks, check_submodel_orders, submodel_knowledge
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.membership_attacks import ShadowModels
from secateur.federated.submodels.networks import build_narrow, without_statistics
from secateur.federated.submodels.shadow_federations import ShadowRun
from secateur.federated.submodels.structure import Structure
from secateur.federated.traffic import Measure, check_spending
from secateur.gpu.determinism import deterministic
from secateur.gpu.memory import let_go
from secateur.interfaces import Params
from secateur.progress import progress
from secateur.report import page_afterwards
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row

if TYPE_CHECKING:
    from secateur.federated.flower.link import Link

log = logging.getLogger(__name__)


def run_federate(config: Federate, out: Path, link: Link | None = None) -> list[Row]:
    """Run every base pruning or channel rule under every defense, for every seed, into `out`.

    Args:
        config: the run file.
        out: the run folder.
        link: the connection to Flower's nodes; None: the clients train in this process.
    """
    if config.engine == "flower" and link is None:
        return _simulate(config, out)
    data, device = load_data(config)
    check_federate(config, data, device)
    for text in cautions(config, data):
        log.warning("%s", text)
    opened = open_run(out, "federate", dump(config), device=str(device), seeds=config.seeds, data=data.key)
    with page_afterwards(out), deterministic(config.deterministic), opened as run:
        experiment = FederateExperiment(config, run, data, device, link)
        for seeds, method, defense in experiment.jobs():
            experiment.measure(seeds, method, defense)
    return run.rows


def _simulate(config: Federate, out: Path) -> list[Row]:
    """Run the federations in Flower's simulation; refuse wrong input before the simulation begins."""
    from secateur.federated.flower.app import simulate

    plan(config)
    data, device = load_data(config)
    clients, gpu = len(shares_of(config, data, config.seeds[0])), device.type == "cuda"
    return simulate(lambda link: run_federate(config, out, link), clients, config.deadline, gpu)


@dataclass(frozen=True, eq=False)
class FederateExperiment:
    """The federations of a run, each with one base pruning or channel rule, one defense and one seed."""

    config: Federate
    run: Run
    data: Dataset
    device: torch.device
    link: Link | None = None

    def jobs(self) -> Iterator[tuple[list[int], Choice, Defense]]:
        """Yield (seeds, base pruning or channel rule, defense) of federations that run together."""
        config = self.config
        if not config.submodels:
            for seed, base, defense in product(config.seeds, config.base_pruning, config.defense):
                yield [seed], base, defense
            return
        stacks = self.device.type == "cuda" and config.execution != "sequential" and self.link is None
        for rule, defense in product(config.submodels, config.defense):
            together = stacks and not config.advise and not rule.make().alone
            for seeds in [config.seeds] if together else [[seed] for seed in config.seeds]:
                yield seeds, rule, defense

    def measure(self, seeds: Sequence[int], method: Choice, defense: Defense) -> Params:
        """Run the federations of the seeds from the first round to the last, and add their rows; or run pilots.

        Return the server's final model; of several seeds all tensors, of pilots none.
        """
        config, rows = self.config, FederationLog()
        if config.advise:
            self._advise(seeds[0], method, defense)
            return {}
        let_go(self.device)
        recorded: list[RecordedFederation] = []
        for seed in seeds:
            beside = recorded[0].federation if recorded else None
            recorded.append(self._record(rows, seed, method, defense, beside))
        parts = [one.federation for one in recorded]
        whole = _join_federations(parts)
        depends = [depends_of(part.terms, part.net, self.data, part.seed, self.device) for part in parts]
        key = {"federations": depends, "threads": config.threads, "execution": config.execution} | attack_key(config)
        key |= {} if self.link is None else {"engine": config.engine}
        try:
            title = f"{method}, {defense}, seed {', '.join(map(str, seeds))}"
            with progress(title, config.rounds, rate=True, unit="rounds") as advance:
                model, finished = run_or_resume(self.run, whole, rows, record_rounds(recorded, advance, title), key)
        except KeyboardInterrupt:
            self._add(rows)  # the page then shows the rounds that finished
            raise
        self._add(finished)
        seconds = Measure("seconds", finished.seconds / len(seeds), config.rounds)
        self.run.add([row_of(one.labels, seconds, one.federation.terms, timing=True) for one in recorded])
        return model

    def train(self, seed: int, method: Choice, defense: Defense) -> Params:
        """Run one federation to its last round, and return the server's final model; its rows are not kept."""
        let_go(self.device)
        whole = _join_federations([self._record(FederationLog(), seed, method, defense, None).federation])
        for _ in whole.rounds():
            pass
        return whole.model()

    def _record(
        self, rows: FederationLog, seed: int, method: Choice, defense: Defense, beside: Any
    ) -> RecordedFederation:
        """Return one federation; over sub-models it shares its data and trainer with the one `beside` it."""
        config, data, device, options = self.config, self.data, self.device, {"execution": self.config.execution}
        terms, net = self._spec(seed, method, defense), network_of(config, data, seed).to(device)
        labels = labels_of(config.model, data.name, seed, method, defense, terms)
        observers: list[Observer] = []
        if isinstance(terms, FederationSpec):
            observers = observers_of(config, self.run, ObservedFederation(net, data, terms, labels, rows, device))
        else:
            options |= {"beside": beside}
            if config.exposure:
                exposer = exposer_of(config, data, labels, rows, terms, device, loses=self.link is not None)
                observers.append(exposer)
                if config.shadow_federations:
                    exposer.shadows = self._run_shadows(seed, terms, labels, exposer)
            if config.attacks:
                observers.append(inverter_of(config, data, labels, rows, terms, net))
        federation = self._engine(seed, method, defense)(net, data, terms, seed, device, observers=observers, **options)
        if isinstance(federation, Federation) and federation.room is not None and federation.room.size:
            print(federation.room, file=sys.stderr)
        return RecordedFederation(federation, labels, rows, observers)

    def _run_shadows(
        self, seed: int, terms: SubmodelSpec, labels: dict[str, Any], exposer: ExposureObserver
    ) -> ShadowModels:
        """Run the attacker's own federations, each a stage of the run, and add a row of their seconds."""
        config, number = self.config, self.config.shadow_federations

        def build() -> nn.Module:
            return network_of(config, self.data, seed).to(self.device)

        asking, where = exposer.asking, (self.device, config.execution, config.threads)
        shadows = ShadowRun(self.run, build, self.data, terms, asking, seed, *where)
        models, seconds = shadows.run_all(labels["extra"]["submodels"])
        note = f"{number} shadow federations of {terms.rounds} rounds"
        self.run.add([row_of(labels, Measure("shadow_seconds", seconds, terms.rounds, note=note), terms, timing=True)])
        return models

    def _spec(self, seed: int, method: Choice, defense: Defense) -> FederationSpec | SubmodelSpec:
        build = build_submodel_spec if self.config.submodels else build_spec
        return build(self.config, self.data, seed, method, defense)

    def _engine(self, seed: int, method: Choice, defense: Defense) -> Callable[..., Any]:
        """Return the constructor of a federation: in this process, or over the link."""
        if self.link is None:
            return SubmodelFederation if self.config.submodels else Federation
        from secateur.federated.flower.app import engine_over

        return engine_over(self.link, self.config, seed, method, defense)

    def _advise(self, seed: int, rule: Choice, defense: Defense) -> None:
        """Run pilots instead of a federation, and add their advice to the run."""
        config, data, device = self.config, self.data, self.device
        terms = build_submodel_spec(config, data, seed, rule, defense)
        labels = labels_of(config.model, data.name, seed, rule, defense, terms)
        extra = labels["extra"] | {"pilot": True, "pilot_rounds": config.pilot_rounds}
        exposer = exposer_of(config, data, labels | {"extra": extra}, FederationLog(), terms, device)
        run_pilots(config, self.run, data, device, rule, terms, exposer)

    def _add(self, rows: FederationLog) -> None:
        gallery.save(self.run.folder / "pictures", rows.figures)
        self.run.show(rows.figures)
        self.run.add(rows.rows)


def _join_federations(federations: Sequence[Any]) -> Resumable:
    """Return the federations as one."""
    first: Resumable = federations[0]
    if len(federations) > 1:
        return StackedFederations(federations)
    return LocalBaseline(first) if isinstance(first, SubmodelFederation) and first.terms.rule.alone else first


def plan(config: Federate) -> list[str]:
    """Describe the steps of the job, a line each; refuse the configurations that the job refuses."""
    if config.engine == "flower":
        require("flwr", "flower")
        require("ray", "flower")
    data, device = load_data(config)
    check_federate(config, data, device)
    sizes = count_rows(shares_of(config, data, config.seeds[0]))
    clients = f"{len(sizes)} clients ({config.partition}) with {min(sizes)} to {max(sizes)} examples each"
    head = f"{config.model} on {data.name}, seeds {', '.join(map(str, config.seeds))}; for each seed:"
    steps = _submodel_steps(config, data, clients) if config.submodels else _federation_steps(config, data, clients)
    return [head, *(f"  {step}" for step in steps)]


def _federation_steps(config: Federate, data: Dataset, clients: str) -> list[str]:
    terms = build_spec(config, data, config.seeds[0], config.base_pruning[0], config.defense[0])
    turn = f"{terms.local.steps} local steps" if terms.local.steps else f"{terms.local.epochs} local epochs"
    return [
        clients,
        f"{terms.rounds} rounds of {terms.per_round} clients, {turn} of {terms.local.batch_size} examples",
        f"{terms.method}, {terms.averaging} average, the model is broadcast {terms.broadcast}",
        f"prune with {', '.join(map(str, config.base_pruning))}",
        f"defend with {', '.join(map(str, config.defense))}",
        *cautions(config, data),
        *describe_attacks(config, terms),
    ]


def _submodel_steps(config: Federate, data: Dataset, clients: str) -> list[str]:
    terms = build_submodel_spec(config, data, config.seeds[0], config.submodels[-1], config.defense[0])
    rates = sorted(set(terms.rates), reverse=True)
    widths = ", ".join(f"{list(terms.rates).count(rate)} with {describe_size(rate)}" for rate in rates)
    rounds, attacked = f"{terms.rounds} rounds", "clients and server"
    if config.advise:
        tried = sizes_of(config)
        widths = f"each with {', '.join(map(describe_size, tried))} in turn"
        rounds, attacked = f"{len(tried) * config.pilot_draws} pilots of {config.pilot_rounds} rounds", "clients"
    count, unit = (terms.local.steps, "step") if terms.local.steps else (terms.local.epochs, "epoch")
    local = f"{count} local {unit}{'s' * (count > 1)} of batches of {terms.local.batch_size}"
    crops = "" if terms.local.augment is None else ", pictures cropped and flipped"
    return [
        f"{clients}: {widths}",
        f"{rounds} of {local}, Adam with {terms.local.learning_rate:g}{crops}",
        f"{terms.averaging} average of each cell, uncovered: {terms.uncovered}, BatchNorm {terms.batchnorm}",
        f"sub-models by {', '.join(map(str, config.submodels))}",
        f"defend with {', '.join(map(str, config.defense))}",
        f"attack {attacked} with {', '.join(map(str, config.exposure)) or 'nothing'}",
        *(
            [f"run {config.shadow_federations} shadow federations of {rounds} each"]
            if config.shadow_federations
            else []
        ),
        *([f"attack updates with {', '.join(map(str, config.attacks))}"] if config.attacks else []),
    ]


def cautions(config: Federate, data: Dataset) -> list[str]:
    """Return the cautions that a reader needs about the clients and the defenses before the run."""
    if config.submodels:
        return []
    sizes = count_rows(shares_of(config, data, config.seeds[0]))
    short = sum(size < config.batch_size for size in sizes)
    fields = {str(defense): protection_of(defense) for defense in config.defense}
    rules = {"withholding", "custom_turn"}
    withholding = [name for name, protection in fields.items() if protection.keys() & rules]
    texts = []
    if short and config.local_epochs is None:
        few = f"{short} of {len(sizes)} clients have fewer rows than batch_size {config.batch_size}"
        texts.append(f"{few} (the smallest has {min(sizes)}); their batches repeat rows, so that every batch is full")
    if withholding and config.averaging != "coverage":
        how = "counts as 0 in the average, as priprune prints it, which may leave nothing learnt"
        advice = "--averaging coverage, the default, leaves it out"
        texts.append(f"what {', '.join(withholding)} withholds {how}; {advice}")
    net = network_of(config, data, config.seeds[0])
    for name, protection in fields.items():
        if (text := turn_caution(net, protection.get("custom_turn"))) is not None:
            texts.append(f"{name}: {text}")
    return texts


def check_federate(config: Federate, data: Dataset, device: torch.device) -> None:
    """Refuse, before any work, a configuration that cannot be run."""
    check_installed(config.defense)
    check = _check_submodels if config.submodels else _check_federation
    for method, defense in product(config.submodels or config.base_pruning, config.defense):
        check(config, data, device, method, defense)


def _check_federation(config: Federate, data: Dataset, device: torch.device, base: Choice, defense: Defense) -> None:
    seed = config.seeds[0]
    try:
        terms = build_spec(config, data, seed, base, defense)
    except WrongInput as error:
        if error.field not in ("base_pruning", "defense"):
            raise
        raise WrongInput(error.field, f"{base} with {defense}: {error.message}") from None
    if terms.faults.deadline is not None and terms.local.steps is not None:
        _check_deadline(terms, seed)
    net = network_of(config, data, seed).to(device)
    check_network(net, terms.custom_turn, data.inputs)
    check_spending(terms)
    sampler_of(terms, seed)  # refuses batches that no client can fill
    check_observers(config, net, data, terms, seed)
    if config.engine == "here":  # elsewhere the clients keep their states
        room_for(initial_state(terms, dict(net.named_parameters())), terms.sampled_clients, device, warn=False)


def _check_submodels(config: Federate, data: Dataset, device: torch.device, rule: Choice, defense: Defense) -> None:
    net = without_statistics(network_of(config, data, config.seeds[0]))
    structure = Structure(net, data.input_shape)
    terms = build_submodel_spec(config, data, config.seeds[0], rule, defense)
    if config.advise:
        check_pilots(rule, terms)
    rates = sizes_of(config) if config.advise else terms.used_rates
    structure.check(terms.rule, rates)
    terms.check_rows(net)
    form = terms.scaler, data.input_shape, data.classes
    narrow = [build_narrow(net, structure, rate, *form) for rate in sorted(set(rates))]
    if config.attacks:
        check_submodel_orders(orders_of(config), terms)
        check_submodel_attacks(config.attacks, submodel_knowledge(net, data, terms, "cpu"), narrow)


def _check_deadline(terms: FederationSpec, seed: int) -> None:
    """Refuse a deadline before which no client can finish."""
    steps, deadline = terms.local.steps or 1, terms.faults.deadline or 0.0
    if all(terms.faults.seconds(client, steps, seed) > deadline for client in range(len(terms.shares))):
        raise WrongInput("faults.deadline", f"{deadline} is before every client is done; use more seconds")
