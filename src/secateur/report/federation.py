"""Federations on the page: names, the table with a line a federation, and the curves over rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.catalogue import split
from secateur.report import plotting, table
from secateur.report.plotting import DASHES, GREY, PALETTE, SYMBOLS, Panel, Part, View, cycle, draw_curve
from secateur.report.summary import (
    Labels,
    average,
    average_along,
    differ,
    group_by,
    name_setting,
    read_labels,
    select_rows,
)
from secateur.report.table import Column, ReportTable, TableCell, format_megabytes, value_column
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
CHANCE = {"nmi_256": "nmi_256_chance"}  # the value of a measure for pictures with shuffled pixels
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
VIEWS = {"update": "every update", "sum": "only the sum"}
Points = Mapping[int, float]
MethodSetting = tuple[int, str]  # the position among joined methods, and the setting
Spread = tuple[float, float, float]  # least, mean and most


@dataclass(frozen=True)
class FederationLine:
    """One federation, a line of the table; means over its seeds."""

    labels: Labels
    accuracy: float | None
    up: float | None  # bytes, of all clients
    down: float | None
    up_client: Spread | None  # bytes of clients that took part
    down_client: Spread | None
    lost: int  # clients, over all rounds
    leak: float | None  # the highest PSNR of an attacked round
    nmi: float | None  # the mean over attacked rounds, of the attack with the highest
    chance: float | None  # the NMI of the same attack's pictures with shuffled pixels
    psnr: float | None
    auc: float | None  # of membership attacks

    @property
    def name(self) -> str:
        """The base pruning and the defense."""
        return name_federation(self.labels)

    @property
    def base(self) -> str:
        """The base pruning, the broadcast and the server's view, without the defense."""
        return f"{self.labels['base_pruning']}, {self.labels['broadcast']}, {self.labels.get('view', 'update')}"

    def describe(self, label: str) -> str:
        """Return a label in words."""
        value = str(self.labels.get(label, "-"))
        return VIEWS.get(value, value) if label == "view" else value


def is_federated(row: Row) -> bool:
    """Return True if a row is of a federation's round."""
    return "base_pruning" in row.extra and "round" in row.extra


def is_pooled(row: Row) -> bool:
    """Return True if a row combines clients that also have rows of their own."""
    return row.attack is not None and row.extra.get("client") is None and row.extra.get("attacked", 1) > 1


def summarise_federations(rows: Iterable[Row]) -> list[FederationLine]:
    """Return one line a federation, in the order they were run."""
    federated = (row for row in rows if is_federated(row))
    groups = group_by(federated, lambda row: (_group_key(row), name_federation(row_labels(row))))
    return [_summarise(group) for group in groups.values()]


def _summarise(rows: Sequence[Row]) -> FederationLine:
    """Return the line of one federation from its rows."""
    last, seeds = max(row.extra["round"] for row in rows), len({row.seed for row in rows})
    accuracy, up, down = (
        average(row.value for row in select_rows(rows, metric, round=last, client=None))
        for metric in ("test_accuracy", "bytes_up", "bytes_down")
    )
    nmi, psnr, auc = (_average_attacks(rows, metric) for metric in ("nmi_256", "psnr", "auc"))
    strongest = max(nmi, key=lambda attack: nmi[attack], default="")
    return FederationLine(
        row_labels(rows[0]),
        accuracy,
        up,
        down,
        _spread(rows, "bytes_up"),
        _spread(rows, "bytes_down"),
        lost=round(sum(row.value or 0 for row in rows if row.metric == "lost_clients") / seeds),
        leak=max((row.value for row in select_rows(rows, "psnr_max") if row.value is not None), default=None),
        nmi=nmi.get(strongest),
        chance=_average_attacks(rows, "nmi_256_chance").get(strongest),
        psnr=max(psnr.values(), default=None),
        auc=max(auc.values(), default=None),
    )


def _spread(rows: Sequence[Row], metric: str) -> Spread | None:
    """Return the least, the mean and the most of the clients that took part: those with bytes."""
    values = [row.value for row in rows if row.metric == metric and row.extra["client"] is not None and row.value]
    return (min(values), sum(values) / len(values), max(values)) if values else None


def _average_attacks(rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Return every attack's mean over attacked rounds."""
    attacked = [row for row in select_rows(rows, metric) if row.attack is not None and not is_pooled(row)]
    means = {attack: average(row.value for row in same) for attack, same in group_by(attacked, _read_attack).items()}
    return {attack: mean for attack, mean in means.items() if mean is not None}


def _read_attack(row: Row) -> str:
    return str(row.attack)


def list_varying(lines: Sequence[FederationLine]) -> dict[str, str]:
    """Return the labels that tell federations apart, with their headings; other labels would be columns of one word."""
    runs = {"run": "run"} if differ((line.labels for line in lines), "run") else {}
    several = {label: x for label, x in SETTINGS.items() if len({line.describe(label) for line in lines}) > 1}
    return runs | several


def describe_shared(lines: Sequence[FederationLine]) -> str:
    """Return in words the labels that all federations share."""
    same = [
        label for line in lines[:1] for label in SETTINGS if label in line.labels and label not in list_varying(lines)
    ]
    return ", ".join(f"{SETTINGS[label]} {lines[0].describe(label)}" for label in same)


def build_tables(lines: Sequence[FederationLine]) -> dict[str, ReportTable]:
    """Return the table of the federations, if there are any."""
    if not lines:
        return {}
    membership = [value_column("AUC of membership", lambda line: line.auc, "{:.3f}")]
    columns = [
        *(
            Column(heading, lambda line, label=label: line.describe(label))  # type: ignore[misc]
            for label, heading in list_varying(lines).items()
        ),
        Column("base pruning", lambda line: _build_method_cell(line.labels["base_pruning"])),
        Column("defense", lambda line: _build_method_cell(line.labels["defense"])),
        value_column("test accuracy", lambda line: line.accuracy, "{:.1%}"),
        value_column("NMI", lambda line: line.nmi, "{:.3f}"),
        value_column("NMI by chance", lambda line: line.chance, "{:.3f}"),
        value_column("PSNR", lambda line: line.psnr, "{:.1f}"),
        value_column("highest PSNR", lambda line: line.leak, "{:.1f}"),
        *(membership if any(line.auc is not None for line in lines) else []),
        Column("clients lost", lambda line: str(line.lost), number=True),
        value_column("MB up", lambda line: line.up, format_megabytes),
        value_column("MB down", lambda line: line.down, format_megabytes),
        _spread_column("MB up a client", lambda line: line.up_client),
        _spread_column("MB down a client", lambda line: line.down_client),
    ]
    caption = "Federations by base pruning and defense"
    return {"federated": table.build_table(caption, lines, columns, id="federated", wide=True)}


def _build_method_cell(method: str) -> TableCell:
    name, settings = split_method(method)
    return TableCell(name, (settings,) if settings else ())


def _spread_column(heading: str, read: Callable[[FederationLine], Spread | None]) -> Column:
    """Return a column of megabytes: the mean of the clients, and below it the least and the most."""

    def build(line: FederationLine) -> TableCell:
        if (spread := read(line)) is None:
            return TableCell("-", measured=True)
        least, mean, most = map(format_megabytes, spread)
        return TableCell(mean, (f"{least} to {most}",), spread[1], measured=True)

    return Column(heading, build, number=True)


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
    return plotting.draw_panel(
        f"{title} over rounds",
        f"{title} by round; in the last: {ends}.",
        traces,
        340 + 22 * lines,
        plotting.count_axis("round", last) | {"range": [0, 1.03 * last]},
        plotting.number_axis(title, 6) | plotting.fit_single(values),
        showlegend=lines > 1 or not named,
        legend=plotting.place_legend(maxheight=22 * lines + 40),
    )


def _group_key(row: Row) -> tuple[Any, ...]:
    """Return the values that federations in one plot must share."""
    return row.extra.get("run"), row.model, row.dataset, row.extra.get("local_batch")


def row_labels(row: Row) -> dict[str, Any]:
    """Return the labels of a row's federation, with its seed."""
    return read_labels(row) | {"seed": row.seed}


def name_group(labels: Labels) -> str:
    """Return the network and its data, and the batch of a local step if it is known."""
    size = labels.get("local_batch")
    return name_setting(labels) + ("" if size is None else f", batches of {size}")


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
