"""How large a study of priprune is run, and what stands for its data and networks: one federation's settings a step.

The paper's setting: one local step a round, 10 clients, learning rate .25, base rate .3, 20 000 rounds; FEMNIST's 193
users with Conv-2 in batches of 20, CIFAR-10 of 100 equal users with VGG-11 in batches of 1. The loss is not printed; it
is PruneFL's binary one, whose code the paper builds on and for which the rate of .25 was chosen. The server attacks
every rounds / 20; which rounds the paper attacked is not printed either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import yaml

from secateur import tree
from secateur.chance import derive
from secateur.config import Federate, read
from secateur.data.dataset import Dataset
from secateur.defenses.priprune import PRESETS, PriPrune
from secateur.errors import WrongInput, unknown
from secateur.federating import loaded
from secateur.models.create import create
from secateur.studies.priprune_grid import CIFAR10, FEMNIST, SMALL_GRID, TINY_GRID, Grid

WEIGHTS = {FEMNIST: 6_603_710, CIFAR10: 9_385_994}  # of the paper's networks
FOUR = ("prunefl", "feddst", "synflow", "snip")  # Table 2
# of a scale: `--set` leaves them alone
FIXED = ("places", "bases", "rates", "defense_rates", "grid", "search", "leaking")
LAMBDAS = ("accuracy", "privacy", "sharing")


@dataclass(frozen=True)
class Place:
    """What stands for a data set of the paper, and for its network."""

    data: str
    model: str
    batch_size: int
    clients: int | None = None  # None: one a writer


@dataclass(frozen=True)
class Scale:
    """How large a study is run; the defaults are the paper's setting. MNIST by writer stands for FEMNIST."""

    places: dict[str, Place] = field(
        default_factory=lambda: {FEMNIST: Place("qmnist", "conv-2", 20), CIFAR10: Place("cifar10", "vgg-11", 1, 100)}
    )
    rounds: int = 20_000
    attacked: int = 20  # rounds
    victims: int = 1  # clients that are attacked in such a round
    brief_rounds: int = 1000  # of studies that only attack, by pruning rate; the paper does not say after how many
    brief_attacked: int = 2
    brief_victims: int = 5
    per_round: int = 10
    learning_rate: float = 0.25
    iterations: int = 10_000  # of gi and sgi
    attack_rate: float = 0.01
    evaluated: int = 40  # rounds
    examples: int | None = None  # at most so many of the data set's rows
    threads: int = 1
    bases: dict[str, str] = field(default_factory=dict)  # settings of base prunings that suit fewer rounds
    rates: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)  # of base prunings
    defense_rates: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    grid: tuple[tuple[float, ...], ...] = ((1, 5, 10), (1, 10, 15), (2e-4, 2e-5, 2e-6))  # Table A1's lambdas
    search: tuple[str, ...] = FOUR  # base prunings of studies by base
    leaking: Grid = field(default_factory=Grid)  # of Figs. 2, 4 and 5


TINY = Scale(
    places={FEMNIST: Place("digits", "lenet-zhu", 4, 8), CIFAR10: Place("digits", "cnn6", 2, 8)},
    rounds=4,
    attacked=2,
    brief_rounds=2,
    brief_attacked=2,
    brief_victims=1,
    per_round=2,
    iterations=4,
    attack_rate=0.1,
    evaluated=4,
    examples=400,
    bases={"prunefl": "every=2:iterations=4:samples=20", "feddst": "every=2", "random": "every=2"},
    rates=(0.3, 0.9),
    defense_rates=(0.1, 0.6),
    grid=((5,), (1, 15), (2e-4, 2e-6)),
    search=("prunefl", "snip"),
    leaking=TINY_GRID,
)
SMALL = Scale(
    places={FEMNIST: Place("qmnist", "conv-2", 20), CIFAR10: Place("cifar10", "vgg-4", 10, 100)},
    rounds=30,
    attacked=3,
    brief_rounds=4,
    brief_attacked=2,
    brief_victims=1,
    iterations=80,
    attack_rate=0.1,
    evaluated=3,
    examples=20_000,
    threads=2,
    bases={"prunefl": "every=10:iterations=60", "feddst": "every=5", "random": "every=10"},
    rates=(0.3, 0.6, 0.9),
    defense_rates=(0.1, 0.3, 0.6),
    grid=((1, 10), (1, 15), (2e-4, 2e-6)),
    leaking=SMALL_GRID,
)
SCALES = {"tiny": TINY, "small": SMALL, "full": Scale()}


def scale_of(name: str, overrides: list[str] | None) -> Scale:
    """A scale by its name, with `field=value` laid over it."""
    if name not in SCALES:
        raise unknown("scale", name, SCALES)
    known = {each.name: getattr(Scale(), each.name) for each in fields(Scale) if each.name not in FIXED}
    given: dict[str, Any] = {}
    for text in overrides or []:
        key, found, value = text.partition("=")
        if not found or key not in known:
            raise WrongInput("set", f"{text!r} is not possible in this study; allowed: {', '.join(known)}")
        given[key] = yaml.safe_load(value)
        whole = not isinstance(known[key], float)
        if not isinstance(given[key], int if whole else float | int) or given[key] <= 0:
            raise WrongInput("set", f"{text!r} is not allowed; give a {'whole ' if whole else ''}number above 0")
    made = replace(SCALES[name], **given)
    for rounds, attacked in ((made.rounds, made.attacked), (made.brief_rounds, made.brief_attacked)):
        if attacked > rounds:
            raise WrongInput("set", f"{attacked} attacked rounds are not possible; there are {rounds} rounds")
    return made


@dataclass(frozen=True)
class Federations:
    """Every base pruning under every defense, on what stands for one data set; a bare priprune has its lambdas."""

    bases: tuple[str, ...] = ("prunefl",)
    defenses: tuple[str, ...] = ("none",)
    data: str = FEMNIST
    attacks: tuple[str, ...] = ("sgi",)
    broadcast: Literal["masked", "dense"] = "masked"
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
            self.datasets[key], _ = loaded(read(Federate, None, fields | given))
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
            "examples": scale.examples,
            "threads": scale.threads,
            "seeds": self.seeds,
            "rounds": rounds,
            "per_round": scale.per_round,
            "partition": "writer" if by_writer else "iid",
            "clients": None if by_writer else place.clients or 100,
            "local_steps": 1,
            "batch_size": step.batch_size or place.batch_size,
            "learning_rate": scale.learning_rate,
            "loss": "binary",
            "broadcast": step.broadcast,
            "evaluate_every": max(1, rounds // scale.evaluated),
            "attack": attacks,
            "attack_every": rounds // attacked,
            "attack_clients": victims,
        }

    def _defense(self, text: str, step: Federations, base: str, data: Dataset) -> str:
        """A defense as it is written; priprune with the paper's lambdas for this data and base, and what is set."""
        name, _, more = text.partition(":")
        if name != "priprune":
            return text
        printed = dict(zip(LAMBDAS, PRESETS.get((step.data, base), PRESETS[step.data, "prunefl"]), strict=True))
        own: dict[str, Any] = printed | dict(pair.split("=") for pair in more.split(":") if pair)
        own["sharing"] = float(own["sharing"]) * self._lighter(step, data)
        usual = PriPrune()
        return ":".join([name, *(f"{k}={float(v):g}" for k, v in own.items() if float(v) != getattr(usual, k))])

    def _lighter(self, step: Federations, data: Dataset) -> int:
        """How many times fewer weights a stand-in has: alpha rests at privacy / (sharing * weights)."""
        model = self.given.get("model") or step.model or self.scale.places[step.data].model
        net = create(model, data.input_shape, data.classes, derive(0, "check"))
        return max(1, round(WEIGHTS[step.data] / tree.count(tree.params_of(net))))
