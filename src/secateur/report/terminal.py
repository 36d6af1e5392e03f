"""Results as tables in a terminal: audits, inversions, federations, single models, and the list of methods."""

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
from secateur.report.summary import SummaryCell, SummaryLine, attacks, by_setting, lines
from secateur.report.verdict import verdict
from secateur.runs.rows import Row

if TYPE_CHECKING:
    from rich.console import Console

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
UNJUDGED = {"attack_loss": "loss"}  # if there is no truth
HEADS = ("server\naccuracy", "server\nadvantage", "clients'\naccuracy", "clients'\nadvantage", "MB up", "MB down")
WHOLE = 16  # characters of a name that a narrow terminal does not split
TABLES = {
    "attack": "on a model: who was in the training data? (secateur audit)",
    "inversion": "on an update: what was it made of? (secateur invert, secateur federate)",
    "updates": "of updates, before a client sends them (secateur invert, secateur federate)",
    "made": "of updates, where clients make them or agree on them (secateur invert)",
    "client": "of a federation's clients: what they withhold (secateur federate)",
    "training": "of training and fine-tuning (secateur audit)",
}


def print_audit(rows: Sequence[Row]) -> None:
    """Print the attacks by model, then the verdict in sentences."""
    from rich.console import Console
    from rich.table import Table

    console, results = Console(highlight=False), lines(rows)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("model", "defense", "attack"):
        table.add_column(name, overflow="fold")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for line in attacks(results):
        cells = [_brief(line.cells.get(name), name) for name in COLUMNS]
        attack = [*split(str(line.labels["attack"])), *(["(adaptive)"] if line.labels["adaptive"] else [])]
        names = (split(line.title), split(str(line.labels["defense"])), attack)
        table.add_row(*map("\n".join, names), *cells)
    console.print(table)
    unmeasured = [line for line in attacks(results) if line.value("auc") is None and line.cells["auc"].note]
    for sentence in dict.fromkeys(f"{line.labels['attack']}: {line.cells['auc'].note}" for line in unmeasured):
        console.print(sentence)
    for group in by_setting(results):
        for sentence in verdict(group):
            console.print(sentence)


def _brief(cell: SummaryCell | None, name: str) -> str:
    """Return a number for a narrow table; the AUC with half the width of its interval."""
    text = shown(cell, name, interval=False)
    if name != "auc" or cell is None or cell.low is None or cell.high is None:
        return text
    return f"{text} ±{(cell.high - cell.low) / 2:.3f}"


def print_inversion(rows: Sequence[Row]) -> None:
    """Print the results of each attack, then the knowledge that each attacker needs."""
    from rich.console import Console
    from rich.table import Table

    console, results = Console(highlight=False), inversion.attacked(rows)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, texts in _names(results).items():
        longest = max(len(part) for text in texts for part in text.split("\n"))
        table.add_column(heading, overflow="fold", min_width=min(WHOLE, longest))
    titles = RECOVERED if any("psnr" in line.cells for line in results) else UNJUDGED
    metrics = [name for name in titles if any(line.value(name) is not None for line in results)]
    for name in metrics:
        table.add_column(titles[name], justify="right", no_wrap=True)
    for number, line in enumerate(results):
        cells = [shown(line.cells.get(name), name, interval=False) for name in metrics]
        table.add_row(*(texts[number] for texts in _names(results).values()), *cells)
    console.print(table)
    for attacker in dict.fromkeys(f"{line.labels['attack']}: {inversion.threat(line)}" for line in results):
        console.print(attacker)
    for note in dict.fromkeys(line.cells["psnr"].note for line in results if "psnr" in line.cells):
        if note is not None:
            console.print(note)
    for sentence in inversion.verdict(results):
        console.print(sentence)


def _names(results: Sequence[SummaryLine]) -> dict[str, list[str]]:
    """Return the columns that name a line: the attack with its settings, and labels that differ between lines."""
    columns = {"attack": ["\n".join(split(str(line.labels["attack"]))) for line in results]}
    defenses = [inversion.defended(line.labels) for line in results]
    labels = [str(line.labels["labels"]) for line in results]
    return (
        columns
        | ({"defense": defenses} if set(defenses) - {"none", "None"} else {})
        | ({"labels": labels} if len(set(labels)) > 1 else {})
    )


def print_federation(rows: Sequence[Row]) -> None:
    """Print the final values of each federation and the results of its attackers."""
    from rich.console import Console
    from rich.table import Table

    if any("submodels" in row.extra for row in rows):
        return print_submodels(rows)
    console, table = Console(highlight=False), Table(box=None, header_style="bold")
    for name in ("base pruning", "defense"):
        table.add_column(name, overflow="fold")
    results = federation.table(rows)
    exposed = any(line.auc is not None for line in results)
    membership = ["member-\nship AUC"] if exposed else []
    for name in ("test\naccuracy", "MB up", "MB down", "clients\nlost", "highest\nPSNR", *membership):
        table.add_column(name, justify="right", no_wrap=True)
    for line in results:
        accuracy = "-" if line.accuracy is None else f"{100 * line.accuracy:.1f}%"
        sent = ["-" if value is None else federation.megabytes(value) for value in (line.up, line.down)]
        leaks = ["-" if line.leak is None else f"{line.leak:.1f} dB"]
        leaks += ["-" if line.auc is None else f"{line.auc:.3f}"] if exposed else []
        names = ("\n".join(split(str(line.labels[label]))) for label in ("base_pruning", "defense"))
        table.add_row(*names, accuracy, *sent, str(line.lost), *leaks)
    console.print(table)


def print_submodels(rows: Sequence[Row]) -> None:
    """Print the final values of each federation, means over the seeds; or advice."""
    from rich.console import Console
    from rich.table import Table

    console, table = Console(highlight=False), Table(box=None, header_style="bold")
    for row, advice in from_rows(rows):
        _print_advice(row, advice, console)
    parties = submodels.parties(rows)
    exposed = {(x.labels["submodels"], x.labels["defense"], x.attack): x for x in submodels.federations(parties)}
    attack_names = list(dict.fromkeys(attack for _, _, attack in exposed)) or [""]
    defended = any(row.defense not in ("none", None) for row in rows)
    visible = (True, defended, len(attack_names) > 1)  # the columns that tell lines apart
    for name in compress(("rule", "defense", "attack"), visible):
        table.add_column(name, overflow="fold")
    for name in HEADS:
        table.add_column(name, justify="right", no_wrap=True)
    whole = [row for row in rows if row.extra.get("client") is None and not {"advice", "scope"} & row.extra.keys()]
    last = [row for row in whole if row.extra["round"] == row.extra["rounds"]]
    for key in dict.fromkeys((row.extra["submodels"], str(row.defense)) for row in last):
        same = [row for row in last if (row.extra["submodels"], str(row.defense)) == key]
        for attack in attack_names:
            table.add_row(*compress((*key, attack), visible), *_cells(same, exposed.get((*key, attack))))
    if table.row_count:
        console.print(table)
    for line in _excluded(list(exposed.values())):
        console.print(line, soft_wrap=True)


def _cells(rows: Sequence[Row], exposed: submodels.SubmodelPoint | None) -> list[str]:
    """Return the cells of one federation under one attack."""

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


def _excluded(federations: Sequence[submodels.SubmodelPoint]) -> list[str]:
    """Return the number of clients outside the mean advantage, and the first one's reason.

    Federations with the same text share a line.
    """
    lines: dict[str, list[str]] = {}
    for line in (line for line in federations if line.excluded):
        of, why = f"{len(line.excluded)} of {line.clients} clients", line.excluded[0].removeprefix("excluded: ")
        lines.setdefault(f"{of} could not be attacked: {why}", []).append(str(line.labels["submodels"]))
    return [f"{', '.join(dict.fromkeys(rules))}: {line}" for line, rules in lines.items()]


def _print_advice(row: Row, advice: Sequence[Advice], console: Console) -> None:
    """Print every client's expected values for each model size with 95 % intervals, and the advised size."""
    from rich.table import Table

    defense = "" if row.defense in ("none", None) else f", {row.defense}"
    heading = f"{row.extra['submodels']}{defense}, seed {row.seed}: what each size of model promises"
    table = Table(box=None, header_style="bold", title=heading, title_justify="left")
    for name in ("client", "examples", "channels", "accuracy", f"advantage of {row.attack or 'the attack'}"):
        table.add_column(name, justify="right")
    for one in advice:
        for option in one.options:
            who = (str(one.client), str(one.data_size)) if option is one.options[0] else ("", "")
            table.add_row(*who, f"{option.rate:g}", _said(option.accuracy), _said(option.advantage))
    console.print(table)
    for one in advice:
        console.print(f"client {one.client}: {one.words}", soft_wrap=True)
    if (text := caution(row)) is not None:
        console.print(text, soft_wrap=True)


def _said(estimate: Estimate | None) -> str:
    """Return an estimate with its interval in percent."""
    if estimate is None:
        return "-"
    value, low, high = (100 * x for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]"


def print_measures(rows: Sequence[Row]) -> None:
    """Print one model's measures, a line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", "value", "note")
    for line in lines(rows):
        last_note = None
        for name, cell in line.cells.items():
            table.add_row(
                title(name), shown(cell, name), "as above" if cell.note and cell.note == last_note else cell.note
            )
            last_note = cell.note
    Console().print(table)


def print_methods(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the methods of a kind: attacks by target, with the knowledge they need, defenses by where they act."""
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
    """Return the table of a method: its kind, or where a defense acts."""
    if (place := row.get("acts_on")) is None:
        return row.get("kind")
    if place in FEDERATED:
        return "client"
    return ("updates" if federated(row["name"]) else "made") if place in UPDATES else "training"


def _needs(row: Mapping[str, Any]) -> str:
    """Return what an attacker must see and know."""
    if "threat" in row:
        return str(row["threat"])
    shadows = {"none": "", "needed": "; shadow models of its own"}.get(row["shadows"], f"; models: {row['shadows']}")
    return f"the model's {row['sees']}{shadows}"
