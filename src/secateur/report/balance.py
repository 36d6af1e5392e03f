"""What each defense of updates is worth as a whole: accuracy, leakage and bytes, and which no other beats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from secateur.catalogue import split
from secateur.metrics.membership import Estimate
from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View, setting
from secateur.rows import Row
from secateur.studies.dgp_found import estimate
from secateur.studies.measured import Measure, mean

FEEDBACK = "+error-feedback"
Attacker = tuple[str, ...]  # the attack with its settings, and all else that makes it another attacker


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
