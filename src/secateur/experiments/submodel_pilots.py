"""Pilot runs for advice: every client with every model size, under similar conditions.

In a pilot each size has about as many clients. The next pilots rotate the sizes, until every client had each size once.
So a client is compared with itself. This is repeated with other random deals. A pilot is short. Longer training makes
better models and exposes more, so only the order of the sizes counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from secateur.catalogue import Choice
from secateur.config import Federate
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.submodel_advice import advise, rows_of
from secateur.federated.build import network_of
from secateur.federated.checkpoint import FederationLog, depends_of, run_or_resume
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import StackedFederations, SubmodelFederation
from secateur.federated.traffic import Round
from secateur.progress import Advance, progress
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive


def check_pilots(rule: Choice, terms: SubmodelSpec) -> None:
    """Refuse rules without a choice of sizes."""
    if terms.rule.whole or terms.rule.alone:
        raise WrongInput("advise", f"{rule} has no models of other sizes to attack; use a rule such as mapp-fl")


def sizes_of(config: Federate) -> list[float]:
    """Return the shares of channels that every client tries, the largest first."""
    return sorted({1.0, *config.client_widths}, reverse=True)


def deal_widths(clients: int, widths: Sequence[float], draws: int, seed: int) -> list[list[float]]:
    """Return the sizes of every pilot, one a client; in each draw every client has every width once.

    Example:
        >>> [sorted(pair) for pair in zip(*deal_widths(4, (1.0, 0.5), 1, 0))]
        [[0.5, 1.0], [0.5, 1.0], [0.5, 1.0], [0.5, 1.0]]
    """
    pilots = []
    for draw in range(draws):
        order = torch.randperm(clients, generator=derive(seed, "pilots", draw)).tolist()
        pilots += [[widths[(position + shift) % len(widths)] for position in order] for shift in range(len(widths))]
    return pilots


def run_pilots(
    config: Federate,
    run: Run,
    data: Dataset,
    device: torch.device,
    rule: Choice,
    terms: SubmodelSpec,
    exposer: ExposureObserver,
) -> list[Row]:
    """Run the pilots of one federation and add their advice to the run."""
    seed, widths, rows = exposer.labels["seed"], sizes_of(config), []
    groups = [[rates] for rates in deal_widths(len(terms.shares), widths, config.pilot_draws, seed)]
    if device.type == "cuda":
        groups = [[rates for (rates,) in groups]]
    with progress(
        f"pilots of {rule}, seed {seed}", len(groups) * config.pilot_rounds, rate=True, unit="rounds"
    ) as advance:
        for group in groups:
            rows += _run_group(config, run, data, device, group, terms, exposer, advance)
    advised = rows_of(advise(rows), exposer.labels | {"attack": str(exposer.attacks[0])})
    run.add(advised)
    return advised


def _run_group(
    config: Federate,
    run: Run,
    data: Dataset,
    device: torch.device,
    group: Sequence[Sequence[float]],
    terms: SubmodelSpec,
    exposer: ExposureObserver,
    advance: Advance,
) -> list[Row]:
    """Run a group of pilots together, as a stage, and return their rows."""
    log, rounds, seed = FederationLog(), config.pilot_rounds, exposer.labels["seed"]
    asking = replace(exposer.asking, updates=1, compare=False)
    pilots: list[tuple[SubmodelFederation, ExposureObserver]] = []
    for rates in group:
        short = replace(terms, rates=rates, rounds=rounds, evaluate_every=rounds)
        watching = ExposureObserver(exposer.attacks[:1], data, exposer.labels, log, short, asking=asking, device=device)
        net, beside = network_of(config, data, seed).to(device), pilots[0][0] if pilots else None
        federation = SubmodelFederation(
            net, data, short, seed, device, observers=[watching], execution=config.execution, beside=beside
        )
        pilots.append((federation, watching))

    def record(done: Round) -> None:
        advance(1)
        for federation, watching in pilots if done.number == rounds else ():
            watching.attack_clients(federation)

    federations = [federation for federation, _ in pilots]
    depends = {
        "federations": [depends_of(fed.terms, fed.net, data, seed, device) for fed in federations],
        "pilot": True,
        "asking": repr(asking),
        "exposure": str(exposer.attacks[0]),
        "threads": config.threads,
    }
    whole = StackedFederations(federations) if len(federations) > 1 else federations[0]
    return run_or_resume(run, whole, log, record, depends)[1].rows
