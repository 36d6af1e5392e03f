"""Defenses of updates side by side: pictures, and accuracy over the epochs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.catalogue import split
from secateur.report.figures import DASHES
from secateur.report.inversion import where
from secateur.report.inversion_gallery import Picture
from secateur.report.plotting import PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View, setting
from secateur.report.summary import Key
from secateur.rows import Row

ACROSS = 9  # truths in a sheet: a batch of Rob
Labels = Mapping[str, Any]


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
