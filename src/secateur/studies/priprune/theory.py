"""Theorem 4.1 and Corollary 4.2 of priprune beside SGI's reconstructions of the same updates: Figs. 2, 4 and 5.

The paper's figures plot no bound: Fig. 2 has NMI and PSNR by pruning rate, Fig. 4 NMI by rate and batch size, Fig. 5 by
model size and rounds. Its text says that they follow the theory. Here both stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from secateur import tree
from secateur.catalogue import Choice
from secateur.config import Federate, defense_of_clients
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.theory_curves import BATCH, RATE, ROUNDS, SIZE, THEORY, Axis, LeakageCurve, curves, updates
from secateur.federated.build import build_spec, network_of
from secateur.federated.checkpoint import depends_of
from secateur.federated.federation import Federation
from secateur.progress import progress
from secateur.runs.artifacts import Result
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.studies.priprune.results import CIFAR10, FEMNIST, PripruneResults
from secateur.studies.table import Cells, Finding, TableLine, Tabulated, find_printed, judge, negate
from secateur.theory.mutual_information import Forms, gradient_spectrum, over_rounds, single_round, single_round_prunefl

STANDS_FOR = {"femnist": FEMNIST, "qmnist": FEMNIST, "mnist": FEMNIST, "cifar10": CIFAR10}
COLUMNS = {
    "nmi_256": "NMI (256 levels)",
    "nmi_256_chance": "by chance",
    "ami_256": "AMI (256)",
    "nmi_100": "NMI (100)",
    "nmi_100_chance": "by chance (100)",
    "ami_100": "AMI (100)",
    "psnr": "PSNR",
    "printed_total": "printed, bits",
    "corrected_total": "corrected, bits",
    "corrected_gradient": "of it the gradient's",
    "rank": "d*",
}
OVER_ROUNDS = {"printed_rounds": "printed x T", "corrected_rounds": "corrected x T"}
BASE_RATE = 0.3  # of studies in which something else varies
RANKS = "(rank correlation within a seed)"


def tabulate(axes: Sequence[Axis], results: PripruneResults) -> Tabulated:
    """Return a part of the table for each axis of a figure, and its findings."""
    known = updates(results.rows)
    drawn = {axis: list(curves(known, axis)) for axis in axes}
    lines = [line for along in drawn.values() for curve in along for line in _lines(curve)]
    return lines, [finding for axis, along in drawn.items() for finding in _findings(axis, along)]


by_rate = partial(tabulate, (RATE,))
by_rate_and_batch = partial(tabulate, (RATE, BATCH))
by_size_and_round = partial(tabulate, (SIZE, ROUNDS))


def _lines(curve: LeakageCurve) -> Iterator[TableLine]:
    """Yield a line for each point of a curve."""
    names = COLUMNS | (OVER_ROUNDS if curve.axis is ROUNDS else {})
    shared = {name: f"{value:g}" if isinstance(value, int | float) else value for name, value in curve.labels.items()}
    for x in curve.points:
        varied = {"model": curve.networks[x]} if curve.axis is SIZE else {}
        cells: Cells = {title: curve.average_at(x, name) for name, title in names.items()}
        at = {curve.axis.title: f"{x:,.0f}" if x >= 1000 else f"{x:g}"}
        yield TableLine(shared | varied | at, cells, _paper(curve, x), part=f"By {curve.axis.title}")


def _paper(curve: LeakageCurve, x: float) -> str:
    """Return Table 2's number of a base pruning at the paper's rate; the figures print no numbers."""
    if curve.axis is not RATE or x != BASE_RATE:
        return ""
    data = STANDS_FOR.get(curve.labels["data"], "")
    numbers = find_printed("priprune", "table_2", data, curve.labels["base"], "none")
    return f"NMI {numbers[0]:g} after 20 000 rounds" if numbers else ""


def _name_case(curve: LeakageCurve) -> str:
    """Return the name of a correlation; with one seed its interval is over updates."""
    return curve.title + ", over the updates of one seed" * (len(curve.seeds) == 1)


def _findings(axis: Axis, drawn: Sequence[LeakageCurve]) -> Iterator[Finding]:
    """Judge if measurement and theory go along an axis as the paper says, and with one another."""
    change, sign = ("rises", 1) if axis.rises else ("falls", -1)
    theory = "rounds" if axis is ROUNDS else "total"
    forms = {f"{form}_{theory}": form for form in ("printed", "corrected")}
    forms |= {} if axis is ROUNDS else {"corrected_gradient": "corrected, without the mask"}

    def correlate(claim: str, first: str, second: str, sign: int = 1) -> Finding:
        rs = {_name_case(curve): curve.correlate(first, second) for curve in drawn}
        cases = rs if sign > 0 else {name: r and negate(r) for name, r in rs.items()}
        return judge(f"{claim} {RANKS}", cases, unit="", key="bound" if "theory" in claim else "leakage")

    yield correlate(f"leakage {change} with the {axis.title}: NMI, 256 levels", "x", "nmi_256", sign)
    yield correlate(f"leakage {change} with the {axis.title}: beyond chance, AMI", "x", "ami_256", sign)
    for metric, form in forms.items():
        yield correlate(f"theory, {form}, {change} with the {axis.title}", "x", metric, sign)
    for metric, form in forms.items():
        yield correlate(f"theory, {form}, goes with measured NMI along the {axis.title}", metric, "nmi_256")
    yield correlate(f"NMI and PSNR agree along the {axis.title}", "nmi_256", "psnr")


def bound(
    examples: int, run: Run, config: Federate, data: Dataset, device: torch.device, seed: int, base: Choice
) -> None:
    """Add the terms of Theorem 4.1 for the attacked updates of one federation as rows; the rounds are run again."""
    terms = build_spec(config, data, seed, base, defense_of_clients("none"))
    federation = Federation(
        network_of(config, data, seed).to(device), data, terms, seed, device, execution=config.execution
    )
    every = config.attack_every or config.rounds
    attacked = range(every, config.rounds + 1, every)
    depends = depends_of(terms, federation.net, data, seed, device) | {"looks": list(attacked), "examples": examples}
    result = run.stage(
        THEORY, depends, lambda: Result({}, {"rounds": list(_bounds(federation, attacked, base, examples))})
    )
    labels: dict[str, Any] = {"model": config.model, "dataset": data.name, "defense": "none", "seed": seed}
    labels |= {"pruner": str(base), "sparsity": terms.base.rate}
    extra = {"study": THEORY, "clients": len(terms.shares), "local_batch": config.batch_size}
    extra |= {"parameters": tree.count(federation.server.weights)}
    for number, one in zip(attacked, result.data["rounds"], strict=True):
        here = labels | {"extra": extra | {"at_round": number, "client": one["client"]}}
        run.add(Row(**here, metric=name, value=value, note=one["note"]) for name, value in one["values"].items())


def _bounds(federation: Federation, attacked: range, base: Choice, examples: int) -> Iterator[dict[str, Any]]:
    """Yield the terms at each attacked round, for the first client drawn and the model that it received."""
    rounds = federation.rounds()
    with progress(f"theory of {base}, seed {federation.seed}", attacked[-1], rate=True) as advance:
        for number in attacked:
            while federation.number < number - 1:
                next(rounds)
                advance(1)
            client = federation.sampler(number).clients[0]
            try:
                values, note = _values(federation, number, client, base, examples), None
            except WrongInput as error:  # the federation diverged
                values, note = {"printed_total": None, "corrected_total": None}, error.message
            yield {"client": client, "values": values, "note": note}
            advance(1)


def _values(federation: Federation, number: int, client: int, base: Choice, examples: int) -> dict[str, float | None]:
    """Return every term of both forms by name, from the gradients of the client's examples."""
    terms, server = federation.terms, federation.server
    rows = terms.shares[client][:examples].to(federation.device)
    mask = server.mask if server.prunes else {}
    spectrum = gradient_spectrum(
        federation.net, federation.model(), federation.train.take(rows), mask, terms.local.loss
    )
    weights, size = tree.count(server.mask), terms.local.batch_size
    if base.name == "prunefl":
        forms = single_round_prunefl(spectrum, size, weights)
    else:
        forms = single_round(spectrum, size, 1 - server.density if server.prunes else 0.0, weights)
    many = over_rounds(forms, number)
    values = terms_by_name(forms) | {"printed_rounds": many.printed.total, "corrected_rounds": many.corrected.total}
    return values | {"rank": spectrum.rank, "covariance_examples": spectrum.examples}


def terms_by_name(forms: Forms) -> dict[str, float | None]:
    """Return both forms as metrics of rows: `printed_batch`, `corrected_total`, ..."""
    names = ("constant", "mask", "batch", "covariance", "dimension", "gradient", "total")
    both = {"printed": forms.printed, "corrected": forms.corrected}
    return {f"{form}_{name}": getattr(terms, name) for form, terms in both.items() for name in names}
