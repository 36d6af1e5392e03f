"""How a model treats its members and the others: gaps, and the histograms that show them (samia_ppb, Figs. 1 and 4)."""

from __future__ import annotations

from typing import Any

from torch import Generator

from secateur.interfaces import Batch, BlackBox
from secateur.metrics.figures import by_class, histogram
from secateur.metrics.gaps import behaviour, gaps_between
from secateur.metrics.membership import Estimate


def portrait(
    box: BlackBox, members: Batch, nonmembers: Batch, classes: int, rng: Generator
) -> tuple[dict[str, Estimate], list[dict[str, Any]]]:
    """The gaps, and as figures the histograms of confidence and sensitivity and the means of every class."""
    labels = [members.labels, nonmembers.labels]
    inside, outside = (behaviour(box, side, rng) for side in (members, nonmembers))
    gaps = {name: gap.overall for name, gap in gaps_between([inside, outside], labels).items()}
    figures = [histogram(name, inside[name], outside[name]) for name in ("confidence", "sensitivity")]
    for name in inside:
        figures.append(by_class(name, (inside[name], labels[0]), (outside[name], labels[1]), classes))
    return gaps, figures
