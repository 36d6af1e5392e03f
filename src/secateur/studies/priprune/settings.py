"""Federations of a priprune study as configurations of `secateur federate`, at a scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from secateur import tree
from secateur.config import Federate, read
from secateur.data.dataset import Dataset
from secateur.data.partition import by_writer
from secateur.defenses.priprune import PRESETS, PriPrune
from secateur.federated.build import loaded
from secateur.models.create import create
from secateur.seeding import derive
from secateur.studies.priprune.scale import CIFAR10, FEMNIST, PripruneScale, StandIn

WEIGHTS = {FEMNIST: 6_603_710, CIFAR10: 9_385_994}  # number of weights of the paper's networks
LAMBDAS = ("accuracy", "privacy", "sharing")


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


class Ready(NamedTuple):
    """Configured federations with their data."""

    config: Federate
    data: Dataset
    paper: str  # the paper's data set that the data stand in for


@dataclass(frozen=True, eq=False)
class PripruneSetting:
    """The context that all steps of a study share."""

    scale: PripruneScale
    given: Mapping[str, Any]  # the user's data, model, data_folder and device, if set
    seeds: list[int]
    needed: tuple[str, ...]  # the paper's data sets for which the study has steps
    datasets: dict[tuple[str, int | None], Dataset] = field(default_factory=dict)

    def configs(self, step: Federations) -> Iterator[Ready]:
        """Yield the federations of a step, one configuration per base pruning; none if the user's data do not match."""
        place = self.scale.places[step.data]
        data = self.data_of(self.given.get("data") or place.data, place)
        if self.given.get("data") and not self._stands_for(step.data, data):
            return
        for base in step.bases:
            name, _, more = base.partition(":")
            settings = ":".join(filter(None, (self.scale.bases.get(name), more)))
            defenses = [self._defense(text, step, name, data) for text in step.defenses]
            chosen = {"base_pruning": f"{name}:{settings}" if settings else name, "defense": defenses}
            yield Ready(read(Federate, None, self._fields(step, place, data) | chosen), data, step.data)

    def data_of(self, name: str, place: StandIn) -> Dataset:
        """Return a data set, which is loaded once."""
        key = name, self.scale.examples
        if key not in self.datasets:
            fields = {"data": name, "model": self.given.get("model") or place.model, "examples": self.scale.examples}
            common = {"data_folder": self.given.get("data_folder"), "threads": self.scale.threads}
            data, _ = loaded(read(Federate, None, fields | common))
            self.datasets[key] = of_first_writers(data, self.scale.writers)
        return self.datasets[key]

    def _stands_for(self, paper: str, data: Dataset) -> bool:
        """Return True if the data can stand in for the paper's data set.

        In a study with both, grey pictures stand in for FEMNIST and coloured ones for CIFAR-10.
        """
        like = CIFAR10 if data.input_shape[0] == 3 else FEMNIST
        return paper == like or like not in self.needed

    def _fields(self, step: Federations, place: StandIn, data: Dataset) -> dict[str, Any]:
        scale, options = self.scale, self.given
        rounds, attacked, victims = scale.rounds, scale.attacked, scale.victims
        if step.brief:
            rounds, attacked, victims = scale.brief_rounds, scale.brief_attacked, scale.brief_victims
        by_writer = place.clients is None and data.writers is not None
        attacks = [f"{name}:iterations={scale.iterations}:learning_rate={scale.attack_rate:g}" for name in step.attacks]
        return {
            "data": options.get("data") or place.data,
            "model": options.get("model") or step.model or place.model,
            "data_folder": options.get("data_folder"),
            "device": options.get("device"),
            "images": options.get("images"),
            "examples": scale.examples,
            "threads": scale.threads,
            "seeds": self.seeds,
            "rounds": rounds,
            "per_round": scale.per_round,
            "partition": "writer" if by_writer else "iid",
            "clients": None if by_writer else place.clients or 100,
            "local_steps": 1,
            "batch_size": step.batch_size or scale.batch_size or place.batch_size,
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
        values["sharing"] = float(values["sharing"]) * self._lighter(step, data)
        usual = PriPrune()
        changed = [f"{k}={_short(v)}" for k, v in values.items() if _short(v) != _short(getattr(usual, k))]
        return ":".join([name, *changed]) + plus + joined

    def _lighter(self, step: Federations, data: Dataset) -> int:
        """Return the ratio of the paper's weights to the stand-in's: alpha settles at privacy / (sharing * weights)."""
        model = self.given.get("model") or step.model or self.scale.places[step.data].model
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
