"""Results as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.report.measures import shown, title
from secateur.report.summary import attacks, by_setting, lines
from secateur.report.verdict import verdict
from secateur.rows import Row

COLUMNS = ("test_accuracy", "attack_accuracy", "auc", "tpr_at_fpr_0.01")


def print_audit(rows: Sequence[Row]) -> None:
    """The attacks by model, then what they mean."""
    from rich.console import Console
    from rich.table import Table

    console, found = Console(highlight=False), lines(rows)
    table = Table(box=None, header_style="bold")
    for name in ("model", "defense", "attack"):
        table.add_column(name, no_wrap=True)
    for name in COLUMNS:
        table.add_column(title(name), justify="right", no_wrap=name == "auc")
    for line in attacks(found):
        cells = (shown(line.cells.get(name), name, interval=name == "auc") for name in COLUMNS)
        table.add_row(line.title, line.labels["defense"], line.labels["attack"], *cells)
    console.print(table)
    for group in by_setting(found):
        for sentence in verdict(group):
            console.print(sentence)


def print_measures(rows: Sequence[Row]) -> None:
    """One model's measures, a line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", "value", "note")
    for line in lines(rows):
        for name, cell in line.cells.items():
            table.add_row(title(name), shown(cell, name), cell.note or "")
    Console().print(table)
