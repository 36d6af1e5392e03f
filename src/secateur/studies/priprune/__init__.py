"""The figures and tables of "PriPrune: Quantifying and Preserving Privacy in Pruned Federated Learning".

Each study is a number of federations and a table. All federations of a study write into one run folder. Studies in the
same folder share their common federations, which are run once. Networks and data sets are the paper's. At smaller
scales others stand in for them (scales.json), and every row names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from secateur.catalogue import Choice
from secateur.config import Federate, dump, read
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.setup import device_of
from secateur.evaluation.theory_curves import BATCH, RATE, ROUNDS, SIZE
from secateur.experiments.federate import FederateExperiment, check_federate
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.studies.priprune import tables, theory
from secateur.studies.priprune.results import GI, SGI, PripruneResults
from secateur.studies.priprune.scale import (
    CIFAR10,
    FEMNIST,
    ConfiguredFederations,
    Federations,
    PripruneScale,
    PripruneSetting,
    scale_of,
)
from secateur.studies.priprune.theory import FIVE
from secateur.studies.study import Request, StudyPlan, register, run_steps, select_steps
from secateur.studies.table import Tabulated

Steps = Callable[[PripruneScale], Sequence[Federations]]
Also = Callable[[PripruneScale, Run, Federate, Dataset, torch.device, int, Choice], None]
PARTS = {name: name for name in ("bases", "defenses", "broadcast")}  # fields that `--set` can select from
INTERVALS = {
    True: "Leakage is the mean over the attacked rounds, in brackets Student's 95 % interval over these; "
    "accuracies have Wilson's. Another seed may differ by more.",
    False: "Values are means over seeds, with Student's 95 % intervals over them.",
}
SIX = (*FIVE, "grasp")  # Fig. 5
WITHHOLDING = tuple(f"{form}{name}" for form in ("", "pseudo-") for name in ("largest", "random", "mix"))
UPLOADS = ("dgp+error-feedback", "top-k+error-feedback", "noise", "dp", "pseudo-largest+dp", "priprune+dp")
SUMMED = ("none", "pseudo-largest", "priprune")  # run under secure aggregation too
MIXES = ("0", "0.3333333333", "0.6666666667", "1")  # shares of the 30 % withheld: 0, 10, 20 and 30 % largest gradients
BOTH = (GI, SGI)  # also where one attack would do: studies in one folder then share the federations of Fig. 3
# the paper's attack, one that knows the client's last update, one that compares sent entries only, and one with both
INFORMED = (SGI, f"{SGI}:follows=true", f"{SGI}:adaptive=support", f"{SGI}:adaptive=support:follows=true")
ALPHAS = ("alpha=0.1", "alpha=0.5", "alpha=0.9", "step=0.001", "step=0.1", "temperature=1", "temperature=20")
EQ_17 = "normalise=global"  # the other reading of Eq. 17, which is illegible in the paper


@dataclass(frozen=True)
class FederatedStudy:
    """The study of one figure or table: federations at a scale, and a function that makes the table of their rows."""

    tabulate: Callable[[PripruneResults], Tabulated]
    steps: Steps
    also: Also | None = None  # a further measurement of every federation

    def plan(self, request: Request) -> StudyPlan:
        """Return the plan of all federations for every seed."""
        parts = [text for text in request.overrides if text.partition("=")[0] in PARTS]
        scale = scale_of(request.scale, [text for text in request.overrides if text not in parts])
        config = read(Federate, None, {name: request.options.get(name) for name in ("seeds", "device")})
        (steps, _), device = select_steps(self.steps(scale), parts, PARTS), device_of(config)
        setting = PripruneSetting(scale, request.options, config.seeds, tuple(step.data for step in steps))
        ready = [federations for step in steps for federations in setting.configs(step)]
        if not ready:
            raise WrongInput("data", f"nothing of {request.study} is run on this data set; use another")
        for federations in ready:
            check_federate(federations.config, federations.data, device)
        datasets = {federations.data.name: federations.data for federations in ready}
        tested = {name: len(data.inputs) - data.train_size for name, data in datasets.items()}
        stands = {(federations.config.model, federations.data.name): federations.paper for federations in ready}
        also = None if self.also is None else partial(self.also, scale)
        more = {"only": dict(text.split("=", 1) for text in parts)} if parts else {}
        measure_all = partial(_run, ready, device, config.seeds, also)

        return StudyPlan(
            run=lambda: run_steps(request, scale, device, config.seeds, measure_all, **more),
            tabulate=lambda rows: self.tabulate(PripruneResults(rows, tested, stands)),
            facts=lambda rows: _facts(scale, rows, ready) | {"seeds": config.seeds},
            intervals=INTERVALS[len(config.seeds) == 1],
        )


def _run(
    ready: Sequence[ConfiguredFederations],
    device: torch.device,
    seeds: Sequence[int],
    also: Callable[..., None] | None,
    run: Run,
) -> None:
    """Run every federation for every seed; steps may share a federation, which is run once."""
    done = set()
    for seed, (config, data, _) in product(seeds, ready):
        for base, defense in product(config.base_pruning, config.defense):
            alone = config.model_copy(update={"base_pruning": [base], "defense": [defense], "seeds": [seed]})
            if (key := str(dump(alone))) not in done:
                done.add(key)
                FederateExperiment(config, run, data, device).measure([seed], base, defense)
                if also is not None:
                    also(run, config, data, device, seed, base)


def _facts(scale: PripruneScale, rows: Sequence[Row], ready: Sequence[ConfiguredFederations]) -> dict[str, Any]:
    """Return the settings that the numbers hold for: stand-ins for data and networks, and the reduced sizes."""

    def unique(values: Iterable[Any]) -> list[Any]:
        return list(dict.fromkeys(values))

    configs = [federations.config for federations in ready]
    facts: dict[str, Any] = {"data": unique(federations.data.name for federations in ready)}
    facts |= {"model": unique(c.model for c in configs)}
    facts |= {} if scale.examples is None else {"examples": scale.examples}
    clients = unique(str(row.extra["clients"]) for row in rows if "clients" in row.extra)
    facts |= {"clients": f"{scale.per_round} of {' or '.join(clients)} a round"}
    facts |= {"batch": unique(c.batch_size for c in configs), "loss": configs[0].loss}
    facts |= {"averaging": configs[0].averaging}
    facts |= {"rounds": unique(c.rounds for c in configs), "attacked every": unique(c.attack_every for c in configs)}
    facts |= {"victims": unique(c.attack_clients for c in configs)}
    return facts | {"iterations": scale.iterations, "attack rate": scale.attack_rate}


def _both(scale: PripruneScale) -> list[Federations]:
    return [Federations(scale.search, ("none", "priprune"), data, INFORMED) for data in (FEMNIST, CIFAR10)]


def _rates(bases: Sequence[str], scale: PripruneScale) -> tuple[str, ...]:
    return tuple(f"{base}:rate={rate:g}" for base in bases for rate in scale.rates)


def _defend(defenses: Sequence[str], **more: Any) -> Steps:
    """Return the function of PruneFL's federations under defenses, the same at every scale."""
    return lambda scale: [Federations(defenses=tuple(defenses), **more)]


def _attack_all(bases: Sequence[str], *more: str, broadcasts: Sequence[str] = ("dense",)) -> Steps:
    """Return the function of short federations by base pruning and rate, under both attacks."""
    return lambda scale: [
        Federations((*more, *_rates(bases, scale)), attacks=BOTH, broadcast=broadcast, brief=True)  # type: ignore[arg-type]
        for broadcast in broadcasts
    ]


def _list_fixed_rates(scale: PripruneScale) -> list[Federations]:
    fixed = [f"pseudo-largest:rate={rate:g}" for rate in scale.defense_rates]
    return [Federations(defenses=("none", "priprune", *fixed), attacks=INFORMED)]


def _largest(scale: PripruneScale) -> list[Federations]:
    rates = [rate for rate in scale.defense_rates if rate <= 0.5]
    return [Federations(defenses=("none", *(f"largest:rate={rate:g}" for rate in rates)))]


def _lambdas(scale: PripruneScale) -> list[Federations]:
    grid = [f"priprune:accuracy={a:g}:privacy={p:g}:sharing={s:g}" for a, p, s in product(*scale.grid)]
    return [Federations(defenses=tuple(grid))]


def _all_defenses(scale: PripruneScale) -> list[Federations]:
    """Return SNIP under all defenses: PruneFL's clients also send squared gradients, which DP does not cover.

    Some defenses are run under secure aggregation as well, where the server sees only the sum over a round's clients.
    """
    everything = Federations(("snip",), ("none", *WITHHOLDING, "priprune", *UPLOADS), attacks=INFORMED)
    followed = tuple(attack for attack in INFORMED if "follows" not in attack)  # a sum shows no client to follow
    return [everything, replace(everything, defenses=SUMMED, view="sum", attacks=followed)]


def _femnist_by_rate(scale: PripruneScale) -> list[Federations]:
    return [theory.by_rate(FEMNIST, scale)]


def _rates_and_batches(scale: PripruneScale) -> list[Federations]:
    batches = [(data, size) for data, sizes in scale.leaking.batches.items() for size in sizes]
    by_batch = [theory.at_base_rate(FIVE, data, scale, batch_size=size) for data, size in batches]
    return [*(theory.by_rate(data, scale) for data in (FEMNIST, CIFAR10)), *by_batch]


def _networks_and_rounds(scale: PripruneScale) -> list[Federations]:
    networks = [(data, model) for data, models in scale.leaking.networks.items() for model in models]
    by_size = [theory.at_base_rate(SIX, data, scale, model=model) for data, model in networks]
    return [*by_size, *(theory.at_base_rate(SIX, data, scale, brief=False) for data in (FEMNIST, CIFAR10))]


STUDIES = {
    "priprune-fig2": FederatedStudy(theory.tabulate(RATE), _femnist_by_rate, theory.bound),
    "priprune-fig3": FederatedStudy(tables.fig3, _attack_all(FIVE, broadcasts=("dense", "masked"))),
    "priprune-fig4": FederatedStudy(theory.tabulate(RATE, BATCH), _rates_and_batches, theory.bound),
    "priprune-fig5": FederatedStudy(theory.tabulate(SIZE, ROUNDS), _networks_and_rounds, theory.bound),
    "priprune-fig6": FederatedStudy(tables.fig6, _defend(("none", *WITHHOLDING), attacks=INFORMED)),
    "priprune-fig8": FederatedStudy(tables.fig8, _list_fixed_rates),
    "priprune-fig9": FederatedStudy(tables.fig9, _both),
    "priprune-table2": FederatedStudy(tables.table2, _both),
    "priprune-tablea1": FederatedStudy(tables.tablea1, _lambdas),
    "priprune-figa1": FederatedStudy(tables.figa1, _attack_all(("prunefl", "random"), "none")),
    "priprune-figa2": FederatedStudy(tables.figa2, _attack_all(("prunefl",))),
    "priprune-figa3": FederatedStudy(tables.figa3, _attack_all(FIVE, broadcasts=("masked",))),
    "priprune-figa4": FederatedStudy(tables.figa4, _defend([f"mix:largest={share}" for share in MIXES])),
    "priprune-figa5": FederatedStudy(tables.figa5, _largest),
    "priprune-alpha": FederatedStudy(
        tables.alpha, _defend(["none", *(f"priprune:{value}" for value in (*ALPHAS, EQ_17))])
    ),
    "priprune-defenses": FederatedStudy(tables.defenses, _all_defenses),
}
register("priprune", "priprune", STUDIES)
