"""Results as tables in a terminal.

Federations over sub-models as tables in a terminal: what each came to, and what its clients are advised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from secateur.catalogue import split
from secateur.config.methods import FEDERATED, UPDATES, federated
from secateur.evaluation.submodel_advice import Advice, caution, from_rows
from secateur.metrics.membership import Estimate
from secateur.report import federation, inversion, submodels
from secateur.report.measures import shown, title
from secateur.report.summary import Cell, Line, attacks, by_setting, lines
from secateur.report.verdict import verdict
from secateur.runs.rows import Row

if TYPE_CHECKING:
    from rich.console import Console

HEADS = ("server\naccuracy", "server\nadvantage", "clients'\naccuracy", "clients'\nadvantage", "MB up", "MB down")

COLUMNS = {
    "test_accuracy": "test\naccuracy",
    "balanced_accuracy": "balanced\naccuracy",  # of an attack; plain accuracy is high where most rows are members
    "auc": "AUC",
    "tpr_at_fpr_0.01": "TPR at\n1% FPR",
}

RECOVERED = {
    "psnr_median": "PSNR\nmedian",
    "psnr_max": "PSNR\nmost",
    "ssim": "SSIM",
    "lpips": "LPIPS",
    "label_accuracy": "labels\nright",
    "recognisable": "recog-\nnisable",
}
UNJUDGED = {"attack_loss": "loss"}  # where there is no truth
WHOLE = 16  # characters of a name that a narrow terminal does not cut up
TABLES = {
    "attack": "on a model: who was in the training data? (secateur audit)",
    "inversion": "on an update: what was it made of? (secateur invert, secateur federate)",
    "updates": "of updates, before a client sends them (secateur invert, secateur federate)",
    "made": "of updates, where clients make them or agree on them (secateur invert)",
    "client": "of a federation's clients: what they withhold (secateur federate)",
    "training": "of training and fine-tuning (secateur audit)",
}


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


def print_audit(rows: Sequence[Row]) -> None:
    """The attacks by model, then what they mean."""
    from rich.console import Console
    from rich.table import Table

    console, found = Console(highlight=False), lines(rows)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("model", "defense", "attack"):
        table.add_column(name, overflow="fold")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for line in attacks(found):
        cells = [_brief(line.cells.get(name), name) for name in COLUMNS]
        told = [*split(str(line.labels["attack"])), *(["(adaptive)"] if line.labels["adaptive"] else [])]
        names = (split(line.title), split(str(line.labels["defense"])), told)
        table.add_row(*map("\n".join, names), *cells)
    console.print(table)
    unmeasured = [line for line in attacks(found) if line.value("auc") is None and line.cells["auc"].note]
    for sentence in dict.fromkeys(f"{line.labels['attack']}: {line.cells['auc'].note}" for line in unmeasured):
        console.print(sentence)
    for group in by_setting(found):
        for sentence in verdict(group):
            console.print(sentence)


def print_inversion(rows: Sequence[Row]) -> None:
    """What each attack recovered, then what each attacker must know."""
    from rich.console import Console
    from rich.table import Table

    console, found = Console(highlight=False), inversion.attacked(rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, texts in _names(found).items():
        longest = max(len(part) for text in texts for part in text.split("\n"))
        table.add_column(heading, overflow="fold", min_width=min(WHOLE, longest))
    titles = RECOVERED if any("psnr" in line.cells for line in found) else UNJUDGED
    metrics = [name for name in titles if any(line.value(name) is not None for line in found)]
    for name in metrics:
        table.add_column(titles[name], justify="right", no_wrap=True)
    for number, line in enumerate(found):
        cells = [shown(line.cells.get(name), name, interval=False) for name in metrics]
        table.add_row(*(texts[number] for texts in _names(found).values()), *cells)
    console.print(table)
    for attacker in dict.fromkeys(f"{line.labels['attack']}: {inversion.threat(line)}" for line in found):
        console.print(attacker)
    for note in dict.fromkeys(line.cells["psnr"].note for line in found if "psnr" in line.cells):
        if note is not None:
            console.print(note)
    for sentence in inversion.verdict(found):
        console.print(sentence)


def _names(found: Sequence[Line]) -> dict[str, list[str]]:
    """The columns that name a line: its attack and what was set of it, and what is not the same for all."""
    columns = {"attack": ["\n".join(split(str(line.labels["attack"]))) for line in found]}
    defenses = [inversion.defended(line.labels) for line in found]
    labels = [str(line.labels["labels"]) for line in found]
    return (
        columns
        | ({"defense": defenses} if set(defenses) - {"none", "None"} else {})
        | ({"labels": labels} if len(set(labels)) > 1 else {})
    )


def print_federation(rows: Sequence[Row]) -> None:
    """What each federation came to, and what its attackers recovered."""
    from rich.console import Console
    from rich.table import Table

    if any("submodels" in row.extra for row in rows):
        return print_submodels(rows)
    console, table = Console(highlight=False), Table(box=None, header_style="bold")
    for name in ("base pruning", "defense"):
        table.add_column(name, overflow="fold")
    found = federation.table(rows)
    exposed = any(each.auc is not None for each in found)
    membership = ["member-\nship AUC"] if exposed else []
    for name in ("test\naccuracy", "MB up", "MB down", "clients\nlost", "highest\nPSNR", *membership):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        accuracy = "-" if each.accuracy is None else f"{100 * each.accuracy:.1f}%"
        sent = ["-" if value is None else federation.megabytes(value) for value in (each.up, each.down)]
        leaks = ["-" if each.leak is None else f"{each.leak:.1f} dB"]
        leaks += ["-" if each.auc is None else f"{each.auc:.3f}"] if exposed else []
        names = ("\n".join(split(str(each.labels[label]))) for label in ("base_pruning", "defense"))
        table.add_row(*names, accuracy, *sent, str(each.lost), *leaks)
    console.print(table)


def print_methods(rows: Sequence[Mapping[str, Any]]) -> None:
    """The methods of a kind; attacks by what they attack, with what they need to know, defenses by where they act."""
    from rich.console import Console
    from rich.table import Table

    for kind in dict.fromkeys(map(_group, rows)):
        attacking = kind in ("attack", "inversion")
        table = Table(box=None, header_style="bold", title=TABLES.get(kind or ""), title_justify="left")
        for name in ("name", "paper", "summary", *(["needs to know"] if attacking else [])):
            table.add_column(name, no_wrap=name in ("name", "paper"))
        for row in (row for row in rows if _group(row) == kind):
            table.add_row(row["name"], row["paper"], row["summary"], *([_needs(row)] if attacking else []))
        Console(highlight=False).print(table)


def _group(row: Mapping[str, Any]) -> str | None:
    """The table that a method stands in: its kind, or where a defense acts."""
    if (place := row.get("acts_on")) is None:
        return row.get("kind")
    if place in FEDERATED:
        return "client"
    return ("updates" if federated(row["name"]) else "made") if place in UPDATES else "training"


def _needs(row: Mapping[str, Any]) -> str:
    """What an attacker must see and know."""
    if "threat" in row:
        return str(row["threat"])
    shadows = {"none": "", "needed": "; shadow models of its own"}.get(row["shadows"], f"; models: {row['shadows']}")
    return f"the model's {row['sees']}{shadows}"


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
        told = None
        for name, cell in line.cells.items():
            table.add_row(title(name), shown(cell, name), "as above" if cell.note and cell.note == told else cell.note)
            told = cell.note
    Console().print(table)
