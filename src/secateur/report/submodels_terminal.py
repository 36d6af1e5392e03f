"""Federations over sub-models as tables in a terminal: what each came to, and what its clients are advised."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TYPE_CHECKING

from secateur.federated.submodels.advice import Advice, caution, from_rows
from secateur.metrics.membership import Estimate
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
    lines = submodels.parties(rows)
    exposed = {(x.labels["submodels"], x.labels["defense"], x.attack): x for x in submodels.federations(lines)}
    attacks = list(dict.fromkeys(attack for _, _, attack in exposed)) or [""]
    defended = any(row.defense not in ("none", None) for row in rows)
    shown = (True, defended, len(attacks) > 1)  # of what tells a line from the others
    for name in compress(("rule", "defense", "attack"), shown):
        table.add_column(name, overflow="fold")
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    whole = [row for row in rows if row.extra.get("client") is None and not {"advice", "scope"} & row.extra.keys()]
    last = [row for row in whole if row.extra["round"] == row.extra["rounds"]]
    for key in dict.fromkeys((row.extra["submodels"], str(row.defense)) for row in last):
        own = [row for row in last if (row.extra["submodels"], str(row.defense)) == key]
        for attack in attacks:
            table.add_row(*compress((*key, attack), shown), *_cells(own, exposed.get((*key, attack))))
    if table.row_count:
        console.print(table)
    for line in _excluded(list(exposed.values())):
        console.print(line, soft_wrap=True)


def _excluded(federations: Sequence[submodels.Federated]) -> list[str]:
    """How many clients are in no mean advantage, and the first one's reason; federations alike in this share a line."""
    lines: dict[str, list[str]] = {}
    for each in (each for each in federations if each.excluded):
        of, why = f"{len(each.excluded)} of {each.clients} clients", each.excluded[0].removeprefix("excluded: ")
        lines.setdefault(f"{of} could not be attacked: {why}", []).append(str(each.labels["submodels"]))
    return [f"{', '.join(dict.fromkeys(rules))}: {line}" for line, rules in lines.items()]


def _cells(rows: Sequence[Row], exposed: submodels.Federated | None) -> list[str]:
    def mean(metric: str) -> float | None:
        values = [row.value for row in rows if row.metric == metric and row.value is not None]
        return sum(values) / len(values) if values else None

    server = exposed.server.advantage if exposed is not None and exposed.server is not None else None
    shares = [mean("test_accuracy"), None if server is None else server.value]
    clients = None if exposed is None else exposed.advantage
    shares += [mean("client_accuracy"), None if clients is None else clients.value]
    sent = [mean(name) for name in ("bytes_up", "bytes_down")]
    cells = ["-" if value is None else f"{value:.1%}" for value in shares]
    return cells + ["-" if value is None else f"{value / 1e6:.2f}" for value in sent]


def _print_advice(told: Row, advice: Sequence[Advice], console: Console) -> None:
    """What every client may expect of each model size with its 95 % interval, and what to take."""
    from rich.table import Table

    defense = "" if told.defense in ("none", None) else f", {told.defense}"
    title = f"{told.extra['submodels']}{defense}, seed {told.seed}: what each size of model promises"
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for name in ("client", "examples", "channels", "accuracy", f"advantage of {told.attack or 'the attack'}"):
        table.add_column(name, justify="right")
    for one in advice:
        for option in one.options:
            who = (str(one.client), str(one.data_size)) if option is one.options[0] else ("", "")
            table.add_row(*who, f"{option.rate:g}", _said(option.accuracy), _said(option.advantage))
    console.print(table)
    for one in advice:
        console.print(f"client {one.client}: {one.words}", soft_wrap=True)
    if (said := caution(told)) is not None:
        console.print(said, soft_wrap=True)


def _said(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    value, low, high = (100 * each for each in (estimate.value, estimate.low, estimate.high))
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]"
