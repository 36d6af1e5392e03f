"""The search of `secateur recommend --updates`: which defense of an update shows least, at the least loss of accuracy.

The rows are halved. On one half recipes are chosen: updates of its training rows are attacked, and a short
collaborative training under the defense shows its accuracy and its bytes. On the other half, with a fresh seed, the
chosen one meets every attack, in every mode that is known against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from secateur.attacks.inversion.adaptive import settings_of_mode
from secateur.catalogue import Choice, Defense
from secateur.config import Invert, RecommendFederation, RecommendUpdates, dump, inversion
from secateur.data.dataset import Dataset
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.precode import with_divergence
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import list_modes
from secateur.evaluation.client import check_pictures
from secateur.evaluation.selection import BYTES, DROP, PSNR, RECOGNISABLE, Assessment, find_strongest
from secateur.evaluation.setup import prepare
from secateur.experiments.context import SeedContext
from secateur.experiments.invert import ClientExposure, check_invert
from secateur.experiments.invert_targets import client_of, data_of
from secateur.experiments.recipe_search import (
    FIRST,
    NOTHING,
    SHADOWED,
    Confirmation,
    HalfRun,
    StageClock,
    describe_amount,
)
from secateur.federated.build import hold_out
from secateur.federated.collaborative.plan import Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeResult, CollaborativeTraining, Epoch, collaborate
from secateur.metrics.cost import communication
from secateur.metrics.estimates import difference
from secateur.metrics.membership import Estimate, share_of
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive

RUNGS = ("the plain attack on some updates", "the plain attack on all updates", "every attacker known")
FEWER = 2  # the first rung's part of the updates and of the iterations
NONE = "none"


def name_defense(defense: Defense) -> str:
    """Name a defense in a sentence."""
    return "no defense" if str(defense) == NONE else str(defense)


@dataclass(frozen=True)
class UpdateRecipe:
    """A defense of a client's update, with its strength."""

    defense: Defense

    @property
    def title(self) -> str:
        """The recipe in words."""
        return name_defense(self.defense)

    @property
    def settings(self) -> dict[str, str | float]:
        """The settings that a search varies: the methods, and their parameters as text."""
        names = "+".join(part.name for part in self.defense.parts)
        values = ":".join(f"{name}={value:g}" for part in self.defense.parts for name, value in part.arguments)
        return {"defense": names, "strength": f"{names}:{values}"}

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of its rows."""
        return {"defense": str(self.defense), "extra": {"title": self.title}}


@dataclass(frozen=True)
class UpdateSpace:
    """The defenses to search."""

    defenses: Sequence[Defense]

    @property
    def sizes(self) -> dict[str, tuple[int, bool]]:
        """One setting: the defense with its strength."""
        return {"defense": (len(self.defenses), False)}

    def build(self, choices: Mapping[str, int]) -> UpdateRecipe:
        """Return the recipe at a position."""
        return UpdateRecipe(self.defenses[choices["defense"]])

    def locate(self, recipe: UpdateRecipe) -> dict[str, int] | None:
        """Return None: the search begins with no recipe."""
        return None


def halve_rows(data: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Return two data sets without a common row: halves of the train part and of the test part."""
    rng, halves = derive(seed, "halves"), []
    train = torch.randperm(data.train_size, generator=rng).tensor_split(2)
    test = (data.train_size + torch.randperm(len(data.inputs) - data.train_size, generator=rng)).tensor_split(2)
    if min(len(part) for part in (*train, *test)) < 2:
        raise WrongInput("data", f"{len(data.inputs)} rows cannot be halved into train and test parts; use more rows")
    for rows, others in zip(train, test, strict=True):
        both = torch.cat([rows, others])
        writers = None if data.writers is None else data.writers[both]
        part = replace(data, inputs=data.inputs[both], labels=data.labels[both], train_size=len(rows), writers=writers)
        halves.append(replace(part, groups=data.groups_of(both)))
    return halves[0], halves[1]


@dataclass(frozen=True)
class HalvedBench:
    """The halves of the data on which recipes are measured whole, and the run that keeps the stages."""

    run: Run
    search: RecommendUpdates | RecommendFederation
    halves: tuple[Dataset, Dataset]  # to choose on, and to confirm on
    device: torch.device
    clock: StageClock = field(default_factory=StageClock)

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of all rows."""
        return {"model": self.search.model, "dataset": self.halves[0].name, "seed": self.search.seed}

    @cached_property
    def fresh_seed(self) -> int:
        """The seed of the confirmation: another model, other clients and draws, and other starts of the attacks."""
        return int(torch.randint(1_000, 1_000_000, (), generator=derive(self.search.seed, "fresh")))

    def list_known(self) -> list[Any]:
        """Return nothing: the run file compares none."""
        return []

    def train_originals(self) -> None:
        """Do nothing: what is undefended is a stage of the first recipe."""

    def train(self, recipes: Sequence[Any], rung: int) -> None:
        """Do nothing: recipes share no steps."""


@dataclass(frozen=True)
class UpdateBench(HalvedBench):
    """The bench of defenses of updates."""

    search: RecommendUpdates
    rungs: Sequence[str] = RUNGS
    objectives: Sequence[str] = (DROP, PSNR, BYTES)

    def open_space(self) -> UpdateSpace:
        """Return the defenses to search."""
        return UpdateSpace(list(dict.fromkeys(self.search.defense)))

    def audit_seconds(self, fresh: int, finalists: int = 1) -> float:
        """Return about the seconds of every attacker known on so many recipes."""
        attacks = 4 * len(self.search.attacks) * self.clock.mean("invert")
        return 1.2 * (finalists * attacks + fresh * self.clock.mean("collaborate"))

    def assess(self, number: int, recipe: UpdateRecipe, rung: int) -> Assessment:
        """Attack updates under a defense on the half to choose on, and train for a short time under it."""
        measures, _, _ = self._measure(recipe.defense, rung, self.halves[0], self.search.seed)
        return Assessment(number, recipe.title, rung, measures)

    def confirm(self, recipe: UpdateRecipe) -> Confirmation:
        """Attack updates of the other half with a fresh seed, by all attacks in all modes."""
        measures, run, trained = self._measure(recipe.defense, SHADOWED, self.halves[1], self.fresh_seed)
        attacks = [str(attack) for attack in self._list_attacks(recipe.defense, SHADOWED)]
        config = self.search.to_invert(defense=[str(recipe.defense)], attack=attacks, limits=self.search.limits)

        def build() -> nn.Module:
            client = client_of(config, self.halves[1], self.device, self.fresh_seed, recipe.defense)
            client.net.load_state_dict(trained.state)
            return client.net.cpu().eval()

        note = f"after {self.search.training_epochs} epochs of {config.users} users, without the defense minus with it"
        rows = [*run.rows, *drop_rows(run.rows, "psnr", measures[DROP], note)]
        return Confirmation(rows, run.figures, measures, "invert", config, dump(config), build)

    def _measure(
        self, defense: Defense, rung: int, data: Dataset, seed: int
    ) -> tuple[dict[str, Estimate], HalfRun, CollaborativeResult]:
        """Return the measures of a defense, the view with the rows of its attacks, and its training."""
        run = HalfRun(self.run, self.clock)
        fields: dict[str, Any] = {"seeds": [seed], "images": self.search.images and rung == SHADOWED}
        fields |= {"targets": max(2, self.search.targets // FEWER)} if rung == FIRST else {}
        config = self.search.to_invert(**fields, defense=[defense], attack=self._list_attacks(defense, rung))
        check_invert(config, data, self.device)
        context = SeedContext(run, config, data, self.device, seed)
        exposure = ClientExposure(config, context, defense)
        if rung == SHADOWED:
            exposure.show_truths()
            exposure.show_guarantee()
        for attack in config.attacks:
            if exposure.mount(attack):
                for mounted in exposure.tune(attack):
                    exposure.measure(mounted)
        trained = self._train(run, config, data, seed, defense)
        undefended = Defense((Choice("defense", NONE),))
        plain = trained if defense == undefended else self._train(run, config, data, seed, undefended)
        return measure_pictures(run.rows) | compare_training(plain, trained, data), run, trained

    def _list_attacks(self, defense: Defense, rung: int) -> list[Choice]:
        """Return the attacks of a rung: the first one, shorter at first; in the end all in every mode."""
        attacks = self.search.attacks
        if rung == FIRST:
            return [_shorten(attacks[0])]
        if rung != SHADOWED:
            return attacks[:1]
        adapted = [
            _adapt(attack, mode) for mode in list_modes(str(defense), "", map(str, attacks)) for attack in attacks
        ]
        return list(dict.fromkeys([*attacks, *(attack for attack in adapted if attack is not None)]))

    def _train(self, run: HalfRun, config: Invert, data: Dataset, seed: int, defense: Defense) -> CollaborativeResult:
        """Return the model that users train together for a short time under a defense, as a stage."""
        client = client_of(config, data, self.device, seed, defense)
        net, loss = client.net, client.truthful.loss
        if client.precode is not None:
            net, loss = with_divergence(net, loss, client.precode.beta)
        schedule = Schedule(self.search.training_epochs, ((1, self.search.training_rate),))
        plan = Plan(config.users, upload_of(defense) or SendAll(), schedule, transform=client.transform, loss=loss)
        training = CollaborativeTraining(net, data, plan, derive(seed, "accuracy"), self.device)
        return collaborate(run, training, measure=count_bytes)


def _shorten(attack: Choice) -> Choice:
    """Return an attack of fewer iterations, if it has them."""
    whole = getattr(attack.make(), "iterations", None)
    return attack if whole is None else inversion(attack, iterations=max(1, whole // FEWER))


def _adapt(attack: Choice, mode: str) -> Choice | None:
    """Return an attack in a mode; None if it has no such mode."""
    try:
        return inversion(f"{attack}:{settings_of_mode(mode)}")
    except WrongInput:
        return None


def count_bytes(epoch: Epoch) -> dict[str, float]:
    """Return the bytes of an update as encoded, and of the same update without compression."""
    real = communication(epoch.sent[0], epoch.inside)
    return {"bytes_up": float(real.up), "dense_up": real.dense / 2}


def compare_training(plain: CollaborativeResult, trained: CollaborativeResult, data: Dataset) -> dict[str, Estimate]:
    """Return the loss of accuracy against the undefended training, and the share of its bytes."""
    tested = len(data.inputs) - data.train_size
    before, after = (share_of(result.history[-1]["test_accuracy"], tested) for result in (plain, trained))
    share = trained.history[-1]["bytes_up"] / plain.history[-1]["bytes_up"]
    drop = NOTHING if trained is plain else difference(before, after)
    return {DROP: drop, BYTES: Estimate(share, share, share)}


def drop_rows(rows: Sequence[Row], like: str, drop: Estimate, note: str) -> list[Row]:
    """Return the loss of accuracy as a row, with the labels of the rows of a measure; limits are held against it."""
    labelled = [row for row in rows if row.metric == like and row.extra.get("target") is None][-1:]
    values: dict[str, Any] = {"value": drop.value, "low": drop.low, "high": drop.high, "note": note}
    return [replace(row, metric=DROP, attack=None, adaptive=None, **values) for row in labelled]


def measure_pictures(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Return the leakage by the strongest attack for each measure; the upper end is the highest of all attacks.

    Of ATS the pictures that the client used are compared. PSNR is at least that of a grey picture: below it all
    recipes show nothing, and only chance would order them.
    """
    overall = [row for row in rows if row.extra.get("target", "") is None and row.extra.get("against") != "raw"]
    pooled = [row for row in overall if row.extra.get("client") is None] or overall  # of clients of one width
    measures = find_strongest(pooled, (RECOGNISABLE, PSNR))
    grey = max((row.value or 0.0 for row in pooled if row.metric == "psnr_grey"), default=0.0)
    if PSNR in measures:
        value, low, high, attack = measures[PSNR]
        measures[PSNR] = Estimate(max(value, grey), max(low, grey), max(high, grey), attack)
    return measures


def prepare_updates(
    config: RecommendUpdates,
) -> tuple[RecommendUpdates, dict[str, Any], torch.device, Callable[[Run], UpdateBench], list[str]]:
    """Return a search of defenses: its fields, the values it depends on, the device, its bench and its plan."""
    whole = config.to_invert(defense=config.defense, attack=config.attack)
    data, device = prepare(whole, check_pictures, data_of)
    halves = halve_rows(hold_out(data), config.seed)
    check_invert(whole, halves[0], device)
    lines = [
        f"{config.model} on {config.data}, seed {config.seed}",
        f"  search {describe_amount(config)}, on half of the rows: {', '.join(map(str, config.defense))}",
        f"  attack {config.targets} updates with {config.attacks[0]}, and train for {config.training_epochs} epochs",
        f"  attack up to {config.finalists} of them with {', '.join(map(str, config.attacks))} in every mode",
        "  attack the best one on the other half, with a fresh seed",
    ]

    def open_bench(run: Run) -> UpdateBench:
        return UpdateBench(run, config, halves, device)

    return config, dump(config), device, open_bench, lines
