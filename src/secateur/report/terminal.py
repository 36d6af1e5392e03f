"""Results as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.report.measures import shown, title
from secateur.report.summary import Cell, attacks, by_setting, lines
from secateur.report.verdict import verdict
from secateur.rows import Row

COLUMNS = {
    "test_accuracy": "test\naccuracy",
    "attack_accuracy": "attack\naccuracy",
    "auc": "AUC",
    "tpr_at_fpr_0.01": "TPR at\n1% FPR",
}


def print_audit(rows: Sequence[Row]) -> None:
    """The attacks by model, then what they mean."""
    from rich.console import Console
    from rich.table import Table

    console, found = Console(highlight=False), lines(rows)
    table = Table(box=None, header_style="bold")
    for name in ("model", "defense", "attack"):
        table.add_column(name, overflow="fold")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for line in attacks(found):
        cells = [_brief(line.cells.get(name), name) for name in COLUMNS]
        attack = f"{line.labels['attack']} (adaptive)" if line.labels["adaptive"] else line.labels["attack"]
        table.add_row(line.title, line.labels["defense"], attack, *cells)
    console.print(table)
    for group in by_setting(found):
        for sentence in verdict(group):
            console.print(sentence)


def _brief(cell: Cell | None, name: str) -> str:
    """A number for a narrow table; the AUC with half the width of its interval."""
    text = shown(cell, name, interval=False)
    if name != "auc" or cell is None or cell.low is None or cell.high is None:
        return text
    return f"{text} ±{(cell.high - cell.low) / 2:.3f}"


def print_measures(rows: Sequence[Row]) -> None:
    """One model's measures, a line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", "value", "note")
    for line in lines(rows):
        for name, cell in line.cells.items():
            table.add_row(title(name), shown(cell, name), cell.note or "")
    Console().print(table)
