"""The federations of a study of priprune as the settings of `secateur federate`, at a scale."""

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
from secateur.studies.priprune.scale import CIFAR10, FEMNIST, Place, Scale

WEIGHTS = {FEMNIST: 6_603_710, CIFAR10: 9_385_994}  # of the paper's networks
LAMBDAS = ("accuracy", "privacy", "sharing")


@dataclass(frozen=True)
class Federations:
    """Every base pruning under every defense, on what stands for one data set; a bare priprune has its lambdas."""

    bases: tuple[str, ...] = ("prunefl",)
    defenses: tuple[str, ...] = ("none",)
    data: str = FEMNIST
    attacks: tuple[str, ...] = ("sgi",)
    broadcast: Literal["masked", "dense"] = "masked"
    view: Literal["update", "sum"] = "update"  # what the server sees: every client's update, or their sum
    brief: bool = False  # few rounds: only the attack is of interest
    model: str | None = None  # None: what stands for the data set's own
    batch_size: int | None = None


class Ready(NamedTuple):
    """Federations that can be run."""

    config: Federate
    data: Dataset
    paper: str  # the data set of the paper that it stands for


@dataclass(frozen=True, eq=False)
class Setting:
    """What all steps of a study share."""

    scale: Scale
    given: Mapping[str, Any]  # data, model, data_folder and device, where a user gave them
    seeds: list[int]
    needed: tuple[str, ...]  # data sets of the paper that the study has steps for
    datasets: dict[tuple[str, int | None], Dataset] = field(default_factory=dict)

    def configs(self, step: Federations) -> Iterator[Ready]:
        """The federations of a step, those of one base pruning together; none where other data were given."""
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

    def data_of(self, name: str, place: Place) -> Dataset:
        """A data set, loaded once."""
        key = name, self.scale.examples
        if key not in self.datasets:
            fields = {"data": name, "model": self.given.get("model") or place.model, "examples": self.scale.examples}
            given = {"data_folder": self.given.get("data_folder"), "threads": self.scale.threads}
            whole, _ = loaded(read(Federate, None, fields | given))
            self.datasets[key] = of_first_writers(whole, self.scale.writers)
        return self.datasets[key]

    def _stands_for(self, paper: str, data: Dataset) -> bool:
        """Grey pictures stand for FEMNIST and coloured ones for CIFAR-10, where a study has both."""
        like = CIFAR10 if data.input_shape[0] == 3 else FEMNIST
        return paper == like or like not in self.needed

    def _fields(self, step: Federations, place: Place, data: Dataset) -> dict[str, Any]:
        scale, given = self.scale, self.given
        rounds, attacked, victims = scale.rounds, scale.attacked, scale.victims
        if step.brief:
            rounds, attacked, victims = scale.brief_rounds, scale.brief_attacked, scale.brief_victims
        by_writer = place.clients is None and data.writers is not None
        attacks = [f"{name}:iterations={scale.iterations}:learning_rate={scale.attack_rate:g}" for name in step.attacks]
        return {
            "data": given.get("data") or place.data,
            "model": given.get("model") or step.model or place.model,
            "data_folder": given.get("data_folder"),
            "device": given.get("device"),
            "images": given.get("images"),
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
        """A defense as it is written; priprune with the paper's lambdas for this data and base, and what is set."""
        alone, plus, joined = text.partition("+")
        name, _, more = alone.partition(":")
        if name != "priprune":
            return text
        printed = dict(zip(LAMBDAS, PRESETS.get((step.data, base), PRESETS[step.data, "prunefl"]), strict=True))
        own: dict[str, Any] = printed | dict(pair.split("=") for pair in more.split(":") if pair)
        own["sharing"] = float(own["sharing"]) * self._lighter(step, data)
        usual = PriPrune()
        changed = [f"{k}={_short(v)}" for k, v in own.items() if _short(v) != _short(getattr(usual, k))]
        return ":".join([name, *changed]) + plus + joined

    def _lighter(self, step: Federations, data: Dataset) -> int:
        """How many times fewer weights a stand-in has: alpha rests at privacy / (sharing * weights)."""
        model = self.given.get("model") or step.model or self.scale.places[step.data].model
        net = create(model, data.input_shape, data.classes, derive(0, "check"))
        return max(1, round(WEIGHTS[step.data] / tree.count(tree.params_of(net))))


def _short(value: float | str) -> str:
    """A hyper-parameter as a defense's text has it: a number without needless digits, a word as it is."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)


def of_first_writers(data: Dataset, number: int) -> Dataset:
    """The train part by its first writers alone, and the whole test part; all of it where writers are not known."""
    if data.writers is None:
        return data
    inside = torch.cat(by_writer(data.writers[: data.train_size])[:number]).sort().values
    rows = torch.cat([inside, torch.arange(data.train_size, len(data.inputs))])
    own = {name: getattr(data, name)[rows] for name in ("inputs", "labels", "writers")}
    return replace(data, **own, train_size=len(inside))
