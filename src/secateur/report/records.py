"""The curves and histograms of a run, one for each model and attack, with its seeds gathered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from secateur.report.summary import Key, attack_key

CONTENT = ("kind", "quantity", "fpr", "tpr", "edges", "members", "nonmembers", "member_mean", "nonmember_mean")
GRID = 120  # points of a mean curve


@dataclass(frozen=True)
class Record:
    """One curve, histogram or set of class means, with the labels of the row that it belongs to."""

    kind: str
    quantity: str | None
    labels: dict[str, Any]
    content: dict[str, Any]
    seeds: tuple[int, ...]


def gather(figures: Iterable[Mapping[str, Any]]) -> list[Record]:
    """One record for each kind, quantity and label. Seeds are averaged; of histograms the first is shown.

    Histograms of different seeds have bins of their own, which a mean would blur.
    """
    groups: dict[tuple[str, str | None, Key], list[Mapping[str, Any]]] = {}
    for figure in figures:
        labels = {k: v for k, v in figure.items() if k not in (*CONTENT, "schema", "seed")}
        groups.setdefault((figure["kind"], figure.get("quantity"), attack_key(labels)), []).append(figure)
    means = {"roc": _mean_curve, "histogram": lambda found: dict(found[0]), "classes": _mean_classes}
    records = []
    for (kind, quantity, _), found in groups.items():
        labels = {k: v for k, v in found[0].items() if k not in (*CONTENT, "schema", "seed")}
        seeds = tuple(figure["seed"] for figure in found)
        records.append(Record(kind, quantity, labels, means[kind](found), seeds[: 1 if kind == "histogram" else None]))
    return records


def _mean_curve(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over seeds of the TPR that each FPR allows, on a grid that is even in the logarithm."""
    if len(found) == 1:
        return {"fpr": found[0]["fpr"], "tpr": found[0]["tpr"]}
    least = min((x for each in found for x in each["fpr"] if x > 0), default=1e-3)
    grid = np.concatenate([[0.0], np.logspace(math.log10(least), 0, GRID)])
    allowed = (np.searchsorted(each["fpr"], grid + 1e-12, side="right") - 1 for each in found)
    rates = np.mean([np.take(each["tpr"], last) for each, last in zip(found, allowed, strict=True)], axis=0)
    return {"fpr": grid.tolist(), "tpr": rates.tolist()}


def _mean_classes(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        side: [_mean(values) for values in zip(*(each[side] for each in found), strict=True)]
        for side in ("members", "nonmembers")
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean over the seeds that have the class."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
