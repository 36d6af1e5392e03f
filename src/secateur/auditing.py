"""The main job: train, prune and attack, and say what each way of pruning gives away.

Read `run_audit` first. protocols.py says who attacks what, workshop.py makes the models, metrics/ the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.bench import Bench, prepare
from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.config import Audit, dump
from secateur.data.dataset import Dataset
from secateur.data.splits import Part, in_out, trained_split, victim_shadow
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, MembershipAttack, Predict, Shadow
from secateur.metrics.figures import roc_figure
from secateur.metrics.membership import evaluate, roc
from secateur.metrics.portrait import portrait
from secateur.pipeline import Job, guarantees, model_rows, state_of
from secateur.prediction import answering
from secateur.protocols import Compression, Duel, duels, grid, guess
from secateur.runs import Result, Row, open_run
from secateur.workshop import VICTIM, Workshop, make

NO_SHADOWS = "needs shadow models; give a `train:` recipe, so that the attacker's models can be trained"


def run_audit(config: Audit, out: Path) -> list[Row]:
    """Audit every pruner, sparsity and defense of the configuration, for every seed, into the folder `out`."""
    from secateur.report.page import write_page

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
    """What an audit would do, a line each."""
    seed = config.seeds[0]
    every = list(duels(config, seed))
    victims = list(dict.fromkeys(duel.victim for duel in every))
    shadows = 0 if config.weights is not None and "train" not in config.model_fields_set else config.shadows
    others = f"{shadows} shadow models" + (f" and {config.in_out} in-out models" if config.in_out else "")
    lines = [f"{config.model} on {config.data}, seeds {', '.join(map(str, config.seeds))}; for each seed:"]
    lines += [f"  train {victim.title}, with {others}" for victim in victims if victim.pruner is None]
    lines += [f"  prune and fine-tune {victim.title}" for victim in victims if victim.pruner is not None]
    names = ", ".join(map(str, config.attack))
    return [*lines, f"  attack in {len(every)} duels ({config.protocol}), each with {names}"]


def parts_of(config: Audit, data: Dataset, seed: int) -> dict[str, Part]:
    """The rows that each model is and is not trained on, by role."""
    rng, rows = derive(seed, "split"), len(data.inputs)
    if config.weights is None:
        split = victim_shadow(rows, config.shadows, rng)
    else:  # its members are known; without a recipe there is nothing to train shadows by
        shadows = config.shadows if "train" in config.model_fields_set else 0
        split = trained_split(rows, data.train_size, shadows, rng)
    parts = {VICTIM: split.victim} | {f"shadow-{i}": part for i, part in enumerate(split.shadows)}
    pool = torch.cat([split.victim.train, split.victim.test])
    if config.in_out:
        for i, inside in enumerate(in_out(pool.numel(), config.in_out, derive(seed, "in-out"))):
            parts[f"in-out-{i}"] = Part(pool[inside], split.victim.validation, pool[~inside])
    return parts


class Arena:
    """One seed's victims and attackers. An attack is fitted once to each attacker's models."""

    def __init__(self, config: Audit, workshop: Workshop) -> None:
        self.config, self.workshop, self.bench = config, workshop, workshop.bench
        self._fitted: dict[tuple[Compression, str], MembershipAttack] = {}
        self._shadows: tuple[Compression | None, list[Shadow]] = (None, [])  # of the attacker met last
        self._selected: dict[str, Compression] = {}
        self._measured: set[Compression] = set()

    def rest(self) -> None:
        """Let go of the data that attacks were fitted on: several seeds' would fill the memory."""
        self._shadows = (None, [])

    @cached_property
    def members(self) -> Batch:
        """What the victim was trained on."""
        return self.bench.rows(self.workshop.parts[VICTIM].train)

    @cached_property
    def nonmembers(self) -> Batch:
        """What the victim never saw."""
        return self.bench.rows(self.workshop.parts[VICTIM].test)

    @cached_property
    def candidates(self) -> Candidates:
        """Members first, then non-members: the order of an in-out pool."""
        both = Batch(*(torch.cat(pair) for pair in zip(self.members, self.nonmembers, strict=True)))
        return Candidates(both, ids=torch.arange(both.size) if self.config.in_out else None)

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
            labels["extra"] = (
                labels["extra"]
                | attacker.labels["extra"]
                | {
                    "attacker_pruner": attacker.labels["pruner"],
                    "attacker_sparsity": attacker.sparsity,
                }
            )

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
        return self._black_box(victim, self._model(victim))

    def _black_box(self, compression: Compression, model: Result) -> BlackBox:
        net = self.workshop.bench_for(compression).net
        answer = answering(net, state_of(model), self.bench.device)
        return remembering(lambda inputs: answer(inputs).softmax(1))

    def _labels(self, labels: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.config.model, "dataset": self.bench.data.name, "seed": self.bench.seed} | labels


def judged(guesses: Guesses, is_member: Tensor, seed: int) -> dict[str, Any]:
    """An attack's guesses against the truth, as plain values: measures with intervals, the ROC curve, the note."""
    found = evaluate(guesses, is_member, derive(seed, "bootstrap"))
    estimates = {name: estimate._asdict() for name, estimate in found.items()}
    figure = roc_figure(roc(guesses.scores.cpu().double(), is_member))
    return {"estimates": estimates, "figure": figure, "note": guesses.note}


def attack_rows(labels: dict[str, Any], found: dict[str, Any]) -> list[Row]:
    """What `judged` found, as rows."""
    rows = []
    for name, estimate in found["estimates"].items():
        note = "; ".join(filter(None, (estimate["note"], found["note"]))) or None
        rows.append(Row(**labels, metric=name, **(estimate | {"note": note})))
    return rows


def remembering(predict: Predict) -> BlackBox:
    """A model as an attacker meets it; the same question is answered from memory."""
    answers = WeakTensorKeyDictionary()

    def answer(inputs: Tensor) -> Tensor:
        if inputs not in answers:
            answers[inputs] = predict(inputs)
        answered: Tensor = answers[inputs]
        return answered

    return BlackBox(answer)


def flat(labels: dict[str, Any]) -> dict[str, Any]:
    """Labels as a figure has them: extras beside the others."""
    extra: dict[str, Any] = labels["extra"]
    return {name: value for name, value in labels.items() if name != "extra"} | extra
