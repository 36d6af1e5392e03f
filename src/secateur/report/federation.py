"""What federations came to: accuracy and leakage over rounds, bytes per client, and what was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.report.federation_names import brief, name, titles
from secateur.report.figures import DASHES
from secateur.report.plotting import PALETTE, Panel, Part, alone, cycle, panel, short
from secateur.report.sections import View, setting
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
NAMED = 12  # curves that a legend names in every panel; of more the first panel's names them
Labels = Mapping[str, Any]
Spread = tuple[float, float, float]  # least, mean and most
Curves = Mapping[tuple[str, str | None], Sequence[tuple[int, float]]]


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


def is_federated(row: Row) -> bool:
    """Whether a row is of a federation's round."""
    return "base_pruning" in row.extra and "round" in row.extra


def table(rows: Sequence[Row]) -> list[Federated]:
    """One line a federation, in the order they were run."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if is_federated(row):
            groups.setdefault((*_place(row), name(_labels(row))), []).append(row)
    return [_line(found) for found in groups.values()]


def places(rows: Sequence[Row]) -> dict[str, list[Federated]]:
    """The federations of each network and data set."""
    found: dict[str, list[Federated]] = {}
    for each in table(rows):
        found.setdefault(place(each.labels), []).append(each)
    return found


def attacked(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """What attacks on updates said, by network and data set."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if is_federated(row) and row.attack is not None and "target" in row.extra and not _pooled(row):
            found.setdefault(place(_labels(row)), []).append(row)
    return found


def over_rounds(rows: Iterable[Row]) -> list[View]:
    """One view a network and data set: each measure by round, a curve a federation and attack, means over seeds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if is_federated(row) and row.metric in OVER_ROUNDS and row.value is not None and not _pooled(row):
            groups.setdefault(_place(row), []).append(row)
    views = []
    for found in groups.values():
        called = titles(map(_labels, found))
        styles = {each: number for number, each in enumerate(called.values())}
        panels: list[Panel] = []
        last = max(row.extra["round"] for row in found)
        for metric, title in OVER_ROUNDS.items():
            curves = _curves([row for row in found if row.metric == metric], called)
            flat = metric == "density" and all(len({y for _, y in points}) == 1 for points in curves.values())
            if curves and not flat:
                panels.append(_panel(title, curves, styles, last, named=len(curves) <= NAMED or not panels))
        if panels:
            views.append(View(place(_labels(found[0])), panels))
    return views


def place(labels: Labels) -> str:
    """A network and its data, and the batch of a local step where it is told."""
    size = labels.get("local_batch")
    return setting(labels) + ("" if size is None else f", batches of {size}")


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
    return Federated(
        _labels(rows[0]),
        final("test_accuracy"),
        final("bytes_up"),
        final("bytes_down"),
        spread("bytes_up"),
        spread("bytes_down"),
        round(sum(row.value or 0 for row in rows if row.metric == "lost_clients") / seeds),
        max(leaks, default=None),
        _strongest(rows, "nmi_256"),
        _strongest(rows, "psnr"),
        _strongest(rows, "auc"),
    )


def _strongest(rows: Sequence[Row], metric: str) -> float | None:
    """The mean over attacked rounds, of the attack with the highest."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.attack is not None and row.metric == metric and row.value is not None and not _pooled(row):
            found.setdefault(row.attack, []).append(row.value)
    return max((sum(values) / len(values) for values in found.values()), default=None)


def _pooled(row: Row) -> bool:
    """Whether a row gathers clients that have rows of their own."""
    return row.attack is not None and row.extra.get("client") is None and row.extra.get("attacked", 1) > 1


def _curves(rows: Sequence[Row], called: Mapping[str, str]) -> Curves:
    """By federation and attack the points (round, mean over seeds and clients)."""
    values: dict[tuple[str, str | None], dict[int, list[float]]] = {}
    attacks = brief(row.attack for row in rows if row.attack is not None)
    for row in rows:
        curve = called[name(_labels(row))], None if row.attack is None else attacks[row.attack]
        values.setdefault(curve, {}).setdefault(row.extra["round"], []).append(float(row.value or 0))
    return {
        curve: [(number, sum(found) / len(found)) for number, found in sorted(points.items())]
        for curve, points in values.items()
    }


def _panel(title: str, curves: Curves, styles: Mapping[str, int], last: int, named: bool) -> Panel:
    """A federation has one colour in all panels, an attack one dash; all go on to the `last` round."""
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
        340 + 22 * len(traces) * named,
        {"title": "round", "zeroline": False, "nticks": 8, "range": [0, 1.03 * last]},
        {"title": title, "zeroline": False, "nticks": 6} | alone(y for trace in traces for y in trace["y"]),
        showlegend=named and len(traces) > 1,
        legend={"orientation": "h", "y": -0.25, "yanchor": "top"},
    )


def _place(row: Row) -> tuple[Any, ...]:
    return row.extra.get("run"), row.model, row.dataset, row.extra.get("local_batch")


def _labels(row: Row) -> dict[str, Any]:
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense, "seed": row.seed} | row.extra
