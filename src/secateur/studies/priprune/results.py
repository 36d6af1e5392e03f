"""What a study of priprune measured, asked by federation and attack.

Lines of a table of priprune: a federation each, or an attack on it.
"""

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
from secateur.studies.table import Cells, Line, sparkline

Course = dict[tuple[int, int, int], float]  # a value by seed, round and client; of a whole federation client -1
NMI, PSNR, LOSS, CHANCE = "nmi_256", "psnr", "attack_loss", "nmi_256_chance"
WITHHELD, ACCURACY = "withheld_of_all", "test_accuracy"
PLACES = ("data", "model", "batch", "broadcast", "view", "base", "rate", "defense")
CURVE = 20  # points of a curve in a line of text


class Federation(NamedTuple):
    """One federation."""

    base: str  # its name
    rate: float
    defense: str
    broadcast: str
    model: str
    data: str
    batch: int  # examples of a local step
    view: str = "update"  # what the server sees: of every client, or "sum", the average alone


@dataclass(frozen=True)
class Seen:
    """The rows of one study."""

    rows: Sequence[Row]
    tested: Mapping[str, int]  # examples of each data set that accuracies are of
    stands: Mapping[tuple[str, str], str] = field(default_factory=dict)  # by model and data: the paper's data set

    @cached_property
    def courses(self) -> dict[Federation, dict[tuple[str, str | None], Course]]:
        """Every measure of every federation and of every attack on it over the rounds, in the order of their runs."""
        found: dict[Federation, dict[tuple[str, str | None], Course]] = {}
        for row in self.rows:
            if not is_federated(row) or row.value is None or not math.isfinite(row.value):
                continue
            client = row.extra["client"]
            if row.extra.get("view") == "sum" and row.attack is not None:
                client = -1  # all of a round's clients as one
            if (row.attack is None) != (client is None):  # bytes of one client; several attacked ones pooled
                continue
            attack = None if row.attack is None else attack_of(row.attack)
            course = found.setdefault(federation_of(row), {}).setdefault((row.metric, attack), {})
            course[row.seed, row.extra["round"], -1 if client is None else client] = row.value
        return found

    def course(self, each: Federation, metric: str, attack: str | None = None) -> Course:
        """One measure over the rounds."""
        return self.courses.get(each, {}).get((metric, attack), {})

    def attacks(self, each: Federation) -> list[str]:
        """Who attacked it."""
        return list(dict.fromkeys(attack for _, attack in self.courses[each] if attack is not None))

    def strongest(self, each: Federation, metric: str = NMI) -> str | None:
        """Of its attackers the one with the highest mean."""
        means = {name: _mean(self.course(each, metric, name)) for name in self.attacks(each)}
        return max(means, key=lambda name: means[name], default=None)

    def over(self, each: Federation | None, metric: str, attack: str | None) -> Measure:
        """The mean over the attacked updates of each seed, with Student's interval."""
        course = {} if each is None else self.course(each, metric, attack)
        return {
            seed: mean_of([value for key, value in course.items() if key[0] == seed])
            for seed in dict.fromkeys(key[0] for key in course)
        }

    def last(self, each: Federation | None, metric: str) -> Measure:
        """The value in the last round; of accuracies with Wilson's interval."""
        course = {} if each is None else self.course(each, metric)
        ends = {key[0]: value for key, value in sorted(course.items())}
        if each is None or metric != ACCURACY:
            return {seed: Estimate(value, -math.inf, math.inf) for seed, value in ends.items()}
        return {seed: share_of(value, self.tested[each.data]) for seed, value in ends.items()}

    def less(self, one: Federation | None, other: Federation | None, metric: str, attack: str) -> Estimate | None:
        """One federation's leakage less another's: of one seed update by update, of several seed by seed."""
        if one is None or other is None:
            return None
        return self.apart(self.course(one, metric, attack), self.course(other, metric, attack))

    def apart(self, one: Course, other: Course) -> Estimate | None:
        """The mean of one course less the other; the same clients and examples are attacked in the same rounds."""
        shared = [key for key in one if key in other]
        by_seed: dict[int, list[float]] = {}
        for key in shared:
            by_seed.setdefault(key[0], []).append(one[key] - other[key])
        if not by_seed:
            return None
        if len(by_seed) == 1:
            return mean_of(*by_seed.values())
        return mean_of([sum(values) / len(values) for values in by_seed.values()])

    def gain(self, one: Federation | None, other: Federation | None) -> Estimate | None:
        """The accuracy of one less that of the other in the end."""
        return combine(sub, self.last(one, ACCURACY), self.last(other, ACCURACY))

    def saved(self, one: Federation | None, other: Federation | None, attack: str = "sgi") -> Estimate | None:
        """Which share of one's NMI the other has less."""
        measures = self.over(one, NMI, attack), self.over(other, NMI, attack)
        return combine(lambda before, after: 1 - after / before if before else 0.0, *measures)

    def select(self, **wanted: Any) -> Iterator[Federation]:
        """The federations of which all this is true; a defense is asked for by its name, or names (priprune+dp)."""
        for each in self.courses:
            if all(
                value == (names_of(each.defense) if name == "defense" else getattr(each, name))
                for name, value in wanted.items()
            ):
                yield each

    def one(self, **wanted: Any) -> Federation | None:
        """The first of them."""
        return next(self.select(**wanted), None)

    def with_defense(self, each: Federation, name: str) -> Federation | None:
        """The same with another defense."""
        return self.one(**each._replace(defense=name)._asdict())


def federation_of(row: Row) -> Federation:
    """Whose row it is."""
    base, broadcast = name_of(row.extra["base_pruning"]), row.extra["broadcast"]
    place = row.model, row.dataset, row.extra["local_batch"]
    seen = row.extra.get("view", "update")
    return Federation(base, row.sparsity or 0.0, row.defense or "none", broadcast, *place, seen)


def names_of(defense: str) -> str:
    """A defense without its settings, also of several that act together.

    Example:
        >>> names_of("priprune:accuracy=10.0:privacy=1.0+dp:delta=0.1"), names_of("none")
        ('priprune+dp', 'none')
    """
    return "+".join(map(name_of, defense.split("+")))


def attack_of(attack: str) -> str:
    """An attack without its iterations and rate.

    Example:
        >>> attack_of("sgi:follows=true:iterations=9:learning_rate=0.1"), attack_of("sgi:iterations=9")
        ('sgi:follows=true', 'sgi')
    """
    name, *settings = attack.split(":")
    return ":".join([name, *(each for each in settings if not each.startswith(("iterations=", "learning_rate=")))])


def _mean(course: Course) -> float:
    return sum(course.values()) / len(course) if course else -math.inf


Paper = Callable[[Federation], str]


def silent(each: Federation) -> str:
    """What the paper prints of it: nothing."""
    return ""


def lines(found: Seen, paper: Paper = silent, chosen: Sequence[Federation] | None = None, part: str = "") -> list[Line]:
    """One line for each federation and attack: its accuracy in the end, and what the attacked updates gave away."""
    wanted = list(found.courses if chosen is None else chosen)
    attacks = dict.fromkeys(attack for each in wanted for attack in found.attacks(each))
    made = []
    for each in wanted:
        for attack in attackers(found, each):
            labels = told(each, wanted) | ({"attack": str(attack)} if len(attacks) > 1 else {})
            made.append(Line(labels, _cells(found, each, attack), paper(each), part=part))
    return made


def attackers(found: Seen, each: Federation) -> list[str | None]:
    """Whose lines a federation has: one of its own where nobody attacked it."""
    return [*found.attacks(each)] or [None]


def told(each: Federation, among: Sequence[Federation]) -> dict[str, str]:
    """What tells a federation from the others, and always its base pruning, rate and defense."""
    names = [
        name
        for name in PLACES
        if name in ("base", "defense") or len({getattr(other, name) for other in among}) > 1 or name == "rate"
    ]
    titles = {"base": "base pruning", "rate": "base rate", "batch": "batch size"}
    return {
        titles.get(name, name): f"{getattr(each, name):g}" if name in ("rate", "batch") else str(getattr(each, name))
        for name in names
    }


def curve(course: Course) -> str:
    """A measure over the rounds in one line of text, of the first seed."""
    first = min((key[0] for key in course), default=0)
    values = [value for key, value in sorted(course.items()) if key[0] == first]
    return sparkline(values[:: max(1, len(values) // CURVE)])


def _cells(found: Seen, each: Federation, attack: str | None) -> Cells:
    cells: Cells = {"test_accuracy": mean(found.last(each, ACCURACY))}
    cells |= {"accuracy over rounds": curve(found.course(each, ACCURACY))}
    for title, metric in {"NMI": NMI, "NMI by chance": CHANCE, "PSNR": PSNR, "loss of the attack": LOSS}.items():
        cells[title] = mean(found.over(each, metric, attack)) if attack else None
    cells |= {"NMI over rounds": curve(found.course(each, NMI, attack)) if attack else None}
    if withheld := found.course(each, WITHHELD):
        cells |= {"withheld": mean(found.last(each, WITHHELD)), "withheld over rounds": curve(withheld)}
    return cells | {"MB up": megabytes(found, each, "bytes_up"), "MB down": megabytes(found, each, "bytes_down")}


def megabytes(found: Seen, each: Federation, metric: str) -> Estimate | None:
    """What all clients sent or received."""
    sums = mean(found.last(each, metric))
    return None if sums is None else Estimate(sums.value / 1e6, sums.low / 1e6, sums.high / 1e6)
