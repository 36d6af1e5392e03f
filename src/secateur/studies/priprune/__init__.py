"""The figures and tables of "PriPrune: Quantifying and Preserving Privacy in Pruned Federated Learning".

Each study is a number of federations and a table. All federations of a study write into one run folder. Studies in the
same folder share their common federations, which are run once. Networks and data sets are the paper's. At smaller
scales others stand in for them (scales.json), and every row names them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from secateur.catalogue import Choice, method, name_of
from secateur.config import Federate, dump, read
from secateur.data.dataset import Dataset
from secateur.errors import WrongInput
from secateur.evaluation.setup import device_of
from secateur.evaluation.theory_curves import BATCH, RATE, ROUNDS, SIZE
from secateur.experiments.federate import check_federate, measure
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.studies.priprune import attack_tables, defense_tables, theory
from secateur.studies.priprune.results import GI, SGI, PripruneResults
from secateur.studies.priprune.scale import (
    CIFAR10,
    FEMNIST,
    SCALES,
    ConfiguredFederations,
    Federations,
    PripruneScale,
    PripruneSetting,
    scale_of,
)
from secateur.studies.study import Plan, Request, run_steps
from secateur.studies.table import Tabulated

Also = Callable[[PripruneScale, Run, Federate, Dataset, torch.device, int, Choice], None]
PARTS = ("bases", "defenses", "broadcast")  # parts of a study that `--set` can select from
INTERVALS = {
    True: "Leakage is the mean over the attacked rounds, in brackets Student's 95 % interval over these; "
    "accuracies have Wilson's. Another seed may differ by more.",
    False: "Values are means over seeds, with Student's 95 % intervals over them.",
}
SIX = (*theory.FIVE, "grasp")  # Fig. 5
FIVE = ("random", "snip", "synflow", "feddst", "prunefl")  # Fig. 3
WITHHOLDING = tuple(f"{form}{name}" for form in ("", "pseudo-") for name in ("largest", "random", "mix"))
UPLOADS = ("dgp+error-feedback", "top-k+error-feedback", "noise", "dp", "pseudo-largest+dp", "priprune+dp")
SUMMED = ("none", "pseudo-largest", "priprune")  # run under secure aggregation too
MIXES = ("0", "0.3333333333", "0.6666666667", "1")  # shares of the 30 % withheld: 0, 10, 20 and 30 % largest gradients
BOTH = (GI, SGI)  # also where one attack would do: studies in one folder then share the federations of Fig. 3
REMEMBERING = (SGI, f"{SGI}:follows=true")  # the paper's attack, and one that knows the client's last update
ALPHAS = ("alpha=0.1", "alpha=0.5", "alpha=0.9", "step=0.001", "step=0.1", "temperature=1", "temperature=20")
EQ_17 = "normalise=global"  # the other reading of Eq. 17, which is illegible in the paper
register = partial(method, "study", paper="priprune", scales=tuple(SCALES))


@dataclass(frozen=True)
class FederatedStudy:
    """The study of one figure or table: federations at a scale, and a function that makes the table of their rows."""

    tabulate: Callable[[PripruneResults], Tabulated]
    steps: Callable[[PripruneScale], Sequence[Federations]]
    also: Also | None = None  # a further measurement of every federation

    def plan(self, request: Request) -> Plan:
        """Return the plan of all federations for every seed."""
        parts = {key: value for key, _, value in (text.partition("=") for text in request.overrides) if key in PARTS}
        scale = scale_of(request.scale, [text for text in request.overrides if text.partition("=")[0] not in PARTS])
        config = read(Federate, None, {name: request.options.get(name) for name in ("seeds", "device")})
        steps, device = select_steps(self.steps(scale), parts), device_of(config)
        setting = PripruneSetting(scale, request.options, config.seeds, tuple(step.data for step in steps))
        torch.set_num_threads(scale.threads)
        ready = [federations for step in steps for federations in setting.configs(step)]
        if not ready:
            raise WrongInput("data", f"nothing of {request.study} is run on this data set; use another")
        for federations in ready:
            check_federate(federations.config, federations.data, device)
        datasets = {federations.data.name: federations.data for federations in ready}
        tested = {name: len(data.inputs) - data.train_size for name, data in datasets.items()}
        stands = {(federations.config.model, federations.data.name): federations.paper for federations in ready}
        also = None if self.also is None else partial(self.also, scale)
        more = {"only": parts} if parts else {}
        measure_all = partial(_run, ready, device, config.seeds, also)

        return Plan(
            run=lambda: run_steps(request, scale, device, config.seeds, measure_all, **more),
            tabulate=lambda rows: self.tabulate(PripruneResults(rows, tested, stands)),
            facts=lambda rows: _facts(scale, rows, ready) | {"seeds": config.seeds},
            intervals=INTERVALS[len(config.seeds) == 1],
        )


@register("priprune-fig2")
def fig2() -> FederatedStudy:
    """NMI and PSNR of SGI by pruning rate, FEMNIST, beside Theorem 4.1 (priprune, Fig. 2)."""
    return FederatedStudy(theory.tabulate(RATE), lambda scale: [theory.by_rate(FEMNIST, scale)], theory.bound)


@register("priprune-fig3")
def fig3() -> FederatedStudy:
    """GI and SGI by base pruning and its rate, broadcast dense and masked (priprune, Fig. 3)."""
    return FederatedStudy(
        attack_tables.fig3,
        lambda scale: [
            Federations(_rates(FIVE, scale), attacks=BOTH, broadcast="dense", brief=True),
            Federations(_rates(FIVE, scale), attacks=BOTH, broadcast="masked", brief=True),
        ],
    )


@register("priprune-fig4")
def fig4() -> FederatedStudy:
    """NMI of SGI by pruning rate and by batch size, both data sets, beside Theorem 4.1 (priprune, Fig. 4)."""

    def steps(scale: PripruneScale) -> list[Federations]:
        batches = [(data, size) for data, sizes in scale.leaking.batches.items() for size in sizes]
        by_batch = [theory.at_base_rate(theory.FIVE, data, scale, batch_size=size) for data, size in batches]
        return [*(theory.by_rate(data, scale) for data in (FEMNIST, CIFAR10)), *by_batch]

    return FederatedStudy(theory.tabulate(RATE, BATCH), steps, theory.bound)


@register("priprune-fig5")
def fig5() -> FederatedStudy:
    """NMI of SGI by model size and by round, both data sets, beside Corollary 4.2 (priprune, Fig. 5)."""

    def steps(scale: PripruneScale) -> list[Federations]:
        networks = [(data, model) for data, models in scale.leaking.networks.items() for model in models]
        by_size = [theory.at_base_rate(SIX, data, scale, model=model) for data, model in networks]
        return [*by_size, *(theory.at_base_rate(SIX, data, scale, brief=False) for data in (FEMNIST, CIFAR10))]

    return FederatedStudy(theory.tabulate(SIZE, ROUNDS), steps, theory.bound)


@register("priprune-fig6")
def fig6() -> FederatedStudy:
    """Largest, Random and Mix on PruneFL, as real and as pseudo-pruning (priprune, Fig. 6)."""
    return FederatedStudy(
        defense_tables.fig6, lambda scale: [Federations(defenses=("none", *WITHHOLDING), attacks=REMEMBERING)]
    )


@register("priprune-fig8")
def fig8() -> FederatedStudy:
    """Fixed defense rates and PriPrune on PruneFL, over the rounds (priprune, Fig. 8)."""
    return FederatedStudy(
        defense_tables.fig8,
        lambda scale: [
            Federations(defenses=("none", "priprune", *_at("pseudo-largest", scale.defense_rates)), attacks=REMEMBERING)
        ],
    )


@register("priprune-fig9")
def fig9() -> FederatedStudy:
    """Accuracy and NMI of four base prunings with and without PriPrune, two data sets (priprune, Fig. 9)."""
    return FederatedStudy(defense_tables.fig9, _both)


@register("priprune-table2")
def table2() -> FederatedStudy:
    """NMI of four base prunings with and without PriPrune, two data sets (priprune, Table 2)."""
    return FederatedStudy(defense_tables.table2, _both)


@register("priprune-tablea1")
def tablea1() -> FederatedStudy:
    """NMI of PruneFL with PriPrune by its three lambdas (priprune, Table A1)."""

    def steps(scale: PripruneScale) -> list[Federations]:
        grid = [f"priprune:accuracy={a:g}:privacy={p:g}:sharing={s:g}" for a, p, s in product(*scale.grid)]
        return [Federations(defenses=tuple(grid))]

    return FederatedStudy(defense_tables.tablea1, steps)


@register("priprune-figa1")
def figa1() -> FederatedStudy:
    """The classic GI attack on PruneFL and Random by pruning rate (priprune, Fig. A1)."""
    return FederatedStudy(
        attack_tables.figa1,
        lambda scale: [
            Federations(("none", *_rates(("prunefl", "random"), scale)), attacks=BOTH, broadcast="dense", brief=True)
        ],
    )


@register("priprune-figa2")
def figa2() -> FederatedStudy:
    """NMI and PSNR of GI on PruneFL by pruning rate (priprune, Fig. A2)."""
    return FederatedStudy(
        attack_tables.figa2,
        lambda scale: [Federations(_rates(("prunefl",), scale), attacks=BOTH, broadcast="dense", brief=True)],
    )


@register("priprune-figa3")
def figa3() -> FederatedStudy:
    """Pictures under SGI by base pruning and its rate (priprune, Fig. A3)."""
    return FederatedStudy(
        attack_tables.figa3, lambda scale: [Federations(_rates(FIVE, scale), attacks=BOTH, brief=True)]
    )


@register("priprune-figa4")
def figa4() -> FederatedStudy:
    """Four mixes of largest and random gradients at 30 % on PruneFL, over the rounds (priprune, Fig. A4)."""
    mixes = tuple(f"mix:largest={share}" for share in MIXES)
    return FederatedStudy(defense_tables.figa4, lambda scale: [Federations(defenses=mixes)])


@register("priprune-figa5")
def figa5() -> FederatedStudy:
    """Largest at 0 to 50 % on PruneFL: accuracy, NMI and the attack's loss (priprune, Fig. A5)."""
    return FederatedStudy(
        defense_tables.figa5,
        lambda scale: [
            Federations(defenses=("none", *_at("largest", [rate for rate in scale.defense_rates if rate <= 0.5])))
        ],
    )


@register("priprune-alpha")
def alpha() -> FederatedStudy:
    """Effect of alpha's start and step, the temperature and Eq. 17's reading, all left open (not in priprune)."""
    settings = tuple(f"priprune:{value}" for value in (*ALPHAS, EQ_17))
    return FederatedStudy(defense_tables.alpha, lambda scale: [Federations(defenses=("none", *settings))])


@register("priprune-defenses")
def defenses() -> FederatedStudy:
    """All defenses of what a client sends on one axis: accuracy, leakage, bytes (not in priprune).

    The base pruning is SNIP: PruneFL's clients also send squared gradients, which DP does not cover. Some defenses are
    run under secure aggregation as well, where the server sees only the sum over a round's clients.
    """
    attacks = (SGI, f"{SGI}:adaptive=support")
    all_defenses = ("none", *WITHHOLDING, "priprune", *UPLOADS)
    return FederatedStudy(
        defense_tables.defenses,
        lambda scale: [
            Federations(("snip",), all_defenses, attacks=attacks),
            Federations(("snip",), SUMMED, attacks=attacks, view="sum"),
        ],
    )


def select_steps(steps: Sequence[Federations], parts: Mapping[str, str]) -> list[Federations]:
    """Select a part of a study, to run on a separate machine, by `bases=prunefl,snip` or `defenses=none,priprune`.

    A name selects all its settings; the study's full text (pseudo-largest:rate=0.3) selects one. `broadcast=dense`
    selects the federations with a dense broadcast.
    """
    left = []
    for step in steps:
        selected: dict[str, Any] = {part: _among(_texts(step, part), wanted) for part, wanted in parts.items()}
        if all(selected.values()):
            selected |= {"broadcast": step.broadcast} if "broadcast" in selected else {}
            left.append(replace(step, **selected))
    if not left:
        known = {part: dict.fromkeys(text for step in steps for text in _texts(step, part)) for part in PARTS}
        choices = ", its ".join(f"{part} are {', '.join(texts)}" for part, texts in known.items())
        raise WrongInput("set", f"leaves nothing of this study; its {choices}")
    return left


def _texts(step: Federations, part: str) -> tuple[str, ...]:
    """Return all values of a part in a step."""
    values = getattr(step, part)
    return (values,) if isinstance(values, str) else values


def _among(texts: Sequence[str], wanted: str) -> tuple[str, ...]:
    names = [name.strip() for name in wanted.split(",")]
    return tuple(text for text in texts if text in names or name_of(text) in names)


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
                measure(config, run, data, device, seed, base, defense)
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
    return [Federations(scale.search, ("none", "priprune"), data, REMEMBERING) for data in (FEMNIST, CIFAR10)]


def _rates(bases: tuple[str, ...], scale: PripruneScale) -> tuple[str, ...]:
    return tuple(f"{base}:rate={rate:g}" for base in bases for rate in scale.rates)


def _at(defense: str, rates: tuple[float, ...] | list[float]) -> tuple[str, ...]:
    return tuple(f"{defense}:rate={rate:g}" for rate in rates)
