"""Defenses of updates side by side: pictures, and accuracy over the epochs.

What each defense of updates is worth as a whole: accuracy, leakage and bytes, and which no other beats.

What a study of defenses measured beside its attacks, as tables of the page: trainings, costs, theorems.
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
from secateur.report.summary import Key, Line, estimate, lines
from secateur.runs.rows import Row

ACROSS = 9  # truths in a sheet: a batch of Rob
Labels = Mapping[str, Any]

FEEDBACK = "+error-feedback"
Attacker = tuple[str, ...]  # the attack with its settings, and all else that makes it another attacker

TITLES = {  # by the kind of measurement
    "training": "What training under each defense came to",
    "cost": "What each defense costs",
    "bounds": "Theorems beside what a training came to",
    "overheard": "What the broadcast alone tells",
}
FIRST = ("test_accuracy", "bytes", "ratio", "paper_ratio", "defense_seconds", "user_seconds")
PLACES = {"run": "run", "model": "network", "dataset": "data", "defense": "defense"}


@dataclass(frozen=True)
class Sheet:
    """What one attack made of the same truths under every defense: a line each, as in dgp Fig. 3."""

    title: str
    lines: list[tuple[str, list[Picture | None]]]


def studied(rows: Iterable[Row]) -> list[Row]:
    """The rows of a study that are no attack's: trainings and costs."""
    return [row for row in rows if "study" in row.extra]


def facts(rows: Sequence[Row]) -> dict[str, str]:
    """What was studied without any attack."""
    told = {"Network": [row.model for row in rows], "Data": [row.dataset for row in rows]}
    return {name: ", ".join(dict.fromkeys(values)) for name, values in told.items() if values}


def sheets(figures: Iterable[Labels]) -> list[Sheet]:
    """One sheet an attack that met several defenses."""
    groups: dict[str, dict[str, dict[Key, Picture]]] = {}
    truths: dict[str, dict[Key, Picture]] = {}
    for figure in figures:
        if figure["kind"] != "picture" or not figure["png"]:
            continue
        place = where(figure)
        key = tuple((name, figure.get(name)) for name in ("seed", "target", "item"))
        if figure["attack"] is None:
            truths.setdefault(place, {})[key] = Picture("truth", figure["png"], [])
            continue
        attack, *settings = split(str(figure["attack"]))
        knowing = [text.partition("=")[2] for text in settings if text.startswith("adaptive=")]
        name = ", ".join([str(figure.get("defense") or "none"), *(f"attacker: {each}" for each in knowing)])
        lines = groups.setdefault(f"{attack}: {place}", {})
        lines.setdefault(name, {})[key] = Picture(name, figure["png"], [])
    made = []
    for title, lines in groups.items():
        if len(lines) > 1:
            above = truths.get(title.partition(": ")[2], {})
            chosen = list(above or next(iter(lines.values())))[:ACROSS]
            every = [*([("truth", above)] if above else []), *lines.items()]
            made.append(Sheet(title, [(name, [found.get(key) for key in chosen]) for name, found in every]))
    return made


def over_epochs(rows: Iterable[Row]) -> list[View]:
    """One view for each network and data set: the accuracy of collaborative training, a curve a defense."""
    groups: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        if row.extra.get("study") == "training" and row.metric == "test_accuracy" and row.value is not None:
            curves = groups.setdefault(setting(_labels(row)), {})
            points = curves.setdefault(row.defense or "none", {})
            points.setdefault(int(row.extra["epoch"]), []).append(row.value)
    return [View(place, [_curves(place, curves)]) for place, curves in groups.items()]


def _curves(title: str, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> Panel:
    traces = list[Part]()
    for number, (name, points) in enumerate(curves.items()):
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 2}
        values = short(_mean(found) for found in points.values())
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": list(points), "y": values, "line": style})
    last = max(max(points) for points in curves.values())
    ends = "; ".join(f"{trace['name']} {100 * trace['y'][-1]:.1f}%" for trace in traces)
    return panel(
        title,
        f"{title}, test accuracy by epoch. In the end: {ends}.",
        traces,
        400,
        {"title": "epoch", "zeroline": False} | ({"nticks": 10} if last > 10 else {"dtick": 1}),  # there is no half one
        {"title": "test accuracy", "tickformat": ".0%", "zeroline": False, "nticks": 6},
    )


def _labels(row: Row) -> dict[str, Any]:
    return {"model": row.model, "dataset": row.dataset, "run": row.extra.get("run")}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Point:
    """What one defense is worth."""

    name: str
    accuracy: Estimate
    leak: Estimate  # the highest mean CW-SSIM that any attacker reached
    attacker: str
    ratio: float  # of dense, an upload and a download

    def worse_than(self, other: Point) -> bool:
        """Whether the other is at least as good in everything, and better in something; by the values alone."""
        mine, theirs = self._values(), other._values()
        return all(b <= a for a, b in zip(mine, theirs, strict=True)) and mine != theirs

    def _values(self) -> tuple[float, float, float]:
        return -self.accuracy.value, self.leak.value, self.ratio


def balance(rows: Sequence[Row]) -> list[View]:
    """One view for each network and data set that was trained on and attacked, with every defense."""
    places: dict[str, list[Row]] = {}
    for row in rows:
        name = setting({"model": row.model, "dataset": row.dataset, "run": row.extra.get("run")})
        places.setdefault(name, []).append(row)
    return [
        View(name, [_scatter(name, points)], front_sentence(points))
        for name, own in places.items()
        if (points := worth(own))
    ]


def worth(rows: Iterable[Row]) -> list[Point]:
    """Every defense that one network was trained with and attacked under; means over the seeds."""
    trained: dict[str, dict[str, Measure]] = {"test_accuracy": {}, "ratio": {}}
    leaks: dict[str, dict[Attacker, Measure]] = {}
    for row in rows:
        name, extra = row.defense or "none", row.extra
        if row.value is None:
            continue
        if extra.get("study") == "training" and extra["epoch"] == extra["epochs"] and row.metric in trained:
            trained[row.metric].setdefault(name, {})[row.seed] = estimate(row)
        # What a defense hides is the raw picture, so of ATS's two likenesses that one counts.
        elif row.metric == "cw_ssim" and row.attack and extra["target"] is None and extra.get("against") != "used":
            more = (str(extra.get(key)) for key in ("stage", "labels", "batch_size"))
            leaks.setdefault(name, {}).setdefault((row.attack, *more), {})[row.seed] = estimate(row)
    points = []
    for name, accuracies in trained["test_accuracy"].items():
        found = ((mean(measure), who[0]) for who, measure in _met(leaks, name).items())
        seen = [(leak, attack) for leak, attack in found if leak is not None]
        accuracy, ratio = mean(accuracies), mean(trained["ratio"].get(name, {}))
        if seen and accuracy is not None and ratio is not None:
            leak, attack = max(seen, key=lambda pair: pair[0].value)
            points.append(Point(name, accuracy, leak, split(attack)[0], ratio.value))
    return points


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in everything: accuracy, leakage and bytes."""
    return [point for point in points if not any(point.worse_than(other) for other in points)]


def front_sentence(points: Sequence[Point]) -> str:
    """The front in words, for whoever prints the page or cannot see the plot."""
    told = "; ".join(
        f"{x.name}: {100 * x.accuracy.value:.1f}% right, CW-SSIM {x.leak.value:.2f} under {x.attacker}, "
        f"{x.ratio:.3f} of the bytes"
        for x in sorted(front(points), key=lambda x: x.accuracy.value)
    )
    return f"On the front, from least to most accurate: {told}."


def _met(leaks: dict[str, dict[Attacker, Measure]], name: str) -> dict[Attacker, Measure]:
    """Who attacked a defense; with error feedback also who met it without: a residual is empty in the first round."""
    base = leaks.get(name.removesuffix(FEEDBACK), {})
    return {who: found for who, found in base.items() if who[1] != "weights given"} | leaks.get(name, {})


def _scatter(title: str, points: Sequence[Point]) -> Panel:
    best, traces = front(points), list[Part]()
    for number, point in enumerate(points):
        ring = {"width": 3 if point in best else 0, "color": GREY}
        told = f"<b>{point.name}</b><br>accuracy {100 * point.accuracy.value:.1f}%<br>CW-SSIM {point.leak.value:.3f}"
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
                "text": [f"{told} under {point.attacker}<br>{point.ratio:.3f} of the bytes of dense"],
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


def _bar(found: Estimate) -> Part:
    """An interval as a thin bar; none where there is none."""
    up, down = (end if math.isfinite(end) else 0.0 for end in (found.high - found.value, found.value - found.low))
    style = {"color": "rgba(123, 134, 129, 0.55)", "thickness": 1, "width": 0}
    return {"type": "data", "array": short([up]), "arrayminus": short([down])} | style


@dataclass(frozen=True)
class Table:
    """One kind of measurement, a line for each network, data set and defense."""

    title: str
    lines: list[Line]

    @property
    def places(self) -> dict[str, str]:
        """What tells the lines apart, and how it is called; the defense always."""
        several = {name for name in PLACES if len({line.labels.get(name) for line in self.lines}) > 1}
        return {name: title for name, title in PLACES.items() if name in several | {"defense"}}

    @property
    def measures(self) -> list[str]:
        """The columns."""
        return ordered((name for line in self.lines for name in line.cells), FIRST)


def tables(rows: Iterable[Row]) -> list[Table]:
    """A table for each kind of measurement; of a training its last epoch."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kind, extra = row.extra.get("study"), row.extra
        if kind in TITLES and extra.get("epoch") == extra.get("epochs"):
            own = {name: extra[name] for name in ("run",) if name in extra}
            kinds.setdefault(kind, []).append(replace(row, extra=own, note=None))
    return [Table(title, lines(kinds[kind])) for kind, title in TITLES.items() if kind in kinds]
