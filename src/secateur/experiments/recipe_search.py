"""The search of a recommendation: generations of recipes, halved by rungs, within a budget.

search.json in the run folder has the numbers at which a search ended: a finished search is not continued.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from secateur.config import Recommend
from secateur.errors import WrongInput
from secateur.evaluation.selection import (
    AUC,
    BYTES,
    DROP,
    IMPORTANCE,
    LATENCY,
    NAMES,
    OBJECTIVES,
    PREFIX,
    Assessment,
    choose,
    rank,
    select_front,
)
from secateur.experiments.recipe_evaluation import FIRST, SHADOWED, WHOLE, RecipeBench
from secateur.experiments.recipe_space import CompressionRecipe, RecipeSampler, build_space
from secateur.metrics.importance import importance
from secateur.metrics.membership import Estimate
from secateur.progress import progress
from secateur.runs.rows import Row
from secateur.seeding import derive

log = logging.getLogger(__name__)
NOTHING = Estimate(0.0, 0.0, 0.0)
FAILED = -1  # rung of a recipe that could not be made
TOLERANCE = 0.02  # loss of accuracy that a choice accepts where no limit is set


def select_limits(config: Recommend) -> dict[str, float]:
    """Return the limits that a choice follows; other limits are held against the recommended model alone."""
    limits = {DROP: TOLERANCE} | {k: v for k, v in config.limits.by_measure().items() if k in NAMES}
    files = {BYTES: config.max_bytes, LATENCY: config.max_latency}
    return limits | {name: limit for name, limit in files.items() if limit is not None}


@dataclass(eq=False)
class RecipeSearch:
    """Search in generations: short fine-tuning for all, all of it for the better half, shadow models for the front."""

    config: Recommend
    bench: RecipeBench
    settings: Mapping[str, Any]
    recipes: list[CompressionRecipe] = field(default_factory=list)
    results: dict[int, Assessment] = field(default_factory=dict)
    screened: dict[int, Assessment] = field(default_factory=dict)  # before shadow models: all under the same attacks

    def __post_init__(self) -> None:
        self.limits = select_limits(self.config)
        self.shown = list(self.config.limits.by_measure()) if self.config.limits.decide == "high" else []
        self._start = time.monotonic()
        self._ended = self._read_end()

    def run(self) -> None:
        """Search until the recipes, the space or the budget are used up; then attack the front with shadow models."""
        space = build_space(self.config, tabular=len(self.bench.data.input_shape) == 1)
        sampler = RecipeSampler(space, self.limits, self.config.seed)
        self.bench.train_originals()
        with progress("recipes", self.config.most_candidates, unit="recipes") as advance:
            while (room := self._room()) and (drawn := sampler.draw(min(room, self.config.generation))):
                self._run_generation(sampler, drawn)
                advance(len(drawn))
        self.screened = dict(self.results)
        finalists = self._promote()
        ended = {"recipes": len(self.recipes), "finalists": finalists}
        self.bench.run.write("search.json", json.dumps({"ended": ended, "settings": self.settings}))

    def _read_end(self) -> dict[str, int] | None:
        """Return the numbers at which a search with these settings ended; None if it did not."""
        try:
            marker = json.loads((self.bench.run.folder / "search.json").read_text())
            return marker["ended"] if marker["settings"] == self.settings else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _run_generation(self, sampler: RecipeSampler, drawn: Sequence[CompressionRecipe]) -> None:
        """Measure a generation after a short fine-tuning, then its better half after all of it; tell the sampler."""
        numbers = list(range(len(self.recipes), len(self.recipes) + len(drawn)))
        self.recipes.extend(drawn)
        self._assess_many(numbers, FIRST)
        better = sorted(numbers, key=lambda number: (rank(self.results[number], self.limits, self.shown), number))
        half = better[: math.ceil(len(numbers) / 2)]
        self._assess_many([number for number in half if self.results[number].rung == FIRST], WHOLE)
        for number in numbers:
            sampler.tell(self.recipes[number], self.results[number])

    def _promote(self) -> int:
        """Attack recipes of the front with shadow models, the best first; return how many were attacked.

        A stronger attacker may push a recipe off the front and let another one on it, so the front is drawn anew.
        """
        most = self.config.finalists if self._ended is None else self._ended["finalists"]
        finalists = 0
        with progress("recipes under shadow models", most, unit="recipes") as advance:
            while finalists < most:
                whole = [item for item in self.results.values() if item.rung >= WHOLE]
                waiting = [item for item in select_front(whole) if item.rung < SHADOWED]
                if not waiting or (self._ended is None and finalists and self._time_left() < 0):
                    break
                number = choose(waiting, self.limits, self.shown).number
                self.results[number] = self._assess(number, SHADOWED)
                finalists = len(self.finalists)
                advance(1)
        return finalists

    def _assess_many(self, numbers: Sequence[int], rung: int) -> None:
        """Measure recipes of one generation, whose models are fine-tuned together where that is faster."""
        self.bench.train([self.recipes[number] for number in numbers], rung)
        for number in numbers:
            self.results[number] = self._assess(number, rung)

    def _assess(self, number: int, rung: int) -> Assessment:
        """Measure a recipe; one that cannot be made, as its loss became NaN, ends no search."""
        try:
            return self.bench.assess(number, self.recipes[number], rung)
        except WrongInput as error:
            if error.field == "out":  # of the folder, not of the recipe
                raise
            log.warning("leaving out %s: %s", self.recipes[number].title, error)
            return Assessment(number, self.recipes[number].title, FAILED, {}, str(error))

    def _room(self) -> int:
        """Return how many more recipes may be drawn; a finished search draws those that it had."""
        if self._ended is not None:
            return self._ended["recipes"] - len(self.recipes)
        most = self.config.most_candidates
        if self.recipes and self._time_left() < self._finals_seconds():
            return 0
        return self.config.generation if most is None else most - len(self.recipes)

    def _time_left(self) -> float:
        """Return the seconds of the budget that are left beside the last audit."""
        if self.config.budget is None:
            return math.inf
        spent = time.monotonic() - self._start
        return self.config.budget - spent - self._audit_seconds(fresh=1)

    def _audit_seconds(self, fresh: int, finalists: int = 1) -> float:
        """Return about the seconds of attacking recipes with shadow models, of which `fresh` sets must be trained."""
        clock, shadows = self.bench.clock, self.config.shadows
        tuning = finalists * shadows * clock.mean("prune", "reshape")
        return 1.2 * (fresh * shadows * clock.mean("train") + tuning + 10 * finalists * clock.mean("attack"))

    def _finals_seconds(self) -> float:
        """Return about the seconds of all attacks with shadow models before the last audit."""
        return self._audit_seconds(fresh=1, finalists=self.config.finalists)

    @property
    def finalists(self) -> list[Assessment]:
        """The recipes that shadow models attacked."""
        return [item for item in self.results.values() if item.rung == SHADOWED]

    @property
    def front(self) -> list[Assessment]:
        """The finalists that no other one beats."""
        return select_front(self.finalists)

    @property
    def chosen(self) -> tuple[int, CompressionRecipe]:
        """The recommended recipe, and its number."""
        if not self.finalists:
            reason = next((item.note for item in self.results.values() if item.note), "the space is empty")
            raise WrongInput("pruner", f"no recipe could be made ({reason}); search others")
        number = choose(self.finalists, self.limits, self.shown).number
        return number, self.recipes[number]

    def rows(self) -> list[Row]:
        """Return the measures of every recipe, and the importance of every setting."""
        rows = []
        for number, item in self.results.items():
            rows += self.measure_rows(self.recipes[number], item.measures, PREFIX, recipe=number, rung=item.rung)
            if item.rung == FAILED:
                (row,) = self.measure_rows(self.recipes[number], {AUC: NOTHING}, PREFIX, recipe=number, rung=FAILED)
                rows.append(replace(row, value=None, low=None, high=None, note=item.note))
        return rows + self._importance_rows()

    def measure_rows(
        self, used: CompressionRecipe, measures: Mapping[str, Estimate], prefix: str, **extra: Any
    ) -> list[Row]:
        """Return the measures of a recipe as rows, under names with a prefix."""
        labels = self._labels() | {k: v for k, v in used.compression.labels.items() if k != "extra"}
        extra |= {"epochs": used.epochs, "learning_rate": used.learning_rate}
        rows = []
        for name, (value, low, high, attack) in measures.items():
            under = {} if attack is None else {"under": attack}
            row = Row(**labels, metric=prefix + name, value=value, low=low, high=high, extra=extra | under)
            rows.append(replace(row, timing=name == LATENCY))
        return rows

    def _importance_rows(self) -> list[Row]:
        """Return the share of each objective's variance that goes with each setting, over all recipes."""
        rows = []
        for name in OBJECTIVES:
            known = {number: item for number, item in self.screened.items() if name in item.measures}
            trials, values = [self.recipes[i].settings for i in known], [x.measures[name].value for x in known.values()]
            shares = importance(trials, values, derive(self.config.seed, "importance", name))
            for setting, share in shares.items():
                extra = {"setting": setting, "of": name}
                rows.append(Row(**self._labels(), metric=IMPORTANCE, **share._asdict(), extra=extra))
        return rows

    def _labels(self) -> dict[str, Any]:
        return {"model": self.config.model, "dataset": self.bench.data.name, "seed": self.config.seed}
