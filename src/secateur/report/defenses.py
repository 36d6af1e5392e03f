"""Defenses of updates side by side: pictures, accuracy over epochs, the front of the trade-off, and tables of a study.

The trade-off weighs accuracy, leakage and bytes. The tables hold a study's trainings, costs and theorems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from secateur.catalogue import split
from secateur.metrics.estimates import Measure, mean
from secateur.metrics.membership import Estimate
from secateur.report.audit import View, setting
from secateur.report.audit_plots import DASHES
from secateur.report.inversion import Picture, where
from secateur.report.measures import ordered
from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.summary import Key, SummaryLine, estimate, lines
from secateur.runs.rows import Row

ACROSS = 9  # truths in a sheet: one batch of the rob attack
FEEDBACK = "+error-feedback"
TITLES = {  # by the kind of measurement
    "training": "What training under each defense came to",
    "cost": "What each defense costs",
    "bounds": "Theorems beside what a training came to",
    "overheard": "What the broadcast alone tells",
}
FIRST = ("test_accuracy", "bytes", "ratio", "paper_ratio", "defense_seconds", "user_seconds")
PLACES = {"run": "run", "model": "network", "dataset": "data", "defense": "defense"}
Labels = Mapping[str, Any]
Attacker = tuple[str, ...]  # the attack with its settings, and other labels that tell attackers apart


@dataclass(frozen=True)
class Sheet:
    """One attack's reconstructions of the same truths under every defense: a line each, as in dgp Fig. 3."""

    title: str
    lines: list[tuple[str, list[Picture | None]]]


@dataclass(frozen=True)
class DefensePoint:
    """One defense on the trade-off of accuracy, leakage and bytes."""

    name: str
    accuracy: Estimate
    leak: Estimate  # the highest mean CW-SSIM that any attacker reached
    attacker: str
    ratio: float  # of the bytes of dense, for an upload and a download

    def worse_than(self, other: DefensePoint) -> bool:
        """Return True if the other is as good in every value and better in one; intervals do not count."""
        mine, theirs = self._values(), other._values()
        return all(b <= a for a, b in zip(mine, theirs, strict=True)) and mine != theirs

    def _values(self) -> tuple[float, float, float]:
        return -self.accuracy.value, self.leak.value, self.ratio


@dataclass(frozen=True)
class DefenseTable:
    """One kind of measurement, a line for each network, data set and defense."""

    title: str
    lines: list[SummaryLine]

    @property
    def places(self) -> dict[str, str]:
        """The labels that tell the lines apart, with their headings; the defense always."""
        several = {name for name in PLACES if len({line.labels.get(name) for line in self.lines}) > 1}
        return {name: title for name, title in PLACES.items() if name in several | {"defense"}}

    @property
    def measures(self) -> list[str]:
        """The metrics of the columns."""
        return ordered((name for line in self.lines for name in line.cells), FIRST)


def studied(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of a study that belong to no attack: trainings and costs."""
    return [row for row in rows if "study" in row.extra]


def facts(rows: Sequence[Row]) -> dict[str, str]:
    """Return the networks and data sets of a study without attacks."""
    names = {"Network": [row.model for row in rows], "Data": [row.dataset for row in rows]}
    return {name: ", ".join(dict.fromkeys(values)) for name, values in names.items() if values}


def sheets(figures: Iterable[Labels]) -> list[Sheet]:
    """Return one sheet for each attack that met several defenses."""
    groups: dict[str, dict[str, dict[Key, Picture]]] = {}
    truths: dict[str, dict[Key, Picture]] = {}
    for figure in figures:
        if figure["kind"] != "picture" or not figure["png"]:
            continue
        setting_name = where(figure)
        key = tuple((name, figure.get(name)) for name in ("seed", "target", "item"))
        if figure["attack"] is None:
            truths.setdefault(setting_name, {})[key] = Picture("truth", figure["png"], [])
            continue
        attack, *settings = split(str(figure["attack"]))
        knowing = [text.partition("=")[2] for text in settings if text.startswith("adaptive=")]
        name = ", ".join([str(figure.get("defense") or "none"), *(f"attacker: {adaptive}" for adaptive in knowing)])
        by_defense = groups.setdefault(f"{attack}: {setting_name}", {})
        by_defense.setdefault(name, {})[key] = Picture(name, figure["png"], [])
    result = []
    for title, by_defense in groups.items():
        if len(by_defense) > 1:
            truth_row = truths.get(title.partition(": ")[2], {})
            chosen = list(truth_row or next(iter(by_defense.values())))[:ACROSS]
            all_rows = [*([("truth", truth_row)] if truth_row else []), *by_defense.items()]
            result.append(Sheet(title, [(name, [pictures.get(key) for key in chosen]) for name, pictures in all_rows]))
    return result


def over_epochs(rows: Iterable[Row]) -> list[View]:
    """Return one view for each network and data set: the accuracy of collaborative training, a curve a defense."""
    groups: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        if row.extra.get("study") == "training" and row.metric == "test_accuracy" and row.value is not None:
            curves = groups.setdefault(_place(row), {})
            points = curves.setdefault(row.defense or "none", {})
            points.setdefault(int(row.extra["epoch"]), []).append(row.value)
    return [View(place, [_curves(place, curves)]) for place, curves in groups.items()]


def _curves(title: str, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> Panel:
    traces = list[Part]()
    for number, (name, points) in enumerate(curves.items()):
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 2}
        means = short(sum(values) / len(values) for values in points.values())
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": list(points), "y": means, "line": style})
    last = max(max(points) for points in curves.values())
    ends = "; ".join(f"{trace['name']} {100 * trace['y'][-1]:.1f}%" for trace in traces)
    return panel(
        title,
        f"{title}, test accuracy by epoch. In the end: {ends}.",
        traces,
        400,
        {"title": "epoch", "zeroline": False} | ({"nticks": 10} if last > 10 else {"dtick": 1}),  # no half epochs
        {"title": "test accuracy", "tickformat": ".0%", "zeroline": False, "nticks": 6},
    )


def _place(row: Row) -> str:
    """Return the network and the data set of a row, with its run where there are several."""
    return setting({"model": row.model, "dataset": row.dataset, "run": row.extra.get("run")})


def balance(rows: Sequence[Row]) -> list[View]:
    """Return one view of all defenses for each network and data set that was trained and attacked."""
    places: dict[str, list[Row]] = {}
    for row in rows:
        places.setdefault(_place(row), []).append(row)
    return [
        View(name, [_scatter(name, points)], front_sentence(points))
        for name, place_rows in places.items()
        if (points := worth(place_rows))
    ]


def worth(rows: Iterable[Row]) -> list[DefensePoint]:
    """Return the point of every defense that one network was trained with and attacked under; means over seeds."""
    trained: dict[str, dict[str, Measure]] = {"test_accuracy": {}, "ratio": {}}
    leaks: dict[str, dict[Attacker, Measure]] = {}
    for row in rows:
        name, extra = row.defense or "none", row.extra
        if row.value is None:
            continue
        if extra.get("study") == "training" and extra["epoch"] == extra["epochs"] and row.metric in trained:
            trained[row.metric].setdefault(name, {})[row.seed] = estimate(row)
        # A defense hides the raw picture, so of ATS's two comparisons the one with the raw picture counts.
        elif row.metric == "cw_ssim" and row.attack and extra["target"] is None and extra.get("against") != "used":
            more = (str(extra.get(key)) for key in ("stage", "labels", "batch_size"))
            leaks.setdefault(name, {}).setdefault((row.attack, *more), {})[row.seed] = estimate(row)
    points = []
    for name, accuracies in trained["test_accuracy"].items():
        means = ((mean(measure), who[0]) for who, measure in _met(leaks, name).items())
        seen = [(leak, attack) for leak, attack in means if leak is not None]
        accuracy, ratio = mean(accuracies), mean(trained["ratio"].get(name, {}))
        if seen and accuracy is not None and ratio is not None:
            leak, attack = max(seen, key=lambda pair: pair[0].value)
            points.append(DefensePoint(name, accuracy, leak, split(attack)[0], ratio.value))
    return points


def _met(leaks: dict[str, dict[Attacker, Measure]], name: str) -> dict[Attacker, Measure]:
    """Return the attackers of a defense; with error feedback also those of the defense without it.

    A residual is empty in the first round, so both are the same there.
    """
    base = leaks.get(name.removesuffix(FEEDBACK), {})
    return {who: measure for who, measure in base.items() if who[1] != "weights given"} | leaks.get(name, {})


def front(points: Sequence[DefensePoint]) -> list[DefensePoint]:
    """Return the points that no other beats in accuracy, leakage and bytes."""
    return [point for point in points if not any(point.worse_than(other) for other in points)]


def front_sentence(points: Sequence[DefensePoint]) -> str:
    """Return the front in words, for readers who print the page or cannot see the plot."""
    defenses = "; ".join(
        f"{x.name}: {100 * x.accuracy.value:.1f}% right, CW-SSIM {x.leak.value:.2f} under {x.attacker}, "
        f"{x.ratio:.3f} of the bytes"
        for x in sorted(front(points), key=lambda x: x.accuracy.value)
    )
    return f"On the front, from least to most accurate: {defenses}."


def _scatter(title: str, points: Sequence[DefensePoint]) -> Panel:
    best, traces = front(points), list[Part]()
    for number, point in enumerate(points):
        ring = {"width": 3 if point in best else 0, "color": GREY}
        label = f"<b>{point.name}</b><br>accuracy {100 * point.accuracy.value:.1f}%<br>CW-SSIM {point.leak.value:.3f}"
        marker = {"color": cycle(PALETTE, number), "size": 10 + 24 * min(point.ratio, 1.2), "line": ring}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{point.name}{' (front)' if point in best else ''}",
                "x": short([point.accuracy.value]),
                "y": short([point.leak.value]),
                "error_x": _bar(point.accuracy),
                "error_y": _bar(point.leak),
                "marker": marker,
                "text": [f"{label} under {point.attacker}<br>{point.ratio:.3f} of the bytes of dense"],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return panel(
        title,
        f"{title}: test accuracy against CW-SSIM of the strongest attacker. {front_sentence(points)}",
        traces,
        440,
        {"title": "test accuracy", "tickformat": ".0%", "zeroline": False, "nticks": 8},
        {"title": "CW-SSIM of the strongest attacker", "zeroline": False, "nticks": 8},
    )


def _bar(x: Estimate) -> Part:
    """Return an interval as a thin bar; of no length if it is not finite."""
    up, down = (end if math.isfinite(end) else 0.0 for end in (x.high - x.value, x.value - x.low))
    style = {"color": "rgba(123, 134, 129, 0.55)", "thickness": 1, "width": 0}
    return {"type": "data", "array": short([up]), "arrayminus": short([down])} | style


def tables(rows: Iterable[Row]) -> list[DefenseTable]:
    """Return a table for each kind of measurement; of a training its last epoch."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kind, extra = row.extra.get("study"), row.extra
        if kind in TITLES and extra.get("epoch") == extra.get("epochs"):
            labels = {name: extra[name] for name in ("run",) if name in extra}
            kinds.setdefault(kind, []).append(replace(row, extra=labels, note=None))
    return [DefenseTable(title, lines(kinds[kind])) for kind, title in TITLES.items() if kind in kinds]
