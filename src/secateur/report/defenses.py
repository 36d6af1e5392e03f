"""Defenses of updates side by side: pictures, accuracy over epochs, the front of the trade-off, and tables of a study.

The trade-off weighs accuracy, leakage and bytes. The tables hold a study's trainings, costs and theorems.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from secateur.attacks.inversion.adaptive import PLAIN
from secateur.catalogue import split
from secateur.evaluation.attack_strength import read_mode
from secateur.metrics.estimates import Measure, mean
from secateur.report import plotting, summary, table
from secateur.report.inversion import Sheet, build_sheets, name_comparison
from secateur.report.plotting import GREY, PALETTE, Panel, View, cycle
from secateur.report.summary import Labels, SummaryCell, SummaryLine, estimate, group_by, select_rows
from secateur.report.table import ReportTable
from secateur.runs.rows import Row

FEEDBACK = "+error-feedback"
ACCURACY, LEAK, RATIO = "test_accuracy", "cw_ssim", "ratio"  # the values of the trade-off
TITLES = {  # by the kind of measurement
    "training": "Training under each defense",
    "cost": "Cost of each defense",
    "bounds": "Theorems beside a training",
    "overheard": "Leakage of the broadcast alone",
}
FIRST = ("test_accuracy", "bytes", "ratio", "paper_ratio", "defense_seconds", "user_seconds")
VARYING = {"run": "run", "model": "network", "dataset": "data"}  # columns only if the lines differ in them
Attacker = tuple[str, ...]  # the attack with its settings, and other labels that tell attackers apart


def list_facts(rows: Iterable[Row]) -> dict[str, str]:
    """Return the networks and data sets of a study's rows that belong to no attack: trainings and costs."""
    studied = [row for row in rows if "study" in row.extra]
    names = {"Network": [row.model for row in studied], "Data": [row.dataset for row in studied]}
    return {name: summary.join_distinct(values) for name, values in names.items() if values}


def build_defense_sheets(figures: Iterable[Labels]) -> list[Sheet]:
    """Return one sheet for each attack that met several defenses, a line each."""
    truth = ("seed", "target", "item")
    return build_sheets(figures, name_comparison, lambda attack: split(attack)[0], _name_line, truth)


def _name_line(figure: Labels) -> str:
    """Return the defense, and the setting of an attacker that knows it."""
    mode = read_mode(str(figure["attack"]))
    return str(figure.get("defense") or "none") + ("" if mode == PLAIN else f", attacker: {mode}")


def draw_epochs(rows: Iterable[Row]) -> list[View]:
    """Return one view for each network and data set: the accuracy of collaborative training, a curve a defense."""
    settings = group_by(select_rows(rows, "test_accuracy", study="training"), _name_setting)
    return [View(setting, [_draw_epoch_panel(setting, same)]) for setting, same in settings.items()]


def _draw_epoch_panel(title: str, rows: Sequence[Row]) -> Panel:
    curves = group_by(rows, lambda row: row.defense or "none")
    traces = [
        plotting.draw_curve(
            name, summary.average_along(same, lambda row: row.extra["epoch"]), plotting.style_line(number)
        )
        for number, (name, same) in enumerate(curves.items())
    ]
    alt = f"{title}, test accuracy by epoch. In the end: {plotting.list_ends(traces, '{:.1%}')}."
    x_axis = plotting.count_axis("epoch", max(row.extra["epoch"] for row in rows), ticks=10)
    y_axis = plotting.share_axis("test accuracy", 6)
    return plotting.draw_panel(title, alt, traces, 400, x_axis, y_axis)


def _name_setting(row: Row) -> str:
    return summary.name_setting(summary.read_labels(row))


def draw_balance(rows: Iterable[Row]) -> list[View]:
    """Return one view of all defenses for each network and data set that was trained and attacked."""
    return [
        View(name, [_draw_scatter(name, lines)], describe_front(lines))
        for name, same in group_by(rows, _name_setting).items()
        if (lines := weigh_defenses(same))
    ]


def weigh_defenses(rows: Iterable[Row]) -> list[SummaryLine]:
    """Return a line for every defense that one network was trained with and attacked under; means over seeds.

    The leakage is the highest mean CW-SSIM of any attacker; the ratio is of the bytes of dense, up and down.
    """
    trained: dict[str, dict[str, Measure]] = {ACCURACY: {}, RATIO: {}}
    leaks: dict[str, dict[Attacker, Measure]] = {}
    for row in select_rows(rows, ACCURACY, RATIO, LEAK):
        name, extra = row.defense or "none", row.extra
        if extra.get("study") == "training" and extra["epoch"] == extra["epochs"] and row.metric in trained:
            trained[row.metric].setdefault(name, {})[row.seed] = estimate(row)
        # A defense hides the raw picture, so of ATS's two comparisons the one with the raw picture counts.
        elif row.metric == LEAK and row.attack and extra["target"] is None and extra.get("against") != "used":
            more = (str(extra.get(key)) for key in ("stage", "labels", "batch_size"))
            leaks.setdefault(name, {}).setdefault((row.attack, *more), {})[row.seed] = estimate(row)
    lines = []
    for name, accuracies in trained[ACCURACY].items():
        means = ((mean(measure), attacker[0]) for attacker, measure in _select_attackers(leaks, name).items())
        known = [(leak, attack) for leak, attack in means if leak is not None]
        accuracy, ratio = mean(accuracies), mean(trained[RATIO].get(name, {}))
        if known and accuracy is not None and ratio is not None:
            leak, attack = max(known, key=lambda pair: pair[0].value)
            cells = {ACCURACY: SummaryCell(*accuracy), LEAK: SummaryCell(*leak), RATIO: SummaryCell(*ratio)}
            lines.append(SummaryLine({"defense": name, "attack": split(attack)[0]}, cells))
    return lines


def _select_attackers(leaks: dict[str, dict[Attacker, Measure]], name: str) -> dict[Attacker, Measure]:
    """Return the attackers of a defense; with error feedback also those of the defense without it.

    A residual is empty in the first round, so both are the same there.
    """
    base = leaks.get(name.removesuffix(FEEDBACK), {})
    return {who: measure for who, measure in base.items() if who[1] != "weights given"} | leaks.get(name, {})


def select_front(lines: Iterable[SummaryLine]) -> list[SummaryLine]:
    """Return the defenses that no other beats in accuracy, leakage and bytes; intervals do not count."""
    return summary.select_front(lines, ACCURACY, LEAK, RATIO, keep_equal=True)


def describe_front(lines: Iterable[SummaryLine]) -> str:
    """Return the front in words, for readers who print the page or cannot see the plot."""
    defenses = "; ".join(
        f"{line.labels['defense']}: {line.rank(ACCURACY):.1%} right, CW-SSIM {line.rank(LEAK):.2f} "
        f"under {line.labels['attack']}, {line.rank(RATIO):.3f} of the bytes"
        for line in select_front(lines)
    )
    return f"On the front, from least to most accurate: {defenses}."


def _draw_scatter(title: str, lines: Sequence[SummaryLine]) -> Panel:
    best, traces = select_front(lines), []
    for number, line in enumerate(lines):
        name, (accuracy, leak, ratio) = line.labels["defense"], map(line.rank, (ACCURACY, LEAK, RATIO))
        text = f"<b>{name}</b><br>accuracy {accuracy:.1%}<br>CW-SSIM {leak:.3f} under {line.labels['attack']}"
        ring = {"width": 3 if line in best else 0, "color": GREY}
        marker = {"color": cycle(PALETTE, number), "size": 10 + 24 * min(ratio, 1.2), "line": ring}
        texts = [f"{text}<br>{ratio:.3f} of the bytes of dense"]
        bars = {f"error_{x}": plotting.draw_intervals([line.cells[y]]) for x, y in (("x", ACCURACY), ("y", LEAK))}
        label = f"{name}{' (front)' if line in best else ''}"
        traces.append(plotting.draw_points(label, [(accuracy, leak)], marker, texts, **bars))
    alt = f"{title}: test accuracy against CW-SSIM of the strongest attacker. {describe_front(lines)}"
    x_axis = plotting.share_axis("test accuracy")
    y_axis = plotting.number_axis("CW-SSIM of the strongest attacker")
    return plotting.draw_panel(title, alt, traces, 440, x_axis, y_axis)


def build_tables(rows: Iterable[Row]) -> dict[str, ReportTable]:
    """Return by its title a table for each kind of measurement; of a training its last epoch."""
    last = [row for row in rows if row.extra.get("epoch") == row.extra.get("epochs")]
    kinds = group_by(last, lambda row: row.extra.get("study"))
    return {title: _build_table(title, kinds[kind]) for kind, title in TITLES.items() if kind in kinds}


def _build_table(title: str, rows: Sequence[Row]) -> ReportTable:
    """Return a table with a line for each network, data set and defense."""
    kept = [{name: row.extra[name] for name in ("run",) if name in row.extra} for row in rows]
    lines = summary.summarise(replace(row, extra=extra, note=None) for row, extra in zip(rows, kept, strict=True))
    labels = [line.labels for line in lines]
    names = [table.label_column(name, heading) for name, heading in VARYING.items() if summary.differ(labels, name)]
    metrics = table.order_measures((name for line in lines for name in line.cells), FIRST)
    return table.build_table(title, lines, [*names, table.label_column("defense"), *map(table.measure_column, metrics)])
