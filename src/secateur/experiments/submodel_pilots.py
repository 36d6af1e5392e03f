"""Pilot runs for advice: every client with every model size, under similar conditions.

In a pilot each size has about as many clients. The next pilots rotate the sizes, until every client had each size once.
So a client is compared with itself. This is repeated with other random deals. A pilot is short. Longer training makes
better models and exposes more, so only the order of the sizes counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from secateur.catalogue import Choice
from secateur.config import Federate
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.submodel_advice import advise, rows_of
from secateur.federated.build import network_of
from secateur.federated.checkpoint import FederationLog, depends_of, federated
from secateur.federated.federation import Round
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.federated.submodels.spec import SubmodelSpec
from secateur.federated.submodels.stacked_federations import FinishedRounds, StackedFederations
from secateur.progress import progress
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


def dealt(clients: int, widths: Sequence[float], draws: int, seed: int) -> list[list[float]]:
    """Return the sizes of every pilot, one a client; in each draw every client has every width once.

    Example:
        >>> [sorted(pair) for pair in zip(*dealt(4, (1.0, 0.5), 1, 0))]
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
    groups = [[rates] for rates in dealt(len(terms.shares), widths, config.pilot_draws, seed)]
    if device.type == "cuda":
        groups = [[rates for (rates,) in groups]]
    with progress(f"pilots of {rule}, seed {seed}", len(groups) * config.pilot_rounds, rate=True) as advance:
        for group in groups:
            rows += _piloted(config, run, data, device, group, terms, exposer, lambda done: advance(1))
    advised = rows_of(advise(rows), exposer.labels | {"attack": str(exposer.attacks[0])})
    run.add(advised)
    return advised


def _piloted(
    config: Federate,
    run: Run,
    data: Dataset,
    device: torch.device,
    group: Sequence[Sequence[float]],
    terms: SubmodelSpec,
    exposer: ExposureObserver,
    advance: Any,
) -> list[Row]:
    """Run a group of pilots together, as a stage, and return their rows."""
    story, rounds, seed = FederationLog(), config.pilot_rounds, exposer.labels["seed"]
    asking = replace(exposer.asking, updates=1, compare=False)
    federations: list[SubmodelFederation] = []
    watchers: list[ExposureObserver] = []
    for rates in group:
        settings: Any = {"asking": asking, "turn": exposer.turn, "device": device}
        watching = ExposureObserver(exposer.attacks[:1], data, exposer.labels, story, rounds, **settings)
        watchers.append(watching)
        short = replace(terms, rates=rates, rounds=rounds, evaluate_every=rounds)
        net, observers = network_of(config, data, seed).to(device), [(watching.pace(short), watching)]
        shared: Any = {"way": config.way, "beside": federations[0] if federations else None}
        federations.append(SubmodelFederation(net, data, short, seed, device, observers=observers, **shared))

    def tell(done: Round | FinishedRounds) -> None:
        advance(done)
        for federation, watching in zip(federations, watchers, strict=True) if done.number == rounds else ():
            watching.attack_clients(federation)

    depends = {"each": [depends_of(federation, data) for federation in federations], "threads": config.threads}
    depends |= {"pilot": True, "asking": repr(asking), "exposure": str(exposer.attacks[0])}
    followed: Any = StackedFederations(federations) if len(federations) > 1 else federations[0]
    return federated(run, followed, story, tell, depends)[1].rows
