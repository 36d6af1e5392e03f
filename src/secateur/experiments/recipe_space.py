"""The recipes that a recommendation searches: the space of compressions, and Optuna's draws from any space.

The sampler is seeded and is told the results of a whole generation in its order. So a search that starts again draws
the same recipes, and the run folder answers those that are measured.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch

from secateur.config import Recommend, check_together
from secateur.errors import WrongInput, require
from secateur.evaluation.selection import OBJECTIVES, PSNR, Assessment
from secateur.experiments.threat_models import Compression, compress_by
from secateur.seeding import derive, draw_seed

TRIES = 20  # draws of recipes that were drawn before, until those that are left are listed
STARTUP = 8  # recipes that are drawn at random, before results guide the draws
WORST = {PSNR: 60.0}  # told for a measure that is missing; others are told as 1


class SearchedRecipe(Protocol):
    """One way to give away less: of a model, of updates or of a federation. It is hashable."""

    @property
    def title(self) -> str:
        """The recipe in words."""
        ...

    @property
    def settings(self) -> dict[str, str | float]:
        """The settings that a search varies."""
        ...

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of its rows, among them `extra`."""
        ...


class Space(Protocol):
    """The recipes of a search."""

    @property
    def sizes(self) -> dict[str, tuple[int, bool]]:
        """The number of values of every setting, and whether they are in an order."""
        ...

    def build(self, choices: Mapping[str, int]) -> Any:
        """Return the recipe of these positions; None if there is none."""
        ...

    def locate(self, recipe: Any) -> dict[str, int] | None:
        """Return the positions of a recipe; None if it is outside of the space."""
        ...


@dataclass(frozen=True)
class CompressionRecipe:
    """One way to make a smaller model: the compression, its defense, and the schedule of fine-tuning."""

    compression: Compression
    epochs: int
    learning_rate: float

    @property
    def title(self) -> str:
        """The recipe in words."""
        pruner = self.compression.pruner
        tuned = pruner is not None and pruner.finetunes
        return self.compression.title + (f", at most {self.epochs} epochs at {self.learning_rate:.2g}" if tuned else "")

    @property
    def settings(self) -> dict[str, str | float]:
        """The settings that a search varies."""
        labels = self.compression.labels
        schedule: dict[str, str | float] = {"epochs": self.epochs, "learning rate": self.learning_rate}
        return {name: labels[name] for name in ("pruner", "sparsity", "defense")} | schedule

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of its rows."""
        return self.compression.labels | {"extra": {"epochs": self.epochs, "learning_rate": self.learning_rate}}


@dataclass(frozen=True)
class SearchSpace:
    """The values of every setting."""

    pruners: Sequence[Any]
    sparsities: Sequence[float]
    defenses: Sequence[Any]
    epochs: Sequence[int]
    learning_rates: Sequence[float]

    @property
    def sizes(self) -> dict[str, tuple[int, bool]]:
        """The number of values of every setting, and whether they are in an order."""
        return {
            "pruner": (len(self.pruners), False),
            "sparsity": (len(self.sparsities), True),
            "defense": (len(self.defenses), False),
            "epochs": (len(self.epochs), True),
            "learning_rate": (len(self.learning_rates), True),
        }

    def build(self, choices: Mapping[str, int]) -> CompressionRecipe | None:
        """Return the recipe of these positions; None if its defense has no fine-tuning to act on."""
        pruner, defense = self.pruners[choices["pruner"]], self.defenses[choices["defense"]]
        try:
            check_together([pruner], [defense])
        except WrongInput:
            return None
        compression = compress_by(pruner, self.sparsities[choices["sparsity"]], defense)
        if compression.pruner is None:
            return None  # sparsity 0: the original itself
        places = (choices["epochs"], choices["learning_rate"]) if pruner.finetunes else (-1, -1)  # one recipe then
        return CompressionRecipe(compression, self.epochs[places[0]], self.learning_rates[places[1]])

    def locate(self, recipe: CompressionRecipe) -> dict[str, int] | None:
        """Return the positions of a recipe; None if it is outside of the space."""
        compression = recipe.compression
        values = (compression.pruner, compression.sparsity, compression.defense, recipe.epochs, recipe.learning_rate)
        lists = (self.pruners, self.sparsities, self.defenses, self.epochs, self.learning_rates)
        if any(value not in known for value, known in zip(values, lists, strict=True)):
            return None
        return {name: known.index(value) for name, value, known in zip(self.sizes, values, lists, strict=True)}


def build_space(config: Recommend, tabular: bool) -> SearchSpace:
    """Return the space of a run file; the recipe of fine-tuning sets the schedules that it leaves open."""
    finetune = config.recipes(tabular)[1]
    schedules = config.epochs or [max(1, finetune.epochs // part) for part in (4, 2, 1)]
    rates = config.learning_rate or [0.3 * finetune.learning_rate, finetune.learning_rate]
    space = SearchSpace(
        list(dict.fromkeys(config.pruner)),
        sorted(set(config.sparsity)),
        list(dict.fromkeys(config.defense)),
        sorted(set(schedules)),
        sorted(set(rates)),
    )
    pairs = product(range(len(space.pruners)), range(len(space.sparsities)), range(len(space.defenses)))
    first = {"epochs": 0, "learning_rate": 0}
    if not any(space.build(dict(zip(("pruner", "sparsity", "defense"), pair, strict=True)) | first) for pair in pairs):
        raise WrongInput(
            "defense", "has no fine-tuning to act on by these pruners and sparsities; add basic, or a pruner with one"
        )
    return space


def list_known(config: Recommend, tabular: bool) -> list[CompressionRecipe]:
    """Return the user's recipes, which are compared with the recommended one."""
    finetune, recipes = config.recipes(tabular)[1], []
    for known in config.known:
        check_together([known.pruner], [known.defense])
        compression = compress_by(known.pruner, known.sparsity, known.defense)
        if compression.pruner is None:
            field = "beat" if known in config.beat else "compare"
            raise WrongInput(field, f"{known.pruner} {known.sparsity:g} is the original itself; remove more")
        schedule = (known.epochs or finetune.epochs, known.learning_rate or finetune.learning_rate)
        recipes.append(CompressionRecipe(compression, *schedule))
    return recipes


class RecipeSampler:
    """Optuna's multi-objective sampler over a space, with the limits as constraints."""

    def __init__(
        self, space: Space, limits: Mapping[str, float], seed: int, objectives: Sequence[str] = OBJECTIVES
    ) -> None:
        require("optuna", "search")
        import optuna

        self.space, self.limits, self._seed = space, limits, seed
        self.objectives = [*objectives, *(name for name in limits if name not in objectives)]
        with _quiet():
            sampler = optuna.samplers.TPESampler(
                seed=draw_seed(derive(seed, "recipes"), 2**31),
                n_startup_trials=STARTUP,
                multivariate=True,
                constant_liar=True,  # the recipes of a generation are drawn before any of them is measured
            )
            self._study = optuna.create_study(directions=["minimize"] * len(self.objectives), sampler=sampler)
        self._trials: dict[Any, Any] = {}

    def draw(self, number: int) -> list[Any]:
        """Draw so many recipes that were not drawn before; fewer only if the space has no more."""
        from optuna.trial import TrialState

        recipes: list[Any] = []
        tries = 0
        with _quiet():
            while len(recipes) < number and tries < TRIES:
                trial = self._study.ask()
                recipe = self.space.build(self._suggest(trial))
                if recipe is None or recipe in self._trials:
                    tries += 1
                    self._study.tell(trial, state=TrialState.FAIL)
                    continue
                self._trials[recipe] = trial
                recipes.append(recipe)
        for positions in self._shuffle_positions() if len(recipes) < number else ():
            recipe = self.space.build(positions)
            if recipe is not None and recipe not in self._trials:
                self._take(recipe, positions)
                recipes.append(recipe)
                if len(recipes) == number:
                    break
        return recipes

    def include(self, recipe: SearchedRecipe) -> bool:
        """Count a recipe of the user's as drawn; return False if it is outside of the space."""
        positions = self.space.locate(recipe)
        if positions is None:
            self._trials[recipe] = None  # int8 alone may be drawn under any sparsity
            return False
        self._take(recipe, positions)
        return True

    def _take(self, recipe: SearchedRecipe, positions: dict[str, int]) -> None:
        """Count a recipe as drawn."""
        with _quiet():
            self._study.enqueue_trial(positions)
            self._trials[recipe] = self._study.ask()
            self._suggest(self._trials[recipe])

    def _shuffle_positions(self) -> Iterator[dict[str, int]]:
        """Yield the positions of every recipe in a seeded order: a sampler repeats what it likes in a small space."""
        sizes = {name: size for name, (size, _) in self.space.sizes.items()}
        order = torch.randperm(math.prod(sizes.values()), generator=derive(self._seed, "the rest of the recipes"))
        for place in order.tolist():
            positions = {}
            for name, size in sizes.items():
                place, positions[name] = divmod(place, size)
            yield positions

    def tell(self, recipe: SearchedRecipe, result: Assessment) -> None:
        """Tell the sampler the measures of a recipe; a missing one counts as the worst."""
        trial = self._trials[recipe]
        values = {
            name: result.measures[name].value if name in result.measures else WORST.get(name, 1.0)
            for name in self.objectives
        }
        with _quiet():
            for name, limit in self.limits.items():
                trial.set_constraint(name, values[name] - limit)
            self._study.tell(trial, list(values.values()))

    def _suggest(self, trial: Any) -> dict[str, int]:
        """Return the trial's position of every setting; numbers are ordered, names are not."""
        return {
            name: trial.suggest_int(name, 0, size - 1)
            if ordered
            else trial.suggest_categorical(name, list(range(size)))
            for name, (size, ordered) in self.space.sizes.items()
        }


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back Optuna's messages: it logs every study, and warns of features that may change."""
    logger = logging.getLogger("optuna")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
