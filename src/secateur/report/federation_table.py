"""The table of federations: a line each, its columns, and what all of them have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.report.federation import group_of, is_federated, is_pooled, labels_of, place
from secateur.report.federation_names import name, titles
from secateur.rows import Row

TOLD = {
    "model": "network",
    "dataset": "data",
    "local_batch": "batch",
    "averaging": "average",
    "broadcast": "broadcast",
    "view": "server sees",
}
MISHAPS = ("lost_clients", "attacked_clients")
SEEN = {"update": "every update", "sum": "only the sum"}
Labels = Mapping[str, Any]
Spread = tuple[float, float, float]  # least, mean and most


@dataclass(frozen=True)
class Federated:
    """One federation, a line of the table; means over its seeds."""

    labels: Labels
    accuracy: float | None
    up: float | None  # bytes, of all clients
    down: float | None
    up_client: Spread | None  # bytes of those that took part
    down_client: Spread | None
    lost: int  # clients, over all rounds
    leak: float | None  # the highest PSNR of an attacked round
    nmi: float | None  # the mean over attacked rounds, of the attack with the highest
    chance: float | None  # what NMI the same attack's pictures have with shuffled pixels
    psnr: float | None
    auc: float | None  # of membership attacks

    @property
    def name(self) -> str:
        """What was pruned and how it was defended."""
        return name(self.labels)

    @property
    def base(self) -> str:
        """What was pruned, broadcast and seen, whatever the defense."""
        return f"{self.labels['base_pruning']}, {self.labels['broadcast']}, {self.labels.get('view', 'update')}"

    def told(self, label: str) -> str:
        """A label in words."""
        value = str(self.labels.get(label, "-"))
        return SEEN.get(value, value) if label == "view" else value


def table(rows: Sequence[Row]) -> list[Federated]:
    """One line a federation, in the order they were run."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if is_federated(row):
            groups.setdefault((*group_of(row), name(labels_of(row))), []).append(row)
    return [_line(found) for found in groups.values()]


def places(rows: Sequence[Row]) -> dict[str, list[Federated]]:
    """The federations of each network and data set."""
    found: dict[str, list[Federated]] = {}
    for each in table(rows):
        found.setdefault(place(each.labels), []).append(each)
    return found


def apart(found: Sequence[Federated]) -> dict[str, str]:
    """The labels that tell some of them from others, with their headings; the others would be columns of one word."""
    several = {label for label in TOLD if len({each.told(label) for each in found}) > 1}
    runs = {"run": "run"} if len({each.labels.get("run") for each in found}) > 1 else {}
    return runs | {label: heading for label, heading in TOLD.items() if label in several}


def common(found: Sequence[Federated]) -> str:
    """What all of them share, in words."""
    same = [label for label in TOLD if label not in apart(found) and label in found[0].labels] if found else []
    return ", ".join(f"{TOLD[label]} {found[0].told(label)}" for label in same)


def settings(rows: Sequence[Row]) -> list[str]:
    """Everything that each method was set to, given or not, a line a method."""
    told = dict.fromkeys(str(row.extra.get("settings", "")) for row in rows if is_federated(row))
    return list(dict.fromkeys(each for text in told for each in text.split("; ") if each))


def mishaps(rows: Sequence[Row]) -> list[str]:
    """Which clients were lost in which rounds, and which attacks could not be made, in words."""
    told = [row for row in rows if is_federated(row) and row.metric in MISHAPS and row.note]
    called = titles(map(labels_of, told))
    return [
        f"{called[name(labels_of(row))]}, seed {row.seed}, round {row.extra['round']}: "
        f"{'' if row.attack is None else f'{row.attack}: '}{row.note}"
        for row in told
    ]


def megabytes(value: float) -> str:
    """Bytes as a person reads them in MB, small ones too.

    Example:
        >>> megabytes(121_281_000), megabytes(4_230)
        ('121.28', '0.0042')
    """
    return f"{value / 1e6:.2f}" if value >= 1e5 or not value else f"{value / 1e6:.2g}"


def _line(rows: Sequence[Row]) -> Federated:
    last = max(row.extra["round"] for row in rows)
    seeds = len({row.seed for row in rows})

    def final(metric: str) -> float | None:
        ends = [row for row in rows if row.metric == metric and row.extra["round"] == last]
        values = [row.value for row in ends if row.extra["client"] is None and row.value is not None]
        return sum(values) / len(values) if values else None

    def spread(metric: str) -> Spread | None:
        own = [row.value for row in rows if row.metric == metric and row.extra["client"] is not None and row.value]
        return (min(own), sum(own) / len(own), max(own)) if own else None

    leaks = [row.value for row in rows if row.metric == "psnr_max" and row.value is not None]
    nmi, psnr, auc = (_by_attack(rows, metric) for metric in ("nmi_256", "psnr", "auc"))
    return Federated(
        labels_of(rows[0]),
        final("test_accuracy"),
        final("bytes_up"),
        final("bytes_down"),
        spread("bytes_up"),
        spread("bytes_down"),
        round(sum(row.value or 0 for row in rows if row.metric == "lost_clients") / seeds),
        max(leaks, default=None),
        max(nmi.values(), default=None),
        _by_attack(rows, "nmi_256_chance").get(max(nmi, key=lambda attack: nmi[attack], default="")),
        max(psnr.values(), default=None),
        max(auc.values(), default=None),
    )


def _by_attack(rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Every attack's mean over attacked rounds."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.attack is not None and row.metric == metric and row.value is not None and not is_pooled(row):
            found.setdefault(row.attack, []).append(row.value)
    return {attack: sum(values) / len(values) for attack, values in found.items()}
