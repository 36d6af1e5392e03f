"""Results of priprune's studies by federation and attack, and the lines of their tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Any, ClassVar, NamedTuple

from secateur.catalogue import name_of
from secateur.evaluation.attack_strength import list_modes, name_unmet, read_mode
from secateur.metrics.estimates import Measure, combine, mean, mean_of, pick_highest
from secateur.metrics.membership import Estimate, share_of
from secateur.report.federation import is_federated
from secateur.report.summary import group_by
from secateur.runs.rows import Row
from secateur.studies.results import Results
from secateur.studies.table import Cells, TableLine, curve

NMI, AMI, PSNR, LOSS, CHANCE = "nmi_256", "ami_256", "psnr", "attack_loss", "nmi_256_chance"
WITHHELD, ACCURACY = "withheld_of_all", "test_accuracy"
GI, SGI = "gi-priprune", "sgi"
FEMNIST, CIFAR10 = "femnist", "cifar10"  # the paper's data sets
TITLES = {"data": "data", "model": "model", "batch": "batch size", "broadcast": "broadcast", "view": "view"}
TITLES |= {"base": "base pruning", "rate": "base rate", "defense": "defense"}
ALWAYS = ("base", "rate", "defense")  # labels of every line
Course = dict[tuple[int, int, int], float]  # a value by seed, round and client; client -1: the whole federation


class PripruneFederation(NamedTuple):
    """A federation by its settings."""

    base: str  # its name; with squares=shared if clients send no squares of withheld weights
    rate: float
    defense: str
    broadcast: str
    model: str
    data: str
    batch: int  # examples of a local step
    view: str = "update"  # the server sees the update of every client, or with "sum" only the average


Place = PripruneFederation | None  # None: it was not run


@dataclass(frozen=True)
class PripruneResults(Results[PripruneFederation]):
    """The rows of one study."""

    paper: ClassVar[str] = "priprune"
    tested: Mapping[str, int]  # test examples of each data set
    stands: Mapping[tuple[str, str], str] = field(default_factory=dict)  # by model and data: the paper's data set
    informed: bool = False  # True: leakage is compared under the strongest attackers

    def under_strongest(self) -> PripruneResults | None:
        """Return the same results, every federation under its strongest attacker; None if each met one attack only."""
        several = any(len(self.attacks_on(federation)) > 1 for federation in self.cells)
        return replace(self, informed=True) if several else None

    def key_of(self, row: Row) -> Place:
        """Return the federation of a row; None for the bytes of one client and for several attacked clients pooled."""
        if not is_federated(row) or row.value is None or not math.isfinite(row.value):
            return None
        extra, whole = row.extra, row.extra["client"] is None and not _of_sum(row)
        if (row.attack is None) != whole:
            return None
        spared, view = ":squares=shared" * ("squares=shared" in extra["base_pruning"]), extra.get("view", "update")
        base = name_of(extra["base_pruning"]) + spared
        setting = extra["broadcast"], row.model, row.dataset, extra["local_batch"], view
        return PripruneFederation(base, row.sparsity or 0.0, row.defense or "none", *setting)

    def attack_of(self, row: Row) -> str | None:
        """Return the attack of a row without its iterations and learning rate."""
        return None if row.attack is None else short_attack(row.attack)

    def course(self, federation: Place, metric: str, attack: str | None = None) -> Course:
        """Return one measure over the rounds."""
        course = {}
        for row in self.rows_of(federation, metric, attack):
            client = row.extra["client"]
            course[row.seed, row.extra["round"], -1 if client is None or _of_sum(row) else client] = row.value or 0.0
        return course

    def leakages(self, one: Place, other: Place, metric: str = NMI, attack: str = SGI) -> tuple[Course, Course]:
        """Return the leakage of two federations over the rounds under an attack; of informed results the strongest.

        Losses of different attacks do not compare. So informed results have none.
        """
        if not self.informed:
            return self.course(one, metric, attack), self.course(other, metric, attack)
        return ({}, {}) if metric == LOSS else self.strongest(one, other, metric)

    def strongest(self, one: Place, other: Place, metric: str = NMI) -> tuple[Course, Course]:
        """Return the leakage of two federations over the rounds, each under the attack that finds most of it.

        The outcome picks the attack, which a real attacker cannot know. An attack counts if both share two seeds on
        which it was met, or their only one. Then seeds count on which each met all of its attacks.
        """
        measures = [self._measure_attacks(x, y, metric) for x, y in ((one, other), (other, one))]
        shared = set.intersection(*(set().union(*attacks.values()) for attacks in measures))
        least = min(2, len(shared))
        for name in set().union(*measures):
            known = [attacks[name] for attacks in measures if name in attacks]
            if len(shared.intersection(*known)) < least:
                measures = [{x: over for x, over in attacks.items() if x != name} for attacks in measures]
        seeds = shared.intersection(*(over for attacks in measures for over in attacks.values()))
        if not all(measures) or len(seeds) < least:
            return {}, {}
        courses = []
        for federation, attacks in zip((one, other), measures, strict=True):
            chosen = pick_highest({name: {seed: over[seed] for seed in seeds} for name, over in attacks.items()})
            course = self.course(federation, metric, chosen)
            courses.append({key: value for key, value in course.items() if key[0] in seeds})
        return courses[0], courses[1]

    def _measure_attacks(self, federation: Place, beside: Place, metric: str) -> dict[str, Measure]:
        """Return the mean over the attacked updates of each seed, by attack.

        An attack that the defended federation beside it should have met and did not is left out. Else the defense would
        seem to hide from it.
        """
        attacks = self.attacks_on(federation) if federation in self.cells else []
        if beside in self.cells and beside is not None and beside.defense != "none" and beside.view == "update":
            met, modes = self.attacks_on(beside), list_modes(beside.defense, beside.base)
            bare = federation is not None and federation.defense == "none"
            attacks = [name for name in attacks if name in met or not (bare or read_mode(name) in modes)]
        return {name: self.over(federation, metric, name) for name in attacks}

    def over(self, federation: Place, metric: str, attack: str | None) -> Measure:
        """Return the mean over the attacked updates of each seed, with Student's interval."""
        return _over_updates(self.course(federation, metric, attack))

    def last(self, federation: Place, metric: str) -> Measure:
        """Return the value in the last round; of accuracies with Wilson's interval."""
        ends = {key[0]: value for key, value in sorted(self.course(federation, metric).items())}
        if federation is None or metric != ACCURACY:
            return {seed: Estimate(value, -math.inf, math.inf) for seed, value in ends.items()}
        if (tested := self.tested.get(federation.data)) is None:  # rows of an archive do not say
            return {seed: Estimate(value, -math.inf, math.inf) for seed, value in ends.items()}
        return {seed: share_of(value, tested) for seed, value in ends.items()}

    def less(self, one: Place, other: Place, metric: str = NMI, attack: Any = SGI) -> Estimate | None:
        """Return one federation's leakage less the other's: for one seed by update, for several by seed.

        Accuracies are those of the last round.
        """
        if metric == ACCURACY:
            return combine(sub, self.last(one, ACCURACY), self.last(other, ACCURACY))
        return paired_difference(*self.leakages(one, other, metric, attack))

    def saving(self, one: Place, other: Place) -> Estimate | None:
        """Return the share of one's NMI by which the other's is lower."""
        measures = map(_over_updates, self.leakages(one, other))
        return combine(lambda before, after: 1 - after / before if before else 0.0, *measures)


def _over_updates(course: Course) -> Measure:
    """Return the mean over the attacked updates of each seed, with Student's interval."""
    seeds = group_by(course, lambda key: key[0])
    return {seed: mean_of([course[key] for key in keys]) for seed, keys in seeds.items()}


def paired_difference(one: Course, other: Course) -> Estimate | None:
    """Return the mean of one course less the other; both attack the same examples in the same rounds.

    None if they share no seed, or one alone where one of them has several.
    """
    shared = group_by((key for key in one if key in other), lambda key: key[0])
    by_seed = [[one[key] - other[key] for key in keys] for keys in shared.values()]
    if len(by_seed) < 2:
        single = len({key[0] for key in (*one, *other)}) == 1
        return mean_of(by_seed[0]) if by_seed and single else None
    return mean_of([sum(values) / len(values) for values in by_seed])


def _of_sum(row: Row) -> bool:
    """Return True if an attack sees all of a round's clients as one."""
    return row.extra.get("view") == "sum" and row.attack is not None


def lines(
    results: PripruneResults, paper: Callable[[PripruneFederation], str] = lambda federation: ""
) -> list[TableLine]:
    """Return a line for each federation and attack: the last accuracy, and the leakage of the attacked updates."""
    several = len(results.attacks) > 1
    table = []
    for federation in results.cells:
        for attack in attackers(results, federation):
            labels = labels_of(federation, results.cells) | ({"attack": str(attack)} if several else {})
            seen = attack and federation.view == "update"
            unmet = name_unmet(federation.defense, results.attacks_on(federation), federation.base) if seen else ""
            table.append(TableLine(labels, _cells(results, federation, attack), paper(federation), unmet))
    return table


def attackers(results: PripruneResults, federation: PripruneFederation) -> list[str | None]:
    """Return the attacks that have a line: None, for one line, if the federation was not attacked."""
    return [*results.attacks_on(federation)] or [None]


def labels_of(federation: PripruneFederation, among: Iterable[PripruneFederation]) -> dict[str, str]:
    """Return the labels in which a federation differs from others, and always base pruning, rate and defense."""
    labels = {}
    for name, title in TITLES.items():
        value = getattr(federation, name)
        if name in ALWAYS or any(getattr(other, name) != value for other in among):
            labels[title] = f"{value:g}" if name in ("rate", "batch") else str(value)
    return labels


def _cells(results: PripruneResults, federation: PripruneFederation, attack: str | None) -> Cells:
    cells: Cells = {"test_accuracy": mean(results.last(federation, ACCURACY))}
    cells |= {"accuracy over rounds": _curve(results.course(federation, ACCURACY))}
    for title, metric in {"NMI": NMI, "NMI by chance": CHANCE, "PSNR": PSNR, "loss of the attack": LOSS}.items():
        cells[title] = mean(results.over(federation, metric, attack)) if attack else None
    cells |= {"NMI over rounds": _curve(results.course(federation, NMI, attack)) if attack else None}
    if withheld := results.course(federation, WITHHELD):
        cells |= {"withheld": mean(results.last(federation, WITHHELD)), "withheld over rounds": _curve(withheld)}
    return cells | {
        f"MB {direction}": _megabytes(results, federation, f"bytes_{direction}") for direction in ("up", "down")
    }


def _curve(course: Course) -> str:
    """Return a measure of the first seed over the rounds, as one line of text."""
    first = min((key[0] for key in course), default=0)
    values = [value for key, value in sorted(course.items()) if key[0] == first]
    return curve(values)


def _megabytes(results: PripruneResults, federation: PripruneFederation, metric: str) -> Estimate | None:
    """Return the megabytes that all clients sent or received."""
    sums = mean(results.last(federation, metric))
    return None if sums is None else Estimate(sums.value / 1e6, sums.low / 1e6, sums.high / 1e6)


def short_attack(attack: str) -> str:
    """Return an attack without its iterations and learning rate.

    Example:
        >>> short_attack("sgi:follows=true:iterations=9:learning_rate=0.1"), short_attack("sgi:iterations=9")
        ('sgi:follows=true', 'sgi')
    """
    name, *settings = attack.split(":")
    return ":".join([name, *(pair for pair in settings if not pair.startswith(("iterations=", "learning_rate=")))])
