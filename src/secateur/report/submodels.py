"""Federations over sub-models: how accurate and how exposed everybody is, and who trains which cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from secateur.report.summary import Cell
from secateur.rows import Row

ATTACK = "yeom"
MEASURES = {"advantage": "advantage", "auc": "AUC"}


class Asker(NamedTuple):
    """An attack on a federation."""

    labels: tuple[tuple[str, Any], ...]
    attack: str


class Who(NamedTuple):
    """A federation, and a client of it; None is the server."""

    labels: tuple[tuple[str, Any], ...]
    client: int | None


@dataclass(frozen=True)
class Party:
    """A client or a server: a line of the table; means over seeds, and the range of several or the interval of one."""

    labels: Mapping[str, Any]
    client: int | None
    data_size: str
    parameters: int
    attack: str
    accuracy: Cell | None
    advantage: Cell | None
    auc: Cell | None

    @property
    def rule(self) -> str:
        """Its federation's rule and network."""
        return name(self.labels)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return "server" if self.client is None else f"client {self.client}"


@dataclass(frozen=True)
class Federated:
    """One federation, a point on the plane: its server, and its average client."""

    labels: Mapping[str, Any]
    server: Party | None
    accuracy: float | None
    advantage: float | None
    clients: int
    excluded: Sequence[str] = ()  # why clients are not in the mean advantage, one each

    @property
    def name(self) -> str:
        """The rule, the network and a defense on top."""
        return name(self.labels)


def is_submodel(row: Row) -> bool:
    """Whether a row is of a federation over sub-models."""
    return "submodels" in row.extra


def name(labels: Mapping[str, Any]) -> str:
    """A channel rule on the server's network, and the defense on top; whether pictures were cropped and flipped.

    Without large clients, whether cells are kept.

    Example:
        >>> name({"submodels": "none", "model": "mapp-cnn-8", "defense": "none"})
        'fedavg, mapp-cnn-8'
    """
    rule = "fedavg" if labels["submodels"] == "none" else str(labels["submodels"])
    told = f"{rule}, {labels['model']}"
    if labels.get("large_clients") == 0 and labels.get("uncovered") == "keep" and not rule.startswith("local"):
        told += ", uncovered kept"
    told += ", crops and flips" if labels.get("augment") else ""
    return told if labels["defense"] in ("none", None) else f"{told}, {labels['defense']}"


def parties(rows: Sequence[Row]) -> list[Party]:
    """Every client and server, one line for each attack that was run."""
    found: dict[tuple[Who, str], dict[str, list[Row]]] = {}
    plain = plain_views(rows)
    for row in rows:
        if "scope" in row.extra and way_of(row) in (None, plain.get(asker_of(row))):
            who = Who(tuple(labels_of(row).items()), row.extra["client"])
            found.setdefault((who, row.attack or ""), {}).setdefault(row.metric, []).append(row)
    lines = []
    for (who, attack), measures in found.items():
        if attack:
            accuracy = found.get((who, ""), {}).get("test_accuracy", [])
            first = next(iter(measures.values()))[0]
            sizes = sorted({row.extra["data_size"] for row in measures["advantage"]})
            size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
            values = [_cell(measures.get(metric, [])) for metric in MEASURES]
            labels = dict(who.labels)
            lines.append(Party(labels, who.client, size, first.extra["parameters"], attack, _cell(accuracy), *values))
    return lines


def federations(lines: Sequence[Party]) -> list[Federated]:
    """One line a federation, in the order they were run, by Yeom's attack or the first that was run."""
    groups: dict[tuple[tuple[str, Any], ...], list[Party]] = {}
    for line in lines:
        groups.setdefault(tuple(line.labels.items()), []).append(line)
    result = []
    for found in groups.values():
        attacks = {line.attack for line in found}
        own = [line for line in found if line.attack == (ATTACK if ATTACK in attacks else found[0].attack)]
        clients = [line for line in own if line.client is not None]
        server = next((line for line in own if line.client is None), None)
        means = [_mean(getattr(line, what) for line in clients) for what in ("accuracy", "advantage")]
        cells = [line.advantage for line in clients]
        excluded = [cell.note or "" for cell in cells if cell is not None and cell.value is None]
        result.append(Federated(found[0].labels, server, means[0], means[1], len(clients), excluded))
    return result


def not_attacked(rows: Sequence[Row]) -> list[Federated]:
    """Federations of which only accuracy is known, by the last round that was evaluated."""
    groups: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    attacked = {tuple(labels_of(row).items()) for row in rows if "scope" in row.extra and row.attack}
    for row in rows:
        key = tuple(labels_of(row).items())
        if is_submodel(row) and "round" in row.extra and not row.extra.get("advice") and key not in attacked:
            groups.setdefault(key, []).append(row)
    result = []
    for key, own in groups.items():
        last = max(row.extra["round"] for row in own)
        end = [row for row in own if row.extra["round"] == last and row.extra.get("client") is None]
        server, clients = (
            _cell([row for row in end if row.metric == metric]) for metric in ("test_accuracy", "client_accuracy")
        )
        labels = dict(key)
        party = Party(labels, None, "", 0, "", server, None, None)
        result.append(Federated(labels, party, None if clients is None else clients.value, None, 0))
    return result


def plain_views(rows: Iterable[Row]) -> dict[Asker, tuple[str, int]]:
    """How each attack asked as it was told to: its first row is of that view, and those for comparison come later."""
    found: dict[Asker, tuple[str, int]] = {}
    for row in rows:
        if (way := way_of(row)) is not None:
            found.setdefault(asker_of(row), way)
    return found


def way_of(row: Row) -> tuple[str, int] | None:
    """With whom examples were scored and how many updates were held; None where a row is of no such thing."""
    batches = row.extra.get("batches") if "scope" in row.extra else None
    return None if batches is None else (batches, row.extra.get("updates", 1))


def asker_of(row: Row) -> Asker:
    """The attack that a row is of."""
    return Asker(tuple(labels_of(row).items()), row.attack or "")


def labels_of(row: Row) -> dict[str, Any]:
    """What tells a federation from others."""
    names = ("run", "submodels", "large_clients", "uncovered", "augment")
    extra = {key: row.extra[key] for key in names if key in row.extra}
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense} | extra


def _cell(rows: Sequence[Row]) -> Cell | None:
    """The mean over seeds; its interval is the one seed's, or the range of several."""
    known = [row for row in rows if row.value is not None]
    values = [row.value for row in known if row.value is not None]
    note = next((row.note for row in rows if row.note), None)
    if not values:
        return Cell(None, None, None, note) if rows else None
    if len(values) == 1:
        return Cell(values[0], known[0].low, known[0].high, note)
    return Cell(sum(values) / len(values), min(values), max(values), note)


def _mean(cells: Iterable[Cell | None]) -> float | None:
    values = [cell.value for cell in cells if cell is not None and cell.value is not None]
    return sum(values) / len(values) if values else None
