"""A run, or several, as one self-contained page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from secateur.artifacts import write
from secateur.errors import WrongInput
from secateur.report.summary import Cell, Line, attacks, lines, strongest
from secateur.rows import Row
from secateur.runs import load_rows

MEASURES = {
    "test_accuracy": "test accuracy",
    "train_accuracy": "train accuracy",
    "attack_accuracy": "attack accuracy",
    "auc": "AUC",
    "tpr_at_fpr_0.1": "TPR at 10 % FPR",
    "tpr_at_fpr_0.01": "TPR at 1 % FPR",
    "tpr_at_fpr_0.001": "TPR at 0.1 % FPR",
}
SHARES = frozenset(MEASURES) - {"auc"}


def write_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of the runs in these folders; one folder's goes into it unless `out` says otherwise."""
    if out is None:
        if len(folders) != 1:
            raise WrongInput("out", "say where the page of several runs goes: --out FILE.html")
        out = folders[0] / "report.html"
    if out.is_dir():
        raise WrongInput("out", f"{out} is a folder; give a file such as report.html")
    runs = [{"folder": str(folder.name or folder), "rows": load_rows(folder)} | _files(folder) for folder in folders]
    rows = [row for run in runs for row in run["rows"]]
    if not rows:
        raise WrongInput("run", f"{', '.join(map(str, folders))}: there are no results yet; finish the run first")
    write(out, render(rows, runs).encode())
    return out


def render(rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> str:
    """The page's HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("secateur", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    table = lines(rows)
    return environment.get_template("page.html.j2").render(
        measures=MEASURES,
        attacks=attacks(table),
        models=[line for line in table if line.labels["attack"] is None],
        costs=_costs(table),
        verdict=verdict(table),
        runs=runs,
        seeds=sorted({row.seed for row in rows}),
    )


def verdict(table: Sequence[Line]) -> list[str]:
    """What the numbers say, in sentences."""
    best = strongest(table)
    pruned = [line for line in best if line.labels["pruner"] != "none"]
    sentences = []
    for line in best:
        if line.labels["pruner"] == "none":
            sentences.append(f"Before pruning, the {line.title} gives its members away with {_leak(line)}.")
    if pruned:
        most = max(pruned, key=lambda line: line.cells["auc"].value or 0)
        least = min(pruned, key=lambda line: line.cells["auc"].value or 0)
        sentences.append(f"Of the pruned models, {_name(most)} gives away most: {_leak(most)}.")
        if least is not most:
            sentences.append(f"{_name(least)} gives away least: {_leak(least)}.")
    safe = all((line.cells["auc"].low or 0) <= 0.5 for line in best)
    if best and safe:
        sentences.append("No attack that was run does better than guessing; a stronger one might.")
    return sentences


def shown(cell: Cell | None, metric: str, interval: bool = True) -> str:
    """A number as a person reads it: shares in per cent, big counts with separators, with its interval."""
    if cell is None or cell.value is None:
        return "-"
    if metric in SHARES:
        return _number(cell, interval, 100, 1, "%")
    if metric == "auc":
        return _number(cell, interval, 1, 3, "")
    if metric.startswith("seconds"):
        return f"{1000 * cell.value:.2f} ms"
    return f"{cell.value:,.0f}" if cell.value == int(cell.value) else f"{cell.value:.3f}"


def _number(cell: Cell, interval: bool, scale: float, digits: int, unit: str) -> str:
    value, *ends = (None if x is None else f"{scale * x:.{digits}f}" for x in (cell.value, cell.low, cell.high))
    return f"{value}{unit} [{', '.join(map(str, ends))}]" if interval and None not in ends else f"{value}{unit}"


def _leak(line: Line) -> str:
    accuracy = shown(line.cells.get("test_accuracy"), "test_accuracy")
    return f"AUC {shown(line.cells['auc'], 'auc')} under {line.labels['attack']}, at a test accuracy of {accuracy}"


def _name(line: Line) -> str:
    return f"{line.title} ({line.labels['defense']})"


def _costs(table: Sequence[Line]) -> list[str]:
    """Cost measures in the order they were measured."""
    found = dict.fromkeys(name for line in table if line.labels["attack"] is None for name in line.cells)
    return [name for name in found if name not in MEASURES]


def _files(folder: Path) -> dict[str, Any]:
    config, marker = folder / "config.yaml", folder / "run.json"
    return {"config": config.read_text() if config.exists() else "", "environment": json.loads(marker.read_text())}
