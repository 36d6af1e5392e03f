"""Results as tables in a terminal: audits, inversions, federations, single models, and the list of methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from secateur.catalogue import split
from secateur.config.methods import FEDERATED, UPDATES, is_for_federations
from secateur.evaluation.limits import Check
from secateur.evaluation.submodel_advice import Advice, caution, from_rows
from secateur.evaluation.validity import METRIC
from secateur.metrics.membership import Estimate
from secateur.models.create import shorten_list
from secateur.report import federation, inversion, submodels
from secateur.report.audit import build_comparison
from secateur.report.headline import build_headline
from secateur.report.method_sheet import describe_needs
from secateur.report.summary import (
    APART,
    SummaryCell,
    SummaryLine,
    group_by,
    group_by_setting,
    select_attacks,
    summarise,
)
from secateur.report.table import Column, build_table, format_measure, label_column, name_measure, to_rich
from secateur.report.update_verdict import judge_federations, judge_updates
from secateur.report.verdict import write_verdict
from secateur.runs.rows import Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

AUDIT = {
    "test_accuracy": "test\naccuracy",
    "balanced_accuracy": "balanced\naccuracy",  # of an attack; plain accuracy is high where most rows are members
    "auc": "AUC",
    "tpr_at_fpr_0.01": "TPR at\n1% FPR",
}
RECOVERED = {
    "recognisable": "recog-\nnisable",
    "psnr_median": "PSNR\nmedian",
    "psnr_max": "PSNR\nmost",
    "label_accuracy": "labels\nright",
    "ssim": "SSIM",
    "lpips": "LPIPS",
}
FEDERATION = {
    "test_accuracy": "test\naccuracy",
    "bytes_up": "MB up",
    "bytes_down": "MB down",
    "lost_clients": "clients\nlost",
    "psnr_max": "highest\nPSNR",
    "auc": "member-\nship AUC",
}
SUBMODELS = {
    "test_accuracy": "server\naccuracy",
    "server_advantage": "server\nadvantage",
    "client_accuracy": "clients'\naccuracy",
    "client_advantage": "clients'\nadvantage",
    "bytes_up": "MB up",
    "bytes_down": "MB down",
}
LAYERS = 8  # layers whose sparsity is printed; the page has all
SAID = ("scaling", "outputs")  # checks that are printed though they hold: they show a wrong reading of the user's model
UNJUDGED = {"attack_loss": "loss"}  # if there is no truth
TABLES = {
    "attack": "on a model: who was in the training data? (secateur audit)",
    "inversion": "on an update: what was it made of? (secateur invert, secateur federate)",
    "updates": "of updates, before a client sends them (secateur invert, secateur federate)",
    "made": "of updates, where clients make them or agree on them (secateur invert)",
    "client": "of a federation's clients: what they withhold (secateur federate)",
    "training": "of training and fine-tuning (secateur audit)",
}


def _open_console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)  # a name in brackets is no style


def _print_sentences(console: Console, sentences: Iterable[str | None]) -> None:
    """Print each different sentence once."""
    for sentence in dict.fromkeys(sentences):
        if sentence is not None:
            console.print(sentence)


def print_audit(rows: Sequence[Row], limits: Sequence[Check] | None = None) -> None:
    """Print the attacks by model, then the verdict in sentences; `limits` are the checks of its limits, if any."""
    console, lines = _open_console(), summarise(row for row in rows if row.metric not in APART)
    attacks, headline = select_attacks(lines), build_headline(rows, limits)
    columns = [
        Column("model", lambda line: "\n".join(split(line.title)).replace(", ", ",\n")),
        Column("defense", lambda line: "\n".join(split(str(line.labels["defense"])))),
        Column("attack", _name_attack),
        *(_brief_column(name, heading) for name, heading in AUDIT.items()),
    ]
    console.print(to_rich(build_table("", attacks, columns), pad_edge=False, padding=(0, 1, 0, 0)))
    if (
        any("bytes_compressed" in line.cells for line in lines)
        and (comparison := build_comparison(lines, True)) is not None
    ):
        console.print(to_rich(comparison, pad_edge=False, padding=(0, 1, 0, 0)))
        timed = [line for line in lines if "seconds_compressed" in line.cells and line.cells["seconds_compressed"].note]
        _print_sentences(console, (f"{line.title}: {line.cells['seconds_compressed'].note}." for line in timed))
    unmeasured = [line for line in attacks if line.value("auc") is None and line.cells["auc"].note]
    _print_sentences(console, (f"{line.labels['attack']}: {line.cells['auc'].note}" for line in unmeasured))
    console.print(f"{headline.badge.text}. {' '.join(headline.sentences)}")
    _print_sentences(console, (sentence for holds, sentence in headline.checks if not holds))
    _print_sentences(console, (row.note for row in rows if row.metric == METRIC and row.extra.get("check") in SAID))
    _print_sentences(console, [_describe_layers(rows)])
    for group in group_by_setting(lines):
        for sentence in write_verdict(group):
            console.print(sentence)


def _describe_layers(rows: Sequence[Row]) -> str | None:
    """Return the shares of weights that are gone from the layers of a model that was pruned before the audit."""
    layers = {str(row.extra["layer"]): row.value or 0.0 for row in rows if row.metric == "layer_sparsity"}
    shares = shorten_list((f"{name} {100 * share:.0f} %" for name, share in layers.items()), LAYERS)
    return f"Weights gone, by layer: {shares}." if layers else None


def _name_attack(line: SummaryLine) -> str:
    return "\n".join([*split(str(line.labels["attack"])), *(["(adaptive)"] if line.labels.get("adaptive") else [])])


def _brief_column(metric: str, heading: str) -> Column:
    """Return the column of a measure without its interval; the AUC has half the width of its interval."""

    def build(line: SummaryLine) -> str:
        cell = line.cells.get(metric)
        text = format_measure(cell, metric, interval=False)
        if metric != "auc" or cell is None or cell.low is None or cell.high is None:
            return text
        return f"{text} ±{(cell.high - cell.low) / 2:.3f}"

    return Column(heading, build, number=True)


def print_inversion(rows: Sequence[Row]) -> None:
    """Print the results of each attack, then the knowledge that each attacker needs."""
    console, lines = _open_console(), inversion.summarise_attacks(rows)
    titles = RECOVERED if any("psnr" in line.cells for line in lines) else UNJUDGED
    measured = [name for name in titles if any(line.value(name) is not None for line in lines)]
    table = _fit_table(console, lines, [_brief_column(name, titles[name]) for name in measured])
    console.print(table)
    _print_sentences(console, (f"{line.labels['attack']}: {inversion.describe_attacker(line)}" for line in lines))
    _print_sentences(console, (line.cells["psnr"].note for line in lines if "psnr" in line.cells))
    _print_sentences(console, (verdict.text for verdict in judge_updates(rows)))


def _fit_table(console: Console, lines: Sequence[SummaryLine], measures: list[Column]) -> RichTable:
    """Return the table of inversions without the last measures for which the terminal is too narrow."""
    from rich.measure import Measurement

    while True:
        table = to_rich(build_table("", lines, [*_list_name_columns(lines), *measures]), pad_edge=False)
        if len(measures) <= 1 or Measurement.get(console, console.options, table).minimum <= console.width:
            return table
        measures = measures[:-1]


def _list_name_columns(lines: Sequence[SummaryLine]) -> list[Column]:
    """Return the columns that name a line: the attack with its settings, and labels that differ between lines."""
    columns = [Column("attack", lambda line: "\n".join(split(str(line.labels["attack"]))))]
    if {inversion.name_defense(line.labels) for line in lines} - {"none", "None"}:
        columns.append(Column("defense", lambda line: inversion.name_defense(line.labels)))
    if len({str(line.labels["labels"]) for line in lines}) > 1:
        columns.append(Column("labels", lambda line: str(line.labels["labels"])))
    return columns


def print_federation(rows: Sequence[Row]) -> None:
    """Print the final values of each federation and the results of its attackers."""
    if any(map(submodels.is_submodel, rows)):
        return print_submodels(rows)
    lines = federation.summarise_federations(rows)
    columns = [
        Column("base pruning", lambda line: "\n".join(split(str(line.labels["base_pruning"])))),
        Column("defense", lambda line: "\n".join(split(str(line.labels["defense"])))),
    ]
    attacked = any("auc" in line.cells for line in lines)
    columns += [_brief_column(name, heading) for name, heading in FEDERATION.items() if name != "auc" or attacked]
    console = _open_console()
    console.print(to_rich(build_table("", lines, columns)))
    _print_sentences(console, federation.list_observed(rows))
    _print_sentences(console, (verdict.text for verdict in judge_federations(rows)))


def print_submodels(rows: Sequence[Row]) -> None:
    """Print the final values of each federation, means over the seeds; or advice."""
    console = _open_console()
    for row, advice in from_rows(rows):
        _print_advice(row, advice, console)
    exposed = [line for line in submodels.summarise_federations(rows) if line.labels["attack"]]
    attacks = list(dict.fromkeys(line.labels["attack"] for line in exposed)) or [""]
    whole = [row for row in rows if row.extra.get("client") is None and not {"advice", "scope"} & row.extra.keys()]
    last = [row for row in whole if row.extra["round"] == row.extra["rounds"]]
    trained = summarise(last, lambda row: {"submodels": row.extra["submodels"], "defense": str(row.defense)})
    lines = [_join_attack(line, attack, exposed) for line in trained for attack in attacks]
    visible = (True, any(row.defense not in ("none", None) for row in rows), len(attacks) > 1)
    names = [label_column("submodels", "rule"), label_column("defense"), label_column("attack")]
    columns = [*compress(names, visible), *(_brief_column(name, heading) for name, heading in SUBMODELS.items())]
    if lines:
        console.print(to_rich(build_table("", lines, columns)))
    for sentence in [*_describe_excluded(exposed), *submodels.describe_unmet_clients(rows)]:
        console.print(sentence, soft_wrap=True)
    if any(map(inversion.is_inversion, rows)):
        print_inversion(rows)


def _join_attack(line: SummaryLine, attack: str, exposed: Sequence[SummaryLine]) -> SummaryLine:
    """Return a federation's line with the advantages of an attack; of several federations the last one's."""
    labels = line.labels | {"attack": attack}
    same = [x for x in exposed if all(str(x.labels[name]) == str(value) for name, value in labels.items())]
    advantages = {k: v for x in same[-1:] for k, v in x.cells.items() if k.endswith("_advantage")}
    return SummaryLine(labels, line.cells | advantages)


def _describe_excluded(lines: Sequence[SummaryLine]) -> list[str]:
    """Return the number of clients outside the mean advantage, and the first one's reason.

    Federations with the same text share a line.
    """
    rules: dict[str, list[str]] = {}
    for line in lines:
        clients, excluded = submodels.list_excluded(line)
        if excluded:
            text = f"{len(excluded)} of {clients} clients could not be attacked: "
            rules.setdefault(text + excluded[0].removeprefix("excluded: "), []).append(str(line.labels["submodels"]))
    return [f"{', '.join(dict.fromkeys(names))}: {text}" for text, names in rules.items()]


def _print_advice(row: Row, advice: Sequence[Advice], console: Console) -> None:
    """Print every client's expected values for each model size with 95 % intervals, and the advised size."""
    defense = "" if row.defense in ("none", None) else f", {row.defense}"
    heading = f"{row.extra['submodels']}{defense}, seed {row.seed}: expected values of each model size"
    lines = [(one, option) for one in advice for option in one.options]
    columns = [
        Column("client", lambda x: str(x[0].client) if x[1] is x[0].options[0] else "", number=True),
        Column("examples", lambda x: str(x[0].data_size) if x[1] is x[0].options[0] else "", number=True),
        Column("channels", lambda x: f"{x[1].rate:g}", number=True),
        Column("accuracy", lambda x: _format_estimate(x[1].accuracy), number=True),
        Column(f"advantage of {row.attack or 'the attack'}", lambda x: _format_estimate(x[1].advantage), number=True),
    ]
    console.print(to_rich(build_table(heading, lines, columns), title=heading, title_justify="left"))
    for sentence in [*(f"client {one.client}: {one.words}" for one in advice), caution(row)]:
        if sentence is not None:
            console.print(sentence, soft_wrap=True)


def _format_estimate(estimate: Estimate | None) -> str:
    """Return an estimate with its interval in percent."""
    if estimate is None:
        return "-"
    value, low, high = (100 * x for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:.1f}% [{low:.1f}, {high:.1f}]"


def print_measures(rows: Sequence[Row]) -> None:
    """Print one model's measures, a line each."""
    from rich.table import Table

    table = Table("measure", "value", "note")
    for line in summarise(rows):
        last: SummaryCell | None = None
        for name, cell in line.cells.items():
            note = "as above" if cell.note and last is not None and cell.note == last.note else cell.note
            table.add_row(name_measure(name), format_measure(cell, name), note)
            last = cell
    _open_console().print(table)


def print_methods(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the methods of a kind: attacks by target, with the knowledge they need, defenses by where they act."""
    from rich.table import Table

    for kind, same in group_by(rows, _choose_table).items():
        attacking = kind in ("attack", "inversion")
        table = Table(box=None, header_style="bold", title=TABLES.get(kind or ""), title_justify="left")
        for name in ("name", "paper", "summary", *(["needs to know"] if attacking else [])):
            table.add_column(name, no_wrap=name in ("name", "paper"))
        for row in same:
            table.add_row(row["name"], row["paper"], row["summary"], *([describe_needs(row)] if attacking else []))
        _open_console().print(table)


def _choose_table(row: Mapping[str, Any]) -> str | None:
    """Return the table of a method: its kind, or where a defense acts."""
    if (acts_on := row.get("acts_on")) is None:
        return row.get("kind")
    if acts_on in FEDERATED:
        return "client"
    return ("updates" if is_for_federations(row["name"]) else "made") if acts_on in UPDATES else "training"
