"""Federations over their rounds: accuracy, leakage and how much was withheld; which rows are theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from secateur.report.federation_names import brief, name, titles
from secateur.report.figures import DASHES
from secateur.report.plotting import GREY, PALETTE, Panel, Part, alone, cycle, panel, short, thin
from secateur.report.sections import View, setting
from secateur.report.tradeoff import SYMBOLS
from secateur.rows import Row

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
