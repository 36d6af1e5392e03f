"""Results of priprune's studies by federation and attack, and the lines of their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import sub
from typing import Any, NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import Measure, combine, mean, mean_of
from secateur.metrics.membership import Estimate, share_of
from secateur.report.federation import is_federated
from secateur.runs.rows import Row
from secateur.studies.table import Cells, TableLine, sparkline

NMI, PSNR, LOSS, CHANCE = "nmi_256", "psnr", "attack_loss", "nmi_256_chance"
WITHHELD, ACCURACY = "withheld_of_all", "test_accuracy"
PLACES = ("data", "model", "batch", "broadcast", "view", "base", "rate", "defense")
CURVE = 20  # points of a curve in a line of text
Course = dict[tuple[int, int, int], float]  # a value by seed, round and client; client -1: the whole federation


class PripruneFederation(NamedTuple):
    """A federation by its settings."""

    base: str  # its name
    rate: float
    defense: str
    broadcast: str
    model: str
    data: str
    batch: int  # examples of a local step
    view: str = "update"  # the server sees the update of every client, or with "sum" only the average


Paper = Callable[[PripruneFederation], str]


@dataclass(frozen=True)
class PripruneResults:
    """The rows of one study."""

    rows: Sequence[Row]
    tested: Mapping[str, int]  # test examples of each data set
    stands: Mapping[tuple[str, str], str] = field(default_factory=dict)  # by model and data: the paper's data set

    @cached_property
    def courses(self) -> dict[PripruneFederation, dict[tuple[str, str | None], Course]]:
        """Every measure of every federation, and of every attack on it, over the rounds; in the order of the runs."""
        courses: dict[PripruneFederation, dict[tuple[str, str | None], Course]] = {}
        for row in self.rows:
            if not is_federated(row) or row.value is None or not math.isfinite(row.value):
                continue
            client = row.extra["client"]
            if row.extra.get("view") == "sum" and row.attack is not None:
                client = -1  # all of a round's clients as one
            if (row.attack is None) != (client is None):  # bytes of one client; several attacked ones pooled
                continue
            attack = None if row.attack is None else attack_of(row.attack)
            course = courses.setdefault(federation_of(row), {}).setdefault((row.metric, attack), {})
            course[row.seed, row.extra["round"], -1 if client is None else client] = row.value
        return courses

    def course(self, federation: PripruneFederation, metric: str, attack: str | None = None) -> Course:
        """Return one measure over the rounds."""
        return self.courses.get(federation, {}).get((metric, attack), {})

    def attacks(self, federation: PripruneFederation) -> list[str]:
        """Return the attacks on a federation."""
        return list(dict.fromkeys(attack for _, attack in self.courses[federation] if attack is not None))

    def strongest(self, federation: PripruneFederation, metric: str = NMI) -> str | None:
        """Return the attack with the highest mean."""
        means = {name: _mean(self.course(federation, metric, name)) for name in self.attacks(federation)}
        return max(means, key=lambda name: means[name], default=None)

    def over(self, federation: PripruneFederation | None, metric: str, attack: str | None) -> Measure:
        """Return the mean over the attacked updates of each seed, with Student's interval."""
        course = {} if federation is None else self.course(federation, metric, attack)
        return {
            seed: mean_of([value for key, value in course.items() if key[0] == seed])
            for seed in dict.fromkeys(key[0] for key in course)
        }

    def last(self, federation: PripruneFederation | None, metric: str) -> Measure:
        """Return the value in the last round; of accuracies with Wilson's interval."""
        course = {} if federation is None else self.course(federation, metric)
        ends = {key[0]: value for key, value in sorted(course.items())}
        if federation is None or metric != ACCURACY:
            return {seed: Estimate(value, -math.inf, math.inf) for seed, value in ends.items()}
        return {seed: share_of(value, self.tested[federation.data]) for seed, value in ends.items()}

    def less(
        self, one: PripruneFederation | None, other: PripruneFederation | None, metric: str, attack: str
    ) -> Estimate | None:
        """Return one federation's leakage less the other's: for one seed by update, for several by seed."""
        if one is None or other is None:
            return None
        return self.apart(self.course(one, metric, attack), self.course(other, metric, attack))

    def apart(self, one: Course, other: Course) -> Estimate | None:
        """Return the mean of one course less the other; both attack the same examples in the same rounds."""
        shared = [key for key in one if key in other]
        by_seed: dict[int, list[float]] = {}
        for key in shared:
            by_seed.setdefault(key[0], []).append(one[key] - other[key])
        if not by_seed:
            return None
        if len(by_seed) == 1:
            return mean_of(*by_seed.values())
        return mean_of([sum(values) / len(values) for values in by_seed.values()])

    def gain(self, one: PripruneFederation | None, other: PripruneFederation | None) -> Estimate | None:
        """Return the last accuracy of one less that of the other."""
        return combine(sub, self.last(one, ACCURACY), self.last(other, ACCURACY))

    def saved(
        self, one: PripruneFederation | None, other: PripruneFederation | None, attack: str = "sgi"
    ) -> Estimate | None:
        """Return the share of one's NMI by which the other's is lower."""
        measures = self.over(one, NMI, attack), self.over(other, NMI, attack)
        return combine(lambda before, after: 1 - after / before if before else 0.0, *measures)

    def select(self, **wanted: Any) -> Iterator[PripruneFederation]:
        """Yield the federations with these settings; a defense is given by its name, or names (priprune+dp)."""
        for federation in self.courses:
            if all(
                value == (names_of(federation.defense) if name == "defense" else getattr(federation, name))
                for name, value in wanted.items()
            ):
                yield federation

    def one(self, **wanted: Any) -> PripruneFederation | None:
        """Return the first federation with these settings."""
        return next(self.select(**wanted), None)

    def with_defense(self, federation: PripruneFederation, name: str) -> PripruneFederation | None:
        """Return the same federation with another defense."""
        return self.one(**federation._replace(defense=name)._asdict())


def silent(federation: PripruneFederation) -> str:
    """Return nothing: the paper prints no number."""
    return ""


def lines(
    results: PripruneResults, paper: Paper = silent, chosen: Sequence[PripruneFederation] | None = None, part: str = ""
) -> list[TableLine]:
    """Return a line for each federation and attack: the last accuracy, and the leakage of the attacked updates."""
    wanted = list(results.courses if chosen is None else chosen)
    attacks = dict.fromkeys(attack for federation in wanted for attack in results.attacks(federation))
    table = []
    for federation in wanted:
        for attack in attackers(results, federation):
            labels = told(federation, wanted) | ({"attack": str(attack)} if len(attacks) > 1 else {})
            table.append(TableLine(labels, _cells(results, federation, attack), paper(federation), part=part))
    return table


def attackers(results: PripruneResults, federation: PripruneFederation) -> list[str | None]:
    """Return the attacks that have a line: None, for one line, if the federation was not attacked."""
    return [*results.attacks(federation)] or [None]


def told(federation: PripruneFederation, among: Sequence[PripruneFederation]) -> dict[str, str]:
    """Return the labels in which a federation differs from others, and always base pruning, rate and defense."""
    names = [
        name
        for name in PLACES
        if name in ("base", "defense") or len({getattr(other, name) for other in among}) > 1 or name == "rate"
    ]
    titles = {"base": "base pruning", "rate": "base rate", "batch": "batch size"}
    return {
        titles.get(name, name): f"{getattr(federation, name):g}"
        if name in ("rate", "batch")
        else str(getattr(federation, name))
        for name in names
    }


def _cells(results: PripruneResults, federation: PripruneFederation, attack: str | None) -> Cells:
    cells: Cells = {"test_accuracy": mean(results.last(federation, ACCURACY))}
    cells |= {"accuracy over rounds": curve(results.course(federation, ACCURACY))}
    for title, metric in {"NMI": NMI, "NMI by chance": CHANCE, "PSNR": PSNR, "loss of the attack": LOSS}.items():
        cells[title] = mean(results.over(federation, metric, attack)) if attack else None
    cells |= {"NMI over rounds": curve(results.course(federation, NMI, attack)) if attack else None}
    if withheld := results.course(federation, WITHHELD):
        cells |= {"withheld": mean(results.last(federation, WITHHELD)), "withheld over rounds": curve(withheld)}
    return cells | {
        "MB up": megabytes(results, federation, "bytes_up"),
        "MB down": megabytes(results, federation, "bytes_down"),
    }


def curve(course: Course) -> str:
    """Return a measure of the first seed over the rounds, as one line of text."""
    first = min((key[0] for key in course), default=0)
    values = [value for key, value in sorted(course.items()) if key[0] == first]
    return sparkline(values[:: max(1, len(values) // CURVE)])


def megabytes(results: PripruneResults, federation: PripruneFederation, metric: str) -> Estimate | None:
    """Return the megabytes that all clients sent or received."""
    sums = mean(results.last(federation, metric))
    return None if sums is None else Estimate(sums.value / 1e6, sums.low / 1e6, sums.high / 1e6)


def federation_of(row: Row) -> PripruneFederation:
    """Return the federation of a row."""
    base, broadcast = name_of(row.extra["base_pruning"]), row.extra["broadcast"]
    setting = row.model, row.dataset, row.extra["local_batch"]
    view = row.extra.get("view", "update")
    return PripruneFederation(base, row.sparsity or 0.0, row.defense or "none", broadcast, *setting, view)


def names_of(defense: str) -> str:
    """Return a defense without its settings, also of several that act together.

    Example:
        >>> names_of("priprune:accuracy=10.0:privacy=1.0+dp:delta=0.1"), names_of("none")
        ('priprune+dp', 'none')
    """
    return "+".join(map(name_of, defense.split("+")))


def attack_of(attack: str) -> str:
    """Return an attack without its iterations and learning rate.

    Example:
        >>> attack_of("sgi:follows=true:iterations=9:learning_rate=0.1"), attack_of("sgi:iterations=9")
        ('sgi:follows=true', 'sgi')
    """
    name, *settings = attack.split(":")
    return ":".join([name, *(pair for pair in settings if not pair.startswith(("iterations=", "learning_rate=")))])


def _mean(course: Course) -> float:
    return sum(course.values()) / len(course) if course else -math.inf
