"""The job of `secateur audit`: train, prune and attack models, and measure the leakage of every way of pruning.

threat_models.py pairs victims with attackers, pipeline.py makes the models, `AuditEvaluation` measures one seed's
models and attacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secateur.catalogue import Choice
from secateur.config import Audit, dump
from secateur.data.dataset import Dataset
from secateur.data.splits import Part, in_out, trained_split, victim_shadow
from secateur.evaluation.membership import attack_rows, flat, judged, remembering
from secateur.evaluation.setup import prepare
from secateur.experiments.context import SeedContext, check_audit, shortage
from secateur.experiments.pipeline import VICTIM, ModelFactory, ModelJob, guarantees, make, model_rows, state_of
from secateur.experiments.predictions import planned
from secateur.experiments.threat_models import Compression, Matchup, duels, grid, guess
from secateur.inference import answering
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, MembershipAttack, Shadow
from secateur.metrics.gaps import portrait
from secateur.runs.artifacts import Result
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from secateur.seeding import derive

NO_SHADOWS = "needs shadow models; give a `train:` recipe, so that the attacker's models can be trained"


def run_audit(config: Audit, out: Path) -> list[Row]:
    """Audit every pruner, sparsity and defense of the configuration, for every seed, into the folder `out`."""
    from secateur.report.page import write_page

    config = _attacked(config)
    check_audit(config)
    data, device = prepare(config)
    with open_run(out, "audit", dump(config), device=str(device), seeds=config.seeds) as run:
        benches = [SeedContext(run, config, data, device, seed) for seed in config.seeds]
        arenas = [AuditEvaluation(config, ModelFactory(bench, parts_of(config, data, bench.seed))) for bench in benches]
        for round_ in zip(*(duels(config, seed) for seed in config.seeds), strict=True):
            make_together(arenas, round_)
            for arena, duel in zip(arenas, round_, strict=True):
                arena.measure_model(duel.victim)
                for attack in config.attack:
                    arena.measure_attack(duel, attack)
                arena.rest()
        rows = run.rows
    write_page([out])
    return rows


def plan(config: Audit) -> list[str]:
    """Describe the steps of an audit, a line each; refuse the configurations that the audit refuses."""
    if config.predictions is not None:
        return planned(config, config.predictions)
    config = _attacked(config)
    names = ", ".join(map(str, config.attack))
    check_audit(config)
    data, _ = prepare(config)
    seed = config.seeds[0]
    parts_of(config, data, seed)
    all_duels = list(duels(config, seed))
    victims = list(dict.fromkeys(duel.victim for duel in all_duels))
    shadows = config.shadows if config.trains_shadows else 0
    others = f"{shadows} shadow models" + (f" and {config.in_out} in-out models" if config.in_out else "")
    lines = [f"{config.model} on {config.data}, seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    verb = "train" if config.weights is None else "take the given weights as"
    lines += [f"  {verb} {victim.title}, with {others}" for victim in victims if victim.pruner is None]
    lines += [f"  prune and fine-tune {victim.title}" for victim in victims if victim.pruner is not None]
    return [*lines, f"  attack in {len(all_duels)} duels ({config.protocol}), each with {names}"]


def _attacked(config: Audit) -> Audit:
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


def make_together(arenas: Sequence[AuditEvaluation], duels: Sequence[Matchup]) -> None:
    """Make all seeds' models of one duel at once; the run's folder keeps them for later use."""
    jobs: dict[Compression, list[ModelJob]] = {}
    for arena, duel in zip(arenas, duels, strict=True):
        others = [role for role in arena.workshop.parts if role != VICTIM]
        for compression, roles in ((duel.victim, [VICTIM]), (duel.attacker, others)):
            if compression is not None:
                jobs.setdefault(compression, []).extend(arena.workshop.jobs(compression, roles))
    for compression, compression_jobs in jobs.items():
        make(compression_jobs, compression)


class AuditEvaluation:
    """The victims and attackers of one seed. An attack is fitted once to each attacker's models."""

    def __init__(self, config: Audit, workshop: ModelFactory) -> None:
        self.config, self.workshop, self.bench = config, workshop, workshop.bench
        self._fitted: dict[tuple[Compression, str], MembershipAttack] = {}
        self._shadows: tuple[Compression | None, list[Shadow]] = (None, [])  # of the last attacker
        self._victim: tuple[Compression | None, BlackBox | None] = (None, None)  # the last victim, with its answers
        self._selected: dict[str, Compression] = {}
        self._measured: set[Compression] = set()

    def rest(self) -> None:
        """Release the data that attacks saw: the data of several seeds would fill the memory."""
        self._shadows, self._victim = (None, []), (None, None)
        for name in ("candidates", "members", "nonmembers"):
            vars(self).pop(name, None)

    @cached_property
    def candidates(self) -> Candidates:
        """The members, then the non-members: the order of an in-out pool."""
        part = self.workshop.parts[VICTIM]
        both = self.bench.rows(torch.cat([part.train, part.test]))
        return Candidates(both, ids=torch.arange(both.size) if self.config.in_out else None)

    @cached_property
    def members(self) -> Batch:
        """The victim's training examples; a view of the candidates, as a second copy would be large."""
        both, size = self.candidates.batch, self.workshop.parts[VICTIM].train.numel()
        return Batch(both.inputs[:size], both.labels[:size])

    @cached_property
    def nonmembers(self) -> Batch:
        """Examples that the victim was not trained on; also a view."""
        both, size = self.candidates.batch, self.workshop.parts[VICTIM].train.numel()
        return Batch(both.inputs[size:], both.labels[size:])

    @cached_property
    def is_member(self) -> Tensor:
        """(N,) bool: the true membership of the candidates, for the evaluation."""
        return torch.arange(self.candidates.batch.size) < self.members.size

    def measure_model(self, victim: Compression) -> None:
        """Measure utility, cost, gaps and guarantees of one victim, once."""
        if victim in self._measured:
            return
        self._measured.add(victim)
        model, bench = self._model(victim), self.workshop.bench_for(victim)
        labels = self._labels(victim.labels)
        sides = {"train_accuracy": self.members, "test_accuracy": self.nonmembers}
        bench.run.add(model_rows(bench, labels, model, sides))
        if victim.pruner is not None:
            proved = guarantees(bench, victim.defense, self.members.size)
            bench.run.add(Row(**labels, metric="epsilon", value=e.epsilon, note=str(e)) for e in proved)

        def compute() -> Result:
            rng = derive(bench.seed, "portrait")
            gaps, figures = portrait(self._box(victim), self.members, self.nonmembers, bench.data.classes, rng)
            return Result(data={"gaps": {name: gap._asdict() for name, gap in gaps.items()}, "figures": figures})

        done = bench.run.stage("portrait", {"model": model.key, "seed": bench.seed}, compute).data
        bench.run.add(Row(**labels, metric=name, **gap) for name, gap in done["gaps"].items())
        bench.run.show(flat(labels) | {"attack": None} | figure for figure in done["figures"])

    def measure_attack(self, duel: Matchup, attack: Choice) -> None:
        """Measure how well one attack tells the victim's members from non-members."""
        run, labels = self.bench.run, self._labels(duel.labels) | {"attack": str(attack)}
        if not self.workshop.shadows() and shortage(attack, 0) is not None:
            run.add([Row(**labels, metric="auc", value=None, note=NO_SHADOWS)])
            return
        attacker = duel.attacker or self.select(attack)
        if duel.attacker is None:
            recipe = {"attacker_pruner": attacker.labels["pruner"], "attacker_sparsity": attacker.sparsity}
            labels["extra"] = labels["extra"] | recipe

        def compute() -> Result:
            guesses = self._fit(attacker, attack).score(self._box(duel.victim), self.candidates)
            return Result(data=judged(guesses, self.is_member, self.bench.seed))

        keys = {role: model.key for role, model in self._attackers_models(attacker, attack).items()}
        depends = {"attack": str(attack), "seed": self.bench.seed, "victim": self._model(duel.victim).key}
        done = run.stage("attack", depends | {"models": keys}, compute).data
        run.add(attack_rows(labels, done))
        run.show([flat(labels) | done["figure"]])

    def select(self, attack: Choice) -> Compression:
        """Return the recipe by which the attack does best on a held-out shadow that is pruned by every recipe."""
        if str(attack) not in self._selected:
            *fit_roles, held_out = self.workshop.shadows()
            recipes = list(dict.fromkeys(guess(self.config, model) for model in grid(self.config)))
            scores = [self._mark(recipe, recipes, attack, fit_roles, held_out) for recipe in recipes]
            self._selected[str(attack)] = recipes[int(torch.tensor(scores).argmax())]
        return self._selected[str(attack)]

    def _mark(
        self, recipe: Compression, others: Sequence[Compression], attack: Choice, roles: Sequence[str], held_out: str
    ) -> float:
        """Return the mean balanced accuracy on the held-out shadow, over all recipes that may have pruned it."""
        shadows = [self._shadow(recipe, role, model) for role, model in self.workshop.models(recipe, roles).items()]
        fitted = attack.make().fit(shadows, derive(self.bench.seed, "attack", str(attack)))
        scores = []
        for other in others:
            target = self._shadow(other, held_out, self.workshop.models(other, [held_out])[held_out])
            positives = [
                fitted.score(target.box, Candidates(side)).members for side in (target.members, target.nonmembers)
            ]
            scores.append((positives[0].double().mean() + (~positives[1]).double().mean()) / 2)
        return float(torch.stack(scores).mean())

    def _fit(self, attacker: Compression, attack: Choice) -> MembershipAttack:
        key = (attacker, str(attack))
        if key not in self._fitted:
            rng = derive(self.bench.seed, "attack", str(attack))
            models = self._attackers_models(attacker, attack)
            if any(role.startswith("in-out") for role in models):
                boxes = [self._black_box(attacker, model) for model in models.values()]
                inside = torch.stack([self._inside(role) for role in models])
                self._fitted[key] = attack.make().fit(InOut(boxes, self.candidates.batch, inside), rng)
            else:
                self._fitted[key] = attack.make().fit(self._shadows_of(attacker, models), rng)
        return self._fitted[key]

    def _attackers_models(self, attacker: Compression, attack: Choice) -> dict[str, Result]:
        """Return in-out models for the attacks that can use them if there are some, else disjoint shadows."""
        needs = attack.method.info["shadows"]
        online = needs == "in-out or disjoint" and self.config.in_out
        roles = [] if needs == "none" else self.workshop.shadows("in-out" if online else "shadow")
        return self.workshop.models(attacker, roles)

    def _shadows_of(self, attacker: Compression, models: dict[str, Result]) -> list[Shadow]:
        if self._shadows[0] != attacker or len(self._shadows[1]) != len(models):
            self._shadows = (attacker, [self._shadow(attacker, role, model) for role, model in models.items()])
        return self._shadows[1]

    def _shadow(self, compression: Compression, role: str, model: Result) -> Shadow:
        part = self.workshop.parts[role]
        return Shadow(self._black_box(compression, model), self.bench.rows(part.train), self.bench.rows(part.test))

    def _inside(self, role: str) -> Tensor:
        """Return a (N,) bool: the rows of the pool that trained an in-out model."""
        pool = torch.cat([self.workshop.parts[VICTIM].train, self.workshop.parts[VICTIM].test])
        return torch.isin(pool, self.workshop.parts[role].train)

    def _model(self, victim: Compression) -> Result:
        return self.workshop.models(victim, [VICTIM])[VICTIM]

    def _box(self, victim: Compression) -> BlackBox:
        if self._victim[0] != victim:
            self._victim = (victim, self._black_box(victim, self._model(victim)))
        assert self._victim[1] is not None
        return self._victim[1]

    def _black_box(self, compression: Compression, model: Result) -> BlackBox:
        net = self.workshop.bench_for(compression).net
        answer = answering(net, state_of(model), self.bench.device)
        return remembering(lambda inputs: answer(inputs).softmax(1))

    def _labels(self, labels: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.config.model, "dataset": self.bench.data.name, "seed": self.bench.seed} | labels
