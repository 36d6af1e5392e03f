"""The runs that a page is made of.

The curves and histograms of a run, one for each model and attack, with its seeds gathered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from secateur.report.summary import Key, attack_key
from secateur.runs.folder import load_figures, load_rows
from secateur.runs.rows import Row

CONTENT = ("kind", "quantity", "fpr", "tpr", "edges", "members", "nonmembers", "member_mean", "nonmember_mean")
GRID = 120  # points of a mean curve


@dataclass(frozen=True)
class Source:
    """A run that the page is made of."""

    name: str
    rows: Sequence[Row]
    figures: Sequence[Mapping[str, Any]]
    config: str
    environment: Mapping[str, Any]


def sources_of(folders: Sequence[Path]) -> list[Source]:
    """The runs in these folders, each under a name of its own; of a sweep the runs that it is made of."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    sources = []
    for folder, name in zip(folders, names, strict=True):
        if (folder / "pieces.jsonl").exists():
            swept = _swept(folder)
            sources += swept if len(folders) == 1 else [replace(each, name=f"{name}: {each.name}") for each in swept]
        else:
            sources.append(_source(folder, name))
    return sources


def _swept(folder: Path) -> list[Source]:
    """The runs of a sweep, the seeds of each together, and last what is missing."""
    runs: dict[str, list[Source]] = {}
    missing = []
    for entry in map(json.loads, (folder / "pieces.jsonl").read_text(encoding="utf-8").splitlines()):
        if entry["state"] == "done":
            found = _source(folder / "pieces" / entry["name"], entry["run"])
            runs.setdefault(entry["run"], []).append(found)
        else:
            why = json.dumps({"missing": entry["said"] or entry["state"]})
            missing.append(Source(f"{entry['name']} (missing)", [], [], why, {}))
    return [*map(_joined, runs.values()), *missing]


def _joined(sources: Sequence[Source]) -> Source:
    """Runs that differ in their seeds alone as one."""
    rows = [row for source in sources for row in source.rows]
    figures = [figure for source in sources for figure in source.figures]
    seeds = [seed for source in sources for seed in source.environment["seeds"]]
    return replace(sources[0], rows=rows, figures=figures, environment={**sources[0].environment, "seeds": seeds})


def _source(folder: Path, name: str) -> Source:
    config, marker = folder / "config.yaml", folder / "run.json"
    rows = load_rows(folder)
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    return Source(name, rows, load_figures(folder), text, json.loads(marker.read_text(encoding="utf-8")))


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
