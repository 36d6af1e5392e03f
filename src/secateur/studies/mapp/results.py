"""Results of mapp_fl's studies by federation: accuracy and advantage of the server and of the clients."""

from __future__ import annotations

from dataclasses import dataclass
from operator import sub
from typing import Literal, NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import Measure, average, average_on_same, combine
from secateur.metrics.membership import Estimate
from secateur.report.summary import estimate
from secateur.runs.rows import Row
from secateur.studies.results import Results

MIXED = "mixed"  # the batches in which examples are scored


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

    @property
    def alone(self) -> bool:
        """True if the clients train alone."""
        return name_of(self.submodels) == "local"


class Query(NamedTuple):
    """The queries of an attack; the defaults are those of the paper's numbers."""

    attack: str = "yeom"
    batches: str = MIXED
    updates: int = 1


class Metric(NamedTuple):
    """A measure of a federation's server, of its average client, or of the average client with a smaller model."""

    name: str
    query: Query | None = None  # None: not a measure of an attack
    of: Literal["server", "clients", "small"] = "clients"


YEOM = Query()
METRICS = {
    "server_accuracy": Metric("test_accuracy", of="server"),
    "server_advantage": Metric("advantage", YEOM, "server"),
    "client_accuracy": Metric("test_accuracy"),
    "client_advantage": Metric("advantage", YEOM),
    "small_accuracy": Metric("test_accuracy", of="small"),
}
ACCURACY, EXPOSURE, SERVER = (METRICS[name] for name in ("client_accuracy", "client_advantage", "server_accuracy"))


@dataclass(frozen=True)
class MappResults(Results[MappFederation]):
    """The rows of one study about clients and servers after the last round."""

    def key_of(self, row: Row) -> MappFederation | None:
        """Return the federation of a row about a last model; None for other rows."""
        extra = row.extra
        if "scope" not in extra:
            return None
        defense, uncovered = row.defense or "none", extra.get("uncovered", "zero")
        return MappFederation(extra["submodels"], row.model, extra["large_clients"], defense, uncovered)

    def attack_of(self, row: Row) -> Query | None:
        """Return the queries of a row's attack."""
        if row.attack is None:
            return None
        return Query(row.attack, row.extra.get("batches", MIXED), row.extra.get("updates", 1))

    def client(self, federation: MappFederation, client: int, metric: str, query: Query | None = None) -> Measure:
        """Return the metric of one client, by seed."""
        return self.of(federation, metric, query, scope="client", client=client)

    def clients(
        self, federation: MappFederation, metric: str, query: Query | None = None, small: bool = False
    ) -> dict[int, dict[int, Estimate]]:
        """Return the metric of every client, or of those with smaller models, by seed and client."""
        by_seed: dict[int, dict[int, Estimate]] = {}
        for row in self.rows_of(federation, metric, query, scope="client"):
            if not (small and row.extra["rate"] == 1):
                by_seed.setdefault(row.seed, {})[row.extra["client"]] = estimate(row)
        return by_seed

    def value(self, federation: MappFederation | None, metric: Metric) -> Measure:
        """Return a metric by seed; it is empty if it was not measured.

        Accuracies of all clients are on the same test examples; attacks ask about each client's own members. Only
        small clients count in a federation of clients that train alone, as in the paper.
        """
        if federation is None or metric.of == "server":
            return self.of(federation, metric.name, metric.query, scope="server")
        by_seed = self.clients(federation, metric.name, metric.query, federation.alone or metric.of == "small")
        pooled = average if metric.query else average_on_same
        return {seed: pooled(list(clients.values())) for seed, clients in by_seed.items()}

    def sizes(self, federation: MappFederation) -> dict[int, dict[int, int]]:
        """Return the number of examples that each client holds, by seed and client."""
        sizes: dict[int, dict[int, int]] = {}
        for row in self.rows_of(federation, "test_accuracy", scope="client"):
            sizes.setdefault(row.seed, {})[row.extra["client"]] = row.extra["data_size"]
        return sizes

    def points(self, federation: MappFederation) -> list[tuple[int, float]]:
        """Return (dataset size, advantage) of every client of every seed."""
        sizes = self.sizes(federation)
        return [
            (sizes[seed][client], value.value)
            for seed, clients in self.clients(federation, "advantage", YEOM).items()
            for client, value in clients.items()
        ]

    def fedavg(self) -> tuple[MappFederation | None, MappFederation | None]:
        """Return FedAvg with the smallest and with the largest network."""
        plain = sorted(self.select(submodels="none"), key=lambda federation: federation.unit)
        return (plain[0], plain[-1]) if len(plain) > 1 else (None, plain[0] if plain else None)

    def compare(
        self, one: MappFederation | None, other: MappFederation | None, metric: Metric, than: Metric | None = None
    ) -> Estimate | None:
        """Return one federation's metric minus the other's; `than` is the other's metric, if it is another one."""
        return combine(sub, self.value(one, metric), self.value(other, than or metric))
