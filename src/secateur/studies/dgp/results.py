"""Results of a dgp study by attacker and client, and by training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from statistics import fmean
from typing import NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import Measure, combine, mean, mean_of
from secateur.metrics.membership import Estimate
from secateur.report.summary import estimate
from secateur.runs.rows import Row
from secateur.studies.dgp.attack_step import NAMES

PAIRED = ("lpips", "cw_ssim")
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
    def place(self) -> AttackKey:
        """The attacked client: the fields that all its attackers share."""
        return self._replace(adaptive="none")


class TrainingKey(NamedTuple):
    """A collaborative training, or another measurement that is no attack, such as the cost of an update."""

    defense: str
    model: str
    data: str


@dataclass(frozen=True)
class DgpResults:
    """The rows of one study."""

    rows: Sequence[Row]

    @cached_property
    def cells(self) -> dict[AttackKey, dict[str, Measure]]:
        """Measures of each attacker over all its targets, by seed, in the order of measurement."""
        cells: dict[AttackKey, dict[str, Measure]] = {}
        for row in self.rows:
            if "target" in row.extra and row.extra["target"] is None and row.attack and row.value is not None:
                cells.setdefault(cell_of(row), {}).setdefault(row.metric, {})[row.seed] = estimate(row)
        return cells

    @cached_property
    def places(self) -> list[AttackKey]:
        """All clients that were attacked plainly."""
        return [cell for cell in self.cells if cell.adaptive == "none"]

    @cached_property
    def courses(self) -> dict[str, dict[TrainingKey, dict[str, Measure]]]:
        """Measures without an attack, by kind (training, cost, ...); of a training those of the last epoch."""
        courses: dict[str, dict[TrainingKey, dict[str, Measure]]] = {}
        for row in self.rows:
            if "study" in row.extra and row.value is not None and row.extra.get("epoch") == row.extra.get("epochs"):
                course = TrainingKey(row.defense or "none", row.model, row.dataset)
                of_kind = courses.setdefault(row.extra["study"], {})
                of_kind.setdefault(course, {}).setdefault(row.metric, {})[row.seed] = estimate(row)
        return courses

    @cached_property
    def left_out(self) -> list[Row]:
        """Rows of measurements that could not be made, with the reason."""
        return [row for row in self.rows if row.metric == "left_out"]

    def of(self, cell: AttackKey, metric: str) -> Measure:
        """Return one measure of one attacker, by seed."""
        return self.cells.get(cell, {}).get(metric, {})

    def accuracy(self, course: TrainingKey) -> Measure:
        """Return the accuracy at the end of a training, by seed."""
        return self.courses.get("training", {}).get(course, {}).get("test_accuracy", {})

    def knowing(self, place: AttackKey) -> AttackKey | None:
        """Return the adaptive attacker with the highest mean PSNR; None if there is no adaptive attacker."""
        adaptive_cells = [cell for cell in self.cells if cell.place == place and cell.adaptive != "none"]
        return max(adaptive_cells, key=lambda cell: _value(mean(self.of(cell, "psnr"))), default=None)

    @cached_property
    def pictures(self) -> dict[tuple[AttackKey, str], dict[Picture, float]]:
        """Scores of every reconstructed picture, by attacker and metric, for paired comparisons."""
        scores: dict[tuple[AttackKey, str], dict[Picture, float]] = {}
        for row in self.rows:
            if row.metric in PAIRED and row.extra.get("item") is not None and row.value is not None:
                picture = (row.seed, row.extra["target"], row.extra["item"])
                scores.setdefault((cell_of(row), row.metric), {})[picture] = row.value
        return scores

    def less(self, one: AttackKey | None, other: AttackKey | None, metric: str) -> Estimate | None:
        """Return the measure of one attacker minus that of another.

        With one seed the attackers are compared target by target, with several seed by seed. A target counts once, by
        the mean over its pictures: pictures of one update are not independent.
        """
        if one is None or other is None:
            return None
        first, second = (self.pictures.get((cell, metric), {}) for cell in (one, other))
        shared = [key for key in first if key in second and math.isfinite(first[key] - second[key])]
        targets: dict[int, list[float]] = {}
        for key in shared:
            targets.setdefault(key[1], []).append(first[key] - second[key])
        if len(targets) > 1 and len({seed for seed, _, _ in shared}) == 1:
            return mean_of([fmean(gaps) for gaps in targets.values()])
        return combine(sub, self.of(one, metric), self.of(other, metric))

    def select(self, **wanted: object) -> Iterator[AttackKey]:
        """Yield the plainly attacked clients with these fields; `defense` is the bare name without settings."""
        for cell in self.places:
            if all(
                wanted[name] == (base(cell.defense) if name == "defense" else getattr(cell, name)) for name in wanted
            ):
                yield cell


def cell_of(row: Row) -> AttackKey:
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


def _value(average: Estimate | None) -> float:
    return -math.inf if average is None else average.value
