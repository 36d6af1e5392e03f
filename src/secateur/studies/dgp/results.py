"""Results of dgp's studies by attacker and by training.

Each client has the paper's plain attacker, and others: who knows of the defense, or searches better (`ig-smooth`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from secateur.attacks.inversion.adaptive import PLAIN
from secateur.catalogue import name_of
from secateur.evaluation.attack_strength import SMOOTH, read_mode
from secateur.metrics.estimates import Measure, mean_of, pick_highest
from secateur.metrics.membership import Estimate
from secateur.report.summary import group_by
from secateur.runs.rows import Row
from secateur.studies.dgp.steps import NAMES, weak_modes
from secateur.studies.results import Results
from secateur.studies.table import Cases, Finding, negate

MEASURES = {"lpips": "LPIPS", "cw_ssim": "CW-SSIM"}  # of hiding, from the same pictures
PAIRED = tuple(MEASURES)
Picture = tuple[int, int, int]  # seed, target, item
PAPERS_NAMES = {name: paper for paper, name in NAMES.items()} | {SMOOTH: "ig"}  # it takes the place of IG


class AttackKey(NamedTuple):
    """An attacker on the updates of one client."""

    attack: str  # the paper's name
    defense: str
    adaptive: str  # how the attacker differs from the paper's: a mode, ig-smooth, both (ig-smooth, support), or none
    model: str
    data: str
    batch_size: int
    labels: str
    against: str  # used or raw: the pictures that reconstructions are compared with; empty: they are the same
    stage: str  # the training stage of the attacked model

    @property
    def client(self) -> AttackKey:
        """The attacked client: the fields that all its attackers share."""
        return self._replace(adaptive=PLAIN)

    @property
    def smooth(self) -> bool:
        """True if ig-smooth takes the place of the paper's IG."""
        return self.adaptive.startswith(SMOOTH)

    @property
    def smoothed(self) -> AttackKey:
        """The same attacker with ig-smooth in the place of IG."""
        return self._replace(adaptive=SMOOTH if self.adaptive == PLAIN else f"{SMOOTH}, {self.adaptive}")

    @property
    def informed(self) -> bool:
        """True if the attacker knows of the defense."""
        return self.adaptive not in (PLAIN, SMOOTH)


class TrainingKey(NamedTuple):
    """A collaborative training, or another measurement that is no attack, such as the cost of an update."""

    defense: str
    model: str
    data: str

    @property
    def text(self) -> str:
        """The defense with its settings and error feedback."""
        return self.defense


@dataclass(frozen=True)
class TrainingResults(Results[TrainingKey]):
    """The rows of one kind (training, cost, ...) without an attack; of trainings those of the last epoch."""

    paper: ClassVar[str] = "dgp"
    kind: str = "training"

    def key_of(self, row: Row) -> TrainingKey | None:
        """Return the training of a row about its last epoch; None for other rows."""
        extra = row.extra
        if extra.get("study") != self.kind or row.value is None or extra.get("epoch") != extra.get("epochs"):
            return None
        return TrainingKey(row.defense or "none", row.model, row.dataset)

    def name_defense(self, defense: str) -> str:
        """Return a defense without settings and error feedback."""
        return base(defense)

    def title(self, key: TrainingKey) -> str:
        """Return the network of a training, and its data if the study has several."""
        return f"{key.model}, {key.data}" if len({other.data for other in self.keys}) > 1 else key.model


@dataclass(frozen=True)
class DgpResults(Results[AttackKey]):
    """The rows of one study: those of all targets of an attacker by attacker, and those of trainings."""

    paper: ClassVar[str] = "dgp"
    informed: bool = False  # True: comparisons are of the strongest attackers

    def under_strongest(self) -> DgpResults | None:
        """Return the same results, every client under its strongest attacker; None if all are the paper's plain one."""
        return replace(self, informed=True) if any(key.adaptive != PLAIN for key in self.cells) else None

    def key_of(self, row: Row) -> AttackKey | None:
        """Return the attacker of a row about all its targets; None for other rows."""
        overall = "target" in row.extra and row.extra["target"] is None
        return attack_key(row) if overall and row.attack and row.value is not None else None

    def attack_of(self, row: Row) -> None:
        """Return None: the attack is in the key."""

    def name_defense(self, defense: str) -> str:
        """Return a defense without settings and error feedback."""
        return base(defense)

    def title(self, key: AttackKey) -> str:
        """Return the attack on a client, with the labels in which the clients of the study differ."""
        settings = [key.defense] if ":" in key.defense else []
        return ", ".join([key.attack, *self.list_varied(key).values(), *settings])

    def list_varied(self, key: AttackKey) -> dict[str, str]:
        """Return the labels in which the clients of the study differ, beside attack and defense."""
        names = ("model", "data", "batch_size", "labels", "stage")
        return {name: str(getattr(key, name)) for name in names if len({getattr(x, name) for x in self.clients}) > 1}

    def contrast(self, one: AttackKey | None, other: AttackKey | None, metric: str = "hidden", case: str = "") -> Cases:
        """Return how much less is seen of one client than of another, as one case.

        LPIPS and CW-SSIM judge the same pictures, so they are no two cases. The lower difference counts: a claim holds
        where it holds by both measures, and fails where it fails by one.
        """
        known = [difference for difference in self.differences(one, other) if difference is not None]
        if not known:
            return {case: None}
        value, low, high = (min(ends) for ends in zip(*((x.value, x.low, x.high) for x in known), strict=True))
        return {case: Estimate(value, low, high)}

    def differences(self, one: AttackKey | None, other: AttackKey | None) -> list[Estimate | None]:
        """Return how much less is seen of one client than of another: how far LPIPS is higher, and CW-SSIM lower."""
        return [self.less(one, other, "lpips"), self.less(other, one, "cw_ssim")]

    def judge(
        self, table: str, words: Mapping[str, str] | None = None, /, **cases: Mapping[str, Estimate | None]
    ) -> list[Finding]:
        """Judge all claims of a table; they name the measures of hiding that were measured."""
        return super().judge(table, {"measures": self.measures} | dict(words or {}), **cases)

    @cached_property
    def measures(self) -> str:
        """The measures of hiding that claims are judged by, and those that were not measured."""
        metrics = {metric for cell in self.cells.values() for metric, _ in cell}
        known = [name for metric, name in MEASURES.items() if metric in metrics] or [*MEASURES.values()]
        missing = [name for name in MEASURES.values() if name not in known]
        return " and ".join(known) + (f" ({' and '.join(missing)} not measured)" if missing else "")

    def compare(self, claim: Mapping[str, Any], words: Mapping[str, str]) -> Cases:
        """Return the cases of a claim, which may be `of` trainings or costs instead of attackers."""
        return self.trainings(claim["of"]).compare(claim, words) if "of" in claim else super().compare(claim, words)

    @cached_property
    def clients(self) -> list[AttackKey]:
        """All clients that were attacked plainly, by the paper's attacker or by ig-smooth."""
        return list(dict.fromkeys(key.client for key in self.cells if not key.informed))

    def select(self, **labels: Any) -> Iterator[AttackKey]:
        """Yield the clients with these labels that met the paper's plain attacker."""
        return super().select(**labels | {"adaptive": PLAIN})

    def trainings(self, kind: str = "training") -> TrainingResults:
        """Return the rows of one kind (training, cost, ...) without an attack."""
        return TrainingResults(self.rows, kind)

    def list_attackers(self, client: AttackKey, smooth: bool = True) -> list[AttackKey]:
        """Return all attackers of a client; `smooth=False` leaves out ig-smooth."""
        return [key for key in self.cells if key.client == client.client and (smooth or not key.smooth)]

    def pick_best(self, attackers: Iterable[AttackKey]) -> AttackKey | None:
        """Return the attacker with the highest CW-SSIM; None without any.

        Its own outcome picks it: a real attacker cannot know which of several ways sees most.
        """
        return pick_highest({key: self._score_recovery(key, "cw_ssim") for key in attackers})

    def best_adaptive(self, client: AttackKey) -> AttackKey | None:
        """Return the best attacker that is not the paper's plain one: who knows of the defense, or ig-smooth."""
        return self.pick_best(key for key in self.list_attackers(client) if key.adaptive != PLAIN)

    def best_informed(self, client: AttackKey, smooth: bool = True) -> AttackKey | None:
        """Return the best attacker who knows of the defense; `smooth=False` leaves out ig-smooth."""
        return self.pick_best(key for key in self.list_attackers(client, smooth) if key.informed)

    def pick_attacker(self, client: AttackKey, metric: str, smooth: bool = True) -> AttackKey | None:
        """Return the attacker whose result on a client counts: the plain one, or the strongest by this metric.

        None if the strongest is asked for, and of the attackers that the defense is known to be weak against it met
        none. `smooth=False` leaves out ig-smooth.
        """
        if not self.informed:
            return client
        attackers = self.list_attackers(client, smooth)
        if not any(key.informed for key in attackers) and weak_modes(client.attack, client.defense):
            return None
        return pick_highest({key: self._score_recovery(key, metric) for key in attackers}) or client

    def met_smooth(self, client: AttackKey, metric: str) -> bool:
        """Return True if a client met ig-smooth in every mode, and on every seed, of the paper's attacker."""
        papers = self.list_attackers(client, smooth=False)
        return bool(papers) and all(self.of(x, metric).keys() <= self.of(x.smoothed, metric).keys() for x in papers)

    def _score_recovery(self, key: AttackKey, metric: str) -> Measure:
        """Return a metric by seed, turned so that more is recovered where it is higher."""
        scores = self.of(key, metric)
        return {seed: negate(score) for seed, score in scores.items()} if metric.startswith("lpips") else scores

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
        the mean over its pictures: pictures of one update are not independent. Of the strongest attackers ig-smooth
        counts if both clients met it. Else one would seem to hide from it.
        """
        if one is None or other is None:
            return None
        smooth = self.met_smooth(one, metric) and self.met_smooth(other, metric)
        one, other = (self.pick_attacker(key, metric, smooth) for key in (one, other))
        if one is None or other is None:
            return None
        first, second = (self._pictures.get((key, metric), {}) for key in (one, other))
        shared = [key for key in first if key in second and math.isfinite(first[key] - second[key])]
        targets = group_by(shared, lambda key: key[1])
        if len(targets) > 1 and len({seed for seed, _, _ in shared}) == 1:
            return mean_of([fmean(first[key] - second[key] for key in keys) for keys in targets.values()])
        return super().less(one, other, metric)


def attack_key(row: Row) -> AttackKey:
    """Return the attacker and client of a row."""
    extra, attack = row.extra, row.attack or ""
    name = name_of(attack)
    key = AttackKey(
        PAPERS_NAMES.get(name, name),
        row.defense or "none",
        read_mode(attack) if attack else PLAIN,
        row.model,
        row.dataset,
        extra.get("batch_size", 1),
        extra.get("labels", "inferred"),
        extra.get("against") or "",
        extra.get("stage", "untrained"),
    )
    return key.smoothed if name == SMOOTH else key


def base(defense: str) -> str:
    """Return the name of a defense without its settings and error feedback.

    Example:
        >>> base("dgp:k1=0.05:k2=0.75+error-feedback")
        'dgp'
    """
    return name_of(defense.partition("+")[0])
