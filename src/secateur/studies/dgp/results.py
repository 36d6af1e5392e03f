"""Results of a dgp study by attacker and client, and by training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import mean_of
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row
from secateur.studies.dgp.steps import NAMES
from secateur.studies.results import Results

PAIRED = ("lpips", "cw_ssim")
ACCURACY = "test_accuracy"
Picture = tuple[int, int, int]  # seed, target, item
PAPERS_NAMES = {name: paper for paper, name in NAMES.items()}


class AttackKey(NamedTuple):
    """An attacker on the updates of one client."""

    attack: str  # the paper's name
    defense: str
    adaptive: str  # the mode of an attacker that knows the defense, or none
    model: str
    data: str
    batch_size: int
    labels: str
    against: str  # used or raw: the pictures that reconstructions are compared with; empty: they are the same
    stage: str  # the training stage of the attacked model

    @property
    def client(self) -> AttackKey:
        """The attacked client: the fields that all its attackers share."""
        return self._replace(adaptive="none")


class TrainingKey(NamedTuple):
    """A collaborative training, or another measurement that is no attack, such as the cost of an update."""

    defense: str
    model: str
    data: str


@dataclass(frozen=True)
class TrainingResults(Results[TrainingKey]):
    """The rows of one kind (training, cost, ...) without an attack; of trainings those of the last epoch."""

    kind: str = "training"

    def key_of(self, row: Row) -> TrainingKey | None:
        """Return the training of a row about its last epoch; None for other rows."""
        extra = row.extra
        if extra.get("study") != self.kind or row.value is None or extra.get("epoch") != extra.get("epochs"):
            return None
        return TrainingKey(row.defense or "none", row.model, row.dataset)

    def label(self, key: TrainingKey, name: str) -> Any:
        """Return a label of a training; a defense without settings and error feedback."""
        return base(key.defense) if name == "defense" else getattr(key, name)

    def under(self, defense: str) -> TrainingKey | None:
        """Return the training under a defense, which is named with its settings; None if there is none."""
        return next((key for key in self.cells if key.defense == defense), None)


@dataclass(frozen=True)
class DgpResults(Results[AttackKey]):
    """The rows of one study: those of all targets of an attacker by attacker, and those of trainings."""

    def key_of(self, row: Row) -> AttackKey | None:
        """Return the attacker of a row about all its targets; None for other rows."""
        overall = "target" in row.extra and row.extra["target"] is None
        return attack_key(row) if overall and row.attack and row.value is not None else None

    def attack_of(self, row: Row) -> None:
        """Return None: the attack is in the key."""

    def label(self, key: AttackKey, name: str) -> Any:
        """Return a label of an attacker; a defense without settings and error feedback."""
        return base(key.defense) if name == "defense" else getattr(key, name)

    @cached_property
    def clients(self) -> list[AttackKey]:
        """All clients that were attacked plainly."""
        return [key for key in self.cells if key.adaptive == "none"]

    def select(self, **labels: Any) -> Iterator[AttackKey]:
        """Yield the plainly attacked clients with these labels."""
        return super().select(**labels, adaptive="none")

    def trainings(self, kind: str = "training") -> TrainingResults:
        """Return the rows of one kind (training, cost, ...) without an attack."""
        return TrainingResults(self.rows, kind)

    @property
    def left_out(self) -> list[Row]:
        """Rows of measurements that could not be made, with the reason as note."""
        return [row for row in self.rows if row.metric == "left_out"]

    def best_adaptive(self, client: AttackKey) -> AttackKey | None:
        """Return the adaptive attacker with the highest mean PSNR; None if there is no adaptive attacker."""
        attackers = [key for key in self.cells if key.client == client and key.adaptive != "none"]
        psnr = {key: self.mean(key, "psnr") for key in attackers}
        return max(attackers, key=lambda key: -math.inf if (x := psnr[key]) is None else x.value, default=None)

    @cached_property
    def _pictures(self) -> dict[tuple[AttackKey, str], dict[Picture, float]]:
        """Scores of every reconstructed picture, by attacker and metric, for paired comparisons."""
        scores: dict[tuple[AttackKey, str], dict[Picture, float]] = {}
        for row in self.rows:
            if row.metric in PAIRED and row.extra.get("item") is not None and row.value is not None:
                picture = (row.seed, row.extra["target"], row.extra["item"])
                scores.setdefault((attack_key(row), row.metric), {})[picture] = row.value
        return scores

    def less(self, one: AttackKey | None, other: AttackKey | None, metric: str, attack: Any = None) -> Estimate | None:
        """Return the measure of one attacker minus that of another.

        With one seed the attackers are compared target by target, with several seed by seed. A target counts once, by
        the mean over its pictures: pictures of one update are not independent.
        """
        if one is None or other is None:
            return None
        first, second = (self._pictures.get((key, metric), {}) for key in (one, other))
        shared = [key for key in first if key in second and math.isfinite(first[key] - second[key])]
        targets: dict[int, list[float]] = {}
        for key in shared:
            targets.setdefault(key[1], []).append(first[key] - second[key])
        if len(targets) > 1 and len({seed for seed, _, _ in shared}) == 1:
            return mean_of([fmean(gaps) for gaps in targets.values()])
        return super().less(one, other, metric)


def attack_key(row: Row) -> AttackKey:
    """Return the attacker and client of a row."""
    extra, attack = row.extra, row.attack or ""
    name = name_of(attack)
    adaptive = re.search(r":adaptive=([\w-]+)", attack)
    return AttackKey(
        PAPERS_NAMES.get(name, name),
        row.defense or "none",
        adaptive[1] if adaptive else "none",
        row.model,
        row.dataset,
        extra.get("batch_size", 1),
        extra.get("labels", "inferred"),
        extra.get("against") or "",
        extra.get("stage", "untrained"),
    )


def base(defense: str) -> str:
    """Return the name of a defense without its settings and error feedback.

    Example:
        >>> base("dgp:k1=0.05:k2=0.75+error-feedback")
        'dgp'
    """
    return name_of(defense.partition("+")[0])
