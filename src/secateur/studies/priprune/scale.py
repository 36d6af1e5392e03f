"""Scales of priprune's studies, and their federations as configurations of `secateur federate`.

The paper's setting is one local step a round, 10 clients, learning rate .25, base rate .3 and 20 000 rounds. FEMNIST
has 193 users with Conv-2 in batches of 20; CIFAR-10 has 100 equal users with VGG-11 in batches of 1. The loss is not
printed. It is PruneFL's binary one, whose code the paper builds on and for which the rate of .25 was chosen. The server
attacks every rounds / 20; the rounds that the paper attacked are not printed either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from secateur import tree
from secateur.config import Federate, read
from secateur.data.dataset import Dataset
from secateur.data.partition import by_writer
from secateur.defenses.priprune import PRESETS, PriPrune
from secateur.errors import WrongInput
from secateur.federated.build import load_data
from secateur.models.create import create
from secateur.seeding import derive
from secateur.studies import study

FEMNIST, CIFAR10 = "femnist", "cifar10"
BASE_RATE = 0.3  # of studies in which something else varies
FOUR = ("prunefl", "feddst", "synflow", "snip")  # base prunings of Table 2
WEIGHTS = {FEMNIST: 6_603_710, CIFAR10: 9_385_994}  # number of weights of the paper's networks
LAMBDAS = ("accuracy", "privacy", "sharing")


@dataclass(frozen=True)
class Grid:
    """The base prunings, rates, batch sizes and networks of Figs. 2, 4 and 5, by the paper's data set."""

    networks_and_batches: dict[str, tuple[str, int]]  # if something else varies
    bases: tuple[str, ...]
    rates: dict[str, tuple[float, ...]]
    batches: dict[str, tuple[int, ...]]
    networks: dict[str, tuple[str, ...]]
    examples: int  # of a client, for the covariance of gradients; the number decides d*


@dataclass(frozen=True)
class StandIn:
    """The data set and network that stand for those of the paper."""

    data: str
    model: str
    batch_size: int
    clients: int | None = None  # None: one a writer


@dataclass(frozen=True)
class PripruneScale:
    """The size of a study; the defaults are the paper's setting."""

    stand_ins: dict[str, StandIn]
    leaking: Grid  # of Figs. 2, 4 and 5
    rounds: int = 20_000
    attacked: int = 20  # rounds
    victims: int = 1  # clients that are attacked in such a round
    brief_rounds: int = 1000  # of studies that only attack, by pruning rate; the paper does not say after how many
    brief_attacked: int = 2
    brief_victims: int = 5
    per_round: int = 10
    batch_size: int | None = None  # of a local step; None: the paper's for its data
    learning_rate: float = 0.25
    coverage: bool = False  # average over clients that sent an entry; in the paper a withheld 0 counts
    iterations: int = 10_000  # of gi and sgi
    attack_rate: float = 0.01
    evaluated: int = 40  # rounds
    examples: int | None = None  # at most so many rows of the data set
    writers: int = 193  # at most so many of the train part; every client of PriPrune has a state
    threads: int = 1
    bases: dict[str, str] = field(default_factory=dict)  # settings of base prunings that suit fewer rounds
    rates: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)  # of base prunings
    defense_rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    grid: tuple[tuple[float, ...], ...] = ((1, 5, 10), (1, 10, 15), (2e-4, 2e-5, 2e-6))  # Table A1's lambdas
    search: tuple[str, ...] = FOUR  # base prunings of studies by base


SCALES = study.read_scales(PripruneScale, "priprune")


def scale_of(name: str, overrides: Sequence[str]) -> PripruneScale:
    """Return a scale by its name, with `field=value` overrides."""
    scale = study.scale_of(SCALES, name, overrides)
    for rounds, attacked in ((scale.rounds, scale.attacked), (scale.brief_rounds, scale.brief_attacked)):
        if attacked > rounds:
            raise WrongInput("set", f"{attacked} attacked rounds are not possible; there are {rounds} rounds")
    return scale


@dataclass(frozen=True)
class Federations:
    """All base prunings under all defenses on one data set's stand-in; a bare priprune has the paper's lambdas."""

    bases: tuple[str, ...] = ("prunefl",)
    defenses: tuple[str, ...] = ("none",)
    data: str = FEMNIST
    attacks: tuple[str, ...] = ("sgi",)
    broadcast: Literal["masked", "dense"] = "masked"
    view: Literal["update", "sum"] = "update"  # the server sees every client's update, or only their sum
    brief: bool = False  # few rounds: only the attack matters
    model: str | None = None  # None: the stand-in for the data set's network
    batch_size: int | None = None


class ConfiguredFederations(NamedTuple):
    """Configured federations with their data."""

    config: Federate
    data: Dataset
    paper: str  # the paper's data set that the data stand in for


@dataclass(frozen=True, eq=False)
class PripruneSetting:
    """The context that all steps of a study share."""

    scale: PripruneScale
    options: Mapping[str, Any]  # the user's data, model, data_folder and device, if set
    seeds: list[int]
    needed: tuple[str, ...]  # the paper's data sets for which the study has steps
    datasets: dict[tuple[str, int | None], Dataset] = field(default_factory=dict)

    def configs(self, step: Federations) -> Iterator[ConfiguredFederations]:
        """Yield the federations of a step, one configuration per base pruning; none if the user's data do not match."""
        stand_in = self.scale.stand_ins[step.data]
        data = self.data_of(self.options.get("data") or stand_in.data, stand_in)
        if self.options.get("data") and not self._stands_for(step.data, data):
            return
        for base in step.bases:
            name, _, more = base.partition(":")
            settings = ":".join(filter(None, (self.scale.bases.get(name), more)))
            defenses = [self._defense(text, step, name, data) for text in step.defenses]
            chosen = {"base_pruning": f"{name}:{settings}" if settings else name, "defense": defenses}
            config = read(Federate, None, self._fields(step, stand_in, data) | chosen)
            yield ConfiguredFederations(config, data, step.data)

    def data_of(self, name: str, stand_in: StandIn) -> Dataset:
        """Return a data set, which is loaded once."""
        key = name, self.scale.examples
        if key not in self.datasets:
            fields = {"data": name, "model": self.options.get("model") or stand_in.model}
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

    def _fields(self, step: Federations, stand_in: StandIn, data: Dataset) -> dict[str, Any]:
        scale, options = self.scale, self.options
        rounds, attacked, victims = scale.rounds, scale.attacked, scale.victims
        if step.brief:
            rounds, attacked, victims = scale.brief_rounds, scale.brief_attacked, scale.brief_victims
        by_writer = stand_in.clients is None and data.writers is not None
        attacks = [f"{name}:iterations={scale.iterations}:learning_rate={scale.attack_rate:g}" for name in step.attacks]
        return {
            **{name: options.get(name) for name in ("data_folder", "device", "images")},
            "data": options.get("data") or stand_in.data,
            "model": options.get("model") or step.model or stand_in.model,
            "examples": scale.examples,
            "threads": scale.threads,
            "seeds": self.seeds,
            "rounds": rounds,
            "per_round": scale.per_round,
            "partition": "writer" if by_writer else "iid",
            "clients": None if by_writer else stand_in.clients or 100,
            "local_steps": 1,
            "batch_size": step.batch_size or scale.batch_size or stand_in.batch_size,
            "learning_rate": scale.learning_rate,
            "loss": "binary",
            "averaging": "coverage" if scale.coverage else "weighted",
            "broadcast": step.broadcast,
            "view": step.view,
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
        model = self.options.get("model") or step.model or self.scale.stand_ins[step.data].model
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
