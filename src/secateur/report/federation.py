"""What federations came to: accuracy and leakage over rounds, bytes per client, and what was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.report.figures import DASHES
from secateur.report.plotting import PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View, setting
from secateur.rows import Row

OVER_ROUNDS = {
    "test_accuracy": "test accuracy",
    "psnr": "PSNR of reconstructions",
    "nmi_256": "NMI, 256 levels",
    "density": "share of weights kept",
    "withheld_of_kept": "share of kept weights withheld",
}
Labels = Mapping[str, Any]
Curves = Mapping[tuple[str, str | None], Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Federated:
    """One federation, a line of the table; means over its seeds."""

    labels: Labels
    accuracy: float | None
    up: float | None  # bytes, of all clients
    down: float | None
    per_client: tuple[float, float, float] | None  # bytes up: least, mean and most of those that took part
    lost: int  # clients, over all rounds
    leak: float | None  # the highest PSNR of an attacked round

    @property
    def name(self) -> str:
        """What was pruned and how it was defended."""
        return name(self.labels)


def is_federated(row: Row) -> bool:
    """Whether a row is of a federation's round."""
    return "base_pruning" in row.extra and "round" in row.extra


def name(labels: Labels) -> str:
    """A base pruning, and the defense on top.

    Example:
        >>> name({"base_pruning": "snip", "defense": "none"}), name({"base_pruning": "none", "defense": "priprune"})
        ('snip', 'no pruning, priprune')
    """
    base = "no pruning" if labels["base_pruning"] == "none" else str(labels["base_pruning"])
    return base if labels["defense"] == "none" else f"{base}, {labels['defense']}"


def table(rows: Sequence[Row]) -> list[Federated]:
    """One line a federation, in the order they were run."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if is_federated(row):
            groups.setdefault((*_place(row), name(_labels(row))), []).append(row)
    return [_line(found) for found in groups.values()]


def over_rounds(rows: Iterable[Row]) -> list[View]:
    """One view a network and data set: each measure by round, a curve a federation and attack, means over seeds."""
    places: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if is_federated(row) and row.metric in OVER_ROUNDS and row.value is not None:
            places.setdefault(_place(row), []).append(row)
    views = []
    for found in places.values():
        styles = {each: number for number, each in enumerate(dict.fromkeys(name(_labels(row)) for row in found))}
        panels = []
        for metric, title in OVER_ROUNDS.items():
            curves = _curves([row for row in found if row.metric == metric])
            flat = metric == "density" and all(len({y for _, y in points}) == 1 for points in curves.values())
            if curves and not flat:
                panels.append(_panel(title, curves, styles))
        if panels:
            views.append(View(setting(_labels(found[0])), panels))
    return views


def _line(rows: Sequence[Row]) -> Federated:
    last = max(row.extra["round"] for row in rows)
    seeds = len({row.seed for row in rows})

    def final(metric: str) -> float | None:
        ends = [row for row in rows if row.metric == metric and row.extra["round"] == last]
        values = [row.value for row in ends if row.extra["client"] is None and row.value is not None]
        return sum(values) / len(values) if values else None

    clients = [row.value for row in rows if row.metric == "bytes_up" and row.extra["client"] is not None and row.value]
    leaks = [row.value for row in rows if row.metric == "psnr_max" and row.value is not None]
    return Federated(
        _labels(rows[0]),
        final("test_accuracy"),
        final("bytes_up"),
        final("bytes_down"),
        (min(clients), sum(clients) / len(clients), max(clients)) if clients else None,
        round(sum(row.value or 0 for row in rows if row.metric == "lost_clients") / seeds),
        max(leaks, default=None),
    )


def _curves(rows: Sequence[Row]) -> Curves:
    """By federation and attack the points (round, mean over seeds)."""
    values: dict[tuple[str, str | None], dict[int, list[float]]] = {}
    for row in rows:
        curve = name(_labels(row)), row.attack
        values.setdefault(curve, {}).setdefault(row.extra["round"], []).append(float(row.value or 0))
    return {
        curve: [(number, sum(found) / len(found)) for number, found in sorted(points.items())]
        for curve, points in values.items()
    }


def _panel(title: str, curves: Curves, styles: Mapping[str, int]) -> Panel:
    """A federation has one colour in all panels, an attack one dash."""
    attacks = list(dict.fromkeys(attack for _, attack in curves))
    traces: list[Part] = []
    for (federation, attack), points in curves.items():
        told = federation if attack is None else f"{federation}, {attack}"
        style = {"color": cycle(PALETTE, styles[federation]), "dash": cycle(DASHES, attacks.index(attack)), "width": 2}
        hover = f"{told}, round %{{x}}: %{{y:.3g}}<extra></extra>"
        own = {"x": [x for x, _ in points], "y": short(y for _, y in points), "name": told, "line": style}
        traces.append({"type": "scatter", "mode": "lines+markers", "marker": {"size": 5}, "hovertemplate": hover} | own)
    ends = ", ".join(f"{trace['name']} {trace['y'][-1]:g}" for trace in traces)
    return panel(
        f"{title} over rounds",
        f"{title} by round; in the last: {ends}.",
        traces,
        340 + 22 * len(traces),
        {"title": "round", "zeroline": False, "nticks": 8},
        {"title": title, "zeroline": False, "nticks": 6},
        showlegend=len(traces) > 1,
        legend={"orientation": "h", "y": -0.25, "yanchor": "top"},
    )


def _place(row: Row) -> tuple[Any, ...]:
    return row.extra.get("run"), row.model, row.dataset


def _labels(row: Row) -> dict[str, Any]:
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense, "seed": row.seed} | row.extra
