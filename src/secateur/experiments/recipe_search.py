"""The search of a recommendation: generations of recipes, halved by rungs, within a budget.

search.json in the run folder has the numbers at which a search ended: a finished search is not continued.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from secateur.config import Common, SearchFields
from secateur.errors import WrongInput
from secateur.evaluation.selection import (
    AUC,
    DROP,
    IMPORTANCE,
    LATENCY,
    NAMES,
    PREFIX,
    Assessment,
    choose,
    choose_better,
    list_excesses,
    rank,
    select_front,
    tighten_limits,
)
from secateur.experiments.recipe_space import RecipeSampler, SearchedRecipe, Space
from secateur.metrics.importance import importance
from secateur.metrics.membership import Estimate
from secateur.progress import progress
from secateur.runs.artifacts import Result
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive

log = logging.getLogger(__name__)
NOTHING = Estimate(0.0, 0.0, 0.0)
FIRST, WHOLE, SHADOWED = 0, 1, 2  # rungs: a short measurement; a whole one; the strongest attackers too
FAILED = -1  # rung of a recipe that could not be made
MODELS = ("train", "prune", "reshape", "weights")  # stages of models, which both halves share
SECONDS = "computed_in"  # entry of a stage's data: the seconds that it took when it was computed
TOLERANCE = 0.02  # loss of accuracy that a choice accepts where no limit is set


def select_limits(config: SearchFields) -> dict[str, float]:
    """Return the limits that a choice follows; other limits are held against the recommended recipe alone."""
    limits = {DROP: TOLERANCE} | {k: v for k, v in config.limits.by_measure().items() if k in NAMES}
    return limits | config.shares


@dataclass
class StageClock:
    """Seconds of every stage that a run has computed, in this start or in an earlier one."""

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)  # by kind and key

    def by_kind(self) -> dict[str, tuple[float, int]]:
        """Return the seconds and the number of the stages of each kind."""
        sums: dict[str, tuple[float, int]] = {}
        for (kind, _), seconds in self.seconds.items():
            total, number = sums.get(kind, (0.0, 0))
            sums[kind] = (total + seconds, number + 1)
        return sums

    def mean(self, *kinds: str) -> float:
        """Return the mean seconds of a stage of these kinds; 0 if there is none."""
        known = [seconds for (kind, _), seconds in self.seconds.items() if kind in kinds]
        return sum(known) / len(known) if known else 0.0


class HalfRun(Run):
    """View of a run for one half of the rows: rows are only collected, and stages are timed.

    `half` is the key of the half that measurements depend on; empty: the data are of this half alone.
    """

    def __init__(self, run: Run, clock: StageClock, half: str = "") -> None:
        super().__init__(run.folder)
        self._half, self._clock = half, clock

    def stages(
        self,
        name: str,
        depends: Sequence[dict[str, Any]],
        compute_many: Callable[[list[int]], Iterable[tuple[int, Result]]],
    ) -> list[Result]:
        """Return the results of many stages, and note the seconds that they took."""

        def compute(missing: list[int]) -> Iterable[tuple[int, Result]]:
            start = time.perf_counter()
            for index, result in compute_many(missing):
                yield index, replace(result, data=result.data | {SECONDS: time.perf_counter() - start})
                start = time.perf_counter()

        shared = not self._half or name in MODELS
        keyed = list(depends) if shared else [one | {"half": self._half} for one in depends]
        results = super().stages(name, keyed, compute)
        for result in results:
            if (seconds := result.data.pop(SECONDS, None)) is not None:  # equal stages are one result
                self._clock.seconds[name, result.key] = seconds
        return results

    def add(self, rows: Iterable[Row]) -> None:
        """Collect rows."""
        self.rows.extend(rows)

    def show(self, figures: Iterable[dict[str, Any]]) -> None:
        """Collect figures."""
        self.figures.extend(figures)

    def flush(self) -> None:
        """Do nothing: the run itself writes the files."""


def describe_amount(config: SearchFields) -> str:
    """Return the number of recipes in words."""
    most = config.most_candidates
    return "as many recipes as the budget allows" if most is None else f"up to {most} recipes"


@dataclass(frozen=True, eq=False)
class Confirmation:
    """The recommended recipe on rows that chose nothing: its rows and measures, its run file and its model."""

    rows: Sequence[Row]
    figures: Sequence[dict[str, Any]]
    measures: Mapping[str, Estimate]
    verb: str  # the command that takes the run file
    run_file: Common
    fields: Mapping[str, Any]  # the run file's values
    build: Callable[[], nn.Module]  # makes the model
    target: str | None = None  # the file that the command writes
    records: Sequence[Any] = ()  # single records, for records.csv
    save: Callable[[Path], None] | None = None  # writes the model into a folder; None: its weights are saved


class Bench(Protocol):
    """The measurements of all recipes of one run, on two halves of the rows."""

    @property
    def run(self) -> Run:
        """The run that keeps the stages."""
        ...

    @property
    def clock(self) -> StageClock:
        """The seconds of the stages."""
        ...

    @property
    def rungs(self) -> Sequence[str]:
        """The names of the rungs."""
        ...

    @property
    def objectives(self) -> Sequence[str]:
        """The measures to minimise."""
        ...

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of all rows: model, data set and seed."""
        ...

    def open_space(self) -> Space:
        """Return the recipes to search."""
        ...

    def list_known(self) -> Sequence[Any]:
        """Return the user's recipes, with which the search begins."""
        ...

    def train_originals(self) -> None:
        """Train, before the search, what all recipes share, if that is faster."""
        ...

    def train(self, recipes: Sequence[Any], rung: int) -> None:
        """Train the models of these recipes together, if that is faster; `assess` then finds them."""
        ...

    def assess(self, number: int, recipe: Any, rung: int) -> Assessment:
        """Measure a recipe on the half to choose on, as far as a rung goes."""
        ...

    def confirm(self, recipe: Any) -> Confirmation:
        """Measure a recipe on the other half, by fresh attackers and all attacks."""
        ...

    def audit_seconds(self, fresh: int, finalists: int = 1) -> float:
        """Return about the seconds of the strongest attackers on so many recipes."""
        ...


@dataclass(eq=False)
class RecipeSearch:
    """Search in generations: a short measurement for all, a whole one for the better half, then the front.

    The front meets the strongest attackers, for models those with shadow models.
    """

    config: SearchFields
    bench: Bench
    settings: Mapping[str, Any]
    spread: Callable[[Sequence[Any], int], None] | None = None  # measures recipes elsewhere first
    recipes: list[Any] = field(default_factory=list)
    results: dict[int, Assessment] = field(default_factory=dict)
    screened: dict[int, Assessment] = field(
        default_factory=dict
    )  # before the strongest attackers: all under the same ones

    def __post_init__(self) -> None:
        self.limits = self.stated = select_limits(self.config)
        self.end = "high" if self.config.limits.decide == "high" else "value"
        self.shown = list(self.config.limits.by_measure()) if self.config.limits.decide == "high" else []
        self.reference: Assessment | None = None  # the best recipe to beat, if one holds the limits
        self._start, self._known, self._rivals = time.monotonic(), 0, 0
        self._ended = self._read_end()

    def run(self) -> None:
        """Search until the recipes, the space or the budget are used up; then attack the front by all means."""
        space = self.bench.open_space()
        self.bench.train_originals()
        self._begin()
        guides = {k: v for k, v in self.limits.items() if k in (*self.stated, *self.bench.objectives)}
        sampler = RecipeSampler(space, guides, self.config.seed, self.bench.objectives)
        self._tell_known(sampler)
        most, whole = self.config.most_candidates, math.prod(size for size, _ in space.sizes.values())
        with progress("recipes", most and min(most, whole), unit="recipes") as advance:
            advance(self._known)
            while (room := self._room()) and (drawn := sampler.draw(min(room, self.config.generation))):
                self._run_generation(sampler, drawn)
                advance(len(drawn))
        self.screened = self.results | self.screened
        finalists = self._promote()
        ended = {"recipes": len(self.recipes), "finalists": finalists}
        self.bench.run.write("search.json", json.dumps({"ended": ended, "settings": self.settings}))

    def _begin(self) -> None:
        """Measure the user's recipes to their end, so that the choice is among them too.

        The strongest attackers meet those to beat. The best of them within the limits then sets the limits.
        """
        known = self.bench.list_known()
        self.recipes = list(dict.fromkeys(known))
        self._known, self._rivals = len(self.recipes), len(set(known[: len(getattr(self.config, "beat", ()))]))
        self._assess_many(range(self._known), WHOLE)
        self.screened = dict(self.results)
        for number in range(self._rivals):
            self.results[number] = self._assess(number, SHADOWED)
        rivals = [self.results[number] for number in range(self._rivals) if self.results[number].rung == SHADOWED]
        best = choose(rivals, self.stated) if rivals else None
        if best is not None and not list_excesses(best, self.stated):
            self.reference, self.limits = best, tighten_limits(self.stated, best)
            self.shown = [DROP] if self.end == "high" else []

    def _tell_known(self, sampler: RecipeSampler) -> None:
        """Tell the sampler the measures of the user's recipes."""
        for number in range(self._known):
            if sampler.include(self.recipes[number]):
                sampler.tell(self.recipes[number], self.results[number])

    def _read_end(self) -> dict[str, int] | None:
        """Return the numbers at which a search with these settings ended; None if it did not."""
        try:
            marker = json.loads((self.bench.run.folder / "search.json").read_text())
            return marker["ended"] if marker["settings"] == self.settings else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _run_generation(self, sampler: RecipeSampler, drawn: Sequence[Any]) -> None:
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
        """Let the strongest attackers meet recipes of the front, the best first; return how many they met.

        A stronger attacker may push a recipe off the front and let another one on it, so the front is drawn anew.
        """
        most = self.config.finalists if self._ended is None else self._ended["finalists"]
        finalists = 0
        with progress("recipes under the strongest attackers", most, unit="recipes") as advance:
            while finalists < most:
                whole = [item for item in self.results.values() if item.rung >= WHOLE]
                waiting = [item for item in select_front(whole, self.bench.objectives) if item.rung < SHADOWED]
                if not waiting or (self._ended is None and finalists and self._time_left() < 0):
                    break
                shown = [] if self.reference is not None and finalists % 2 else self.shown  # and the best by value
                number = choose(waiting, self.limits, shown).number
                self.results[number] = self._assess(number, SHADOWED)
                finalists = sum(item.number >= self._rivals for item in self.finalists)
                advance(1)
        return finalists

    def _assess_many(self, numbers: Sequence[int], rung: int) -> None:
        """Measure recipes of one generation, whose models are fine-tuned together where that is faster."""
        (self.spread or self.bench.train)([self.recipes[number] for number in numbers], rung)
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
        if len(self.recipes) > self._known and self._time_left() < self._finals_seconds():
            return 0
        return self.config.generation if most is None else max(0, most - len(self.recipes))

    def _time_left(self) -> float:
        """Return the seconds of the budget that are left beside the last audit."""
        if self.config.budget is None:
            return math.inf
        spent = time.monotonic() - self._start
        return self.config.budget - spent - self.bench.audit_seconds(fresh=1)

    def _finals_seconds(self) -> float:
        """Return about the seconds of all strongest attacks before the last audit."""
        return self.bench.audit_seconds(fresh=1, finalists=self.config.finalists)

    @property
    def finalists(self) -> list[Assessment]:
        """The recipes that met the strongest attackers."""
        return [item for item in self.results.values() if item.rung == SHADOWED]

    @property
    def front(self) -> list[Assessment]:
        """The finalists that no other one beats."""
        return select_front(self.finalists, self.bench.objectives)

    @property
    def chosen(self) -> tuple[int, Any]:
        """The recommended recipe, and its number."""
        if not self.finalists:
            reason = next((item.note for item in self.results.values() if item.note), "the space is empty")
            raise WrongInput("defense", f"no recipe could be made ({reason}); search others")
        if self.reference is not None:
            number = choose_better(self.finalists, self.reference, self.limits, self.end).number
        else:
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
        self, used: SearchedRecipe, measures: Mapping[str, Estimate], prefix: str, **extra: Any
    ) -> list[Row]:
        """Return the measures of a recipe as rows, under names with a prefix."""
        labels = self.bench.labels | used.labels
        extra |= labels.pop("extra")
        rows = []
        for name, (value, low, high, attack) in measures.items():
            under = {} if attack is None else {"under": attack}
            row = Row(**labels, metric=prefix + name, value=value, low=low, high=high, extra=extra | under)
            rows.append(replace(row, timing=name == LATENCY))
        return rows

    def _importance_rows(self) -> list[Row]:
        """Return the share of each objective's variance that goes with each setting, over all recipes."""
        rows = []
        for name in self.bench.objectives:
            known = {number: item for number, item in self.screened.items() if name in item.measures}
            trials, values = [self.recipes[i].settings for i in known], [x.measures[name].value for x in known.values()]
            shares = importance(trials, values, derive(self.config.seed, "importance", name))
            for setting, share in shares.items():
                extra = {"setting": setting, "of": name}
                rows.append(Row(**self.bench.labels, metric=IMPORTANCE, **share._asdict(), extra=extra))
        return rows
