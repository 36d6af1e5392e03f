"""The runs that a page is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from secateur.rows import Row
from secateur.runs import load_figures, load_rows


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
