"""The job of `secateur recommend`: search recipes, choose one within limits, and audit it on rows that chose nothing.

Read `run_recommend` first. recipe_search.py halves recipes by rungs, and evaluation/selection.py has the front and the
choice. Recipes of models are drawn from recipe_space.py and measured by recipe_evaluation.py; update_recipes.py and
federation_recipes.py have those of updates and federations. recipe.yaml in the run folder is the run file of
`secateur prune`, `invert` or `federate` with the recommended recipe.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from secateur import tree
from secateur.config import (
    Recommend,
    RecommendFederation,
    RecommendUpdates,
    SearchFields,
    dump,
    dump_recipes,
    list_code,
)
from secateur.data.dataset import Dataset
from secateur.errors import require
from secateur.evaluation import limits as holding
from secateur.evaluation.limits import Check, Outcome
from secateur.evaluation.membership import write_records
from secateur.evaluation.selection import (
    AUC,
    COMPARED,
    DROP,
    NAMES,
    SPENT,
    TPR,
    Assessment,
    check_measures,
    choose,
    choose_better,
    compare_values,
    explain_limits,
    find_gain,
    list_excesses,
    write_estimate,
)
from secateur.evaluation.setup import join_population, prepare, with_scaling
from secateur.evaluation.validity import Validity, doubt_training, failures, validity_rows
from secateur.experiments.context import (
    check_function,
    check_installed,
    check_models,
    check_pruners,
    fit_attacks,
    fit_pruners,
)
from secateur.experiments.federation_recipes import prepare_federation
from secateur.experiments.prune import scale_inputs
from secateur.experiments.recipe_evaluation import RecipeBench, split_parts
from secateur.experiments.recipe_search import (
    FIRST,
    SHADOWED,
    TOLERANCE,
    WHOLE,
    Bench,
    Confirmation,
    RecipeSearch,
    describe_amount,
    select_limits,
)
from secateur.experiments.recipe_space import SearchedRecipe, build_space, list_known
from secateur.experiments.recipe_spread import opened_spread
from secateur.experiments.update_recipes import prepare_updates
from secateur.gpu.determinism import deterministic
from secateur.metrics.membership import Estimate
from secateur.models.create import check_untrained
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row

SHIP = "Ship"  # begins the answer if no limit is broken


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The answer of a search: the recipe, its measures on both halves, and the sentences that say them."""

    rows: list[Row]
    figures: list[dict[str, Any]]
    recipe: SearchedRecipe
    chosen: Assessment  # on the rows of the search
    confirmed: Confirmation  # on the other rows, under fresh attackers and all attacks
    front: Sequence[Assessment]
    compared: Sequence[tuple[SearchedRecipe, Mapping[str, Estimate]]]  # the user's, on those rows too
    checks: Sequence[Check]
    sentences: Sequence[str]
    command: str


@dataclass(frozen=True, eq=False)
class Preparation:
    """A search that is ready to run: its fields, the values that it depends on, and what opens its bench in a run."""

    config: SearchFields
    settings: Mapping[str, Any]
    device: torch.device
    open: Callable[[Run], Bench]
    lines: Sequence[str]  # the plan in words


def prepare_any(config: SearchFields) -> Preparation:
    """Return the search of a run file, of models, updates or a federation; refuse before any work what cannot run."""
    require("optuna", "search")
    if isinstance(config, RecommendUpdates):
        return Preparation(*prepare_updates(config))
    if isinstance(config, RecommendFederation):
        return Preparation(*prepare_federation(config))
    assert isinstance(config, Recommend)
    return prepare_models(config)


def run_recommend(
    config: SearchFields, out: Path, export: Path | None = None, address: str | None = None
) -> Recommendation:
    """Search recipes and audit the best one, into the folder `out`; the model goes to the folder `export`.

    With an `address` the recipes of a generation are measured by the workers of a Ray cluster.
    """
    from secateur.report.page import write_page

    ready = prepare_any(config)
    marks: dict[str, Any] = {"device": str(ready.device), "seeds": [config.seed]}
    exact = deterministic(getattr(config, "deterministic", False))
    with (
        exact,
        open_run(out, "recommend", ready.settings, **marks) as run,
        opened_spread(config, run, address, prepare_any) as spread,
    ):
        bench = ready.open(run)
        search = RecipeSearch(ready.config, bench, ready.settings, spread)
        search.run()
        run.add(search.rows())
        confirmed = doubt_original(search, bench.confirm(search.chosen[1]))
        run.add(confirmed.rows)
        run.show(confirmed.figures)
        if confirmed.records:
            run.write_parts("records.csv", write_records(confirmed.records))
        recommendation = answer(search, confirmed, out)
        run.add(time_rows(bench))
        shown = {"recipe": recommendation.chosen.number, "front": [item.number for item in search.front]}
        shown |= {"sentences": recommendation.sentences, "command": recommendation.command, "rungs": bench.rungs}
        held = holding.outcome(recommendation.checks) is Outcome.WITHIN
        shown["held"] = held and recommendation.sentences[0].startswith(SHIP)
        run.show([{"kind": "recipe"} | shown])
        write_files(confirmed, run, export)
    write_page([out])
    return recommendation


def prepare_models(config: Recommend) -> Preparation:
    """Return a search of compressions."""
    config, data, device, scaling = prepare_search(config)
    audit = config.to_audit()
    recipes = dump_recipes(audit, len(data.input_shape) == 1)
    parts, halves = split_parts(audit, data, config.seed)

    def open_bench(run: Run) -> RecipeBench:
        return RecipeBench(run, config, audit, data, device, parts, halves, scaling)

    settings = dump(config) | {name: value for name, value in recipes.items() if name == "train"}
    return Preparation(config, settings, device, open_bench, describe_search(config))


def prepare_search(config: Recommend) -> tuple[Recommend, Dataset, torch.device, Validity | None]:
    """Return the configuration with the methods that can run, and the data; refuse before any work what cannot."""
    named = config.model_fields_set
    check_installed([*config.defense, *(known.defense for known in config.known)], config.execution)
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
    known = [recipe.compression.pruner for recipe in list_known(config, tabular)]
    check_pruners([pruner for pruner in known if pruner is not None], audit, data)
    return config, data, device, scaling


def describe_search(config: Recommend) -> list[str]:
    """Describe the steps of a search of compressions, a line each."""
    names: dict[str, Sequence[object]] = {
        "pruners": config.pruner,
        "sparsities": config.sparsity,
        "defenses": config.defense,
    }
    listed = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in names.items())
    keep = f"  keep the best of {len(config.beat)} recipes of yours, unless another one is better beyond the intervals"
    keep = keep if config.limits.decide == "high" else keep.replace("beyond the intervals", "by values")
    return [
        f"{config.model} on {config.data}, seed {config.seed}",
        f"  search {describe_amount(config)}, on half of the rows ({listed})",
        f"  attack up to {config.finalists} of them with {config.shadows} shadow models",
        *([keep] if config.beat else []),
        f"  audit the best one on the other half, with {config.shadows} fresh ones and "
        f"{', '.join(map(str, config.attack))}",
    ]


def plan(config: SearchFields) -> list[str]:
    """Describe the steps of a search, a line each; refuse the configurations that the search refuses."""
    return list(prepare_any(config).lines)


def answer(search: RecipeSearch, confirmed: Confirmation, out: Path) -> Recommendation:
    """Return the recommendation: the checks of its limits on the rows that chose nothing, and its sentences."""
    number, recipe = search.chosen
    chosen, limits = search.results[number], search.config.limits
    by_rows = {row.metric for row in confirmed.rows if not row.extra.get("client")} & limits.by_measure().keys()
    if isinstance(search.config, RecommendFederation):
        by_rows = set()  # rows of rounds and clients, which no limit reads
    policy = holding.policy_of(limits)
    checks = holding.check(
        confirmed.rows, replace(policy, limits={k: v for k, v in policy.limits.items() if k in by_rows})
    )
    others = {k: v for k, v in limits.by_measure().items() if k not in by_rows}
    checks += check_measures(recipe.title, confirmed.measures, others, limits.decide)
    checks += check_measures(recipe.title, confirmed.measures, search.config.shares)
    compared = compare(search, confirmed)
    beaten, bounds = explain_reference(search, confirmed.measures, compared)
    checks += check_measures(recipe.title, confirmed.measures, bounds, limits.decide)
    outcome = holding.outcome(checks)
    doubts = [f"{doubt[0].upper()}{doubt[1:]}." for doubt in failures(confirmed.rows, "original")]
    stated, over = limits.by_measure() | search.config.shares, dict[str, float]()
    stated |= {name: min(bound, stated.get(name, bound)) for name, bound in bounds.items()}
    if outcome is Outcome.INCONCLUSIVE:
        over = list_excesses(Assessment(number, recipe.title, SHADOWED, confirmed.measures), stated)
    doubts += [f"It is above the limit {stated[k]:g} on {NAMES[k]} by value; intervals do not decide." for k in over]
    sentences = write_sentences(search, chosen, confirmed.measures, outcome is Outcome.ABOVE, doubts)
    if (over or outcome is Outcome.ABOVE) and not list_excesses(chosen, search.limits):
        sentences += name_others(search, compared)
    sentences += beaten
    sentences += [
        f"Yours, {known.title}: {_list_measures(measures)}, on the same rows." for known, measures in compared
    ]
    trust = ["--trust"] if list_code(confirmed.run_file) else []
    target = str(out / "again") if confirmed.target is None else confirmed.target
    command = shlex.join(["secateur", confirmed.verb, str(out / "recipe.yaml"), *trust, "--out", target])
    rows, figures = search.bench.run.rows, search.bench.run.figures
    return Recommendation(rows, figures, recipe, chosen, confirmed, search.front, compared, checks, sentences, command)


def doubt_original(search: RecipeSearch, confirmed: Confirmation) -> Confirmation:
    """Return the confirmation with a failed check if the run's own original is less accurate than what is made of it.

    A drop against such an original hides what a recipe loses, so the run passes no limit.
    """
    if not isinstance(search.config, Recommend) or search.config.weights is not None:
        return confirmed
    whole = [item for item in search.results.values() if item.rung >= WHOLE]
    best = find_gain(whole, max(select_limits(search.config)[DROP], TOLERANCE))
    if best is None:
        return confirmed
    value, low, high, _ = best.measures[DROP]
    check = doubt_training(Estimate(-value, -high, -low), best.title)
    rows = validity_rows(search.bench.labels | search.chosen[1].labels, [check])
    return replace(confirmed, rows=[*confirmed.rows, *rows])


def write_sentences(
    search: RecipeSearch,
    chosen: Assessment,
    confirmed: Mapping[str, Estimate],
    above: bool,
    doubts: Sequence[str] = (),
) -> list[str]:
    """Return the answer: the recipe with its measures on both halves, the limits in its way, and the effort.

    `above` is True if the recipe breaks a limit on the rows that chose nothing; `doubts` say why it is no answer yet.
    """
    broken = list_excesses(chosen, search.limits)
    sentences = explain_limits(search.finalists, search.limits) if broken else []
    if DROP in broken and search.config.limits.accuracy_drop is None:
        sentences.append(f"The accuracy drop {TOLERANCE:g} is the search's own limit; --max-accuracy-drop sets yours.")
    verb = "The best recipe of the search is" if doubts else SHIP
    verb = "The nearest recipe is" if broken else "The best recipe of the search breaks a limit:" if above else verb
    sentences.append(f"{verb} {chosen.title}: {_list_measures(confirmed)}, on rows that chose nothing.")
    sentences += doubts
    sentences.append(f"On the rows that chose it: {_list_measures(chosen.measures)}.")
    by_value = choose(search.finalists, search.limits)
    if by_value.number != chosen.number and not broken:
        unshown = "But its intervals do not show that it holds them; limits: {decide: value} takes it."
        sentences.append(
            f"By value {by_value.title} leaks less within the limits: {_list_measures(by_value.measures)}."
        )
        sentences.append(unshown)
    items = search.results.values()
    counts = [sum(item.rung >= rung for item in items) for rung in (FIRST, WHOLE, SHADOWED)]
    reached = [f"{count} reached {name}" for count, name in zip(counts[1:], search.bench.rungs[1:], strict=True)]
    sentences.append(f"Of {counts[0]} recipes {' and '.join(reached)}.")
    open_ones = [item for item in items if item.rung == WHOLE and not list_excesses(item, search.limits)]
    if broken and open_ones:
        sentences.append(f"{len(open_ones)} more may hold the limits; raise --finalists to attack them too.")
    return sentences


def name_others(search: RecipeSearch, compared: Sequence[tuple[SearchedRecipe, Mapping[str, Estimate]]]) -> list[str]:
    """Return other recipes that hold the limits, for a recommended one that breaks them on rows that chose nothing.

    They are named by the rows that chose. A recipe of the user's that holds the limits there too is named as well, with
    what is wrong in taking it: these rows would then have chosen it.
    """
    limits, number, sentences = search.limits, search.chosen[0], []
    others = [item for item in search.finalists if item.number != number and not list_excesses(item, limits)]
    audited = {recipe.title for recipe, _ in compared}
    if others:
        best = choose(others, limits, search.shown)
        rest = "" if best.title in audited else "; it was not audited on the other rows"
        sentences.append(f"Next by the rows that chose is {best.title}: {_list_measures(best.measures)}{rest}.")
    both = [Assessment(search.recipes.index(recipe), recipe.title, SHADOWED, measures) for recipe, measures in compared]
    both = [item for item in both if not list_excesses(item, limits)]
    both = [item for item in both if not list_excesses(search.results[item.number], limits)]
    if both:
        best = choose(both, limits)
        sentences.append(f"Of yours, {best.title} holds the limits on both halves; taking it is a choice by both.")
    if sentences:
        sentences.append("Audit such a recipe with another seed, under compare, before you ship it.")
    return sentences


def explain_reference(
    search: RecipeSearch,
    confirmed: Mapping[str, Estimate],
    compared: Sequence[tuple[SearchedRecipe, Mapping[str, Estimate]]],
) -> tuple[list[str], dict[str, float]]:
    """Return how the recommended recipe stands beside the one to beat, and that one's accuracy drop and AUC.

    Both are measured on the rows that chose nothing. The best recipe by values is audited there too, if intervals
    do not show it.
    """
    reference = search.reference
    if reference is None:
        beat = getattr(search.config, "beat", ())
        return ["None of yours to beat holds the limits, so the limits alone choose."] if beat else [], {}
    number = search.chosen[0]
    sentences, bounds = [], dict[str, float]()
    if number == reference.number:
        sentences.append(f"It is yours: no other recipe is shown to beat {reference.title}.")
    else:
        theirs = next(measures for known, measures in compared if known == search.recipes[reference.number])
        words = [f"{NAMES[k]} {compare_values(confirmed[k], theirs[k])}" for k in (DROP, AUC, TPR) if k in theirs]
        sentences.append(f"Beside yours to beat, {reference.title}, on rows that chose nothing: {', '.join(words)}.")
        bounds = {name: theirs[name].value for name in (DROP, AUC)}
    other = choose_better(search.finalists, reference, search.limits, "value").number
    if other not in (number, reference.number):
        aside = search.recipes[other]
        measures = search.bench.confirm(aside).measures
        search.bench.run.add(search.measure_rows(aside, measures, COMPARED, recipe=other, rung=SHADOWED, rule="value"))
        sentences.append(f"By value {aside.title} beats it: {_list_measures(measures)}, on rows that chose nothing.")
    return sentences, bounds


def _list_measures(measures: Mapping[str, Estimate]) -> str:
    """Return measures in words, with the attack that reached them."""
    texts = []
    for name, estimate in measures.items():
        under = f" under {estimate.note}" if estimate.note else ""
        texts.append(f"{NAMES[name]} {write_estimate(estimate)}{under}")
    return ", ".join(texts)


def compare(search: RecipeSearch, confirmed: Confirmation) -> list[tuple[SearchedRecipe, Mapping[str, Estimate]]]:
    """Add the recommended recipe to the run as measured on the rows that chose nothing, and the user's beside it.

    Each is attacked by fresh shadow models of its own recipe. A kill leaves the rows of those that are done.
    """
    run, (number, chosen) = search.bench.run, search.chosen
    run.add(search.measure_rows(chosen, confirmed.measures, COMPARED, recipe=number, rung=SHADOWED))
    compared = list[tuple[SearchedRecipe, Mapping[str, Estimate]]]()
    for place, recipe in enumerate(search.bench.list_known(), start=1):
        compared.append((recipe, search.bench.confirm(recipe).measures))
        run.add(search.measure_rows(*compared[-1], COMPARED, recipe=-place, rung=SHADOWED))
        run.flush()
    return compared


def time_rows(bench: Bench) -> list[Row]:
    """Return the seconds that each kind of work took, in all starts of the run."""
    return [
        Row(**bench.labels, metric=SPENT, value=seconds, timing=True, extra={"work": kind, "stages": number})
        for kind, (seconds, number) in bench.clock.by_kind().items()
    ]


def write_files(confirmed: Confirmation, run: Run, export: Path | None) -> None:
    """Write the run file that makes the recommended recipe, and its model if a folder is named."""
    import yaml
    from safetensors.torch import save_file

    run.write("recipe.yaml", yaml.safe_dump(dict(confirmed.fields), sort_keys=False))
    if export is None:
        return
    if confirmed.save is not None:
        confirmed.save(export)
        return
    export.mkdir(parents=True, exist_ok=True)
    save_file(tree.state_of(confirmed.build()), export / "model.safetensors")
