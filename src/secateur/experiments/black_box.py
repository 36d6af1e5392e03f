"""Audit of models that can only be asked: as they were brought, or before and after a compression made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.catalogue import Choice
from secateur.evaluation.validity import member_accuracy, validity_rows
from secateur.experiments.exposure import MembershipExposure, fit_attack
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.metrics.epsilon import LEVEL
from secateur.metrics.estimates import paired_drop
from secateur.metrics.membership import auc_change
from secateur.models.sparsity import layer_sparsity, overall_sparsity
from secateur.runs.artifacts import Result
from secateur.runs.folder import MemoryRun, Run
from secateur.runs.rows import Row
from secateur.seeding import derive


@dataclass(frozen=True, eq=False)
class BoxAudit:
    """The audit of one model or of two, on one set of members and non-members, into a run."""

    run: Run | MemoryRun
    seed: int
    members: Batch
    nonmembers: Batch
    attacks: Sequence[Choice]
    shadows: Sequence[Shadow] = ()
    ids: Tensor | None = None  # (N,) names of the candidates: the members, then the non-members
    data_key: str = ""

    def measure(
        self, box: BlackBox, labels: dict[str, Any], title: str, key: str = "", trained: bool = True
    ) -> MembershipExposure:
        """Measure the model itself and every attack on it; return what the attacks found.

        Args:
            box: the model.
            labels: the labels of its rows.
            title: its name in tables of records.
            key: the hash of the model's file, which keys the stages.
            trained: True if the model is as the user trained it, so that it must know its members.
        """
        both = Batch(*(torch.cat(parts) for parts in zip(self.members, self.nonmembers, strict=True)))
        level = LEVEL / max(1, len(self.attacks))
        sides = (self.members, self.nonmembers, Candidates(both))
        exposure = MembershipExposure(self.run, self.seed, *sides, lambda: box, title, self.ids, level)
        exposure.measure_accuracy(labels)
        if not box.labels_only:
            answers = box.predict(self.members.inputs)
            classes, hits = answers.shape[1], answers.argmax(1) == self.members.labels
            exposure.check_validity(labels, classes, self.data_key)
            if trained:
                accuracy = float(hits.double().mean())
                self.run.add(validity_rows(labels, [member_accuracy(accuracy, classes)]))
            exposure.measure_gaps(labels, classes, key)
        for attack in self.attacks:
            fit = partial(fit_attack, attack, self.shadows, self.seed)
            exposure.measure_attack(labels | {"attack": str(attack)}, fit, model=key, data=self.data_key)
        return exposure

    def compare(
        self, before: MembershipExposure, after: MembershipExposure, labels: dict[str, Any], **depends: Any
    ) -> None:
        """Measure how accuracy and every attack's AUC changed, paired over the same rows; `labels` are those after."""

        def lose() -> Result:
            hits = [
                side.box.predict(self.nonmembers.inputs).argmax(1) == self.nonmembers.labels for side in (before, after)
            ]
            return Result(data=paired_drop(*hits)._asdict())

        done = self.run.stage("accuracy_drop", depends | {"data": self.data_key, "seed": self.seed}, lose).data
        self.run.add([Row(**labels, metric="accuracy_drop", **done)])
        for attack in (name for name in after.record.scores if name in before.record.scores):
            scores = before.record.scores[attack], after.record.scores[attack]
            change = auc_change(*scores, after.is_member, derive(self.seed, "change"))
            self.run.add([Row(**labels, attack=attack, metric="auc_change", **change._asdict())])


def needs_no_shadows(attack: Choice) -> bool:
    """Return True if an attack's ranking is the same with and without shadow models."""
    return attack.method.info["shadows"] in ("none", "for a threshold")


def sparsity_rows(labels: dict[str, Any], net: nn.Module | None, before: nn.Module | None = None) -> list[Row]:
    """Return the share of weights that are gone from each layer, of a network that was pruned elsewhere."""
    if net is None or not overall_sparsity(net, before):
        return []
    shares = layer_sparsity(net, before).items()
    return [
        Row(**(labels | {"extra": labels["extra"] | {"layer": name}}), metric="layer_sparsity", value=share)
        for name, share in shares
    ]
