"""Federations on the page: names, the table with a line a federation, and the curves over rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from secateur.catalogue import split
from secateur.report import plotting, summary, table
from secateur.report.plotting import DASHES, GREY, PALETTE, SYMBOLS, Panel, Part, View, cycle, draw_curve
from secateur.report.summary import Labels, SummaryCell, SummaryLine, average, average_along, group_by, select_rows
from secateur.report.table import Column, ReportTable, TableCell, measure_column
from secateur.runs.rows import Row

OVER_ROUNDS = {
    "test_accuracy": "test accuracy",
    "nmi_256": "NMI, 256 levels",
    "psnr": "PSNR of reconstructions",
    "attack_loss": "the attack's loss",
    "auc": "AUC of membership attacks",
    "withheld_of_all": "defense rate (withheld of all)",
    "density": "share of weights kept",
}
NMI = "nmi_256"
CHANCE = {NMI: "nmi_256_chance"}  # the value of a measure for pictures with shuffled pixels
MEASURES = {  # columns of the table, with headings that are not the measure's title
    "test_accuracy": None,
    NMI: "NMI",
    CHANCE[NMI]: None,
    "psnr": None,
    "psnr_max": "highest PSNR",
    "auc": "AUC of membership",
    "lost_clients": None,
    "bytes_up": None,
    "bytes_down": None,
    "client_bytes_up": None,
    "client_bytes_down": None,
}
NAMED = 12  # curves that the legend of every panel names; more are named in the first panel only
SETTINGS = {
    "model": "network",
    "dataset": "data",
    "local_batch": "batch",
    "averaging": "average",
    "broadcast": "broadcast",
    "view": "server sees",
}
MISHAPS = ("lost_clients", "attacked_clients")
OBSERVED = ("local_steps", "update_change", "imitation_error")  # measures of somebody else's clients (audit-app)
VIEWS = {"update": "every update", "sum": "only the sum"}
Points = Mapping[int, float]
MethodSetting = tuple[int, str]  # the position among joined methods, and the setting


def is_federated(row: Row) -> bool:
    """Return True if a row is of a federation's round."""
    return "base_pruning" in row.extra and "round" in row.extra


def is_pooled(row: Row) -> bool:
    """Return True if a row combines clients that also have rows of their own."""
    return row.attack is not None and row.extra.get("client") is None and row.extra.get("attacked", 1) > 1


def summarise_federations(rows: Iterable[Row]) -> list[SummaryLine]:
    """Return one line a federation, in the order they were run; cells are means over its seeds.

    Of an attacked round the strongest attack counts: NMI and its chance level are of the attack with the highest NMI.
    """
    federated = (row for row in rows if is_federated(row))
    groups = group_by(federated, lambda row: (_group_key(row), name_federation(row_labels(row))))
    return [SummaryLine(row_labels(same[0]), _summarise_cells(same), same) for same in groups.values()]


def _summarise_cells(rows: Sequence[Row]) -> dict[str, SummaryCell]:
    last, seeds = max(row.extra["round"] for row in rows), len({row.seed for row in rows})
    nmi, chance, psnr, auc = (_average_attacks(rows, metric) for metric in (NMI, CHANCE[NMI], "psnr", "auc"))
    strongest = max(nmi, key=lambda attack: nmi[attack], default="")
    values = {
        metric: average(row.value for row in select_rows(rows, metric, round=last, client=None))
        for metric in ("test_accuracy", "bytes_up", "bytes_down")
    }
    values |= {
        NMI: nmi.get(strongest),
        CHANCE[NMI]: chance.get(strongest),
        "psnr": max(psnr.values(), default=None),
        "psnr_max": max((row.value for row in select_rows(rows, "psnr_max") if row.value is not None), default=None),
        "auc": max(auc.values(), default=None),
        "lost_clients": round(sum(row.value or 0 for row in rows if row.metric == "lost_clients") / seeds),
    }
    cells = {metric: SummaryCell(value, None, None) for metric, value in values.items() if value is not None}
    for metric in ("bytes_up", "bytes_down"):  # of clients that took part: those with bytes
        sent = [row.value for row in select_rows(rows, metric) if row.extra["client"] is not None and row.value]
        cells |= {f"client_{metric}": SummaryCell(average(sent), min(sent), max(sent))} if sent else {}
    return cells


def _average_attacks(rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Return every attack's mean over attacked rounds."""
    attacked = [row for row in select_rows(rows, metric) if row.attack is not None and not is_pooled(row)]
    return average_along(attacked, lambda row: str(row.attack))


def describe_label(line: SummaryLine, label: str) -> str:
    """Return a label of a federation in words."""
    value = str(line.labels.get(label, "-"))
    return VIEWS.get(value, value) if label == "view" else value


def list_varying(lines: Sequence[SummaryLine]) -> dict[str, str]:
    """Return the labels that tell federations apart, with their headings; other labels would be columns of one word."""
    runs = {"run": "run"} if summary.differ((line.labels for line in lines), "run") else {}
    return runs | {x: title for x, title in SETTINGS.items() if len({describe_label(line, x) for line in lines}) > 1}


def describe_shared(lines: Sequence[SummaryLine]) -> str:
    """Return in words the labels that all federations share."""
    if not lines:
        return ""
    same = [label for label in SETTINGS if label not in list_varying(lines) and label in lines[0].labels]
    return ", ".join(f"{SETTINGS[label]} {describe_label(lines[0], label)}" for label in same)


def build_tables(lines: Sequence[SummaryLine]) -> dict[str, ReportTable]:
    """Return the table of the federations, if there are any."""
    if not lines:
        return {}
    attacked = any(line.value("auc") is not None for line in lines)
    columns = [
        *(Column(heading, partial(describe_label, label=label)) for label, heading in list_varying(lines).items()),
        Column("base pruning", lambda line: _build_method_cell(line.labels["base_pruning"])),
        Column("defense", lambda line: _build_method_cell(line.labels["defense"])),
        *(measure_column(metric, heading) for metric, heading in MEASURES.items() if metric != "auc" or attacked),
    ]
    caption = "Federations by base pruning and defense"
    return {"federated": table.build_table(caption, lines, columns, id="federated", wide=True)}


def _build_method_cell(method: str) -> TableCell:
    name, settings = split_method(method)
    return TableCell(name, (settings,) if settings else ())


def list_settings(rows: Iterable[Row]) -> list[str]:
    """Return all settings of each method, chosen or default, a line a method."""
    texts = dict.fromkeys(str(row.extra.get("settings", "")) for row in rows if is_federated(row))
    return list(dict.fromkeys(line for text in texts for line in text.split("; ") if line))


def list_mishaps(rows: Iterable[Row]) -> list[str]:
    """Return in words the clients that were lost in a round, and the attacks that could not be made."""
    noted = [row for row in rows if is_federated(row) and row.metric in MISHAPS and row.note]
    names = shorten_names(map(row_labels, noted))
    return [
        f"{names[name_federation(row_labels(row))]}, seed {row.seed}, round {row.extra['round']}: "
        f"{'' if row.attack is None else f'{row.attack}: '}{row.note}"
        for row in noted
    ]


def list_observed(rows: Iterable[Row]) -> list[str]:
    """Return in words what the clients of somebody else's app do, and what they send of it; once for all defenses."""
    noted = [row for row in rows if is_federated(row) and row.metric in OBSERVED and row.note]
    return list(dict.fromkeys(f"{row.note}" for row in noted))


def draw_rounds(rows: Iterable[Row]) -> list[View]:
    """Return one view a network and data set: each measure by round, a curve a federation and attack.

    A curve is the mean over seeds.
    """
    drawn = select_rows(rows, *OVER_ROUNDS, *CHANCE.values())
    groups = group_by((row for row in drawn if is_federated(row) and not is_pooled(row)), _group_key)
    views = []
    for group in groups.values():
        names = shorten_names(map(row_labels, group))
        styles = {name: number for number, name in enumerate(names.values())}
        panels: list[Panel] = []
        last = max(row.extra["round"] for row in group)
        for metric, title in OVER_ROUNDS.items():
            curves = _average_curves(select_rows(group, metric), names)
            flat = metric == "density" and all(len(set(points.values())) == 1 for points in curves.values())
            if curves and not flat:
                chance = (
                    average_along(select_rows(group, CHANCE[metric]), lambda row: row.extra["round"])
                    if metric in CHANCE
                    else {}
                )
                named = len(curves) <= NAMED or not panels
                panels.append(_draw_round_panel(title, curves, chance, styles, last, named))
        if panels:
            views.append(View(name_group(row_labels(group[0])), panels))
    return views


def _average_curves(rows: Sequence[Row], names: Mapping[str, str]) -> dict[tuple[str, str | None], Points]:
    """Return by federation and attack the mean over seeds and clients at each round."""
    attacks = shorten_methods(row.attack for row in rows if row.attack is not None)
    curves = group_by(rows, lambda row: (names[name_federation(row_labels(row))], row.attack and attacks[row.attack]))
    return {curve: _average_rounds(same) for curve, same in curves.items()}


def _average_rounds(rows: Iterable[Row]) -> Points:
    return average_along(rows, lambda row: row.extra["round"])


def _draw_round_panel(
    title: str,
    curves: Mapping[tuple[str, str | None], Points],
    chance: Points,
    styles: Mapping[str, int],
    last: int,
    named: bool,
) -> Panel:
    """Plot one measure: a federation has one colour in all panels, an attack one dash; all reach the `last` round."""
    attacks = list(dict.fromkeys(attack for _, attack in curves))
    dashes = {attack: cycle(DASHES, number) for number, attack in enumerate(attacks)}
    hover = "%{y:.3g} in round %{x}"
    traces: list[Part] = []
    for (federation, attack), points in curves.items():
        label = federation if attack is None else f"{federation}, {attack}"
        line = {"color": cycle(PALETTE, styles[federation]), "dash": dashes[attack], "width": 2}
        marker = {"size": 5, "symbol": cycle(SYMBOLS, styles[federation] // len(PALETTE))}  # where colours repeat
        more = {"mode": "lines+markers", "marker": marker, "showlegend": named}
        traces.append(draw_curve(label, points, line, hover, **more))
    ends = plotting.list_ends(traces) + (f"; by chance {list(chance.values())[-1]:.4g}" if chance else "")
    if not named and len(attacks) > 1:  # the first panel names the colours, not the dashes
        styled = {str(attack): {"color": GREY, "dash": dashes[attack], "width": 2} for attack in attacks}
        traces += [draw_curve(attack, {}, line) for attack, line in styled.items()]
    traces += [draw_curve("by chance", chance, plotting.style_guide("dot"), hover)] if chance else []
    lines = sum(trace.get("showlegend", True) for trace in traces)
    values = (y for points in curves.values() for y in points.values())
    alt = f"{title} by round; in the last: {ends}."
    x_axis = plotting.count_axis("round", last) | {"range": [0, 1.03 * last]}
    y_axis = plotting.number_axis(title, 6) | plotting.fit_single(values)
    return plotting.draw_panel(
        f"{title} over rounds",
        alt,
        traces,
        340 + 22 * lines,
        x_axis,
        y_axis,
        showlegend=lines > 1 or not named,
        legend=plotting.place_legend(maxheight=22 * lines + 40),
    )


def _group_key(row: Row) -> tuple[Any, ...]:
    """Return the values that federations in one plot must share."""
    return row.extra.get("run"), row.model, row.dataset, row.extra.get("local_batch")


def row_labels(row: Row) -> dict[str, Any]:
    """Return the labels of a row's federation, with its seed."""
    return summary.read_labels(row) | {"seed": row.seed}


def name_group(labels: Labels) -> str:
    """Return the network and its data, and the batch of a local step if it is known."""
    size = labels.get("local_batch")
    return summary.name_setting(labels) + ("" if size is None else f", batches of {size}")


def name_federation(labels: Labels) -> str:
    """Return the name of a federation: the base pruning, and the defense on top.

    Example:
        >>> name_federation({"base_pruning": "snip", "defense": "none"})
        'snip'
        >>> name_federation({"base_pruning": "none", "defense": "priprune"})
        'no pruning, priprune'
    """
    base = "no pruning" if labels["base_pruning"] == "none" else str(labels["base_pruning"])
    base += ", broadcast dense" if labels.get("broadcast") == "dense" else ""
    base += ", only the sum seen" if labels.get("view") == "sum" else ""
    return base if labels["defense"] == "none" else f"{base}, {labels['defense']}"


def shorten_names(labelled: Iterable[Labels]) -> dict[str, str]:
    """Return every federation's name, without the settings that tell it from no other."""
    by_name = {name_federation(labels): labels for labels in labelled}
    bases = shorten_methods(str(labels["base_pruning"]) for labels in by_name.values())
    names = {}
    for full, labels in by_name.items():
        defenses = [str(x["defense"]) for x in by_name.values() if x["base_pruning"] == labels["base_pruning"]]
        short = shorten_methods(defenses)[str(labels["defense"])]
        names[full] = name_federation({**labels, "base_pruning": bases[str(labels["base_pruning"])], "defense": short})
    return names


def shorten_methods(methods: Iterable[str]) -> dict[str, str]:
    """Return methods as they are written, without the settings that all of one name share.

    Example:
        >>> methods = ["snip:rate=0.3", "largest:of=kept:rate=0.1", "largest:of=kept:rate=0.2"]
        >>> shorten_methods(methods)["largest:of=kept:rate=0.1"]
        'largest:rate=0.1'
    """
    by_text = {text: _parse_method(text) for text in methods}
    shared: dict[str, set[MethodSetting]] = {}
    for names, settings in by_text.values():
        joined = "+".join(names)
        shared[joined] = shared.get(joined, set(settings)) & set(settings)
    shortened = {}
    for text, (names, settings) in by_text.items():
        differing = [setting for setting in settings if setting not in shared["+".join(names)]]
        parts = [[name, *(setting for at, setting in differing if at == number)] for number, name in enumerate(names)]
        shortened[text] = "+".join(map(":".join, parts))
    return shortened


def split_method(method: str) -> tuple[str, str]:
    """Return the name of a method, or of several joined, and its settings, for a narrow table.

    Example:
        >>> split_method("priprune:accuracy=10.0:privacy=1.0+dp:clip=1.0"), split_method("none")
        (('priprune+dp', 'accuracy=10.0, privacy=1.0, clip=1.0'), ('none', ''))
    """
    names, settings = _parse_method(method)
    return "+".join(names), ", ".join(setting for _, setting in settings)


def _parse_method(method: str) -> tuple[list[str], list[MethodSetting]]:
    """Return the joined names, and the settings of each."""
    parts = [split(part) for part in method.split("+")]
    settings = [(at, setting) for at, (_, *values) in enumerate(parts) for setting in values]
    return [first for first, *_ in parts], settings
