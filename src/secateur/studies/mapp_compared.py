"""What federations of mapp_fl's studies are compared by: accuracy and advantage of servers and average clients."""

from __future__ import annotations

from collections.abc import Callable
from operator import sub

from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding
from secateur.studies.mapp_found import YEOM, Federation, Seen, Way
from secateur.studies.measured import Measure, combine, mean, name_of
from secateur.studies.tables import Cells, Line

NEAR = 0.02  # of accuracy: where the paper says similar or competitive and gives no number
LITTLE = 0.01  # of advantage
Tabulated = tuple[list[Line], list[Finding]]
Cases = dict[str, Estimate | None]


def summary(found: Seen, federation: Federation, way: Way = YEOM) -> Cells:
    """Accuracy and advantage of the server and of the average client."""
    alone = name_of(federation.submodels) == "local"
    cells: Cells = {
        "server_accuracy": None if alone else mean(found.server(federation, "test_accuracy")),
        "server_advantage": None if alone else mean(found.server(federation, "advantage", way)),
        "client_accuracy": mean(clients(found, federation, "test_accuracy")),
        "client_advantage": mean(clients(found, federation, "advantage", way)),
    }
    return cells


def whose(federation: Federation) -> str:
    """Whom the average client stands for, where it is not everybody."""
    return "the average of its small clients" if name_of(federation.submodels) == "local" else ""


def clients(found: Seen, federation: Federation, metric: str, way: Way | None = None) -> Measure:
    """Of the average client; of those that train alone, the small ones, as in the paper."""
    return found.average(federation, metric, way, small=name_of(federation.submodels) == "local")


def averaged(found: Seen) -> tuple[Federation | None, Federation | None]:
    """FedAvg with the smallest and with the largest network."""
    plain = sorted((f for f in found.federations if f.submodels == "none"), key=lambda f: f.unit)
    return (plain[0], plain[-1]) if len(plain) > 1 else (None, plain[0] if plain else None)


def exposed(found: Seen, federation: Federation) -> Measure:
    """The average client's advantage."""
    return clients(found, federation, "advantage", YEOM)


def accurate(found: Seen, federation: Federation) -> Measure:
    """The average client's accuracy."""
    return clients(found, federation, "test_accuracy")


def small_accurate(found: Seen, federation: Federation) -> Measure:
    """The average accuracy of those with smaller models."""
    return found.average(federation, "test_accuracy", small=True)


def served(found: Seen, federation: Federation) -> Measure:
    """The server's accuracy."""
    return found.server(federation, "test_accuracy")


def server_exposed(found: Seen, federation: Federation) -> Measure:
    """The server's advantage."""
    return found.server(federation, "advantage", YEOM)


def less(
    found: Seen, one: Federation | None, other: Federation | None, what: Callable[[Seen, Federation], Measure]
) -> Estimate | None:
    """One federation's measure less another's."""
    if one is None or other is None:
        return None
    return combine(sub, what(found, one), what(found, other))
