"""Federations on the page: curves over rounds, the table with a line a federation, and the names of federations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.catalogue import split
from secateur.report.audit import View, setting
from secateur.report.audit_plots import DASHES, SYMBOLS
from secateur.report.plotting import GREY, PALETTE, Panel, Part, alone, cycle, panel, short, thin
from secateur.runs.rows import Row

OVER_ROUNDS = {
    "test_accuracy": "test accuracy",
    "nmi_256": "NMI, 256 levels",
    "psnr": "PSNR of reconstructions",
    "attack_loss": "the attack's own loss",
    "auc": "AUC of membership attacks",
    "withheld_of_all": "defense rate (withheld of all)",
    "density": "share of weights kept",
}
CHANCE = {"nmi_256": "nmi_256_chance"}  # the value of a measure for pictures with shuffled pixels
NAMED = 12  # curves that the legend of every panel names; more are named in the first panel only
TOLD = {
    "model": "network",
    "dataset": "data",
    "local_batch": "batch",
    "averaging": "average",
    "broadcast": "broadcast",
    "view": "server sees",
}
MISHAPS = ("lost_clients", "attacked_clients")
SEEN = {"update": "every update", "sum": "only the sum"}
Labels = Mapping[str, Any]
Points = Sequence[tuple[int, float]]
Curves = Mapping[tuple[str, str | None], Points]
Setting = tuple[int, str]  # the position among joined methods, and the setting
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
        return name(self.labels)

    @property
    def base(self) -> str:
        """The base pruning, the broadcast and the server's view, without the defense."""
        return f"{self.labels['base_pruning']}, {self.labels['broadcast']}, {self.labels.get('view', 'update')}"

    def told(self, label: str) -> str:
        """Return a label in words."""
        value = str(self.labels.get(label, "-"))
        return SEEN.get(value, value) if label == "view" else value


def is_federated(row: Row) -> bool:
    """Return True if a row is of a federation's round."""
    return "base_pruning" in row.extra and "round" in row.extra


def is_pooled(row: Row) -> bool:
    """Return True if a row combines clients that also have rows of their own."""
    return row.attack is not None and row.extra.get("client") is None and row.extra.get("attacked", 1) > 1


def over_rounds(rows: Iterable[Row]) -> list[View]:
    """Return one view a network and data set: each measure by round, a curve a federation and attack.

    A curve is the mean over seeds.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        drawn = row.metric in OVER_ROUNDS or row.metric in CHANCE.values()
        if is_federated(row) and drawn and row.value is not None and not is_pooled(row):
            groups.setdefault(group_of(row), []).append(row)
    views = []
    for group in groups.values():
        called = titles(map(labels_of, group))
        styles = {curve: number for number, curve in enumerate(called.values())}
        panels: list[Panel] = []
        last = max(row.extra["round"] for row in group)
        for metric, title in OVER_ROUNDS.items():
            curves = _curves([row for row in group if row.metric == metric], called)
            flat = metric == "density" and all(len({y for _, y in points}) == 1 for points in curves.values())
            if curves and not flat:
                beside = _by_round([row for row in group if row.metric == CHANCE.get(metric)])
                named = len(curves) <= NAMED or not panels
                panels.append(_panel(title, curves, beside, styles, last, named))
        if panels:
            views.append(View(place(labels_of(group[0])), panels))
    return views


def _curves(rows: Sequence[Row], called: Mapping[str, str]) -> Curves:
    """Return by federation and attack the points of the curve."""
    by_curve: dict[tuple[str, str | None], list[Row]] = {}
    attacks = brief(row.attack for row in rows if row.attack is not None)
    for row in rows:
        curve = called[name(labels_of(row))], None if row.attack is None else attacks[row.attack]
        by_curve.setdefault(curve, []).append(row)
    return {curve: _by_round(curve_rows) for curve, curve_rows in by_curve.items()}


def _by_round(rows: Iterable[Row]) -> Points:
    """Return (round, mean over seeds, clients and all else) in the order of the rounds."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row.extra["round"], []).append(float(row.value or 0))
    return [(number, sum(measured) / len(measured)) for number, measured in sorted(values.items())]


def _panel(title: str, curves: Curves, beside: Points, styles: Mapping[str, int], last: int, named: bool) -> Panel:
    """Plot one measure: a federation has one colour in all panels, an attack one dash; all reach the `last` round."""
    attacks = list(dict.fromkeys(attack for _, attack in curves))
    dashes = {attack: cycle(DASHES, number) for number, attack in enumerate(attacks)}
    traces: list[Part] = []
    for (federation, attack), points in curves.items():
        label = federation if attack is None else f"{federation}, {attack}"
        line = {"color": cycle(PALETTE, styles[federation]), "dash": dashes[attack], "width": 2}
        marker = {"size": 5, "symbol": cycle(SYMBOLS, styles[federation] // len(PALETTE))}  # where colours repeat
        traces.append(_trace(label, points, line) | {"mode": "lines+markers", "marker": marker, "showlegend": named})
    ends = ", ".join(f"{trace['name']} {trace['y'][-1]:g}" for trace in traces)
    ends += f"; by chance {beside[-1][1]:.4g}" if beside else ""
    if not named and len(attacks) > 1:  # the first panel names the colours, not the dashes
        traces += [_trace(str(attack), [], {"color": GREY, "dash": dashes[attack], "width": 2}) for attack in attacks]
    traces += [_trace("by chance", beside, thin("dot"))] if beside else []
    lines = sum(trace.get("showlegend", True) for trace in traces)
    ticks = {"nticks": 8} if last > 8 else {"dtick": 1}  # no half rounds
    return panel(
        f"{title} over rounds",
        f"{title} by round; in the last: {ends}.",
        traces,
        340 + 22 * lines,
        {"title": "round", "zeroline": False, "range": [0, 1.03 * last]} | ticks,
        {"title": title, "zeroline": False, "nticks": 6} | alone(y for points in curves.values() for _, y in points),
        showlegend=lines > 1 or not named,
        legend={"orientation": "h", "y": -0.25, "yanchor": "top", "maxheight": 22 * lines + 40},
    )


def _trace(label: str, points: Points, line: Part) -> Part:
    """Return a line; without points only its legend entry shows."""
    hover = f"{label}, round %{{x}}: %{{y:.3g}}<extra></extra>"
    data = {"x": [x for x, _ in points], "y": short(y for _, y in points)} if points else {"x": [None], "y": [None]}
    return {"type": "scatter", "mode": "lines", "name": label, "line": line, "hovertemplate": hover} | data


def attacked(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of attacks on updates, by network and data set."""
    by_place: dict[str, list[Row]] = {}
    for row in rows:
        if is_federated(row) and row.attack is not None and "target" in row.extra and not is_pooled(row):
            by_place.setdefault(place(labels_of(row)), []).append(row)
    return by_place


def table(rows: Sequence[Row]) -> list[FederationLine]:
    """Return one line a federation, in the order they were run."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if is_federated(row):
            groups.setdefault((*group_of(row), name(labels_of(row))), []).append(row)
    return [_line(group) for group in groups.values()]


def _line(rows: Sequence[Row]) -> FederationLine:
    """Return the line of one federation from its rows."""
    last = max(row.extra["round"] for row in rows)
    seeds = len({row.seed for row in rows})

    def final(metric: str) -> float | None:
        ends = [row for row in rows if row.metric == metric and row.extra["round"] == last]
        values = [row.value for row in ends if row.extra["client"] is None and row.value is not None]
        return sum(values) / len(values) if values else None

    def spread(metric: str) -> Spread | None:
        values = [row.value for row in rows if row.metric == metric and row.extra["client"] is not None and row.value]
        return (min(values), sum(values) / len(values), max(values)) if values else None

    leaks = [row.value for row in rows if row.metric == "psnr_max" and row.value is not None]
    nmi, psnr, auc = (_by_attack(rows, metric) for metric in ("nmi_256", "psnr", "auc"))
    return FederationLine(
        labels_of(rows[0]),
        final("test_accuracy"),
        final("bytes_up"),
        final("bytes_down"),
        spread("bytes_up"),
        spread("bytes_down"),
        round(sum(row.value or 0 for row in rows if row.metric == "lost_clients") / seeds),
        max(leaks, default=None),
        max(nmi.values(), default=None),
        _by_attack(rows, "nmi_256_chance").get(max(nmi, key=lambda attack: nmi[attack], default="")),
        max(psnr.values(), default=None),
        max(auc.values(), default=None),
    )


def _by_attack(rows: Sequence[Row], metric: str) -> dict[str, float]:
    """Return every attack's mean over attacked rounds."""
    by_attack: dict[str, list[float]] = {}
    for row in rows:
        if row.attack is not None and row.metric == metric and row.value is not None and not is_pooled(row):
            by_attack.setdefault(row.attack, []).append(row.value)
    return {attack: sum(values) / len(values) for attack, values in by_attack.items()}


def places(rows: Sequence[Row]) -> dict[str, list[FederationLine]]:
    """Return the federations of each network and data set."""
    by_place: dict[str, list[FederationLine]] = {}
    for line in table(rows):
        by_place.setdefault(place(line.labels), []).append(line)
    return by_place


def apart(lines: Sequence[FederationLine]) -> dict[str, str]:
    """Return the labels that tell federations apart, with their headings; other labels would be columns of one word."""
    several = {label for label in TOLD if len({line.told(label) for line in lines}) > 1}
    runs = {"run": "run"} if len({line.labels.get("run") for line in lines}) > 1 else {}
    return runs | {label: heading for label, heading in TOLD.items() if label in several}


def common(lines: Sequence[FederationLine]) -> str:
    """Return in words the labels that all federations share."""
    same = [label for label in TOLD if label not in apart(lines) and label in lines[0].labels] if lines else []
    return ", ".join(f"{TOLD[label]} {lines[0].told(label)}" for label in same)


def settings(rows: Sequence[Row]) -> list[str]:
    """Return all settings of each method, given or default, a line a method."""
    texts = dict.fromkeys(str(row.extra.get("settings", "")) for row in rows if is_federated(row))
    return list(dict.fromkeys(line for text in texts for line in text.split("; ") if line))


def mishaps(rows: Sequence[Row]) -> list[str]:
    """Return in words the clients that were lost in a round, and the attacks that could not be made."""
    noted = [row for row in rows if is_federated(row) and row.metric in MISHAPS and row.note]
    called = titles(map(labels_of, noted))
    return [
        f"{called[name(labels_of(row))]}, seed {row.seed}, round {row.extra['round']}: "
        f"{'' if row.attack is None else f'{row.attack}: '}{row.note}"
        for row in noted
    ]


def megabytes(value: float) -> str:
    """Return bytes in MB with readable digits, also for small numbers.

    Example:
        >>> megabytes(121_281_000), megabytes(4_230)
        ('121.28', '0.0042')
    """
    return f"{value / 1e6:.2f}" if value >= 1e5 or not value else f"{value / 1e6:.2g}"


def group_of(row: Row) -> tuple[Any, ...]:
    """Return the values that federations in one plot must share."""
    return row.extra.get("run"), row.model, row.dataset, row.extra.get("local_batch")


def labels_of(row: Row) -> dict[str, Any]:
    """Return the labels of a row's federation."""
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense, "seed": row.seed} | row.extra


def place(labels: Labels) -> str:
    """Return the network and its data, and the batch of a local step if it is known."""
    size = labels.get("local_batch")
    return setting(labels) + ("" if size is None else f", batches of {size}")


def name(labels: Labels) -> str:
    """Return the name of a federation: the base pruning, and the defense on top.

    Example:
        >>> name({"base_pruning": "snip", "defense": "none"}), name({"base_pruning": "none", "defense": "priprune"})
        ('snip', 'no pruning, priprune')
    """
    base = "no pruning" if labels["base_pruning"] == "none" else str(labels["base_pruning"])
    base += ", broadcast dense" if labels.get("broadcast") == "dense" else ""
    base += ", only the sum seen" if labels.get("view") == "sum" else ""
    return base if labels["defense"] == "none" else f"{base}, {labels['defense']}"


def titles(labelled: Iterable[Labels]) -> dict[str, str]:
    """Return every federation's name, without the settings that tell it from no other."""
    by_name = {name(labels): labels for labels in labelled}
    bases = brief(str(labels["base_pruning"]) for labels in by_name.values())
    called = {}
    for full, labels in by_name.items():
        defenses = [str(x["defense"]) for x in by_name.values() if x["base_pruning"] == labels["base_pruning"]]
        brief_labels = {
            "base_pruning": bases[str(labels["base_pruning"])],
            "defense": brief(defenses)[str(labels["defense"])],
        }
        called[full] = name({**labels, **brief_labels})
    return called


def brief(methods: Iterable[str]) -> dict[str, str]:
    """Return methods as they are written, without the settings that all of one name share.

    Example:
        >>> brief(["snip:rate=0.3", "largest:of=kept:rate=0.1", "largest:of=kept:rate=0.2"])["largest:of=kept:rate=0.1"]
        'largest:rate=0.1'
    """
    by_text = {text: _parts(text) for text in methods}
    shared: dict[str, set[Setting]] = {}
    for names, settings in by_text.values():
        joined = "+".join(names)
        shared[joined] = shared.get(joined, set(settings)) & set(settings)
    shortened = {}
    for text, (names, settings) in by_text.items():
        differing = [setting for setting in settings if setting not in shared["+".join(names)]]
        parts = [[name, *(setting for at, setting in differing if at == number)] for number, name in enumerate(names)]
        shortened[text] = "+".join(map(":".join, parts))
    return shortened


def name_and_settings(method: str) -> tuple[str, str]:
    """Return the name of a method, or of several joined, and its settings, for a narrow table.

    Example:
        >>> name_and_settings("priprune:accuracy=10.0:privacy=1.0+dp:clip=1.0"), name_and_settings("none")
        (('priprune+dp', 'accuracy=10.0, privacy=1.0, clip=1.0'), ('none', ''))
    """
    names, settings = _parts(method)
    return "+".join(names), ", ".join(setting for _, setting in settings)


def _parts(method: str) -> tuple[list[str], list[Setting]]:
    """Return the joined names, and the settings of each."""
    parts = [split(part) for part in method.split("+")]
    return [first for first, *_ in parts], [
        (at, setting) for at, (_, *values) in enumerate(parts) for setting in values
    ]
