"""How the losses of attacks on updates fell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from secateur.report.figures import DASHES
from secateur.report.inversion import Labels, name, place, where
from secateur.report.plotting import PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View
from secateur.report.summary import Key

CURVES = 40  # in a plot


def losses(figures: Iterable[Labels]) -> list[View]:
    """One view for each attack: how its own loss fell, a curve a target."""
    groups: dict[Key, list[Labels]] = {}
    for figure in figures:
        if figure["kind"] == "loss":
            groups.setdefault((("where", where(figure)), ("attack", name(figure))), []).append(figure)
    several = len({key[0] for key in groups}) > 1
    views = []
    for (shared, attack), found in groups.items():
        label = f"{shared[1]}: {attack[1]}" if several else str(attack[1])
        views.append(View(label, [_curves(label, found)]))
    return views


def _curves(title: str, found: Sequence[Labels]) -> Panel:
    drawn = found[:CURVES]
    traces: list[Part] = []
    ends: list[float] = []
    for number, figure in enumerate(drawn):
        points = [(step, float(loss)) for step, loss in figure["curve"] if loss is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        ends += values[-1:]
        name = place(figure) + (f", seed {figure['seed']}" if figure["seed"] else "")
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 1.5}
        more = {"x": list(steps), "y": short(values), "name": name, "line": style}
        traces.append(
            {"type": "scatter", "mode": "lines", "hovertemplate": f"{name}: %{{y:.3g}}<extra></extra>"} | more
        )
    every = [float(y) for trace in traces for y in trace["y"]]
    left = f" (the first {CURVES} of {len(found)} targets)" if len(found) > CURVES else ""
    reach = f"it ends between {min(ends):.3g} and {max(ends):.3g}" if ends else "no finite loss"
    return panel(
        f"{title}{left}",
        f"The attack's own loss by iteration, {title}: {reach}.",
        traces,
        340,
        {"title": "iteration", "zeroline": False, "nticks": 8},
        {"title": "the attack's loss", "zeroline": False, "nticks": 6} | _scale(every),
        showlegend=False,
    )


def _scale(values: Sequence[float]) -> Part:
    """A logarithmic axis where it can be one: labelled at powers of ten, or at 1, 2 and 5 where there are few of these.

    Example:
        >>> [_scale(ends).get("dtick") for ends in ([1e-12, 1.0], [1e-4, 1.0], [0.002, 0.03], [0.7, 1.1])]
        [2, 1, 'D2', None]
    """
    if min(values, default=0.0) <= 0:
        return {}
    decades = math.log10(max(values) / min(values))
    ticks = {"dtick": math.ceil(decades / 6)} if decades >= 2 else {"dtick": "D2"} if decades >= 0.7 else {}
    return {"type": "log", "exponentformat": "power"} | ticks
