"""Federations over their rounds: accuracy, leakage and how much was withheld; which rows are theirs.

What a person calls a federation on the page.

The table of federations: a line each, its columns, and what all of them have in common.
"""

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
CHANCE = {"nmi_256": "nmi_256_chance"}  # what a measure is of pictures whose pixels are shuffled
NAMED = 12  # curves that a legend names in every panel; of more the first panel's names them
Labels = Mapping[str, Any]
Points = Sequence[tuple[int, float]]
Curves = Mapping[tuple[str, str | None], Points]
Setting = tuple[int, str]  # of which of several joined methods, and the setting

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
Spread = tuple[float, float, float]  # least, mean and most


def is_federated(row: Row) -> bool:
    """Whether a row is of a federation's round."""
    return "base_pruning" in row.extra and "round" in row.extra


def attacked(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """What attacks on updates said, by network and data set."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if is_federated(row) and row.attack is not None and "target" in row.extra and not is_pooled(row):
            found.setdefault(place(labels_of(row)), []).append(row)
    return found


def over_rounds(rows: Iterable[Row]) -> list[View]:
    """One view a network and data set: each measure by round, a curve a federation and attack, means over seeds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        drawn = row.metric in OVER_ROUNDS or row.metric in CHANCE.values()
        if is_federated(row) and drawn and row.value is not None and not is_pooled(row):
            groups.setdefault(group_of(row), []).append(row)
    views = []
    for found in groups.values():
        called = titles(map(labels_of, found))
        styles = {each: number for number, each in enumerate(called.values())}
        panels: list[Panel] = []
        last = max(row.extra["round"] for row in found)
        for metric, title in OVER_ROUNDS.items():
            curves = _curves([row for row in found if row.metric == metric], called)
            flat = metric == "density" and all(len({y for _, y in points}) == 1 for points in curves.values())
            if curves and not flat:
                beside = _by_round([row for row in found if row.metric == CHANCE.get(metric)])
                named = len(curves) <= NAMED or not panels
                panels.append(_panel(title, curves, beside, styles, last, named))
        if panels:
            views.append(View(place(labels_of(found[0])), panels))
    return views


def place(labels: Labels) -> str:
    """A network and its data, and the batch of a local step where it is told."""
    size = labels.get("local_batch")
    return setting(labels) + ("" if size is None else f", batches of {size}")


def is_pooled(row: Row) -> bool:
    """Whether a row gathers clients that have rows of their own."""
    return row.attack is not None and row.extra.get("client") is None and row.extra.get("attacked", 1) > 1


def _curves(rows: Sequence[Row], called: Mapping[str, str]) -> Curves:
    """By federation and attack the points of its curve."""
    own: dict[tuple[str, str | None], list[Row]] = {}
    attacks = brief(row.attack for row in rows if row.attack is not None)
    for row in rows:
        curve = called[name(labels_of(row))], None if row.attack is None else attacks[row.attack]
        own.setdefault(curve, []).append(row)
    return {curve: _by_round(found) for curve, found in own.items()}


def _by_round(rows: Iterable[Row]) -> Points:
    """(round, mean over seeds, clients and whatever else) in the order of the rounds."""
    values: dict[int, list[float]] = {}
    for row in rows:
        values.setdefault(row.extra["round"], []).append(float(row.value or 0))
    return [(number, sum(found) / len(found)) for number, found in sorted(values.items())]


def _panel(title: str, curves: Curves, beside: Points, styles: Mapping[str, int], last: int, named: bool) -> Panel:
    """A federation has one colour in all panels, an attack one dash; all go on to the `last` round."""
    attacks = list(dict.fromkeys(attack for _, attack in curves))
    dashes = {attack: cycle(DASHES, number) for number, attack in enumerate(attacks)}
    traces: list[Part] = []
    for (federation, attack), points in curves.items():
        told = federation if attack is None else f"{federation}, {attack}"
        line = {"color": cycle(PALETTE, styles[federation]), "dash": dashes[attack], "width": 2}
        marker = {"size": 5, "symbol": cycle(SYMBOLS, styles[federation] // len(PALETTE))}  # where colours come again
        traces.append(_trace(told, points, line) | {"mode": "lines+markers", "marker": marker, "showlegend": named})
    ends = ", ".join(f"{trace['name']} {trace['y'][-1]:g}" for trace in traces)
    ends += f"; by chance {beside[-1][1]:.4g}" if beside else ""
    if not named and len(attacks) > 1:  # the first panel tells the colours, and not the dashes
        traces += [_trace(str(attack), [], {"color": GREY, "dash": dashes[attack], "width": 2}) for attack in attacks]
    traces += [_trace("by chance", beside, thin("dot"))] if beside else []
    lines = sum(trace.get("showlegend", True) for trace in traces)
    ticks = {"nticks": 8} if last > 8 else {"dtick": 1}  # there is no half round
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


def _trace(told: str, points: Points, line: Part) -> Part:
    """A line; without points it is in the legend alone."""
    hover = f"{told}, round %{{x}}: %{{y:.3g}}<extra></extra>"
    own = {"x": [x for x, _ in points], "y": short(y for _, y in points)} if points else {"x": [None], "y": [None]}
    return {"type": "scatter", "mode": "lines", "name": told, "line": line, "hovertemplate": hover} | own


def group_of(row: Row) -> tuple[Any, ...]:
    """What federations must share to stand in one picture."""
    return row.extra.get("run"), row.model, row.dataset, row.extra.get("local_batch")


def labels_of(row: Row) -> dict[str, Any]:
    """What a row tells of its federation."""
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense, "seed": row.seed} | row.extra


def name(labels: Labels) -> str:
    """A base pruning, and the defense on top.

    Example:
        >>> name({"base_pruning": "snip", "defense": "none"}), name({"base_pruning": "none", "defense": "priprune"})
        ('snip', 'no pruning, priprune')
    """
    base = "no pruning" if labels["base_pruning"] == "none" else str(labels["base_pruning"])
    base += ", broadcast dense" if labels.get("broadcast") == "dense" else ""
    base += ", only the sum seen" if labels.get("view") == "sum" else ""
    return base if labels["defense"] == "none" else f"{base}, {labels['defense']}"


def titles(found: Iterable[Labels]) -> dict[str, str]:
    """Every federation's name, shorter where its methods' settings tell it from none of the others."""
    every = {name(labels): labels for labels in found}
    bases = brief(str(labels["base_pruning"]) for labels in every.values())
    called = {}
    for full, labels in every.items():
        own = [str(x["defense"]) for x in every.values() if x["base_pruning"] == labels["base_pruning"]]
        short = {"base_pruning": bases[str(labels["base_pruning"])], "defense": brief(own)[str(labels["defense"])]}
        called[full] = name({**labels, **short})
    return called


def brief(methods: Iterable[str]) -> dict[str, str]:
    """Methods as they are written, without the settings that all of one name share.

    Example:
        >>> brief(["snip:rate=0.3", "largest:of=kept:rate=0.1", "largest:of=kept:rate=0.2"])["largest:of=kept:rate=0.1"]
        'largest:rate=0.1'
    """
    every = {text: _parts(text) for text in methods}
    shared: dict[str, set[Setting]] = {}
    for names, settings in every.values():
        joined = "+".join(names)
        shared[joined] = shared.get(joined, set(settings)) & set(settings)
    found = {}
    for text, (names, settings) in every.items():
        own = [each for each in settings if each not in shared["+".join(names)]]
        parts = [[name, *(setting for at, setting in own if at == number)] for number, name in enumerate(names)]
        found[text] = "+".join(map(":".join, parts))
    return found


def name_and_settings(method: str) -> tuple[str, str]:
    """A method, or several joined, as a narrow table has it: the name, and below what was set.

    Example:
        >>> name_and_settings("priprune:accuracy=10.0:privacy=1.0+dp:clip=1.0"), name_and_settings("none")
        (('priprune+dp', 'accuracy=10.0, privacy=1.0, clip=1.0'), ('none', ''))
    """
    names, settings = _parts(method)
    return "+".join(names), ", ".join(setting for _, setting in settings)


def _parts(method: str) -> tuple[list[str], list[Setting]]:
    """The names that are joined, and what is set of each."""
    parts = [split(part) for part in method.split("+")]
    return [first for first, *_ in parts], [(at, each) for at, (_, *own) in enumerate(parts) for each in own]


@dataclass(frozen=True)
class Federated:
    """One federation, a line of the table; means over its seeds."""

    labels: Labels
    accuracy: float | None
    up: float | None  # bytes, of all clients
    down: float | None
    up_client: Spread | None  # bytes of those that took part
    down_client: Spread | None
    lost: int  # clients, over all rounds
    leak: float | None  # the highest PSNR of an attacked round
    nmi: float | None  # the mean over attacked rounds, of the attack with the highest
    chance: float | None  # what NMI the same attack's pictures have with shuffled pixels
    psnr: float | None
    auc: float | None  # of membership attacks

    @property
    def name(self) -> str:
        """What was pruned and how it was defended."""
        return name(self.labels)

    @property
    def base(self) -> str:
        """What was pruned, broadcast and seen, whatever the defense."""
        return f"{self.labels['base_pruning']}, {self.labels['broadcast']}, {self.labels.get('view', 'update')}"

    def told(self, label: str) -> str:
        """A label in words."""
        value = str(self.labels.get(label, "-"))
        return SEEN.get(value, value) if label == "view" else value


def table(rows: Sequence[Row]) -> list[Federated]:
    """One line a federation, in the order they were run."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if is_federated(row):
            groups.setdefault((*group_of(row), name(labels_of(row))), []).append(row)
    return [_line(found) for found in groups.values()]


def places(rows: Sequence[Row]) -> dict[str, list[Federated]]:
    """The federations of each network and data set."""
    found: dict[str, list[Federated]] = {}
    for each in table(rows):
        found.setdefault(place(each.labels), []).append(each)
    return found


def apart(found: Sequence[Federated]) -> dict[str, str]:
    """The labels that tell some of them from others, with their headings; the others would be columns of one word."""
    several = {label for label in TOLD if len({each.told(label) for each in found}) > 1}
    runs = {"run": "run"} if len({each.labels.get("run") for each in found}) > 1 else {}
    return runs | {label: heading for label, heading in TOLD.items() if label in several}


def common(found: Sequence[Federated]) -> str:
    """What all of them share, in words."""
    same = [label for label in TOLD if label not in apart(found) and label in found[0].labels] if found else []
    return ", ".join(f"{TOLD[label]} {found[0].told(label)}" for label in same)


def settings(rows: Sequence[Row]) -> list[str]:
    """Everything that each method was set to, given or not, a line a method."""
    told = dict.fromkeys(str(row.extra.get("settings", "")) for row in rows if is_federated(row))
    return list(dict.fromkeys(each for text in told for each in text.split("; ") if each))


def mishaps(rows: Sequence[Row]) -> list[str]:
    """Which clients were lost in which rounds, and which attacks could not be made, in words."""
    told = [row for row in rows if is_federated(row) and row.metric in MISHAPS and row.note]
    called = titles(map(labels_of, told))
    return [
        f"{called[name(labels_of(row))]}, seed {row.seed}, round {row.extra['round']}: "
        f"{'' if row.attack is None else f'{row.attack}: '}{row.note}"
        for row in told
    ]


def megabytes(value: float) -> str:
    """Bytes as a person reads them in MB, small ones too.

    Example:
        >>> megabytes(121_281_000), megabytes(4_230)
        ('121.28', '0.0042')
    """
    return f"{value / 1e6:.2f}" if value >= 1e5 or not value else f"{value / 1e6:.2g}"


def _line(rows: Sequence[Row]) -> Federated:
    last = max(row.extra["round"] for row in rows)
    seeds = len({row.seed for row in rows})

    def final(metric: str) -> float | None:
        ends = [row for row in rows if row.metric == metric and row.extra["round"] == last]
        values = [row.value for row in ends if row.extra["client"] is None and row.value is not None]
        return sum(values) / len(values) if values else None

    def spread(metric: str) -> Spread | None:
        own = [row.value for row in rows if row.metric == metric and row.extra["client"] is not None and row.value]
        return (min(own), sum(own) / len(own), max(own)) if own else None

    leaks = [row.value for row in rows if row.metric == "psnr_max" and row.value is not None]
    nmi, psnr, auc = (_by_attack(rows, metric) for metric in ("nmi_256", "psnr", "auc"))
    return Federated(
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
    """Every attack's mean over attacked rounds."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.attack is not None and row.metric == metric and row.value is not None and not is_pooled(row):
            found.setdefault(row.attack, []).append(row.value)
    return {attack: sum(values) / len(values) for attack, values in found.items()}
