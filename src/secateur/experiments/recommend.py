"""The job of `secateur recommend`: search recipes, choose one within limits, and audit it on rows that chose nothing.

Read `run_recommend` first. recipe_space.py draws recipes, recipe_evaluation.py measures them, recipe_search.py halves
them by rungs, and evaluation/selection.py has the front and the choice. recipe.yaml in the run folder is the run file
of `secateur prune` that makes the recommended model.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from secateur.config import Audit, Prune, Recommend, dump, dump_recipes, list_code
from secateur.data.dataset import Dataset
from secateur.errors import require
from secateur.evaluation import limits as holding
from secateur.evaluation.limits import Check, Outcome
from secateur.evaluation.membership import write_records
from secateur.evaluation.selection import (
    COMPARED,
    DROP,
    NAMES,
    SPENT,
    Assessment,
    check_file,
    explain_limits,
    list_excesses,
    write_estimate,
)
from secateur.evaluation.setup import join_population, prepare, with_scaling
from secateur.evaluation.validity import Validity
from secateur.experiments.audit_evaluation import AuditEvaluation
from secateur.experiments.context import (
    check_function,
    check_installed,
    check_models,
    check_pruners,
    fit_attacks,
    fit_pruners,
)
from secateur.experiments.pipeline import VICTIM, mask_of, module_of
from secateur.experiments.prune import save, save_program, scale_inputs
from secateur.experiments.recipe_evaluation import FIRST, SHADOWED, WHOLE, RecipeBench, measure, split_parts
from secateur.experiments.recipe_search import TOLERANCE, RecipeSearch
from secateur.experiments.recipe_space import CompressionRecipe, build_space, list_known
from secateur.gpu.determinism import deterministic
from secateur.interfaces import Converter
from secateur.metrics.membership import Estimate
from secateur.models.create import check_untrained
from secateur.pruning.removal import remove
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row

SHIP = "Ship"  # begins the answer if no limit is broken


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The answer of a search: the recipe, its measures on both halves, and the sentences that say them."""

    rows: list[Row]
    figures: list[dict[str, Any]]
    recipe: CompressionRecipe
    chosen: Assessment  # on the rows of the search
    confirmed: Mapping[str, Estimate]  # on the other rows, under fresh shadow models and all attacks
    front: Sequence[Assessment]
    compared: Sequence[tuple[CompressionRecipe, Mapping[str, Estimate]]]  # the user's, on those rows too
    checks: Sequence[Check]
    sentences: Sequence[str]
    command: str
    prune: Prune  # the run file that makes the model
    build: Callable[[], nn.Module]  # makes the recommended model


def run_recommend(config: Recommend, out: Path, export: Path | None = None) -> Recommendation:
    """Search recipes and audit the best one, into the folder `out`; the model goes to the folder `export`."""
    from secateur.report.page import write_page

    config, data, device, scaling = prepare_search(config)
    audit = config.to_audit()
    tabular = len(data.input_shape) == 1
    settings = dump(config) | {name: value for name, value in dump_recipes(audit, tabular).items() if name == "train"}
    with (
        deterministic(config.deterministic),
        open_run(out, "recommend", settings, device=str(device), seeds=[config.seed]) as run,
    ):
        parts, halves = split_parts(audit, data, config.seed)
        bench = RecipeBench(run, audit, data, device, config.seed, parts, halves, scaling)
        search = RecipeSearch(config, bench, settings)
        search.run()
        run.add(search.rows())
        evaluation, collected = bench.confirm(search.chosen[1])
        run.add(collected.rows)
        run.show(collected.figures)
        run.write_parts("records.csv", write_records(evaluation.records))
        recommendation = answer(search, evaluation, collected.rows, out)
        run.add(compare_rows(search, recommendation))
        run.add(time_rows(bench))
        shown = {"recipe": recommendation.chosen.number, "front": [item.number for item in search.front]}
        shown |= {"sentences": recommendation.sentences, "command": recommendation.command}
        shown["held"] = recommendation.sentences[0].startswith(SHIP)
        run.show([{"kind": "recipe"} | shown])
        write_files(recommendation, evaluation, data, run, export)
    write_page([out])
    return recommendation


def prepare_search(config: Recommend) -> tuple[Recommend, Dataset, torch.device, Validity | None]:
    """Return the configuration with the methods that can run, and the data; refuse before any work what cannot."""
    require("optuna", "search")
    named = config.model_fields_set
    check_installed([*config.defense, *(known.defense for known in config.compare)], config.execution)
    check_function(config, config.pruner, config.defense)
    for attack in config.attack:
        check_models(attack, config.shadows)
    data, device = prepare(config)
    check_untrained(config.model, data.input_shape, data.classes)
    data, scaling = scale_inputs(config, data)
    if config.population is not None:
        data = join_population(config, data, config.population)
    config = with_scaling(config, data)
    audit = fit_attacks(fit_pruners(config.to_audit(), data, "pruner" in named), data, "attack" in named)
    config = config.model_copy(update={"pruner": audit.pruner, "attack": audit.attack})
    tabular = len(data.input_shape) == 1
    build_space(config, tabular)  # refuses an empty one
    check_pruners([recipe.compression.pruner for recipe in list_known(config, tabular)], audit, data)
    return config, data, device, scaling


def plan(config: Recommend) -> list[str]:
    """Describe the steps of a search, a line each; refuse the configurations that the search refuses."""
    config, data, _, _ = prepare_search(config)
    split_parts(config.to_audit(), data, config.seed)
    names: dict[str, Sequence[object]] = {
        "pruners": config.pruner,
        "sparsities": config.sparsity,
        "defenses": config.defense,
    }
    listed = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in names.items())
    most = config.most_candidates
    amount = "as many recipes as the budget allows" if most is None else f"up to {most} recipes"
    return [
        f"{config.model} on {config.data}, seed {config.seed}",
        f"  search {amount}, on half of the rows ({listed})",
        f"  attack up to {config.finalists} of them with {config.shadows} shadow models",
        f"  audit the best one on the other half, with {config.shadows} fresh ones and "
        f"{', '.join(map(str, config.attack))}",
    ]


def answer(search: RecipeSearch, evaluation: AuditEvaluation, rows: Sequence[Row], out: Path) -> Recommendation:
    """Return the recommendation: the checks of its limits on the rows that chose nothing, and its sentences."""
    number, recipe = search.chosen
    chosen, config = search.results[number], search.config
    before, after = divide(rows)
    confirmed = measure(before, after)
    checks = holding.check(rows, holding.policy_of(config.limits))
    checks += check_file(holding.subject_of(after[0]), confirmed, search.limits)
    broken = holding.outcome(checks) is Outcome.ABOVE
    compared = compare(search)
    sentences = write_sentences(search, chosen, confirmed, broken)
    sentences += [
        f"Yours, {recipe.title}: {_list_measures(measures)}, on the same rows." for recipe, measures in compared
    ]
    model = f"model{'.pt2' if is_quantised(recipe) else '.safetensors'}"
    prune = configure_prune(evaluation.config, recipe, after)
    trust = ["--trust"] if list_code(prune) else []
    command = shlex.join(["secateur", "prune", str(out / "recipe.yaml"), *trust, "--out", model])
    build = partial(build_model, evaluation, recipe, prune)
    return Recommendation(
        search.bench.run.rows,
        search.bench.run.figures,
        recipe,
        chosen,
        confirmed,
        search.front,
        compared,
        checks,
        sentences,
        command,
        prune,
        build,
    )


def write_sentences(
    search: RecipeSearch, chosen: Assessment, confirmed: Mapping[str, Estimate], above: bool
) -> list[str]:
    """Return the answer: the recipe with its measures on both halves, the limits in its way, and the effort.

    `above` is True if the recipe breaks a limit on the rows that chose nothing.
    """
    broken = list_excesses(chosen, search.limits)
    sentences = explain_limits(search.finalists, search.limits) if broken else []
    if DROP in broken and search.config.limits.accuracy_drop is None:
        sentences.append(f"The accuracy drop {TOLERANCE:g} is the search's own limit; --max-accuracy-drop sets yours.")
    verb = "The nearest recipe is" if broken else "The best recipe of the search breaks a limit:" if above else SHIP
    sentences.append(f"{verb} {chosen.title}: {_list_measures(confirmed)}, on rows that chose nothing.")
    sentences.append(f"On the rows that chose it: {_list_measures(chosen.measures)}.")
    items = search.results.values()
    counts = [sum(item.rung >= rung for item in items) for rung in (FIRST, WHOLE, SHADOWED)]
    sentences.append(
        f"Of {counts[0]} recipes {counts[1]} were fine-tuned to the end and {counts[2]} attacked with shadow models."
    )
    open_ones = [item for item in items if item.rung == WHOLE and not list_excesses(item, search.limits)]
    if broken and open_ones:
        sentences.append(f"{len(open_ones)} more may hold the limits; raise --finalists to attack them too.")
    return sentences


def _list_measures(measures: Mapping[str, Estimate]) -> str:
    """Return measures in words, with the attack that reached them."""
    texts = []
    for name, estimate in measures.items():
        under = f" under {estimate.note}" if estimate.note else ""
        texts.append(f"{NAMES[name]} {write_estimate(estimate)}{under}")
    return ", ".join(texts)


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


def write_files(
    recommendation: Recommendation, evaluation: AuditEvaluation, data: Dataset, run: Run, export: Path | None
) -> None:
    """Write the run file that makes the model, and the model itself if a folder is named."""
    import yaml

    recipe, config = recommendation.recipe, recommendation.prune
    run.write("recipe.yaml", yaml.safe_dump(dump_recipes(config, len(data.input_shape) == 1), sort_keys=False))
    if export is None:
        return
    net = recommendation.build()
    if is_quantised(recipe):
        save_program(export / "model.pt2", net, data.input_shape)
        return
    (model,) = evaluation.factory.models(recipe.compression, [VICTIM]).values()
    save(export / "model.safetensors", net, mask_of(model), config, data)


def compare(search: RecipeSearch) -> list[tuple[CompressionRecipe, dict[str, Estimate]]]:
    """Return the user's recipes with their measures on the rows that chose nothing.

    Each is attacked by fresh shadow models of its own recipe.
    """
    known = list_known(search.config, tabular=len(search.bench.data.input_shape) == 1)
    return [(recipe, measure(*divide(search.bench.confirm(recipe)[1].rows))) for recipe in known]


def compare_rows(search: RecipeSearch, recommendation: Recommendation) -> list[Row]:
    """Return the measures of the recommended recipe and of the user's; nothing if there is none of the user's."""
    if not recommendation.compared:
        return []
    rows = search.measure_rows(
        recommendation.recipe, recommendation.confirmed, COMPARED, recipe=recommendation.chosen.number, rung=SHADOWED
    )
    for place, (recipe, measures) in enumerate(recommendation.compared, start=1):
        rows += search.measure_rows(recipe, measures, COMPARED, recipe=-place, rung=SHADOWED)
    return rows


def divide(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of the original, and those of the compressed model."""
    return [row for row in rows if row.pruner == "none"], [row for row in rows if row.pruner != "none"]


def time_rows(bench: RecipeBench) -> list[Row]:
    """Return the seconds that each kind of work took, in all starts of the run."""
    labels: dict[str, Any] = {"model": bench.config.model, "dataset": bench.data.name, "seed": bench.seed}
    return [
        Row(**labels, metric=SPENT, value=seconds, timing=True, extra={"work": kind, "stages": number})
        for kind, (seconds, number) in bench.clock.by_kind().items()
    ]
