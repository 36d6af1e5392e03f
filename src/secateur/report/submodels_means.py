"""What clients and seeds come to together, for the tables of federations over sub-models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from secateur.federated.submodels.correlation import SMALLEST, Correlation, correlation
from secateur.metrics.membership import Estimate
from secateur.report.summary import Cell
from secateur.rows import Row


def over_seeds(rows: Sequence[Row]) -> Cell | None:
    """The mean over seeds; its interval is the one seed's, or the range of several."""
    known = _estimates(rows)
    note = next((row.note for row in rows if row.note), None)
    if not known:
        return Cell(None, None, None, note) if rows else None
    if len(known) == 1:
        (row,) = (row for row in rows if row.value is not None)
        return Cell(row.value, row.low, row.high, note)
    return _cell([each.value for each in known], note)


def over_clients(rows: Iterable[Row], average: Callable[[Sequence[Estimate]], Estimate]) -> Cell | None:
    """The average client: of one seed with the clients' intervals together, of several the range of their means."""
    seeds: dict[int, list[Row]] = {}
    for row in rows:
        seeds.setdefault(row.seed, []).append(row)
    means = [average(known) for known in map(_estimates, seeds.values()) if known]
    if not means:
        return None
    return Cell(*means[0][:3]) if len(means) == 1 else _cell([each.value for each in means])


class BySize(NamedTuple):
    """How advantage and data size go together over clients of one model size."""

    parameters: int
    found: Correlation
    smallest: int  # examples of those that count

    @property
    def whom(self) -> str:
        """Over whom r is."""
        least = f" with {self.smallest} examples or more" if self.smallest else ""
        return f"{self.found.clients} of size {self.parameters:,}{least}"


def by_size(rows: Iterable[Row]) -> list[BySize]:
    """Pearson's r by model size: of clients with as many examples as the paper wants, or of all where these are few."""
    points: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        if row.value is not None:
            points.setdefault(row.extra["parameters"], []).append((row.extra["data_size"], row.value))
    tried = [(size, correlation(own, least), least) for size, own in points.items() for least in (SMALLEST, 0)]
    found = [BySize(size, r, least) for size, r, least in tried if r is not None]
    return list({each.parameters: each for each in reversed(found)}.values())[::-1]


def _cell(values: Sequence[float], note: str | None = None) -> Cell:
    return Cell(sum(values) / len(values), min(values), max(values), note)


def _estimates(rows: Iterable[Row]) -> list[Estimate]:
    return [
        Estimate(row.value, row.value if row.low is None else row.low, row.value if row.high is None else row.high)
        for row in rows
        if row.value is not None
    ]
