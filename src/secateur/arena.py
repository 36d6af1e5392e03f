"""Where victims meet attackers: one seed's models, what is seen of them, and how well each attack does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.config import Audit
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, MembershipAttack, Shadow
from secateur.judging import attack_rows, flat, judged, remembering
from secateur.metrics.portrait import portrait
from secateur.pipeline import guarantees, model_rows, state_of
from secateur.prediction import answering
from secateur.protocols import Compression, Duel, grid, guess
from secateur.runs import Result, Row
from secateur.workshop import VICTIM, Workshop

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
