"""Measurement of one recipe inside a run that shares its originals and shadow models with all other recipes.

Candidates are the members and non-members that attacks are asked about. One half of them chooses recipes, the other
half confirms the choice. Models are trained on all of their rows, so that both halves ask the same models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from secateur.catalogue import Choice
from secateur.config import Audit, choice
from secateur.data.dataset import Dataset, fingerprint
from secateur.data.partition import Part, halve
from secateur.errors import WrongInput
from secateur.evaluation.selection import AUC, BYTES, DROP, LATENCY, TPR, Assessment
from secateur.evaluation.validity import Validity
from secateur.experiments.audit_evaluation import AuditEvaluation
from secateur.experiments.context import SeedContext, shortage, split_rows
from secateur.experiments.pipeline import VICTIM, ModelFactory, ModelJob, make, prune_generation, trains_alone
from secateur.experiments.recipe_space import CompressionRecipe
from secateur.experiments.threat_models import Compression, Matchup, list_matchups
from secateur.metrics.membership import TOO_FEW, Estimate
from secateur.runs.artifacts import Result
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive

FIRST, WHOLE, SHADOWED = 0, 1, 2  # rungs: short fine-tuning; all of it; shadow models attack too
SHORTER = 4  # the first rung's part of the epochs
CHEAP = ("conf", "xent", "mentr")  # attacks of the first rungs: they need no shadow models
STRONG = ("lira", "rmia")  # attacks of the last rung, beside these
MODELS = ("train", "prune", "reshape", "weights")  # stages of models, which both halves share
SECONDS = "computed_in"  # entry of a stage's data: the seconds that it took when it was computed
FORMS = ("compressed", "removed", "masked")  # of a model's cost, the deployed one first


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
    """View of a run for one half of the candidates: measurements depend on the half, and rows are only collected."""

    def __init__(self, run: Run, half: Part, clock: StageClock) -> None:
        super().__init__(run.folder)
        self._half, self._clock = fingerprint(half.train, half.test), clock

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

        keyed = list(depends) if name in MODELS else [one | {"half": self._half} for one in depends]
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


class HalfFactory(ModelFactory):
    """Maker of models that are trained on all of their rows, and a victim that is asked about one half of them."""

    def __init__(self, context: SeedContext, parts: Mapping[str, Part], half: Part) -> None:
        super().__init__(context, {**parts, VICTIM: half})
        self._whole = dict(parts)

    def jobs(self, compression: Compression, roles: Iterable[str]) -> list[ModelJob]:
        """Return the models to be made, with all of their rows."""
        context = self.context_for(compression)
        return [ModelJob(context, role, self._whole[role]) for role in roles]


@dataclass(frozen=True)
class RecipeBench:
    """The data, the halves and the shadow models by which all recipes of one run are measured."""

    run: Run
    config: Audit  # of all recipes
    data: Dataset
    device: torch.device
    seed: int
    parts: Mapping[str, Part]  # the victim's, those of the search's shadows, then those of fresh ones
    halves: tuple[Part, Part]  # to choose on, and to confirm on
    scaling: Validity | None = None
    clock: StageClock = field(default_factory=StageClock)

    def assess(self, number: int, recipe: CompressionRecipe, rung: int) -> Assessment:
        """Measure a recipe on the half to choose on, as far as a rung of the search goes."""
        attacks = [choice("attack", name) for name in (*CHEAP, *(STRONG if rung == SHADOWED else ()))]
        shadows = self._roles(0) if rung == SHADOWED else []
        attacks = [attack for attack in attacks if shortage(attack, len(shadows)) is None]
        evaluation, run = self._open(shorten(recipe, rung), attacks, shadows, self.halves[0])
        victim = recipe.compression
        evaluation.measure_model(victim.original)
        evaluation.measure_model(victim)
        for attack in attacks:
            evaluation.measure_attack(Matchup(victim, victim, adaptive=True), attack)
        before, after = ([row for row in run.rows if (row.pruner == "none") is plain] for plain in (True, False))
        return Assessment(number, recipe.title, rung, measure(before, after))

    def train_originals(self) -> None:
        """Train the originals of the victim and of all shadow models in one go, if models step together."""
        context = SeedContext(
            HalfRun(self.run, self.halves[0], self.clock), self.config, self.data, self.device, self.seed
        )
        if not trains_alone(context):
            make(HalfFactory(context, self.parts, self.halves[0]).jobs(Compression(), self.parts), Compression())

    def train(self, recipes: Sequence[CompressionRecipe], rung: int) -> None:
        """Fine-tune the models of these recipes together, if models step together; `assess` then finds them."""
        pairs = []
        for recipe in recipes:
            evaluation, _ = self._open(shorten(recipe, rung), [], [], self.halves[0])
            pairs += [(job, recipe.compression) for job in evaluation.factory.jobs(recipe.compression, [VICTIM])]
        with suppress(WrongInput):  # `assess` meets it again, and knows the recipe
            prune_generation(pairs)

    def confirm(self, recipe: CompressionRecipe) -> tuple[AuditEvaluation, HalfRun]:
        """Audit a recipe and its original on the other half, with fresh shadow models and all attacks."""
        attacks = self.config.attack
        evaluation, run = self._open(recipe, attacks, self._roles(1), self.halves[1])
        for matchup in list_matchups(evaluation.config, self.seed):
            evaluation.measure_model(matchup.victim)
            evaluation.measure_shadows(matchup)
            for attack in attacks:
                evaluation.measure_attack(matchup, attack)
            evaluation.release()
        return evaluation, run

    def configure(self, recipe: CompressionRecipe) -> Audit:
        """Return the audit of one recipe."""
        compression = recipe.compression
        schedule = {"epochs": recipe.epochs, "learning_rate": recipe.learning_rate}
        fields: dict[str, Any] = {"finetune": self.config.finetune.model_copy(update=schedule)}
        fields |= {"pruner": [compression.pruner], "sparsity": [compression.sparsity]}
        return self.config.model_copy(update=fields | {"defense": [compression.defense]})

    def _open(
        self, recipe: CompressionRecipe, attacks: Sequence[Choice], shadows: Sequence[str], half: Part
    ) -> tuple[AuditEvaluation, HalfRun]:
        """Return the audit of one recipe by these attacks and shadow models, and the view that collects its rows."""
        config = self.configure(recipe).model_copy(update={"attack": list(attacks)})
        run = HalfRun(self.run, half, self.clock)
        context = SeedContext(run, config, self.data, self.device, self.seed)
        parts = {role: self.parts[role] for role in (VICTIM, *shadows)}
        return AuditEvaluation(config, HalfFactory(context, parts, half), self.scaling), run

    def _roles(self, group: int) -> list[str]:
        """Return the roles of the shadow models: group 0 is the search's, group 1 the fresh ones."""
        roles = [role for role in self.parts if role != VICTIM]
        half = len(roles) // 2
        return roles[group * half : (group + 1) * half]


def shorten(recipe: CompressionRecipe, rung: int) -> CompressionRecipe:
    """Return a recipe with the epochs of a rung."""
    return recipe if rung > FIRST else replace(recipe, epochs=max(1, recipe.epochs // SHORTER))


def split_parts(config: Audit, data: Dataset, seed: int) -> tuple[dict[str, Part], tuple[Part, Part]]:
    """Return the rows of the victim and of twice the shadow models, and the two halves of the victim's candidates."""
    split = split_rows(config, data, 2 * config.shadows, seed)
    parts = {VICTIM: split.victim} | {f"shadow-{i}": part for i, part in enumerate(split.shadows)}
    return parts, halve(split.victim, derive(seed, "halves"))


def measure(before: Sequence[Row], after: Sequence[Row]) -> dict[str, Estimate]:
    """Return the measures of a recipe from rows of its original and of its model; of attacks the strongest counts.

    The upper end is the highest of all attacks: a score that ties has an interval without width. A measure that the
    sample does not support is left out.
    """
    measures = {}
    for name in (DROP, AUC, TPR):
        known = [row for row in after if row.metric == name and row.value is not None and not _is_unsupported(row)]
        if known:
            top = max(known, key=lambda row: row.value or 0.0)
            low, high = (top.value if end is None else end for end in (top.low, top.high))
            assert top.value is not None and low is not None and high is not None
            highest = max([high, *(row.high for row in known if row.high is not None)])
            measures[name] = Estimate(top.value, low, highest, top.attack)
    for name, cost in ((BYTES, "bytes"), (LATENCY, "seconds")):
        old, new = (_find_cost(rows, cost) for rows in (before, after))
        if old and new is not None:
            measures[name] = Estimate(new / old, new / old, new / old)
    return measures


def _is_unsupported(row: Row) -> bool:
    return (row.note or "").startswith(TOO_FEW)


def _find_cost(rows: Sequence[Row], cost: str) -> float | None:
    """Return a model's cost in the form that is deployed."""
    values = {row.metric: row.value for row in rows if row.attack is None}
    return next((values[f"{cost}_{form}"] for form in FORMS if values.get(f"{cost}_{form}") is not None), None)
