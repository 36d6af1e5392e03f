"""The main job: train, prune and attack, and say what each way of pruning gives away.

Read `run_audit` first; the models are made in pipeline.py, the numbers in metrics/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.chance import derive
from secateur.config import Audit, Choice, dump
from secateur.data.splits import Part, victim_shadow
from secateur.interfaces import Batch, BlackBox, Candidates, Params, Shadow, TrainsWithPenalty
from secateur.metrics.membership import evaluate
from secateur.pipeline import Bench, model_rows, prepare, prune_and_finetune, state_of, train_originals
from secateur.report.page import write_page
from secateur.runs import Result, Row, open_run
from secateur.training import predict

VICTIM = "victim"


@dataclass(frozen=True)
class Target:
    """A victim's model to be attacked, with the shadow models that the attacker made for it."""

    bench: Bench
    parts: dict[str, Part]  # by role: what each model was and was not trained on
    models: dict[str, Result]  # by role: the victim's and the attacker's shadows
    labels: dict[str, Any]  # the row fields that say which model this is

    @cached_property
    def victim(self) -> BlackBox:
        """What the attacker sees of the victim."""
        return black_box(self.bench, state_of(self.models[VICTIM]))

    @cached_property
    def members(self) -> Batch:
        """What the victim was trained on."""
        return self.bench.rows(self.parts[VICTIM].train)

    @cached_property
    def nonmembers(self) -> Batch:
        """What the victim never saw."""
        return self.bench.rows(self.parts[VICTIM].test)

    @cached_property
    def candidates(self) -> Candidates:
        """Members first, then non-members."""
        return Candidates(Batch(*(torch.cat(pair) for pair in zip(self.members, self.nonmembers, strict=True))))

    @cached_property
    def shadows(self) -> list[Shadow]:
        """The attacker's models with their own members and non-members."""
        return [
            Shadow(black_box(self.bench, state_of(model)), *(self.bench.rows(i) for i in (part.train, part.test)))
            for role, model in self.models.items()
            for part in [self.parts[role]]
            if role != VICTIM
        ]


def run_audit(config: Audit, out: Path) -> list[Row]:
    """Audit every pruner, sparsity and defense of the configuration, for every seed, into the folder `out`."""
    data, device = prepare(config)
    with open_run(out, "audit", dump(config), device=str(device), seeds=config.seeds) as run:
        for seed in config.seeds:
            bench = Bench(run, config, data, device, seed)
            split = victim_shadow(len(data.inputs), config.shadows, derive(seed, "split"))
            parts = {VICTIM: split.victim} | {f"shadow-{i}": part for i, part in enumerate(split.shadows)}
            for target in targets(bench, config, parts):
                sides = {"train_accuracy": target.members, "test_accuracy": target.nonmembers}
                run.add(model_rows(bench, target.labels, target.models[VICTIM], sides))
                for attack in config.attack:
                    run.add(measure_attack(target, attack))
        rows = run.rows
    write_page([out])
    return rows


def targets(bench: Bench, config: Audit, parts: dict[str, Part]) -> Iterator[Target]:
    """The originals, then every pruned and fine-tuned model, each with its shadows."""
    common = {"model": config.model, "dataset": bench.data.name, "seed": bench.seed}
    originals = {}
    for pruner in config.pruner:
        own = pruner if isinstance(pruner.make(), TrainsWithPenalty) else None  # slimming trains its own original
        if own not in originals:
            originals[own] = train_originals(bench, parts, own)
            extra = {"original": str(own)} if own else {}
            labels = {"pruner": "none", "sparsity": 0.0, "defense": "basic", "adaptive": False, "extra": extra}
            yield Target(bench, parts, originals[own], common | labels)
        for sparsity, defense in product(config.sparsity, config.defense):
            labels = {"pruner": str(pruner), "sparsity": sparsity, "defense": str(defense), "adaptive": config.adaptive}
            models = pruned_models(bench, config, originals[own], parts, pruner, sparsity, defense)
            yield Target(bench, parts, models, common | labels)


def pruned_models(
    bench: Bench,
    config: Audit,
    originals: dict[str, Result],
    parts: dict[str, Part],
    pruner: Choice,
    sparsity: float,
    defense: Choice,
) -> dict[str, Result]:
    """The victim with its defense; the shadows with the same (an adaptive attacker) or with `basic`."""
    victim = {VICTIM: originals[VICTIM]}
    shadows = {role: result for role, result in originals.items() if role != VICTIM}
    guessed = defense if config.adaptive else Choice("defense", "basic")
    if guessed == defense:
        return prune_and_finetune(bench, victim | shadows, parts, pruner, sparsity, defense)
    models = prune_and_finetune(bench, victim, parts, pruner, sparsity, defense)
    return models | prune_and_finetune(bench, shadows, parts, pruner, sparsity, guessed)


def measure_attack(target: Target, attack: Choice) -> list[Row]:
    """How well one attack tells the victim's members from examples it never saw."""
    seed = target.bench.seed

    def compute() -> Result:
        fitted = attack.make().fit(target.shadows, derive(seed, "attack", str(attack)))
        guesses = fitted.score(target.victim, target.candidates)
        is_member = torch.arange(target.candidates.batch.size) < target.members.size
        found = evaluate(guesses, is_member, derive(seed, "bootstrap"))
        return Result(data={name: estimate._asdict() for name, estimate in found.items()})

    depends = {"attack": str(attack), "seed": seed, "models": {role: m.key for role, m in target.models.items()}}
    done = target.bench.run.stage("attack", depends, compute).data
    return [Row(**target.labels, attack=str(attack), metric=name, **values) for name, values in done.items()]


def black_box(bench: Bench, state: Params) -> BlackBox:
    """A model as an attacker meets it; the same question is answered from memory."""
    state = {name: value.to(bench.device) for name, value in state.items()}
    answers = WeakTensorKeyDictionary()

    def answer(inputs: torch.Tensor) -> torch.Tensor:
        if inputs not in answers:
            answers[inputs] = predict(bench.net, state, inputs)
        answered: torch.Tensor = answers[inputs]
        return answered

    return BlackBox(answer)
