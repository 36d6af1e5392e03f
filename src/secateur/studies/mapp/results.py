"""Results of mapp_fl's studies by federation: accuracy and advantage of the server and of the clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import Any, NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import Measure, average, average_on_same, combine, mean
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row
from secateur.studies.claims import Finding
from secateur.studies.table import Cells, TableLine

MIXED = "mixed"  # the batches in which examples are scored
NEAR = 0.02  # of accuracy, for "similar" or "competitive", of which the paper gives no number
LITTLE = 0.01  # of advantage
Tabulated = tuple[list[TableLine], list[Finding]]
Cases = dict[str, Estimate | None]
Clients = dict[int, Estimate]  # by client


class MappFederation(NamedTuple):
    """One federation over its seeds."""

    submodels: str
    model: str
    large: int
    defense: str = "none"
    uncovered: str = "zero"

    @property
    def unit(self) -> int:
        """U of the server's network."""
        last = self.model.rpartition("-")[2]
        return int(last) if last.isdigit() else 0

    @property
    def title(self) -> str:
        """The name in tables."""
        rule = "fedavg" if self.submodels == "none" else self.submodels
        kept = "" if self.uncovered == "zero" else f" (uncovered: {self.uncovered})"
        return (rule if self.defense == "none" else f"{rule} + {self.defense}") + kept


class Way(NamedTuple):
    """The queries of an attack; the defaults are those of the paper's numbers."""

    attack: str = "yeom"
    batches: str = MIXED
    updates: int = 1


YEOM = Way()


@dataclass(frozen=True)
class MappResults:
    """The rows of one study about clients and servers after the last round."""

    rows: Sequence[Row]

    @cached_property
    def ends(self) -> dict[tuple[MappFederation, str, Way | None], list[Row]]:
        """The rows of the clients' and servers' last models, by federation, metric and attack."""
        ends: dict[tuple[MappFederation, str, Way | None], list[Row]] = {}
        for row in self.rows:
            if "scope" in row.extra:
                way = None
                if row.attack is not None:
                    way = Way(row.attack, row.extra.get("batches", MIXED), row.extra.get("updates", 1))
                ends.setdefault((federation_of(row), row.metric, way), []).append(row)
        return ends

    @cached_property
    def federations(self) -> list[MappFederation]:
        """All federations, in the order in which they were run."""
        return list(dict.fromkeys(federation for federation, _, _ in self.ends))

    @cached_property
    def ways(self) -> list[Way]:
        """All ways in which attacks asked."""
        return list(dict.fromkeys(way for _, _, way in self.ends if way is not None))

    def server(self, federation: MappFederation, metric: str, way: Way | None = None) -> Measure:
        """Return the metric of the server's last model, by seed."""
        rows = self.ends.get((federation, metric, way), ())
        return {row.seed: estimate(row) for row in rows if row.extra["scope"] == "server" and row.value is not None}

    def clients(
        self, federation: MappFederation, metric: str, way: Way | None = None, small: bool = False
    ) -> dict[int, Clients]:
        """Return the metric of every client, or of those with smaller models, by seed and client."""
        by_seed: dict[int, Clients] = {}
        for row in self.ends.get((federation, metric, way), ()):
            if row.extra["scope"] == "client" and row.value is not None and not (small and row.extra["rate"] == 1):
                by_seed.setdefault(row.seed, {})[row.extra["client"]] = estimate(row)
        return by_seed

    def average(self, federation: MappFederation, metric: str, way: Way | None = None, small: bool = False) -> Measure:
        """Return the metric of the average client, by seed.

        Accuracies of all clients are on the same test examples; attacks ask about each client's own members.
        """
        by_seed, pooled = self.clients(federation, metric, way, small), average if way else average_on_same
        return {seed: pooled(list(clients.values())) for seed, clients in by_seed.items()}

    def client(self, federation: MappFederation, client: int, metric: str, way: Way | None = None) -> Measure:
        """Return the metric of one client, by seed."""
        by_seed = self.clients(federation, metric, way)
        return {seed: clients[client] for seed, clients in by_seed.items() if client in clients}

    def sizes(self, federation: MappFederation) -> dict[int, dict[int, int]]:
        """Return the number of examples that each client holds, by seed and client."""
        sizes: dict[int, dict[int, int]] = {}
        for row in self.ends.get((federation, "test_accuracy", None), ()):
            if row.extra["scope"] == "client":
                sizes.setdefault(row.seed, {})[row.extra["client"]] = row.extra["data_size"]
        return sizes

    def other(self, federation: MappFederation, **changes: Any) -> MappFederation | None:
        """Return the federation that differs by these changes alone, if there is one."""
        wanted = federation._replace(**changes)
        return wanted if wanted in self.federations else None


def federation_of(row: Row) -> MappFederation:
    """Return the federation of a row."""
    extra = row.extra
    defense, uncovered = row.defense or "none", extra.get("uncovered", "zero")
    return MappFederation(extra["submodels"], row.model, extra["large_clients"], defense, uncovered)


def estimate(row: Row) -> Estimate:
    """Return a row's value with its interval."""
    low, high = (-math.inf if row.low is None else row.low), (math.inf if row.high is None else row.high)
    return Estimate(row.value or 0.0, low, high, row.note)


def points(results: MappResults, federation: MappFederation, way: Way = YEOM) -> list[tuple[int, float]]:
    """Return (dataset size, advantage) of every client of every seed."""
    sizes: Mapping[int, Mapping[int, int]] = results.sizes(federation)
    return [
        (sizes[seed][client], value.value)
        for seed, clients in results.clients(federation, "advantage", way).items()
        for client, value in clients.items()
    ]


def summary(results: MappResults, federation: MappFederation, way: Way = YEOM) -> Cells:
    """Return the accuracy and advantage of the server and of the average client."""
    alone = name_of(federation.submodels) == "local"
    cells: Cells = {
        "server_accuracy": None if alone else mean(results.server(federation, "test_accuracy")),
        "server_advantage": None if alone else mean(results.server(federation, "advantage", way)),
        "client_accuracy": mean(clients(results, federation, "test_accuracy")),
        "client_advantage": mean(clients(results, federation, "advantage", way)),
    }
    return cells


def whose(federation: MappFederation) -> str:
    """Return a mark if the average client is not the average of all clients."""
    return "the average of its small clients" if name_of(federation.submodels) == "local" else ""


def clients(results: MappResults, federation: MappFederation, metric: str, way: Way | None = None) -> Measure:
    """Return the metric of the average client; of clients that train alone only the small ones, as in the paper."""
    return results.average(federation, metric, way, small=name_of(federation.submodels) == "local")


def averaged(results: MappResults) -> tuple[MappFederation | None, MappFederation | None]:
    """Return FedAvg with the smallest and with the largest network."""
    plain = sorted((f for f in results.federations if f.submodels == "none"), key=lambda f: f.unit)
    return (plain[0], plain[-1]) if len(plain) > 1 else (None, plain[0] if plain else None)


def less(
    results: MappResults,
    one: MappFederation | None,
    other: MappFederation | None,
    what: Callable[[MappResults, MappFederation], Measure],
) -> Estimate | None:
    """Return one federation's measure less the other's."""
    if one is None or other is None:
        return None
    return combine(sub, what(results, one), what(results, other))


def exposed(results: MappResults, federation: MappFederation) -> Measure:
    """Return the average client's advantage."""
    return clients(results, federation, "advantage", YEOM)


def accurate(results: MappResults, federation: MappFederation) -> Measure:
    """Return the average client's accuracy."""
    return clients(results, federation, "test_accuracy")


def small_accurate(results: MappResults, federation: MappFederation) -> Measure:
    """Return the average accuracy of the clients with smaller models."""
    return results.average(federation, "test_accuracy", small=True)


def served(results: MappResults, federation: MappFederation) -> Measure:
    """Return the server's accuracy."""
    return results.server(federation, "test_accuracy")


def server_exposed(results: MappResults, federation: MappFederation) -> Measure:
    """Return the server's advantage."""
    return results.server(federation, "advantage", YEOM)
