"""Defenses of updates side by side: pictures, accuracy over the epochs, and what each is worth as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.catalogue import split
from secateur.report.figures import DASHES
from secateur.report.inversion_gallery import Picture
from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View, setting
from secateur.report.summary import Key
from secateur.rows import Row

ACROSS = 9  # truths in a sheet: a batch of Rob
FEEDBACK = "+error-feedback"  # an update before the first round is the same with it and without it
Labels = Mapping[str, Any]


@dataclass(frozen=True)
class Sheet:
    """What one attack made of the same truths under every defense: a line each, as in dgp Fig. 3."""

    title: str
    lines: list[tuple[str, list[Picture | None]]]


@dataclass(frozen=True)
class Point:
    """What one defense is worth."""

    name: str
    accuracy: float
    leak: float  # the highest mean CW-SSIM that any attacker reached
    attacker: str
    ratio: float  # of dense, an upload and a download

    def worse_than(self, other: Point) -> bool:
        """Whether the other is at least as good in everything, and better in something."""
        mine, theirs = (-self.accuracy, self.leak, self.ratio), (-other.accuracy, other.leak, other.ratio)
        return all(b <= a for a, b in zip(mine, theirs, strict=True)) and mine != theirs


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
        place = _place(figure)
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


def balance(rows: Sequence[Row]) -> list[View]:
    """One view for each data set that was trained on and attacked: accuracy, leakage and bytes of every defense."""
    views = []
    for place in dict.fromkeys((row.extra.get("run"), row.dataset) for row in studied(rows)):
        own = [row for row in rows if (row.extra.get("run"), row.dataset) == place]
        if points := worth(own):
            name = str(place[1]) if place[0] is None else f"{place[0]}: {place[1]}"
            views.append(View(name, [_scatter(name, points)], front_sentence(points)))
    return views


def worth(rows: Iterable[Row]) -> list[Point]:
    """Every defense that was trained with and attacked; means over networks and seeds."""
    trained = {"test_accuracy": dict[str, list[float]](), "ratio": dict[str, list[float]]()}
    leaks: dict[str, dict[tuple[str, str], list[float]]] = {}
    for row in rows:
        name, extra = row.defense or "none", row.extra
        if row.value is None:
            continue
        if extra.get("study") == "training" and extra["epoch"] == extra["epochs"] and row.metric in trained:
            trained[row.metric].setdefault(name, []).append(row.value)
        # What a defense hides is the raw picture, so of ATS's two likenesses that one counts.
        elif row.metric == "cw_ssim" and row.attack and extra["target"] is None and extra.get("against") != "used":
            attacker = row.attack, str(extra.get("labels"))  # one who was told the labels is another
            leaks.setdefault(name, {}).setdefault(attacker, []).append(row.value)
    points = []
    for name, accuracy in trained["test_accuracy"].items():
        attacked = leaks.get(name, leaks.get(name.removesuffix(FEEDBACK)))
        if attacked and name in trained["ratio"]:
            leak, (attack, _) = max((_mean(values), attacker) for attacker, values in attacked.items())
            points.append(Point(name, _mean(accuracy), leak, split(attack)[0], _mean(trained["ratio"][name])))
    return points


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in everything: accuracy, leakage and bytes."""
    return [point for point in points if not any(point.worse_than(other) for other in points)]


def front_sentence(points: Sequence[Point]) -> str:
    """The front in words, for whoever prints the page or cannot see the plot."""
    told = "; ".join(
        f"{x.name}: {100 * x.accuracy:.1f}% right, CW-SSIM {x.leak:.2f} under {x.attacker}, {x.ratio:.3f} of the bytes"
        for x in sorted(front(points), key=lambda x: x.accuracy)
    )
    return f"On the front, from least to most accurate: {told}."


def _scatter(title: str, points: Sequence[Point]) -> Panel:
    best, traces = front(points), list[Part]()
    for number, point in enumerate(points):
        ring = {"width": 3 if point in best else 0, "color": GREY}
        told = f"<b>{point.name}</b><br>accuracy {100 * point.accuracy:.1f}%<br>CW-SSIM {point.leak:.3f} under "
        marker = {"color": cycle(PALETTE, number), "size": 10 + 24 * min(point.ratio, 1.2), "line": ring}
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{point.name}{' (front)' if point in best else ''}",
                "x": short([point.accuracy]),
                "y": short([point.leak]),
                "marker": marker,
                "text": [f"{told}{point.attacker}<br>{point.ratio:.3f} of the bytes of dense"],
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


def _curves(title: str, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> Panel:
    traces = list[Part]()
    for number, (name, points) in enumerate(curves.items()):
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 2}
        values = short(_mean(found) for found in points.values())
        traces.append({"type": "scatter", "mode": "lines", "name": name, "x": list(points), "y": values, "line": style})
    ends = "; ".join(f"{trace['name']} {100 * trace['y'][-1]:.1f}%" for trace in traces)
    return panel(
        title,
        f"{title}, test accuracy by epoch. In the end: {ends}.",
        traces,
        400,
        {"title": "epoch", "zeroline": False, "nticks": 10},
        {"title": "test accuracy", "tickformat": ".0%", "zeroline": False, "nticks": 6},
    )


def _place(figure: Labels) -> str:
    size = figure.get("batch_size", 1)
    told = [setting(figure), *([f"batches of {size}"] if size > 1 else [])]
    return ", ".join([*told, *(["labels told"] if figure.get("labels") == "oracle" else [])])


def _labels(row: Row) -> dict[str, Any]:
    return {"model": row.model, "dataset": row.dataset, "run": row.extra.get("run")}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
