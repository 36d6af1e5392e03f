"""What a study of dgp measured, asked by attacker and client, and by training."""

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


class Cell(NamedTuple):
    """One attacker on the updates of one client."""

    attack: str  # as the paper calls it
    defense: str
    adaptive: str  # how the attacker makes use of knowing the defense; none
    model: str
    data: str
    batch_size: int
    labels: str
    against: str  # used or raw: what a reconstruction is compared with, where they differ
    stage: str  # how far the attacked model was trained

    @property
    def place(self) -> Cell:
        """The client: what all its attackers share."""
        return self._replace(adaptive="none")


class Course(NamedTuple):
    """One collaborative training, or one measurement of what an update costs."""

    defense: str
    model: str
    data: str


@dataclass(frozen=True)
class Seen:
    """The rows of one study."""

    rows: Sequence[Row]

    @cached_property
    def cells(self) -> dict[Cell, dict[str, Measure]]:
        """Every measure of every attacker over all its targets, by seed, in the order in which they were measured."""
        found: dict[Cell, dict[str, Measure]] = {}
        for row in self.rows:
            if "target" in row.extra and row.extra["target"] is None and row.attack and row.value is not None:
                found.setdefault(cell_of(row), {}).setdefault(row.metric, {})[row.seed] = estimate(row)
        return found

    @cached_property
    def places(self) -> list[Cell]:
        """Every client that was attacked plainly."""
        return [cell for cell in self.cells if cell.adaptive == "none"]

    @cached_property
    def courses(self) -> dict[str, dict[Course, dict[str, Measure]]]:
        """What is no attack's, by kind of measurement (training, cost, ...); of a training its last epoch."""
        found: dict[str, dict[Course, dict[str, Measure]]] = {}
        for row in self.rows:
            if "study" in row.extra and row.value is not None and row.extra.get("epoch") == row.extra.get("epochs"):
                course = Course(row.defense or "none", row.model, row.dataset)
                kind = found.setdefault(row.extra["study"], {})
                kind.setdefault(course, {}).setdefault(row.metric, {})[row.seed] = estimate(row)
        return found

    @cached_property
    def left_out(self) -> list[Row]:
        """What could not be measured, with the reason."""
        return [row for row in self.rows if row.metric == "left_out"]

    def of(self, cell: Cell, metric: str) -> Measure:
        """One measure of one attacker."""
        return self.cells.get(cell, {}).get(metric, {})

    def accuracy(self, course: Course) -> Measure:
        """The accuracy at the end of a training."""
        return self.courses.get("training", {}).get(course, {}).get("test_accuracy", {})

    def knowing(self, place: Cell) -> Cell | None:
        """Of the attackers who make use of knowing the defense, the one that comes nearest to the pictures."""
        own = [cell for cell in self.cells if cell.place == place and cell.adaptive != "none"]
        return max(own, key=lambda cell: _value(mean(self.of(cell, "psnr"))), default=None)

    @cached_property
    def pictures(self) -> dict[tuple[Cell, str], dict[Picture, float]]:
        """What every picture of an attacker scored, for comparisons picture by picture."""
        found: dict[tuple[Cell, str], dict[Picture, float]] = {}
        for row in self.rows:
            if row.metric in PAIRED and row.extra.get("item") is not None and row.value is not None:
                picture = (row.seed, row.extra["target"], row.extra["item"])
                found.setdefault((cell_of(row), row.metric), {})[picture] = row.value
        return found

    def less(self, one: Cell | None, other: Cell | None, metric: str) -> Estimate | None:
        """One attacker's measure less another's: of one seed target by target, of several seed by seed.

        A target counts once, by the mean over its pictures: those of one update are not independent.
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

    def select(self, **wanted: object) -> Iterator[Cell]:
        """The plainly attacked clients of which all this is true; a defense is asked for by its first name."""
        for cell in self.places:
            if all(
                wanted[name] == (base(cell.defense) if name == "defense" else getattr(cell, name)) for name in wanted
            ):
                yield cell


def cell_of(row: Row) -> Cell:
    """Whose row it is."""
    extra, attack = row.extra, row.attack or ""
    name = name_of(attack)
    told = re.search(r":adaptive=([\w-]+)", attack)
    return Cell(
        PAPERS_NAMES.get(name, name),
        row.defense or "none",
        told[1] if told else "none",
        row.model,
        row.dataset,
        extra.get("batch_size", 1),
        extra.get("labels", "inferred"),
        extra.get("against") or "",
        extra.get("stage", "untrained"),
    )


def base(defense: str) -> str:
    """The first name of a defense that is written with its settings and its error feedback.

    Example:
        >>> base("dgp:k1=0.05:k2=0.75+error-feedback")
        'dgp'
    """
    return name_of(defense.partition("+")[0])


def _value(found: Estimate | None) -> float:
    return -math.inf if found is None else found.value
