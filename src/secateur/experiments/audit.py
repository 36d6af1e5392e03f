"""The job of `secateur audit`: train, prune and attack models, and measure the leakage of every pruned model.

threat_models.py pairs victims with attackers, pipeline.py makes the models, and audit_evaluation.py measures them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from secateur.catalogue import methods
from secateur.config import Audit, dump_recipes
from secateur.data.dataset import Dataset
from secateur.data.partition import Part, in_out, in_out_pool
from secateur.evaluation.membership import write_records
from secateur.evaluation.setup import join_population, prepare, with_scaling
from secateur.evaluation.validity import Validity
from secateur.experiments.audit_evaluation import NO_SHADOWS, AuditEvaluation, make_together
from secateur.experiments.black_box import ROWS, can_only_be_asked, plan_black_box
from secateur.experiments.context import (
    SeedContext,
    check_audit,
    check_possible,
    fit_attacks,
    fit_pruners,
    population_of,
    shortage,
    split_rows,
)
from secateur.experiments.exposure import RANKING
from secateur.experiments.pipeline import VICTIM, ModelFactory
from secateur.experiments.predictions import describe_plan
from secateur.experiments.prune import scale_inputs
from secateur.experiments.threat_models import list_matchups
from secateur.gpu.determinism import deterministic
from secateur.interfaces import TrainsWithPenalty
from secateur.models.create import check_untrained, create, load_weights
from secateur.models.wrap import check_repeatable, wrap
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from secateur.seeding import derive

IN_OUT = 8  # models that the attacker trains on the pool of a victim that was brought along


def run_audit(config: Audit, out: Path, export: Path | None = None) -> list[Row]:
    """Audit every pruner, sparsity and defense of the configuration, for every seed, into the folder `out`.

    The audited models go to the folder `export`, if there is one, as files of `secateur prune`.
    """
    from secateur.report.page import write_page

    named = config.model_fields_set
    config = _with_possible_methods(config)
    check_audit(config)
    data, device, scaling = _prepare(config)
    config = fit_pruners(config, data, "pruner" in named)
    config = with_scaling(fit_attacks(config, data, "attack" in named), data)
    settings = dump_recipes(config, tabular=len(data.input_shape) == 1)
    opened = open_run(out, "audit", settings, device=str(device), seeds=config.seeds, data=data.key)
    with deterministic(config.deterministic), opened as run:
        contexts = [SeedContext(run, config, data, device, seed) for seed in config.seeds]
        factories = [ModelFactory(context, parts_of(config, data, context.seed)) for context in contexts]
        evaluations = [AuditEvaluation(config, factory, scaling) for factory in factories]
        for matchups in zip(*(list_matchups(config, seed) for seed in config.seeds), strict=True):
            make_together(evaluations, matchups)
            for evaluation, matchup in zip(evaluations, matchups, strict=True):
                evaluation.measure_model(matchup.victim)
                evaluation.measure_shadows(matchup)
                for attack in config.attack:
                    evaluation.measure_attack(matchup, attack)
                evaluation.release()
        for evaluation in evaluations if config.canaries else []:
            evaluation.measure_canaries()
        records = [record for evaluation in evaluations for record in evaluation.records]
        run.write_parts("records.csv", write_records(records))
        if export is not None:
            for evaluation in evaluations:
                evaluation.export_models(export)
        rows = run.rows
    write_page([out])
    return rows


def plan(config: Audit) -> list[str]:
    """Describe the steps of an audit, a line each; refuse the configurations that the audit refuses."""
    if config.predictions is not None:
        return describe_plan(config, config.predictions)
    if can_only_be_asked(config):
        return plan_black_box(config)
    named = config.model_fields_set
    config = _with_possible_methods(config)
    check_audit(config)
    data, _, scaling = _prepare(config)
    config = fit_pruners(config, data, "pruner" in named)
    names = ", ".join(map(str, fit_attacks(config, data, "attack" in named).attack))
    seed = config.seeds[0]
    parts_of(config, data, seed)
    matchups = list(list_matchups(config, seed))
    victims = list(dict.fromkeys(matchup.victim for matchup in matchups))
    shadows = config.shadows if config.trains_shadows else 0
    others = f"{shadows} shadow models" + (f" and {config.in_out} in-out models" if config.in_out else "")
    lines = [f"{config.model} on {config.data}, seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    verb = "train" if config.weights is None else "take the given weights as"
    others += f", trained by {config.train.function}" if config.train.function else ""
    lines += [f"  {verb} {victim.title}, with {others}" for victim in victims if victim.pruner is None]
    for victim in victims:
        if victim.pruner is not None:
            verb = "prune and fine-tune" if victim.pruner.uses_sparsity else "compress by"
            lines.append(f"  {verb} {victim.title}")
    lines += [f"  {scaling.sentence}"] if scaling is not None else []
    return [*lines, f"  attack in {len(matchups)} match-ups ({config.protocol}), each with {names}"]


def _prepare(config: Audit) -> tuple[Dataset, torch.device, Validity | None]:
    """Return the data, the device, and how inputs are scaled; None for our own scaling of a data set of ours.

    Refuse a model that brings trained weights where it would be trained.
    Where weights are given and the user says nothing of the scaling, the members' accuracy decides it.
    """
    data, device = prepare(config)
    if config.trains_shadows:
        check_untrained(config.model, data.input_shape, data.classes)
    data, scaling = scale_inputs(config, data)
    if scaling is None and (config.data not in methods("dataset") or config.form.says_scaling):
        scaling = Validity("scaling", True, f"the model gets {data.scaling}")
    if config.weights is not None:
        net = create(config.model, data.input_shape, data.classes, derive(0, "check"))
        check_repeatable("model", wrap(load_weights(net, config.weights)), data.inputs[:ROWS])
    if config.population is not None:
        data = join_population(config, data, config.population)
    return data, device, scaling


def _with_possible_methods(config: Audit) -> Audit:
    """Choose the attacks, the pruners and the attacker's models where the user did not.

    A training function knows no term of a pruner, so pruners with one are left out beside it.
    Without a recipe no shadow can be trained, so attacks run that need none. For weights with a recipe the attacker
    trains in-out models on the victim's own pool: disjoint shadows would have too few rows.
    """
    if config.train.function is not None and "pruner" not in config.model_fields_set:
        pruners = [pruner for pruner in config.pruner if pruner.find_part(TrainsWithPenalty) is None]
        config = config.model_copy(update={"pruner": pruners})
    if not config.trains_shadows:
        config = config.with_default_attacks(*RANKING, "blindmi")
        check_possible(config.attack, NO_SHADOWS)
        return config
    if config.weights is not None and not {"shadows", "in_out"} & config.model_fields_set:
        config = config.model_copy(update={"shadows": 0, "in_out": IN_OUT})
    able = [attack for attack in config.attack if shortage(attack, config.shadows, config.in_out) is None]
    return config.model_copy(update={"attack": able}) if "attack" not in config.model_fields_set else config


def parts_of(config: Audit, data: Dataset, seed: int) -> dict[str, Part]:
    """Return by role the rows that each model is and is not trained on."""
    split = split_rows(config, data, config.shadows if config.trains_shadows else 0, seed)
    parts = {VICTIM: split.victim} | {f"shadow-{i}": part for i, part in enumerate(split.shadows)}
    if config.in_out:
        pool = in_out_pool(split.victim, population_of(data), derive(seed, "population"))
        for i, inside in enumerate(in_out(pool.numel(), config.in_out, derive(seed, "in-out"))):
            parts[f"in-out-{i}"] = Part(pool[inside], split.victim.validation, pool[~inside])
    return parts
