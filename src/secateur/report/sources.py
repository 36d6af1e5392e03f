"""The runs of a page: their rows and figures, and the curves and histograms with seeds gathered."""

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
    """One run of the page."""

    name: str
    rows: Sequence[Row]
    figures: Sequence[Mapping[str, Any]]
    config: str
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """One curve, histogram or set of class means, with the labels of its row."""

    kind: str
    quantity: str | None
    labels: dict[str, Any]
    content: dict[str, Any]
    seeds: tuple[int, ...]


def sources_of(folders: Sequence[Path]) -> list[Source]:
    """Load the runs in these folders, each under a different name; of a sweep its runs."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    sources = []
    for folder, name in zip(folders, names, strict=True):
        if (folder / "pieces.jsonl").exists():
            swept = _swept(folder)
            sources += (
                swept if len(folders) == 1 else [replace(source, name=f"{name}: {source.name}") for source in swept]
            )
        else:
            sources.append(_source(folder, name))
    return sources


def _swept(folder: Path) -> list[Source]:
    """Load the runs of a sweep, the seeds of each together; missing pieces come last."""
    runs: dict[str, list[Source]] = {}
    missing = []
    for entry in map(json.loads, (folder / "pieces.jsonl").read_text(encoding="utf-8").splitlines()):
        if entry["state"] == "done":
            source = _source(folder / "pieces" / entry["name"], entry["run"])
            runs.setdefault(entry["run"], []).append(source)
        else:
            why = json.dumps({"missing": entry["said"] or entry["state"]})
            missing.append(Source(f"{entry['name']} (missing)", [], [], why, {}))
    return [*map(_joined, runs.values()), *missing]


def _joined(sources: Sequence[Source]) -> Source:
    """Return runs that differ in their seeds alone as one."""
    rows = [row for source in sources for row in source.rows]
    figures = [figure for source in sources for figure in source.figures]
    seeds = [seed for source in sources for seed in source.environment["seeds"]]
    return replace(sources[0], rows=rows, figures=figures, environment={**sources[0].environment, "seeds": seeds})


def _source(folder: Path, name: str) -> Source:
    """Load the run in a folder."""
    config, marker = folder / "config.yaml", folder / "run.json"
    rows = load_rows(folder)
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    return Source(name, rows, load_figures(folder), text, json.loads(marker.read_text(encoding="utf-8")))


def gather(figures: Iterable[Mapping[str, Any]]) -> list[Record]:
    """Return one record for each kind, quantity and label. Seeds are averaged; of histograms the first is shown.

    Histograms of different seeds have different bins, which a mean would blur.
    """
    groups: dict[tuple[str, str | None, Key], list[Mapping[str, Any]]] = {}
    for figure in figures:
        key = figure["kind"], figure.get("quantity"), attack_key(_labels(figure))
        groups.setdefault(key, []).append(figure)
    means = {"roc": _mean_curve, "histogram": lambda same: dict(same[0]), "classes": _mean_classes}
    records = []
    for (kind, quantity, _), same in groups.items():
        seeds = tuple(figure["seed"] for figure in same)
        records.append(
            Record(kind, quantity, _labels(same[0]), means[kind](same), seeds[: 1 if kind == "histogram" else None])
        )
    return records


def _labels(figure: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of a figure, without its content and its seed."""
    return {k: v for k, v in figure.items() if k not in (*CONTENT, "schema", "seed")}


def _mean_curve(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean over seeds of the TPR at each FPR, on a grid that is even in the logarithm."""
    if len(figures) == 1:
        return {"fpr": figures[0]["fpr"], "tpr": figures[0]["tpr"]}
    least = min((x for figure in figures for x in figure["fpr"] if x > 0), default=1e-3)
    grid = np.concatenate([[0.0], np.logspace(math.log10(least), 0, GRID)])
    allowed = (np.searchsorted(figure["fpr"], grid + 1e-12, side="right") - 1 for figure in figures)
    rates = np.mean([np.take(figure["tpr"], last) for figure, last in zip(figures, allowed, strict=True)], axis=0)
    return {"fpr": grid.tolist(), "tpr": rates.tolist()}


def _mean_classes(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each class over seeds, for members and non-members."""
    return {
        side: [_mean(values) for values in zip(*(figure[side] for figure in figures), strict=True)]
        for side in ("members", "nonmembers")
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean over the seeds that have the class."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
