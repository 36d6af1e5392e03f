"""Measurement of one recipe inside a run that shares its originals and shadow models with all other recipes.

Candidates are the members and non-members that attacks are asked about. One half of them chooses recipes, the other
half confirms the choice. Models are trained on all of their rows, so that both halves ask the same models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.catalogue import Choice
from secateur.config import Audit, Prune, Recommend, choice, dump, dump_recipes
from secateur.data.dataset import Dataset, fingerprint
from secateur.data.partition import Part, halve
from secateur.errors import WrongInput
from secateur.evaluation.selection import AUC, BYTES, DROP, LATENCY, OBJECTIVES, TPR, Assessment, find_strongest
from secateur.evaluation.validity import Validity
from secateur.experiments.audit_evaluation import AuditEvaluation
from secateur.experiments.context import SeedContext, shortage, split_rows
from secateur.experiments.pipeline import (
    VICTIM,
    ModelFactory,
    ModelJob,
    make,
    mask_of,
    module_of,
    prune_generation,
    trains_alone,
)
from secateur.experiments.prune import save, save_program
from secateur.experiments.recipe_search import FIRST, SHADOWED, Confirmation, HalfRun, StageClock
from secateur.experiments.recipe_space import CompressionRecipe, SearchSpace, build_space
from secateur.experiments.threat_models import Compression, Matchup, list_matchups
from secateur.interfaces import Converter
from secateur.metrics.membership import Estimate
from secateur.pruning.removal import remove
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.seeding import derive

RUNGS = ("short fine-tuning", "all of the fine-tuning", "shadow models")
SHORTER = 4  # the first rung's part of the epochs
CHEAP = ("conf", "xent", "mentr")  # attacks of the first rungs: they need no shadow models
STRONG = ("lira", "rmia")  # attacks of the last rung, beside these
FORMS = ("compressed", "removed", "masked")  # of a model's cost, the deployed one first


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
    search: Recommend
    config: Audit  # of all recipes
    data: Dataset
    device: torch.device
    parts: Mapping[str, Part]  # the victim's, those of the search's shadows, then those of fresh ones
    halves: tuple[Part, Part]  # to choose on, and to confirm on
    scaling: Validity | None = None
    clock: StageClock = field(default_factory=StageClock)
    rungs: Sequence[str] = RUNGS
    objectives: Sequence[str] = OBJECTIVES

    @property
    def seed(self) -> int:
        """The seed."""
        return self.search.seed

    @property
    def tabular(self) -> bool:
        """True if examples are rows of a table."""
        return len(self.data.input_shape) == 1

    @property
    def labels(self) -> dict[str, Any]:
        """The labels of all rows."""
        return {"model": self.config.model, "dataset": self.data.name, "seed": self.seed}

    def open_space(self) -> SearchSpace:
        """Return the compressions to search."""
        return build_space(self.search, self.tabular)

    def audit_seconds(self, fresh: int, finalists: int = 1) -> float:
        """Return about the seconds of attacking recipes with shadow models, of which `fresh` sets must be trained."""
        clock, shadows = self.clock, self.search.shadows
        tuning = finalists * shadows * clock.mean("prune", "reshape")
        return 1.2 * (fresh * shadows * clock.mean("train") + tuning + 10 * finalists * clock.mean("attack"))

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
            HalfRun(self.run, self.clock, key_of_half(self.halves[0])), self.config, self.data, self.device, self.seed
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

    def confirm(self, recipe: CompressionRecipe) -> Confirmation:
        """Audit a recipe and its original on the other half, with fresh shadow models and all attacks."""
        attacks = self.config.attack
        evaluation, run = self._open(recipe, attacks, self._roles(1), self.halves[1])
        for matchup in list_matchups(evaluation.config, self.seed):
            evaluation.measure_model(matchup.victim)
            evaluation.measure_shadows(matchup)
            for attack in attacks:
                evaluation.measure_attack(matchup, attack)
            evaluation.release()
        before, after = ([row for row in run.rows if (row.pruner == "none") is plain] for plain in (True, False))
        prune = configure_prune(evaluation.config, recipe, after)
        build = partial(build_model, evaluation, recipe, prune)
        return Confirmation(
            run.rows,
            run.figures,
            measure(before, after),
            "prune",
            prune,
            dump_recipes(prune, self.tabular),
            build,
            f"model{'.pt2' if is_quantised(recipe) else '.safetensors'}",
            evaluation.records,
            partial(save_model, evaluation, recipe, prune, build),
        )

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
        run = HalfRun(self.run, self.clock, key_of_half(half))
        context = SeedContext(run, config, self.data, self.device, self.seed)
        parts = {role: self.parts[role] for role in (VICTIM, *shadows)}
        return AuditEvaluation(config, HalfFactory(context, parts, half), self.scaling), run

    def _roles(self, group: int) -> list[str]:
        """Return the roles of the shadow models: group 0 is the search's, group 1 the fresh ones."""
        roles = [role for role in self.parts if role != VICTIM]
        half = len(roles) // 2
        return roles[group * half : (group + 1) * half]


def key_of_half(half: Part) -> str:
    """Return the key of a half, which measurements depend on."""
    return fingerprint(half.train, half.test)


def shorten(recipe: CompressionRecipe, rung: int) -> CompressionRecipe:
    """Return a recipe with the epochs of a rung."""
    return recipe if rung > FIRST else replace(recipe, epochs=max(1, recipe.epochs // SHORTER))


def is_quantised(recipe: CompressionRecipe) -> bool:
    """Return True if the model of a recipe can only be asked, as a program."""
    pruner = recipe.compression.pruner
    return pruner is not None and pruner.find_part(Converter) is not None


def configure_prune(config: Audit, recipe: CompressionRecipe, rows: Sequence[Row]) -> Prune:
    """Return the run file of `secateur prune` for a recipe; channels are removed where the measured bytes are so."""
    compression = recipe.compression
    assert compression.pruner is not None
    removed = any(row.metric == "bytes_removed" and row.value is not None for row in rows)
    fields = {name: value for name, value in dump(config).items() if name in Prune.model_fields or name == "schema"}
    fields |= {"pruner": str(compression.pruner), "sparsity": compression.sparsity}
    fields |= {"defense": str(compression.defense), "seed": config.seeds[0]}
    return Prune.model_validate(fields | {"remove": removed and compression.pruner.only_masks})


def build_model(evaluation: AuditEvaluation, recipe: CompressionRecipe, config: Prune) -> nn.Module:
    """Return the recommended model on the CPU, in the form that is shipped."""
    (model,) = evaluation.factory.models(recipe.compression, [VICTIM]).values()
    context = evaluation.factory.context_for(recipe.compression)
    net = module_of(context, recipe.compression, model).cpu().eval()
    return remove(net, mask_of(model), context.data.input_shape).eval() if config.remove else net


def save_model(
    evaluation: AuditEvaluation,
    recipe: CompressionRecipe,
    config: Prune,
    build: Callable[[], nn.Module],
    folder: Path,
) -> None:
    """Write the recommended model into a folder."""
    data = evaluation.factory.context.data
    if is_quantised(recipe):
        save_program(folder / "model.pt2", build(), data.input_shape)
        return
    (model,) = evaluation.factory.models(recipe.compression, [VICTIM]).values()
    save(folder / "model.safetensors", build(), mask_of(model), config, data)


def split_parts(config: Audit, data: Dataset, seed: int) -> tuple[dict[str, Part], tuple[Part, Part]]:
    """Return the rows of the victim and of twice the shadow models, and the two halves of the victim's candidates."""
    split = split_rows(config, data, 2 * config.shadows, seed)
    parts = {VICTIM: split.victim} | {f"shadow-{i}": part for i, part in enumerate(split.shadows)}
    return parts, halve(split.victim, derive(seed, "halves"))


def measure(before: Sequence[Row], after: Sequence[Row]) -> dict[str, Estimate]:
    """Return the measures of a recipe from rows of its original and of its model; of attacks the strongest counts."""
    measures = find_strongest(after, (DROP, AUC, TPR))
    for name, cost in ((BYTES, "bytes"), (LATENCY, "seconds")):
        old, new = (_find_cost(rows, cost) for rows in (before, after))
        if old and new is not None:
            measures[name] = Estimate(new / old, new / old, new / old)
    return measures


def _find_cost(rows: Sequence[Row], cost: str) -> float | None:
    """Return a model's cost in the form that is deployed."""
    values = {row.metric: row.value for row in rows if row.attack is None}
    return next((values[f"{cost}_{form}"] for form in FORMS if values.get(f"{cost}_{form}") is not None), None)
