"""The job of `secateur audit`: train, prune and attack models, and measure the leakage of every pruned model.

threat_models.py pairs victims with attackers, and pipeline.py makes the models. `MembershipExposure` measures one
victim, `AuditEvaluation` all victims and attackers of one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from secateur.catalogue import Choice
from secateur.config import Audit, dump
from secateur.data.dataset import Dataset
from secateur.data.partition import Part, in_out, trained_split, victim_shadow
from secateur.evaluation.membership import attack_rows, cache_answers, evaluate_guesses, flat_labels
from secateur.evaluation.setup import prepare
from secateur.experiments.context import SeedContext, check_audit, shortage
from secateur.experiments.pipeline import VICTIM, ModelFactory, ModelJob, guarantees, make, model_rows, state_of
from secateur.experiments.predictions import planned
from secateur.experiments.threat_models import Compression, Matchup, grid, guess, list_matchups
from secateur.inference import answering
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, MembershipAttack, Shadow
from secateur.metrics.gaps import portrait
from secateur.metrics.membership import share
from secateur.runs.artifacts import Result
from secateur.runs.folder import MemoryRun, Run, open_run
from secateur.runs.rows import Row
from secateur.seeding import derive

NO_SHADOWS = "needs shadow models; give a `train:` recipe, so that the attacker's models can be trained"


def run_audit(config: Audit, out: Path) -> list[Row]:
    """Audit every pruner, sparsity and defense of the configuration, for every seed, into the folder `out`."""
    from secateur.report.page import write_page

    config = _with_possible_attacks(config)
    check_audit(config)
    data, device = prepare(config)
    with open_run(out, "audit", dump(config), device=str(device), seeds=config.seeds) as run:
        contexts = [SeedContext(run, config, data, device, seed) for seed in config.seeds]
        factories = [ModelFactory(context, parts_of(config, data, context.seed)) for context in contexts]
        evaluations = [AuditEvaluation(config, factory) for factory in factories]
        for matchups in zip(*(list_matchups(config, seed) for seed in config.seeds), strict=True):
            make_together(evaluations, matchups)
            for evaluation, matchup in zip(evaluations, matchups, strict=True):
                evaluation.measure_model(matchup.victim)
                for attack in config.attack:
                    evaluation.measure_attack(matchup, attack)
                evaluation.release()
        rows = run.rows
    write_page([out])
    return rows


def plan(config: Audit) -> list[str]:
    """Describe the steps of an audit, a line each; refuse the configurations that the audit refuses."""
    if config.predictions is not None:
        return planned(config, config.predictions)
    config = _with_possible_attacks(config)
    names = ", ".join(map(str, config.attack))
    check_audit(config)
    data, _ = prepare(config)
    seed = config.seeds[0]
    parts_of(config, data, seed)
    matchups = list(list_matchups(config, seed))
    victims = list(dict.fromkeys(matchup.victim for matchup in matchups))
    shadows = config.shadows if config.trains_shadows else 0
    others = f"{shadows} shadow models" + (f" and {config.in_out} in-out models" if config.in_out else "")
    lines = [f"{config.model} on {config.data}, seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    verb = "train" if config.weights is None else "take the given weights as"
    lines += [f"  {verb} {victim.title}, with {others}" for victim in victims if victim.pruner is None]
    lines += [f"  prune and fine-tune {victim.title}" for victim in victims if victim.pruner is not None]
    return [*lines, f"  attack in {len(matchups)} match-ups ({config.protocol}), each with {names}"]


def _with_possible_attacks(config: Audit) -> Audit:
    """Choose attacks that need no shadow models if the model has no recipe and the user named no attacks."""
    return config if config.trains_shadows else config.unaided("correctness", "blindmi")


def parts_of(config: Audit, data: Dataset, seed: int) -> dict[str, Part]:
    """Return by role the rows that each model is and is not trained on."""
    rng, rows = derive(seed, "split"), len(data.inputs)
    if config.weights is None:
        split = victim_shadow(rows, config.shadows, rng)
    else:  # the victim's members are known; without a recipe no shadow can be trained
        split = trained_split(rows, data.train_size, config.shadows if config.trains_shadows else 0, rng)
    parts = {VICTIM: split.victim} | {f"shadow-{i}": part for i, part in enumerate(split.shadows)}
    pool = torch.cat([split.victim.train, split.victim.test])
    if config.in_out:
        for i, inside in enumerate(in_out(pool.numel(), config.in_out, derive(seed, "in-out"))):
            parts[f"in-out-{i}"] = Part(pool[inside], split.victim.validation, pool[~inside])
    return parts


def make_together(evaluations: Sequence[AuditEvaluation], matchups: Sequence[Matchup]) -> None:
    """Make all seeds' models of one match-up at once; the run's folder keeps them for later use."""
    jobs: dict[Compression, list[ModelJob]] = {}
    for evaluation, matchup in zip(evaluations, matchups, strict=True):
        others = [role for role in evaluation.factory.parts if role != VICTIM]
        for compression, roles in ((matchup.victim, [VICTIM]), (matchup.attacker, others)):
            if compression is not None:
                jobs.setdefault(compression, []).extend(evaluation.factory.jobs(compression, roles))
    for compression, compression_jobs in jobs.items():
        make(compression_jobs, compression)


@dataclass(eq=False)
class MembershipExposure:
    """A model's leakage about its members, for one seed: its gaps, and the guesses of attacks.

    The rows and figures go to a run, in a folder or in memory.
    """

    run: Run | MemoryRun
    seed: int
    members: Batch
    nonmembers: Batch
    candidates: Candidates  # the members, then the non-members
    build_box: Callable[[], BlackBox]  # called when a stage must be computed

    @cached_property
    def box(self) -> BlackBox:
        """The model."""
        return self.build_box()

    def measure_accuracy(self, labels: dict[str, Any]) -> None:
        """Measure the accuracy on members and on non-members."""
        for name, side in (("train_accuracy", self.members), ("test_accuracy", self.nonmembers)):
            accuracy = share(self.box.predict(side.inputs).argmax(1) == side.labels)
            self.run.add([Row(**labels, metric=name, **accuracy._asdict())])

    def measure_gaps(self, labels: dict[str, Any], classes: int, key: str = "") -> None:
        """Measure the gaps between answers for members and for non-members; `key` is the model's stage key."""

        def compute() -> Result:
            rng = derive(self.seed, "portrait")
            gaps, figures = portrait(self.box, self.members, self.nonmembers, classes, rng)
            return Result(data={"gaps": {name: gap._asdict() for name, gap in gaps.items()}, "figures": figures})

        done = self.run.stage("portrait", {"model": key, "seed": self.seed}, compute).data
        self.run.add(Row(**labels, metric=name, **gap) for name, gap in done["gaps"].items())
        self.run.show(flat_labels(labels) | {"attack": None} | figure for figure in done["figures"])

    def measure_attack(self, labels: dict[str, Any], fit: Callable[[], MembershipAttack], **depends: Any) -> None:
        """Measure how well an attack tells members from non-members; the stage depends on `depends`."""

        def compute() -> Result:
            guesses = fit().score(self.box, self.candidates)
            is_member = torch.arange(self.candidates.batch.size) < self.members.size
            return Result(data=evaluate_guesses(guesses, is_member, self.seed))

        done = self.run.stage("attack", depends | {"attack": labels["attack"], "seed": self.seed}, compute).data
        self.run.add(attack_rows(labels, done))
        self.run.show([flat_labels(labels) | done["figure"]])


def fit_attack(attack: Choice, known: Sequence[Shadow] | InOut, seed: int) -> MembershipAttack:
    """Return the attack, fitted to the attacker's models."""
    fitted: MembershipAttack = attack.make().fit(known, derive(seed, "attack", str(attack)))
    return fitted


class AuditEvaluation:
    """The victims and attackers of one seed. An attack is fitted once to each attacker's models."""

    def __init__(self, config: Audit, factory: ModelFactory) -> None:
        self.config, self.factory, self.context = config, factory, factory.context
        self._fitted, self._selected = cache(self._fit), cache(self._select)
        self._exposure = lru_cache(maxsize=1)(self._expose)  # of the last victim, with its answers
        self._shadows = lru_cache(maxsize=1)(self._build_shadows)  # of the last attacker
        self._measured: set[Compression] = set()

    def release(self) -> None:
        """Release the data that attacks saw: the data of several seeds would fill the memory."""
        self._shadows.cache_clear()
        self._exposure.cache_clear()
        vars(self).pop("candidates", None)

    @cached_property
    def candidates(self) -> Candidates:
        """The members, then the non-members: the order of an in-out pool."""
        part = self.factory.parts[VICTIM]
        both = self.context.rows(torch.cat([part.train, part.test]))
        return Candidates(both, ids=torch.arange(both.size) if self.config.in_out else None)

    def measure_model(self, victim: Compression) -> None:
        """Measure utility, cost, gaps and guarantees of one victim, once."""
        if victim in self._measured:
            return
        self._measured.add(victim)
        model, context, exposure = self._model(victim), self.factory.context_for(victim), self._exposure(victim)
        labels = self._labels(victim.labels)
        sides = {"train_accuracy": exposure.members, "test_accuracy": exposure.nonmembers}
        context.run.add(model_rows(context, labels, model, sides))
        if victim.pruner is not None:
            proved = guarantees(context, victim.defense, exposure.members.size)
            context.run.add(Row(**labels, metric="epsilon", value=e.epsilon, note=str(e)) for e in proved)
        exposure.measure_gaps(labels, context.data.classes, model.key)

    def measure_attack(self, matchup: Matchup, attack: Choice) -> None:
        """Measure how well one attack tells the victim's members from non-members."""
        labels = self._labels(matchup.labels) | {"attack": str(attack)}
        if not self.factory.shadows() and shortage(attack, 0) is not None:
            self.context.run.add([Row(**labels, metric="auc", value=None, note=NO_SHADOWS)])
            return
        attacker = matchup.attacker or self._selected(attack)
        if matchup.attacker is None:
            recipe = {"attacker_pruner": attacker.labels["pruner"], "attacker_sparsity": attacker.sparsity}
            labels["extra"] = labels["extra"] | recipe
        keys = {role: model.key for role, model in self._attackers_models(attacker, attack).items()}
        fit, key = partial(self._fitted, attacker, attack), self._model(matchup.victim).key
        self._exposure(matchup.victim).measure_attack(labels, fit, victim=key, models=keys)

    def _select(self, attack: Choice) -> Compression:
        """Return the recipe by which the attack does best on a held-out shadow that is pruned by every recipe."""
        *fit_roles, held_out = self.factory.shadows()
        recipes = list(dict.fromkeys(guess(self.config, model) for model in grid(self.config)))
        scores = [self._score_recipe(recipe, recipes, attack, fit_roles, held_out) for recipe in recipes]
        return recipes[int(torch.tensor(scores).argmax())]

    def _score_recipe(
        self, recipe: Compression, others: Sequence[Compression], attack: Choice, roles: Sequence[str], held_out: str
    ) -> float:
        """Return the mean balanced accuracy on the held-out shadow, over all recipes that may have pruned it."""
        fitted = fit_attack(attack, self._build_shadows(recipe, tuple(roles)), self.context.seed)
        scores = []
        for other in others:
            (target,) = self._build_shadows(other, (held_out,))
            sides = (target.members, target.nonmembers)
            inside, outside = (fitted.score(target.box, Candidates(side)).members for side in sides)
            scores.append((inside.double().mean() + (~outside).double().mean()) / 2)
        return float(torch.stack(scores).mean())

    def _fit(self, attacker: Compression, attack: Choice) -> MembershipAttack:
        models = self._attackers_models(attacker, attack)
        known: list[Shadow] | InOut
        if any(role.startswith("in-out") for role in models):
            boxes, parts = [self._black_box(attacker, model) for model in models.values()], self.factory.parts
            pool = torch.cat([parts[VICTIM].train, parts[VICTIM].test])
            known = InOut(boxes, self.candidates.batch, torch.stack([torch.isin(pool, parts[r].train) for r in models]))
        else:
            known = self._shadows(attacker, tuple(models))
        return fit_attack(attack, known, self.context.seed)

    def _attackers_models(self, attacker: Compression, attack: Choice) -> dict[str, Result]:
        """Return in-out models for the attacks that can use them if there are some, else disjoint shadows."""
        needs = attack.method.info["shadows"]
        online = needs == "in-out or disjoint" and self.config.in_out
        roles = [] if needs == "none" else self.factory.shadows("in-out" if online else "shadow")
        return self.factory.models(attacker, roles)

    def _build_shadows(self, compression: Compression, roles: tuple[str, ...]) -> list[Shadow]:
        shadows = []
        for role, model in self.factory.models(compression, roles).items():
            part, rows = self.factory.parts[role], self.context.rows
            shadows.append(Shadow(self._black_box(compression, model), rows(part.train), rows(part.test)))
        return shadows

    def _model(self, victim: Compression) -> Result:
        return self.factory.models(victim, [VICTIM])[VICTIM]

    def _expose(self, victim: Compression) -> MembershipExposure:
        """Return the exposure of a victim; its members and non-members are views, as second copies would be large."""
        both, size = self.candidates.batch, self.factory.parts[VICTIM].train.numel()
        members, nonmembers = Batch(*(part[:size] for part in both)), Batch(*(part[size:] for part in both))
        run, seed = self.context.run, self.context.seed
        box = partial(self._black_box, victim, self._model(victim))
        return MembershipExposure(run, seed, members, nonmembers, self.candidates, box)

    def _black_box(self, compression: Compression, model: Result) -> BlackBox:
        net = self.factory.context_for(compression).net
        answer = answering(net, state_of(model), self.context.device)
        return cache_answers(lambda inputs: answer(inputs).softmax(1))

    def _labels(self, labels: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.config.model, "dataset": self.context.data.name, "seed": self.context.seed} | labels
