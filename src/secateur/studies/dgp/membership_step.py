"""Membership inference on models trained under defenses of updates, a question that dgp leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import sub
from typing import Any

import torch
from torch import Tensor

from secateur.catalogue import Choice
from secateur.config import choice
from secateur.data.dataset import Dataset, fingerprint
from secateur.data.partition import Part, in_out, victim_shadow
from secateur.errors import WrongInput
from secateur.evaluation.membership import attack_rows, cache_answers, evaluate_guesses, flat_labels
from secateur.federated.collaborative.training import CollaborativeResult
from secateur.inference import answering
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, Shadow
from secateur.metrics.estimates import combine, mean
from secateur.metrics.membership import Estimate, share
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.claims import Finding, judge
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.scale import CIFAR10, DgpSetting
from secateur.studies.dgp.training_step import parted, structure, train
from secateur.studies.results import AuditResults, VictimKey
from secateur.studies.table import Cells, TableLine

SHADOWED, IN_OUT = ("conf", "mentr"), ("lira", "rmia")
VICTIM, SHADOW = "victim", "shadow"
GUESSING = 0.5  # the AUC of random guessing


@dataclass(frozen=True)
class Members:
    """A step that attacks membership in collaborative training under every defense.

    The attacker's models are trained under the same defense.
    """

    defenses: tuple[str, ...]
    model: str = "resnet18"
    data: str = CIFAR10

    def __call__(self, setting: DgpSetting) -> None:
        """Train a victim and the attacker's models, and attack the victim's predictions.

        The shadow model has disjoint data; models of LiRA and RMIA have random subsets of the victim's data.
        """
        model, data = setting.model(self), setting.data(self)
        if model is None:
            return
        split = victim_shadow(len(data.inputs), 1, derive(setting.seed, "membership"))
        for defense in self.defenses:
            meeting = MembershipMatch(setting, model, data, defense, split.victim, split.shadows[0])
            try:
                meeting.measure()
            except WrongInput as error:
                setting.leave_out(setting.labels(model, data, defense, "left out"), f"not attacked: {error.message}")


@dataclass(frozen=True, eq=False)
class MembershipMatch:
    """The victim and the attackers under one defense."""

    setting: DgpSetting
    model: str
    data: Dataset
    defense: str
    own: Part
    others: Part

    def measure(self) -> None:
        """Measure the victim's accuracy on members and non-members, and run every attack."""
        setting, members, outside = self.setting, self._rows(self.own.train), self._rows(self.own.test)
        victim = self._train(self.own.train, self.own.test, VICTIM)
        box, labels = self._box(victim), self._labels()
        for name, side in (("train_accuracy", members), ("test_accuracy", outside)):
            right = share(box.predict(side.inputs).argmax(1) == side.labels)
            setting.run.add([Row(**labels, attack=None, metric=name, **right._asdict())])
        shadow = self._train(self.others.train, self.others.test, SHADOW)
        disjoint = [Shadow(self._box(shadow), self._rows(self.others.train), self._rows(self.others.test))]
        for name in SHADOWED:
            self._attack(name, victim, box, disjoint, [shadow])
        if setting.scale.in_out:
            pool = torch.cat([self.own.train, self.own.test])
            design = in_out(len(pool), setting.scale.in_out, derive(setting.seed, "in-out"))
            models = [self._train(pool[row], pool[~row], f"in-out-{i}") for i, row in enumerate(design)]
            known = InOut([self._box(model) for model in models], self._rows(pool), design)
            for name in IN_OUT:
                self._attack(name, victim, box, known, models)

    def _attack(
        self,
        name: str,
        victim: CollaborativeResult,
        box: BlackBox,
        known: Sequence[Shadow] | InOut,
        models: Sequence[CollaborativeResult],
    ) -> None:
        """Run one attack as a stage of the run, and add its rows."""
        attack: Choice = choice("attack", name)
        labels = self._labels() | {"attack": str(attack)}
        both = self._rows(torch.cat([self.own.train, self.own.test]))
        is_member = torch.arange(both.size) < len(self.own.train)

        def compute() -> Result:
            fitted = attack.make().fit(known, derive(self.setting.seed, "attack", str(attack)))
            ids = torch.arange(both.size) if isinstance(known, InOut) else None
            return Result(data=evaluate_guesses(fitted.score(box, Candidates(both, ids)), is_member, self.setting.seed))

        keys = [fingerprint(*trained.state.values()) for trained in (victim, *models)]
        scores = self.setting.run.stage("membership", {"attack": str(attack), "models": keys}, compute).data
        self.setting.run.add(attack_rows(labels, scores))
        self.setting.run.show([flat_labels(labels) | scores["figure"]])

    def _train(self, members: Tensor, outside: Tensor, role: str) -> CollaborativeResult:
        return train(self.setting, self.model, parted(self.data, members, outside), self.defense, role)

    def _box(self, trained: CollaborativeResult) -> BlackBox:
        net = structure(self.setting, self.model, self.data, self.defense)
        answer = answering(net, trained.state, self.setting.device)
        return cache_answers(lambda inputs: answer(inputs).softmax(1))

    def _rows(self, rows: Tensor) -> Batch:
        return self.data.batch.take(rows).to(self.setting.device)

    def _labels(self) -> dict[str, Any]:
        labels = {"model": self.model, "dataset": self.data.name, "pruner": "none", "sparsity": 0.0}
        return labels | {"defense": self.defense, "adaptive": True, "seed": self.setting.seed, "extra": {}}


def membership(results: DgpResults) -> tuple[list[TableLine], list[Finding]]:
    """Return one line per defense and attack, and per defense the verdict that it hides members."""
    audit = AuditResults([row for row in results.rows if not row.extra])
    lines, findings = [], []
    bare = VictimKey("none", 0.0, "none", None)
    for model in audit.models:
        for attack in audit.attacks:
            names = ("auc", "attack_accuracy", "tpr_at_fpr_0.01")
            cells: Cells = {name: mean(audit.of(model, name, attack)) for name in names}
            cells |= {name: mean(audit.of(model, name)) for name in ("test_accuracy", "train_accuracy")}
            lines.append(TableLine({"defense": model.defense, "attack": attack}, cells))
        if model != bare:
            findings.append(_hides(audit, bare, model))
    return lines, findings


def _hides(audit: AuditResults, bare: VictimKey, model: VictimKey) -> Finding:
    """Judge that a defense lowers the AUC of every attack that beats guessing on the undefended model.

    The undefended model alone selects the attacks, so that no defense selects its own test.
    """
    plain = {attack: audit.of(bare, "auc", attack) for attack in audit.attacks}
    blind = [name for name, auc in plain.items() if (known := mean(auc)) is not None and known.low <= GUESSING]
    cases: dict[str, Estimate | None] = {
        attack: combine(sub, auc, audit.of(model, "auc", attack))
        for attack, auc in plain.items()
        if attack not in blind
    }
    claim = f"{model.defense} hides members too: a lower AUC than without a defense (not in the paper)"
    finding = judge(claim, cases, "every", unit="")
    if not blind:
        return finding
    left_out = f"left out, not clearly above {GUESSING:g} without a defense: {', '.join(blind)}"
    return replace(finding, measured=f"{finding.measured}; {left_out}" if cases else left_out)
