"""Audits on the page: the facts, and the tables of attacks, models, costs, exposed records and groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from secateur.report import summary, table
from secateur.report.summary import Labels, SummaryLine, attack_key, join_distinct, model_key, name_model
from secateur.report.table import COST, MODEL, Column, ReportTable, TableCell
from secateur.runs.rows import Row

COMMON = (*summary.MODEL, "attack", "adaptive")  # labels that every audit has; others describe the attacker
SHOWN = ("auc", "tpr_at_fpr_0.01", "tpr_at_fpr_0.001", "balanced_accuracy")  # of an attack; all are in its rows
MOST_MODELS = 20  # whose exposed records and groups the page lists
MOST_GROUPS = 20  # groups that the page lists
BY_AUC = ("AUC", lambda line: line.rank("auc"))  # the order of lines where a page has too many
VARYING = ("run", "model", "dataset")  # labels that are columns only if the lines differ in them


def list_facts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the facts of the audit, in the order of the work."""
    pruned = [row for row in rows if row.pruner not in (None, "none", "given")]
    attacked = [row for row in rows if row.attack is not None]
    facts = {
        "Network": join_distinct(row.model for row in rows),
        "Data": join_distinct(row.dataset for row in rows),
        "Compressors": join_distinct(row.pruner for row in pruned),
        "Sparsities": join_distinct(sorted({row.sparsity for row in pruned if row.sparsity is not None})),
        "Defenses": join_distinct(row.defense for row in pruned),
        "Attacks": join_distinct(row.attack for row in attacked),
        "Attacker": join_distinct(
            "knows the defense" if row.adaptive else "does not know the defense"
            for row in attacked
            if row.defense not in (None, "none", "given")
        ),
        "Seeds": join_distinct(sorted({row.seed for row in rows})),
    }
    return {name: text for name, text in facts.items() if text}


def name_audited(rows: Sequence[Row]) -> str:
    """Name what was audited, for the title of the page."""
    if rows and all(row.dataset == "saved predictions" for row in rows):
        return "the saved predictions"
    pruners = {row.pruner for row in rows if row.pruner not in (None, "none")}
    if pruners - {"given"}:
        deed = summary.name_deed((row.pruner, row.sparsity) for row in rows)
        return "the pruned models" if deed == "pruning" else "the compressed models"
    shipped = [row for row in rows if row.pruner != "none"] or rows
    models = {(row.model, row.defense, row.extra.get("run"), row.seed) for row in shipped}
    return "the models" if len(models) > 1 else "the model"


def build_tables(lines: Sequence[SummaryLine]) -> dict[str, ReportTable]:
    """Return the tables of attacks, of accuracy and gaps, and of costs; only those that have measures."""
    attacks, models = summary.select_attacks(lines), summary.select_models(lines)
    varying = [table.label_column(name) for name in VARYING if summary.differ((line.labels for line in lines), name)]
    tables = {}
    if (comparison := build_comparison(lines)) is not None:
        tables["comparison"] = comparison
    if attacks:
        strongest = {attack_key(line.labels) for line in summary.select_strongest(lines)}
        more = list(dict.fromkeys(name for line in attacks for name in line.labels if name not in COMMON))
        tables["attacks"] = table.build_table(
            "Attacks by compressor, sparsity and defense",
            attacks,
            [*varying, *_list_attack_columns(attacks, more)],
            id="attacks",
            wide=len(varying) + len(more) > 1,
            is_bold=lambda line: attack_key(line.labels) in strongest,
            rank=BY_AUC,
        )
    aucs = {model_key(line.labels): line.rank("auc") for line in summary.select_strongest(lines)}
    names = [*varying, Column("model", lambda line: line.title), table.label_column("defense")]

    def rank_model(line: SummaryLine) -> float:
        return aucs.get(model_key(line.labels), -math.inf)

    metrics = list(dict.fromkeys(name for line in models for name in line.cells))
    for key, caption, chosen in (
        ("models", "Accuracy and gaps by model", table.order_measures((x for x in metrics if x not in COST), MODEL)),
        ("costs", "Cost by model", [name for name in COST if name in metrics]),
    ):
        if chosen:
            columns = [*names, *map(table.measure_column, chosen)]
            tables[key] = table.build_table(caption, models, columns, id=key, rank=("AUC", rank_model))
    return tables


def build_comparison(lines: Sequence[SummaryLine], brief: bool = False) -> ReportTable | None:
    """Return one line for each model: its leakage, accuracy, size and latency; None if nothing was compressed.

    Args:
        lines: lines of models and of attacks.
        brief: True for a narrow terminal: without intervals, and without the attack's name.
    """
    best = summary.select_strongest(lines)
    if not any(line.pruned for line in best) or not any("bytes_masked" in line.cells for line in best):
        return None
    varying = [table.label_column(name) for name in VARYING if summary.differ((line.labels for line in lines), name)]
    return table.build_table(
        "What every model leaks, and what it costs",
        best,
        [
            *varying,
            Column("model", lambda line: line.title),
            table.label_column("defense"),
            *([] if brief else [table.label_column("attack", "strongest attack")]),
            *(table.measure_column(name, interval=not brief) for name in ("auc", "tpr_at_fpr_0.01", "test_accuracy")),
            *(_smallest_column(name, heading) for name, heading in (("bytes", "bytes"), ("seconds", "latency"))),
        ],
        id="comparison",
        rank=BY_AUC,
    )


def _smallest_column(cost: str, heading: str) -> Column:
    """Return the column of a cost in the form that is deployed: compressed, else removed, else masked."""

    def build(line: SummaryLine) -> table.TableCell:
        forms = [f"{cost}_{form}" for form in ("compressed", "removed", "masked")]
        return table.build_measure(line, next((name for name in forms if line.value(name) is not None), forms[-1]))

    return Column(heading, build, number=True)


def _list_attack_columns(attacks: Sequence[SummaryLine], more: Sequence[str]) -> list[Column]:
    """Return the columns that name an attack and its model, with the labels `more`, then those of its measures."""
    metrics = ["test_accuracy", *(name for name in SHOWN if any(name in line.cells for line in attacks))]
    model = [
        Column("compressor", lambda line: _name_compressor(line)),
        Column("sparsity", lambda line: f"{line.labels['sparsity'] or 0:g}", number=True),
        table.label_column("defense"),
        Column("attacker", lambda line: "adaptive" if line.labels["adaptive"] else "non-adaptive"),
    ]
    if all(line.labels["pruner"] == "given" for line in attacks):  # nothing is known of its making
        model = [Column("model", lambda line: line.title)]
    return [
        *model,
        *(table.label_column(name, table.name_measure(name)) for name in more),
        table.label_column("attack"),
        *map(table.measure_column, metrics),
    ]


def _name_compressor(line: SummaryLine) -> str:
    """Return the compressor without its sparsity, which has a column; or the title of a model without one."""
    return str(line.labels["pruner"]) if line.pruned and line.labels["pruner"] != "given" else line.title


def list_layers(rows: Iterable[Row]) -> list[tuple[str, ReportTable]]:
    """Return a table for each model that was pruned before the audit: the share of weights gone from each layer."""
    columns = [
        Column("layer", lambda row: str(row.extra["layer"])),
        Column("weights gone", lambda row: _format_share([row.value]), number=True),
    ]
    chosen = [row for row in rows if row.metric == "layer_sparsity"]
    models = summary.group_by(chosen, lambda row: (row.extra.get("run"), row.model, row.sparsity))
    tables = []
    for (run, model, sparsity), layers in models.items():
        name = f"{run}: {model}" if run else model
        title = f"{name}, {100 * (sparsity or 0):.0f} % sparse"
        once = list({row.extra["layer"]: row for row in layers}.values())  # every seed has the same
        tables.append((title, table.build_table(f"Sparsity by layer, {title}", once, columns)))
    return tables


def list_exposed(lines: Sequence[SummaryLine], figures: Iterable[Labels]) -> list[tuple[str, ReportTable]]:
    """Return tables of the members that the strongest attack on each pruned model is surest of, of the first seed."""
    models = _list_strongest(lines, [figure for figure in figures if figure["kind"] == "exposed"])
    tables = []
    for title, records in models:
        groups = [Column("group", lambda record: record["group"])] if records and "group" in records[0] else []
        columns = [
            Column("row", lambda record: TableCell(str(record["id"]), (), record["id"], measured=True), number=True),
            Column("label", lambda record: str(record["label"]), number=True),
            *groups,
            Column("FPR", lambda record: _format_share([record["fpr"]]), number=True),
        ]
        tables.append((title, table.build_table(f"Most exposed records, {title}", records, columns)))
    return tables


def list_groups(lines: Sequence[SummaryLine], figures: Iterable[Labels]) -> list[tuple[str, ReportTable]]:
    """Return tables of groups by the AUC of the strongest attack on each pruned model, of the first seed."""
    models = _list_strongest(lines, [figure for figure in figures if figure["kind"] == "groups"])
    columns = [
        Column("group", lambda record: record["group"]),
        Column("members", lambda record: TableCell(str(record["members"]), (), record["members"], True), number=True),
        Column("non-members", lambda r: TableCell(str(r["nonmembers"]), (), r["nonmembers"], True), number=True),
        Column("AUC", lambda record: _format_auc(record["auc"]), number=True),
        Column("TPR at 1 % FPR", lambda record: _format_share(record.get("tpr_at_fpr_0.01")), number=True),
    ]
    tables = []
    for title, records in models:
        known = sorted((record for record in records if "auc" in record), key=lambda record: -record["auc"][0])
        if known:
            tables.append((title, table.build_table(f"Most exposed groups, {title}", known[:MOST_GROUPS], columns)))
    return tables


def _format_auc(ends: Sequence[float]) -> TableCell:
    value, low, high = ends
    return TableCell(f"{value:.3f}", (f"[{low:.3f}, {high:.3f}]",), value, measured=True)


def _format_share(ends: Sequence[float] | None) -> TableCell:
    """Return the cell of a share with its interval, if it has one; None: there are too few rows for it."""
    if ends is None:
        return TableCell("too few rows", (), None, measured=True)
    value, *interval = (100 * end for end in ends)
    small = (f"[{interval[0]:.1f}, {interval[1]:.1f}]",) if interval else ()
    return TableCell(f"{value:.1f} %", small, ends[0], measured=True)


def _list_strongest(lines: Sequence[SummaryLine], records: Sequence[Labels]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the records of the strongest attack on each pruned model, with its title."""
    several, exposed, pruned = len(summary.group_by_setting(lines)) > 1, [], any(line.pruned for line in lines)
    by_model, strongest = summary.group_by(records, model_key), summary.select_strongest(lines)
    if len(strongest) > MOST_MODELS:
        strongest = sorted(strongest, key=lambda line: -line.rank("auc"))
    for line in strongest:
        near = by_model.get(model_key(line.labels), [])
        same = [x for x in near if all(x.get(name) == value for name, value in line.labels.items())]
        if same and (line.pruned or not pruned):
            title = f"{name_view(line.labels, several)} under {line.labels['attack']}"
            exposed.append((title, list(same[0]["records"])))
    return exposed


def name_view(labels: Labels, several: bool) -> str:
    """Name a model, and its setting if the page has several."""
    title = name_model(labels)
    return f"{summary.name_setting(labels)}: {title}" if several else title
