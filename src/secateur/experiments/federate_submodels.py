"""The job `secateur federate --submodels`: every channel rule under every defense, for every seed.

On a GPU the seeds of a rule run together, as lanes of one stack. On a CPU each seed is a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from secateur.catalogue import Choice, Defense
from secateur.config import Federate, dump
from secateur.data.dataset import Dataset
from secateur.evaluation.submodel_advice import sized
from secateur.experiments.context import check_installed
from secateur.experiments.submodel_pilots import check_pilots, run_pilots, sizes_of
from secateur.federated.build import loaded, network_of
from secateur.federated.checkpoint import FederationLog, depends_of, federated
from secateur.federated.federation import Round
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.membership_attacks import Asking
from secateur.federated.submodels.spec import SubmodelSpec, check_rows, terms_of
from secateur.federated.submodels.stacked_federations import FinishedRounds, StackedFederations
from secateur.federated.submodels.structure import Structure, narrowed, static
from secateur.federated.traffic import Measure
from secateur.gpu.memory import let_go
from secateur.progress import progress
from secateur.report import page_afterwards
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row
from secateur.training.recipe import Recipe

if TYPE_CHECKING:
    from secateur.federated.flower.link import Link


def run_submodels(config: Federate, out: Path, link: Link | None = None) -> list[Row]:
    """Run every rule under every defense for every seed, into the folder `out`; `link` connects to Flower's nodes."""
    data, device = loaded(config)
    check_submodels(config, data)
    together = device.type == "cuda" and config.way != "sequential" and link is None
    with page_afterwards(out), open_run(out, "federate", dump(config), device=str(device), seeds=config.seeds) as run:
        for rule in config.submodels:
            for defense in config.defense:
                if config.advise:
                    advise(config, run, data, device, rule, defense)
                    continue
                joint = together and not rule.make().alone
                for seeds in [config.seeds] if joint else [[seed] for seed in config.seeds]:
                    measure(config, run, data, device, seeds, rule, defense, link)
    return run.rows


def check_submodels(config: Federate, data: Dataset) -> None:
    """Refuse an impossible configuration before any work."""
    check_installed(config.defense)
    net = static(network_of(config, data, config.seeds[0]))
    structure = Structure(net, data.input_shape)
    for rule in config.submodels:
        for defense in config.defense:
            terms = terms_of(config, data, config.seeds[0], rule, defense)
            if config.advise:
                check_pilots(rule, terms)
            rates = sizes_of(config) if config.advise else terms.used_rates
            structure.check(terms.rule, rates)
            check_rows(net, terms)
            for rate in set(rates):
                narrowed(net, structure, rate, terms.scaler, data.input_shape, data.classes)


def plan_submodels(config: Federate) -> list[str]:
    """Describe the job in lines; refuse every configuration that the job would refuse before its work."""
    data, _ = loaded(config)
    check_submodels(config, data)
    terms = terms_of(config, data, config.seeds[0], config.submodels[-1], config.defense[0])
    sizes, rates = [len(rows) for rows in terms.shares], sorted(set(terms.rates), reverse=True)
    widths = ", ".join(f"{list(terms.rates).count(rate)} with {sized(rate)}" for rate in rates)
    rounds = f"{terms.rounds} rounds"
    if config.advise:
        tried = sizes_of(config)
        widths = f"each with {', '.join(map(sized, tried))} in turn"
        rounds = f"{len(tried) * config.pilot_draws} pilots of {config.pilot_rounds} rounds"
    attacked = "clients" if config.advise else "clients and server"
    local = f"{terms.local.epochs} local epoch{'s' * (terms.local.epochs > 1)} of batches of {terms.local.batch_size}"
    crops = "" if terms.local.augment is None else ", pictures cropped and flipped"
    return [
        f"{config.model} on {data.name}, seeds {', '.join(map(str, config.seeds))}; for each seed:",
        f"  {len(sizes)} clients ({config.partition}) with {min(sizes)} to {max(sizes)} examples each: {widths}",
        f"  {rounds} of {local}, Adam with {terms.local.learning_rate:g}{crops}",
        f"  {terms.averaging} average of each cell, uncovered: {terms.uncovered}, BatchNorm {terms.batchnorm}",
        f"  sub-models by {', '.join(map(str, config.submodels))}",
        f"  defend with {', '.join(map(str, config.defense))}",
        f"  attack {attacked} with {', '.join(map(str, config.exposure)) or 'nothing'}",
    ]


def labels_of(
    model: str, data: Dataset, seed: int, rule: Choice, defense: Defense, terms: SubmodelSpec
) -> dict[str, Any]:
    """Return the labels of every row of a federation; `row_of` adds the round, the client and its width."""
    extra = {"submodels": str(rule), "large_clients": sum(rate == 1 for rate in terms.used_rates)}
    extra |= {name: getattr(terms, name) for name in ("uncovered", "batchnorm", "averaging", "own_labels")}
    extra |= {"clients": len(terms.shares), "rounds": terms.rounds}
    extra |= {} if terms.local.augment is None else {"augment": True}
    return {"model": model, "dataset": data.name, "seed": seed, "defense": str(defense), "extra": extra}


def row_of(labels: dict[str, Any], terms: SubmodelSpec, measure: Measure, timing: bool = False) -> Row:
    """Return a measure as a row."""
    client = measure.client
    row_extra: dict[str, Any] = {"round": measure.round, "client": client}
    if client is not None:
        row_extra |= {"rate": terms.used_rates[client], "client_rows": len(terms.shares[client])}
    row_labels = labels | {"extra": labels["extra"] | row_extra}
    return Row(**row_labels, metric=measure.metric, value=measure.value, note=measure.note, timing=timing)


def measure(
    config: Federate,
    run: Run,
    data: Dataset,
    device: torch.device,
    seeds: Sequence[int],
    rule: Choice,
    defense: Defense,
    link: Link | None = None,
) -> None:
    """Run the federations of the seeds from the first round to the last, several together, and add their rows."""
    let_go(device)
    federations: list[SubmodelFederation] = []
    story, exposers = FederationLog(), []
    for seed in seeds:
        terms, beside = terms_of(config, data, seed, rule, defense), federations[0] if federations else None
        net = network_of(config, data, seed).to(device)
        exposer = exposer_of(config, data, labels_of(config.model, data, seed, rule, defense, terms), story, device)
        pace = exposer.pace(terms) if link is None else 1  # real clients may be lost at any time
        watching = [(pace, exposer)] if config.exposure else []
        make = _engine(config, link, seed, rule, defense)
        federations.append(make(net, data, terms, seed, device, observers=watching, way=config.way, beside=beside))
        exposers.append(exposer)
    followed: Any = (
        StackedFederations(federations)
        if len(federations) > 1
        else LocalBaseline(federations[0])
        if federations[0].terms.rule.alone
        else federations[0]
    )
    depends = {
        "each": [depends_of(federation, data) for federation in federations],
        "threads": config.threads,
        "way": config.way,
    }
    depends |= {"exposure": list(map(str, config.exposure)), "asking": repr(exposers[0].asking)}
    depends |= {} if link is None else {"engine": config.engine}
    title = f"{rule}, {defense}, seed {', '.join(map(str, seeds))}"
    try:
        with progress(title, config.rounds, rate=True) as advance:
            tell = teller(federations, exposers, story, advance)
            _, result = federated(run, followed, story, tell, depends, federations[0].every)
    except KeyboardInterrupt:
        run.add(story.rows)  # the page shows the rounds until the interruption
        raise
    run.show(result.figures)
    run.add(result.rows)
    for federation, exposer in zip(federations, exposers, strict=True):
        spent = Measure("seconds", result.seconds / len(federations), config.rounds)
        run.add([row_of(exposer.labels, federation.terms, spent, timing=True)])


def advise(config: Federate, run: Run, data: Dataset, device: torch.device, rule: Choice, defense: Defense) -> None:
    """Run pilots instead of the federation for every seed, and add their advice to the run."""
    for seed in config.seeds:
        terms = terms_of(config, data, seed, rule, defense)
        labels = labels_of(config.model, data, seed, rule, defense, terms)
        piloted = labels["extra"] | {"pilot": True, "pilot_rounds": config.pilot_rounds}
        exposer = exposer_of(config, data, labels | {"extra": piloted}, FederationLog(), device)
        run_pilots(config, run, data, device, rule, terms, exposer)


def _engine(
    config: Federate, link: Link | None, seed: int, rule: Choice, defense: Defense
) -> Callable[..., SubmodelFederation]:
    """Return the function that builds a federation: in process, or over a link."""
    if link is None:
        return SubmodelFederation
    from secateur.federated.flower.app import engine_over

    return engine_over(link, config, seed, rule, defense)


def exposer_of(
    config: Federate, data: Dataset, labels: dict[str, Any], story: FederationLog, device: torch.device
) -> ExposureObserver:
    """Return the attacker of the clients and the server of one federation."""
    asking = Asking(
        printed=config.knowledge == "min",
        whole=config.asks_known,
        batches=config.scoring,
        size=config.test_batch,
        updates=config.attack_history,
        shadows=config.shadow_clients,
    )
    turn = Recipe(
        epochs=config.local_epochs or 1,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        weight_decay=0.0,
        patience=None,
    )
    near = replace(data, inputs=data.inputs.to(device), labels=data.labels.to(device))
    return ExposureObserver(
        config.exposure, near, labels, story, config.rounds, asking=asking, turn=turn, device=device
    )


def teller(
    federations: Sequence[SubmodelFederation],
    exposers: Sequence[ExposureObserver],
    story: FederationLog,
    advance: Callable[..., None],
) -> Callable[[Round | FinishedRounds], None]:
    """Return a function that is called after each round.

    It adds the round's measures to the story, attacks clients and servers after the last one, and updates the display.
    """
    shown = 0

    def tell(done: Round | FinishedRounds) -> None:
        nonlocal shown
        finished = done.each if isinstance(done, FinishedRounds) else [done]
        for federation, exposer, round_done in zip(federations, exposers, finished, strict=True):
            story.rows += [row_of(exposer.labels, federation.terms, measure) for measure in round_done.measures]
            if exposer.attacks and done.number == federation.terms.rounds:
                exposer.finish(federation)
        server = [m.value for m in finished[0].measures if m.metric == "test_accuracy" and m.client is None]
        text = f"round {done.number}, accuracy {server[0]:.3f}" if server else None
        advance(done.number - shown, text)
        shown = done.number

    return tell
