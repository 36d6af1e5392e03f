"""The federations of priprune's studies as configurations of `secateur federate`, and the plan of a study.

Each study is a number of federations and a table. All federations of a study write into one run folder. Studies in the
same folder share their common federations, which are run once. Networks and data sets are the paper's. At smaller
scales others stand in for them (scales.json), and every row names them.

The paper's setting is one local step a round, 10 clients, learning rate .25, base rate .3 and 20 000 rounds. FEMNIST
has 193 users with Conv-2 in batches of 20; CIFAR-10 has 100 equal users with VGG-11 in batches of 1. The loss is not
printed. It is PruneFL's binary one, whose code the paper builds on and for which the rate of .25 was chosen. The server
attacks every rounds / 20; the rounds that the paper attacked are not printed either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import torch

from secateur import tree
from secateur.catalogue import methods, name_of
from secateur.config import Federate, dump, read
from secateur.data.dataset import Dataset
from secateur.data.partition import by_writer
from secateur.defenses.priprune import PRESETS, PriPrune
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import read_settings, sends_squares
from secateur.evaluation.setup import device_of
from secateur.experiments.federate import FederateExperiment, check_federate
from secateur.federated.build import load_data
from secateur.models.create import create
from secateur.runs.archive import Archive
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.priprune.results import CIFAR10, FEMNIST, PripruneResults
from secateur.studies.priprune.theory import STANDS_FOR, bound
from secateur.studies.results import names_of
from secateur.studies.study import SIZES, Request, Scale, Study, StudyPlan, register, run_steps, scale_of, select_steps

FIVE = ("random", "snip", "synflow", "feddst", "prunefl")  # base prunings of Figs. 2, 3 and 4
WEIGHTS = {FEMNIST: 6_603_710, CIFAR10: 9_385_994}  # number of weights of the paper's networks
SQUARES = "sgi:magnitudes=true"  # the attacker of base prunings whose clients send squared gradients
LAMBDAS = ("accuracy", "privacy", "sharing")
TESTED = {"qmnist": 10_000, "cifar10": 10_000}  # test examples of whole data sets
PARTS = {name: name for name in ("bases", "defenses", "broadcast")}  # fields that `--set` can select from
INTERVALS = {
    True: "Leakage is the mean over the attacked rounds, in brackets Student's 95 % interval over these; "
    "accuracies have Wilson's. Another seed may differ by more.",
    False: "Values are means over seeds, with Student's 95 % intervals over them.",
}


def read_scale(name: str, overrides: Sequence[str]) -> Scale:
    """Return a scale by its name, with `field=value` overrides."""
    scale = scale_of("priprune", name, overrides)
    for rounds, attacked in ((scale.rounds, scale.attacked), (scale.brief_rounds, scale.brief_attacked)):
        if attacked > rounds:
            raise WrongInput("set", f"{attacked} attacked rounds are not possible; there are {rounds} rounds")
    return scale


def values_of(scale: Scale) -> dict[str, Sequence[Any]]:
    """Return the values of a scale that steps of studies.json name."""
    grid = scale.leaking
    values: dict[str, Sequence[Any]] = {name: getattr(scale, name) for name in ("rates", "defense_rates", "search")}
    values |= dict(zip(LAMBDAS, scale.grid, strict=True))
    values["low_rates"] = [rate for rate in scale.defense_rates if rate <= 0.5]
    values["five_bounded"] = [name for name in FIVE if name in grid["bases"]]
    values["six_bounded"] = [name for name in (*FIVE, "grasp") if name in grid["bases"]]
    for data, (network, batch) in grid["networks_and_batches"].items():
        values |= {f"network_{data}": [network], f"batch_{data}": [batch]}
        values |= {f"{name}_{data}": grid[name][data] for name in ("rates", "batches", "networks")}
    return values


@dataclass(frozen=True)
class Federations:
    """All base prunings under all defenses on one data set's stand-in; a bare priprune has the paper's lambdas."""

    bases: tuple[str, ...] = ("prunefl",)
    defenses: tuple[str, ...] = ("none",)
    data: str = FEMNIST
    attacks: tuple[str, ...] = ("sgi",)
    broadcast: Literal["masked", "dense"] = "masked"
    view: Literal["update", "sum"] = "update"  # the server sees every client's update, or only their sum
    fixed: bool = False  # a client has the same examples in every round
    brief: bool = False  # few rounds: only the attack matters
    model: str | None = None  # None: the stand-in for the data set's network
    batch_size: int | None = None
    bound: bool = False  # compute the terms of Theorem 4.1 for the attacked updates too


class ConfiguredFederations(NamedTuple):
    """Configured federations with their data."""

    config: Federate
    data: Dataset
    step: Federations


@dataclass(frozen=True, eq=False)
class PripruneSetting:
    """The context that all steps of a study share."""

    scale: Scale
    options: Mapping[str, Any]  # the user's data, model, data_folder and device, if set
    seeds: list[int]
    needed: tuple[str, ...]  # the paper's data sets for which the study has steps
    datasets: dict[tuple[str, int | None], Dataset] = field(default_factory=dict)

    def configs(self, step: Federations) -> Iterator[ConfiguredFederations]:
        """Yield the federations of a step, one configuration per base pruning; none if the user's data do not match."""
        stand_in = self.scale.stand_ins[step.data]
        data = self.data_of(self.options.get("data") or stand_in["data"], stand_in)
        if self.options.get("data") and not self._stands_for(step.data, data):
            return
        for base in step.bases:
            name, _, more = base.partition(":")
            settings = ":".join(filter(None, (self.scale.bases.get(name), more)))
            defenses = [self._defense(text, step, name, data) for text in step.defenses]
            chosen = {"base_pruning": f"{name}:{settings}" if settings else name, "defense": defenses}
            config = read(Federate, None, self._fields(self._inform(step, base), stand_in, data) | chosen)
            yield ConfiguredFederations(config, data, step)

    def _inform(self, step: Federations, base: str) -> Federations:
        """Return the step with the attacker that reads squared gradients, where defenses meet informed attackers."""
        informed = step.view == "update" and any("adaptive=" in name for name in step.attacks)
        return replace(step, attacks=(*step.attacks, SQUARES)) if informed and sends_squares(base) else step

    def data_of(self, name: str, stand_in: Mapping[str, Any]) -> Dataset:
        """Return a data set, which is loaded once."""
        key = name, self.scale.examples
        if key not in self.datasets:
            fields = {"data": name, "model": self.options.get("model") or stand_in["model"]}
            fields |= {"examples": self.scale.examples, "threads": self.scale.threads}
            fields |= {"data_folder": self.options.get("data_folder")}
            data, _ = load_data(read(Federate, None, fields))
            self.datasets[key] = of_first_writers(data, self.scale.writers)
        return self.datasets[key]

    def _stands_for(self, paper: str, data: Dataset) -> bool:
        """Return True if the data can stand in for the paper's data set.

        In a study with both, grey pictures stand in for FEMNIST and coloured ones for CIFAR-10.
        """
        like = CIFAR10 if data.input_shape[0] == 3 else FEMNIST
        return paper == like or like not in self.needed

    def _fields(self, step: Federations, stand_in: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
        scale, options = self.scale, self.options
        rounds, attacked, victims = scale.rounds, scale.attacked, scale.victims
        if step.brief:
            rounds, attacked, victims = scale.brief_rounds, scale.brief_attacked, scale.brief_victims
        by_writer = stand_in["clients"] is None and data.writers is not None
        attacks = [f"{name}:iterations={scale.iterations}:learning_rate={scale.attack_rate:g}" for name in step.attacks]
        return {
            **{name: options.get(name) for name in ("data_folder", "device", "images")},
            "data": options.get("data") or stand_in["data"],
            "model": options.get("model") or step.model or stand_in["model"],
            "examples": scale.examples,
            "threads": scale.threads,
            "seeds": self.seeds,
            "rounds": rounds,
            "per_round": scale.per_round,
            "partition": "writer" if by_writer else "iid",
            "clients": None if by_writer else stand_in["clients"] or 100,
            "local_steps": 1,
            "batch_size": step.batch_size or scale.batch_size or stand_in["batch_size"],
            "learning_rate": scale.learning_rate,
            "loss": "binary",
            "averaging": "coverage" if scale.coverage else "weighted",
            "broadcast": step.broadcast,
            "view": step.view,
            "fixed_batches": step.fixed,
            "evaluate_every": max(1, rounds // scale.evaluated),
            "attack": attacks,
            "attack_every": rounds // attacked,
            "attack_clients": victims,
        }

    def _defense(self, text: str, step: Federations, base: str, data: Dataset) -> str:
        """Return the text of a defense; priprune gets the paper's lambdas for this data set and base pruning.

        Settings in the text override the lambdas.
        """
        alone, plus, joined = text.partition("+")
        name, _, more = alone.partition(":")
        if name != "priprune":
            return text
        printed = dict(zip(LAMBDAS, PRESETS.get((step.data, base), PRESETS[step.data, "prunefl"]), strict=True))
        values: dict[str, Any] = printed | dict(pair.split("=") for pair in more.split(":") if pair)
        values["sharing"] = float(values["sharing"]) * self._weights_ratio(step, data)
        usual = PriPrune()
        changed = [f"{k}={_short(v)}" for k, v in values.items() if _short(v) != _short(getattr(usual, k))]
        return ":".join([name, *changed]) + plus + joined

    def _weights_ratio(self, step: Federations, data: Dataset) -> int:
        """Return the ratio of the paper's weights to the stand-in's: alpha settles at privacy / (sharing * weights)."""
        model = self.options.get("model") or step.model or self.scale.stand_ins[step.data]["model"]
        net = create(model, data.input_shape, data.classes, derive(0, "check"))
        return max(1, round(WEIGHTS[step.data] / tree.count(tree.params_of(net))))


def _short(value: float | str) -> str:
    """Format a hyper-parameter for a defense's text: a number in its shortest form, a word unchanged."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)


def of_first_writers(data: Dataset, number: int) -> Dataset:
    """Return the first writers' train examples with the full test part; all data if writers are unknown."""
    if data.writers is None:
        return data
    inside = torch.cat(by_writer(data.writers[: data.train_size])[:number]).sort().values
    rows = torch.cat([inside, torch.arange(data.train_size, len(data.inputs))])
    parts = {name: getattr(data, name)[rows] for name in ("inputs", "labels", "writers")}
    return replace(data, **parts, train_size=len(inside))


def plan(study: Study, request: Request) -> StudyPlan:
    """Return the plan of all federations for every seed."""
    parts = [text for text in request.overrides if text.partition("=")[0] in PARTS]
    scale = read_scale(request.scale, [text for text in request.overrides if text not in parts])
    config = read(Federate, None, {name: request.options.get(name) for name in ("seeds", "device")})
    (steps, _), device = (
        select_steps(study.read_steps(Federations, **values_of(scale)), parts, PARTS),
        device_of(config),
    )
    setting = PripruneSetting(scale, request.options, config.seeds, tuple(step.data for step in steps))
    ready = [federations for step in steps for federations in setting.configs(step)]
    if not ready:
        raise WrongInput("data", f"nothing of {request.study} is run on this data set; use another")
    for federations in ready:
        check_federate(federations.config, federations.data, device)
    datasets = {federations.data.name: federations.data for federations in ready}
    tested = {name: len(data.inputs) - data.train_size for name, data in datasets.items()}
    stands = {(federations.config.model, federations.data.name): federations.step.data for federations in ready}
    more = {"only": dict(text.split("=", 1) for text in parts)} if parts else {}
    measure = partial(_run, scale, ready, device, config.seeds)
    return StudyPlan(
        run=lambda: run_steps(request, scale, device, config.seeds, measure, **more),
        tabulate=lambda rows: study.tabulate(PripruneResults(rows, tested, stands)),
        facts=lambda rows: _facts(scale, rows, ready) | {"seeds": config.seeds},
        intervals=INTERVALS[len(config.seeds) == 1],
    )


def _run(
    scale: Scale, ready: Sequence[ConfiguredFederations], device: torch.device, seeds: Sequence[int], run: Run
) -> None:
    """Run every federation for every seed; steps may share a federation, which is run once."""
    done = set()
    for seed, (config, data, step) in product(seeds, ready):
        for base, defense in product(config.base_pruning, config.defense):
            alone = config.model_copy(update={"base_pruning": [base], "defense": [defense], "seeds": [seed]})
            if (key := str(dump(alone))) not in done:
                done.add(key)
                FederateExperiment(config, run, data, device).measure([seed], base, defense)
                if step.bound:
                    bound(scale.leaking["examples"], run, config, data, device, seed, base)


def _facts(scale: Scale, rows: Sequence[Row], ready: Sequence[ConfiguredFederations]) -> dict[str, Any]:
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


def _rate_of(defense: str) -> float | None:
    """Return the rate of a withholding rule; None of another defense."""
    entry = methods("defense").get(name_of(defense))
    usual = None if entry is None or "+" in defense else entry.defaults.get("rate")
    return None if usual is None else float(read_settings(defense).get("rate", usual))


def gather(study: Study, archive: Archive) -> dict[str, PripruneResults]:
    """Return the results of the archived federations that are the study's, by broadcast, base pruning and defense.

    A rule of a study that names no rate has its usual one; archives may hold others.
    """
    scale = archive.scale if archive.scale in SIZES else "full"
    steps = study.read_steps(Federations, **values_of(read_scale(scale, ())))
    wanted = {
        (broadcast, name_of(base), names_of(text), None if "rate=" in text else _rate_of(text))
        for step in steps
        for broadcast in (step.broadcast, None)  # a bound by theory has none
        for base in step.bases
        for text in step.defenses
    }

    def is_wanted(row: Row) -> bool:
        key = row.extra.get("broadcast"), name_of(row.pruner or "none"), names_of(row.defense or "none")
        return bool({(*key, None), (*key, _rate_of(row.defense or "none"))} & wanted)

    rows = [row for row in archive.rows if is_wanted(row)]
    stands = {(row.model, row.dataset): STANDS_FOR.get(row.dataset, "") for row in rows}
    return {"": PripruneResults(rows, TESTED if scale == "full" else {}, stands)}


register("priprune", "priprune", plan, gather)
