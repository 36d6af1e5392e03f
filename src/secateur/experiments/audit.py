"""The main job: train, prune and attack, and say what each way of pruning gives away.

Read `run_audit` first. threat_models.py says who attacks what, pipeline.py makes the models, `Arena` lets
them meet: one seed's models, what is seen of them, and how well each attack does.
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
from secateur.experiments.context import Bench, check_audit
from secateur.experiments.pipeline import VICTIM, Job, Workshop, guarantees, make, model_rows, state_of
from secateur.experiments.predictions import planned
from secateur.experiments.threat_models import Compression, Duel, duels, grid, guess
from secateur.inference import answering
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, MembershipAttack, Shadow
from secateur.metrics.gaps import portrait
from secateur.runs.artifacts import Result
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from secateur.seeding import derive

NO_SHADOWS = "needs shadow models; give a `train:` recipe, so that the attacker's models can be trained"


class Arena:
    """One seed's victims and attackers. An attack is fitted once to each attacker's models."""

    def __init__(self, config: Audit, workshop: Workshop) -> None:
        self.config, self.workshop, self.bench = config, workshop, workshop.bench
        self._fitted: dict[tuple[Compression, str], MembershipAttack] = {}
        self._shadows: tuple[Compression | None, list[Shadow]] = (None, [])  # of the attacker met last
        self._victim: tuple[Compression | None, BlackBox | None] = (None, None)  # the one met last, with its answers
        self._selected: dict[str, Compression] = {}
        self._measured: set[Compression] = set()

    def rest(self) -> None:
        """Let go of the data that attacks saw: several seeds' would fill the memory."""
        self._shadows, self._victim = (None, []), (None, None)
        for name in ("candidates", "members", "nonmembers"):
            vars(self).pop(name, None)

    @cached_property
    def candidates(self) -> Candidates:
        """Members first, then non-members: the order of an in-out pool."""
        part = self.workshop.parts[VICTIM]
        both = self.bench.rows(torch.cat([part.train, part.test]))
        return Candidates(both, ids=torch.arange(both.size) if self.config.in_out else None)

    @cached_property
    def members(self) -> Batch:
        """What the victim was trained on; a view of the candidates, as a second copy would be large."""
        both, size = self.candidates.batch, self.workshop.parts[VICTIM].train.numel()
        return Batch(both.inputs[:size], both.labels[:size])

    @cached_property
    def nonmembers(self) -> Batch:
        """What the victim never saw; a view too."""
        both, size = self.candidates.batch, self.workshop.parts[VICTIM].train.numel()
        return Batch(both.inputs[size:], both.labels[size:])

    @cached_property
    def is_member(self) -> Tensor:
        """The truth, for the evaluator."""
        return torch.arange(self.candidates.batch.size) < self.members.size

    def measure_model(self, victim: Compression) -> None:
        """Utility, cost, gaps and guarantees of one victim, once."""
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

    def measure_attack(self, duel: Duel, attack: Choice) -> None:
        """How well one attack tells the victim's members from examples it never saw."""
        run, labels = self.bench.run, self._labels(duel.labels) | {"attack": str(attack)}
        if attack.method.info["shadows"] != "none" and not self.workshop.shadows():
            run.add([Row(**labels, metric="auc", value=None, note=NO_SHADOWS)])
            return
        attacker = duel.attacker or self.select(attack)
        if duel.attacker is None:
            chosen = {"attacker_pruner": attacker.labels["pruner"], "attacker_sparsity": attacker.sparsity}
            labels["extra"] = labels["extra"] | chosen

        def compute() -> Result:
            guesses = self._fit(attacker, attack).score(self._box(duel.victim), self.candidates)
            return Result(data=judged(guesses, self.is_member, self.bench.seed))

        keys = {role: model.key for role, model in self._attackers_models(attacker, attack).items()}
        depends = {"attack": str(attack), "seed": self.bench.seed, "victim": self._model(duel.victim).key}
        done = run.stage("attack", depends | {"models": keys}, compute).data
        run.add(attack_rows(labels, done))
        run.show([flat(labels) | done["figure"]])

    def select(self, attack: Choice) -> Compression:
        """The recipe by which the adversary's attack does best on a shadow it held out, pruned in every way."""
        if str(attack) not in self._selected:
            *own, held = self.workshop.shadows()
            recipes = list(dict.fromkeys(guess(self.config, model) for model in grid(self.config)))
            marks = [self._mark(recipe, recipes, attack, own, held) for recipe in recipes]
            self._selected[str(attack)] = recipes[int(torch.tensor(marks).argmax())]
        return self._selected[str(attack)]

    def _mark(
        self, recipe: Compression, others: Sequence[Compression], attack: Choice, own: Sequence[str], held: str
    ) -> float:
        """The mean balanced accuracy on the held-out shadow, over all that may have been done to it."""
        shadows = [self._shadow(recipe, role, model) for role, model in self.workshop.models(recipe, own).items()]
        fitted = attack.make().fit(shadows, derive(self.bench.seed, "attack", str(attack)))
        marks = []
        for other in others:
            target = self._shadow(other, held, self.workshop.models(other, [held])[held])
            members = [
                fitted.score(target.box, Candidates(side)).members for side in (target.members, target.nonmembers)
            ]
            marks.append((members[0].double().mean() + (~members[1]).double().mean()) / 2)
        return float(torch.stack(marks).mean())

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
        """In-out models for the attacks that can use them where there are some, else disjoint shadows."""
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
        """(N,) bool: which rows of the pool trained an in-out model."""
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


def run_audit(config: Audit, out: Path) -> list[Row]:
    """Audit every pruner, sparsity and defense of the configuration, for every seed, into the folder `out`."""
    from secateur.report.page import write_page

    config = _attacked(config)
    check_audit(config)
    data, device = prepare(config)
    with open_run(out, "audit", dump(config), device=str(device), seeds=config.seeds) as run:
        benches = [Bench(run, config, data, device, seed) for seed in config.seeds]
        arenas = [Arena(config, Workshop(bench, parts_of(config, data, bench.seed))) for bench in benches]
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


def make_together(arenas: Sequence[Arena], duels: Sequence[Duel]) -> None:
    """Make all seeds' models of one duel at once; the run's folder keeps them for when they are asked for."""
    jobs: dict[Compression, list[Job]] = {}
    for arena, duel in zip(arenas, duels, strict=True):
        others = [role for role in arena.workshop.parts if role != VICTIM]
        for compression, roles in ((duel.victim, [VICTIM]), (duel.attacker, others)):
            if compression is not None:
                jobs.setdefault(compression, []).extend(arena.workshop.jobs(compression, roles))
    for compression, some in jobs.items():
        make(some, compression)


def plan(config: Audit) -> list[str]:
    """What an audit would do, a line each; what it would refuse before it begins is refused here too."""
    if config.predictions is not None:
        return planned(config, config.predictions)
    config = _attacked(config)
    names = ", ".join(map(str, config.attack))
    check_audit(config)
    data, _ = prepare(config)
    seed = config.seeds[0]
    parts_of(config, data, seed)
    every = list(duels(config, seed))
    victims = list(dict.fromkeys(duel.victim for duel in every))
    shadows = config.shadows if config.trains_shadows else 0
    others = f"{shadows} shadow models" + (f" and {config.in_out} in-out models" if config.in_out else "")
    lines = [f"{config.model} on {config.data}, seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    made = "train" if config.weights is None else "take the given weights as"
    lines += [f"  {made} {victim.title}, with {others}" for victim in victims if victim.pruner is None]
    lines += [f"  prune and fine-tune {victim.title}" for victim in victims if victim.pruner is not None]
    return [*lines, f"  attack in {len(every)} duels ({config.protocol}), each with {names}"]


def _attacked(config: Audit) -> Audit:
    """A model given without a recipe is attacked by what needs no shadow models, where nothing else was asked for."""
    return config if config.trains_shadows else config.unaided("correctness", "blindmi")


def parts_of(config: Audit, data: Dataset, seed: int) -> dict[str, Part]:
    """The rows that each model is and is not trained on, by role."""
    rng, rows = derive(seed, "split"), len(data.inputs)
    if config.weights is None:
        split = victim_shadow(rows, config.shadows, rng)
    else:  # its members are known; without a recipe there is nothing to train shadows by
        split = trained_split(rows, data.train_size, config.shadows if config.trains_shadows else 0, rng)
    parts = {VICTIM: split.victim} | {f"shadow-{i}": part for i, part in enumerate(split.shadows)}
    pool = torch.cat([split.victim.train, split.victim.test])
    if config.in_out:
        for i, inside in enumerate(in_out(pool.numel(), config.in_out, derive(seed, "in-out"))):
            parts[f"in-out-{i}"] = Part(pool[inside], split.victim.validation, pool[~inside])
    return parts
