"""Federations over sub-models as tables in a terminal: what each came to, and what its clients are advised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from secateur.federated.submodels.advice import Advice, Option, from_rows
from secateur.report import submodels
from secateur.rows import Row

if TYPE_CHECKING:
    from rich.console import Console

HEADS = ("server\naccuracy", "server\nadvantage", "clients'\naccuracy", "clients'\nadvantage", "MB up", "MB down")


def print_submodels(rows: Sequence[Row]) -> None:
    """What each federation came to at its end, the mean over the seeds; or advice."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(highlight=False), Table(box=None, header_style="bold")
    for told, advice in from_rows(rows):
        _print_advice(told, advice, console)
    for name in ("sub-models", "defense"):
        table.add_column(name, overflow="fold")
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    whole = [row for row in rows if row.extra.get("client") is None and not {"advice", "scope"} & row.extra.keys()]
    last = [row for row in whole if row.extra["round"] == row.extra["rounds"]]
    exposed = {(x.labels["submodels"], x.labels["defense"]): x for x in submodels.federations(submodels.parties(rows))}
    for key in dict.fromkeys((row.extra["submodels"], row.defense) for row in last):
        own = [row for row in last if (row.extra["submodels"], row.defense) == key]
        table.add_row(*map(str, key), *_cells(own, exposed.get(key)))
    if table.row_count:
        console.print(table)


def _cells(rows: Sequence[Row], exposed: submodels.Federated | None) -> list[str]:
    def mean(metric: str) -> float | None:
        values = [row.value for row in rows if row.metric == metric and row.value is not None]
        return sum(values) / len(values) if values else None

    server = exposed.server.advantage if exposed is not None and exposed.server is not None else None
    shares = [mean("test_accuracy"), None if server is None else server.value]
    shares += [mean("client_accuracy"), None if exposed is None else exposed.advantage]
    sent = [mean(name) for name in ("bytes_up", "bytes_down")]
    cells = ["-" if value is None else f"{value:.1%}" for value in shares]
    return cells + ["-" if value is None else f"{value / 1e6:.2f}" for value in sent]


def _print_advice(told: Row, advice: Sequence[Advice], console: Console) -> None:
    """What every client may expect of each model size, and what to take."""
    from rich.table import Table

    title = f"{told.extra['submodels']}, seed {told.seed}: accuracy and advantage with each share of the channels"
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for name in ("client", "examples", *(f"{option.rate:g}" for option in advice[0].options)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("advice", overflow="fold")
    for one in advice:
        table.add_row(str(one.client), str(one.data_size), *map(_option, one.options), one.words)
    console.print(table)


def _option(option: Option) -> str:
    advantage = "-" if option.advantage is None else f"{100 * option.advantage.value:.1f}%"
    return f"{100 * option.accuracy.value:.1f}%, {advantage}"
