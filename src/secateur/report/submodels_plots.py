"""Plots of federations over sub-models: the plane of accuracy and exposure, and the rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from secateur.report.figures import DASHES
from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View
from secateur.report.submodels import Federated, Party, federations, is_submodel, labels_of, name
from secateur.report.submodels_sizes import by_size
from secateur.report.tradeoff import SYMBOLS
from secateur.rows import Row

UNDER = {"orientation": "h", "y": -0.25, "yanchor": "top"}


def over_rounds(rows: Sequence[Row]) -> list[View]:
    """One view a data set: the server's accuracy by round, a curve a federation."""
    curves: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        whole = is_submodel(row) and row.extra.get("client") is None and "scope" not in row.extra
        if whole and row.metric == "test_accuracy" and row.value is not None and "round" in row.extra:
            title = f"{name(labels_of(row))}, {row.extra['large_clients']} large"
            own = curves.setdefault(row.dataset, {}).setdefault(title, {})
            own.setdefault(row.extra["round"], []).append(row.value)
    several = {place: own for place, own in curves.items() if any(len(points) > 1 for points in own.values())}
    return [View(place, [_curves(own)]) for place, own in several.items()]


def _curves(found: Mapping[str, Mapping[int, Sequence[float]]]) -> Panel:
    traces: list[Part] = []
    for number, (title, points) in enumerate(found.items()):
        means = {at: sum(values) / len(values) for at, values in sorted(points.items())}
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 2}
        own = {"x": list(means), "y": short(means.values()), "name": title, "line": style}
        traces.append({"type": "scatter", "mode": "lines", "hovertemplate": "round %{x}: %{y:.1%}"} | own)
    said = ", ".join(f"{trace['name']} {trace['y'][-1]:g}" for trace in traces)
    span = max(trace["x"][-1] for trace in traces) - min(trace["x"][0] for trace in traces)
    return panel(
        "The server's accuracy over rounds",
        f"Test accuracy of the server by round; in the last: {said}.",
        traces,
        340 + 22 * len(traces),
        {"title": "round", "zeroline": False, "dtick": max(1, math.ceil(span / 8))},
        {"title": "test accuracy", "tickformat": ".1~%", "zeroline": False, "nticks": 6},
        showlegend=len(traces) > 1,
        legend=UNDER,
    )


def planes(lines: Sequence[Party]) -> list[View]:
    """One view a data set and attack, a colour a rule.

    The average client's accuracy against its advantage, and every client's advantage against its data size.
    """
    places: dict[str, list[Federated]] = {}
    for each in federations(lines):
        if each.accuracy is not None and each.advantage is not None:
            places.setdefault(_place(each), []).append(each)
    views = []
    for place, found in places.items():
        curves, own = _named_curves(found), [line for line in lines if _place(line) == place]
        count = len(set(curves.values()))
        common = {"height": 440 + 22 * count, "legend": UNDER, "showlegend": count > 1}
        views.append(View(place, [_plane(found, curves, **common), by_size(own, curves, **common)], _sentence(found)))
    return views


def _named_curves(found: Sequence[Federated]) -> dict[str, str]:
    """The curve of each federation, by its name: kept cells have one of their own only beside zeroed ones."""
    plain = {each.name: name(dict(each.labels) | {"uncovered": None}) for each in found}
    without_large = Counter(plain[own] for own in {x.name for x in found if x.labels["large_clients"] == 0})
    return {own: base if without_large[base] < 2 else own for own, base in plain.items()}


def _place(each: Federated | Party) -> str:
    return f"{each.labels['dataset']}, {each.attack}"


def _plane(found: Sequence[Federated], curves: Mapping[str, str], **layout: Any) -> Panel:
    traces: list[Part] = []
    ordered = sorted(found, key=lambda each: each.labels["large_clients"])
    for number, rule in enumerate(dict.fromkeys(curves.values())):
        own = [each for each in ordered if curves[each.name] == rule]
        colour = cycle(PALETTE, number)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers+text" if len(own) > 1 else "markers+text",
                "x": short(_at(each)[0] for each in own),
                "y": short(_at(each)[1] for each in own),
                "text": [str(each.labels["large_clients"]) for each in own],
                "textposition": "top center",
                "name": rule,
                "marker": {"size": 10, "color": colour, "symbol": cycle(SYMBOLS, number // len(PALETTE))},
                "line": {"width": 1, "color": colour, "dash": "dot"},
                "hovertemplate": f"{rule}, %{{text}} large clients: %{{x:.1%}}, advantage %{{y:.1%}}<extra></extra>",
            }
        )
    said = "; ".join(
        f"{each.name} with {each.labels['large_clients']} large {100 * _at(each)[0]:.1f}%, {100 * _at(each)[1]:.1f}%"
        for each in found
    )
    return panel(
        "The average client: accuracy against advantage",
        f"Accuracy and membership advantage of the average client: {said}.",
        traces,
        xaxis={"title": "test accuracy of the average client", "tickformat": ".1~%", "zeroline": False, "nticks": 8},
        yaxis={"title": f"advantage of {found[0].attack}", "tickformat": ".1%", "zerolinecolor": GREY, "nticks": 8},
        **layout,
    )


def _at(each: Federated) -> tuple[float, float]:
    """The average client's accuracy and advantage."""
    accuracy, advantage = each.accuracy, each.advantage
    return (accuracy.value or 0.0 if accuracy else 0.0), (advantage.value or 0.0 if advantage else 0.0)


def _sentence(found: Sequence[Federated]) -> str:
    """Who lies on the front: nobody is both more accurate and less exposed."""
    front = [
        one.name + f" ({one.labels['large_clients']} large)"
        for one in found
        if not any(
            _at(other)[0] >= _at(one)[0] and _at(other)[1] <= _at(one)[1] and _at(other) != _at(one) for other in found
        )
    ]
    said = f"By the means nobody is both more accurate and less exposed than {' or '.join(front)}."
    return said if len(found) > 1 else ""
