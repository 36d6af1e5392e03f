"""Plot layer of the page: colours for light and dark mode, traces, axes, and panels for the style sheet."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

# Each colour has a contrast of at least 3:1 against the light and the dark background.
PALETTE = ("#2b86c5", "#cf6a22", "#26946a", "#b25cc0", "#d2505e", "#7b79d6", "#1c959b", "#8b8a2f", "#c4609a", "#8a7663")
MEMBERS, OTHERS, GREY = PALETTE[1], PALETTE[0], "#7b8681"
CLEAR = "rgba(0,0,0,0)"
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "hexagram")
INTERVAL = {"color": "rgba(123, 134, 129, 0.55)", "thickness": 1, "width": 0}  # the style of an error bar
VIEWS = 50  # choices of one section at most
SECTION = 300_000  # bytes of one section's views: a page of any number of rows stays readable
POINTS = 400  # of one curve
Part = dict[str, Any]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Panel:
    """Plot with its title and its alternative text."""

    title: str
    alt: str
    data: list[Part]
    layout: Part


@dataclass(frozen=True)
class View:
    """Panels and text that the page shows for the choice `label`."""

    label: str
    panels: list[Panel]
    text: str = ""

    @property
    def content(self) -> Part:
        """The view for the page's script."""
        return {"label": self.label, "panels": [vars(panel) for panel in self.panels], "text": self.text}


def draw_views(items: Sequence[Item], draw: Callable[[Item], View]) -> list[View]:
    """Draw a view of each item, as many as a page has room for; the text of each says how many are left out."""
    views: list[View] = []
    size = 0
    for item in items[:VIEWS]:
        view = draw(item)
        size += len(json.dumps(view.content, separators=(",", ":"), default=str))
        if views and size > SECTION:
            break
        views.append(view)
    if left := len(items) - len(views):
        said = f"The first {len(views)} of {left + len(views):,} are drawn; all are in figures.jsonl and results.jsonl."
        views = [replace(view, text=f"{view.text} {said}".strip()) for view in views]
    return views


def thin_points(points: Sequence[tuple[Any, float]], most: int = POINTS) -> Sequence[tuple[Any, float]]:
    """Return at most `most` points of a curve: of neighbouring ones the lowest and the highest, in their order.

    Example:
        >>> len(thin_points([(x, (x % 7) * 1.0) for x in range(10_000)])), thin_points([(0, 1.0)])
        (400, [(0, 1.0)])
    """
    if len(points) <= most:
        return points
    ends = [round(i * len(points) / (most // 2)) for i in range(most // 2 + 1)]
    kept: set[int] = set()
    for start, end in pairwise(ends):
        ranked = sorted(range(start, end), key=lambda i: points[i][1])
        kept |= {ranked[0], ranked[-1]}
    kept = (kept - {min(kept), max(kept)}) | {0, len(points) - 1}
    return [points[i] for i in sorted(kept)]


def draw_panel(
    title: str, alt: str, traces: Sequence[Part], height: int, xaxis: Part, yaxis: Part, **layout: Any
) -> Panel:
    """Return a plot without plotly's colours; tests hold it against plotly's schema, which takes 0.1 s a plot."""
    axes = {name: _style_axis(**part) for name, part in (("xaxis", xaxis), ("yaxis", yaxis))}
    common = {
        "template": {},
        "height": height,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 46},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 13},
    }
    return Panel(title, alt, list(traces), common | axes | layout)


def _style_axis(title: str, **axis: Any) -> Part:
    title_style = {"text": title, "font": {"size": 13}, "standoff": 8}
    return {"title": title_style, "ticks": "outside", "ticklen": 5, "tickcolor": CLEAR, "automargin": True} | axis


def number_axis(title: str, ticks: int = 8, **more: Any) -> Part:
    """Return an axis of numbers with at most this many ticks."""
    return {"title": title, "zeroline": False, "nticks": ticks} | more


def share_axis(title: str, ticks: int = 8, **more: Any) -> Part:
    """Return an axis of shares, in percent."""
    return number_axis(title, ticks, tickformat=".0%") | more


def count_axis(title: str, last: int, ticks: int = 8) -> Part:
    """Return an axis of whole numbers: rounds or epochs have no halves."""
    return {"title": title, "zeroline": False} | ({"nticks": ticks} if last > ticks else {"dtick": 1})


def fit_single(values: Iterable[float], most: float = math.inf) -> Part:
    """Return an axis from 0 if all values are equal; plotly's default would be 2 wide around the value.

    Example:
        >>> fit_single([0.5, 0.5]), fit_single([0.95], most=1), fit_single([0.5, 0.6])
        ({'range': [0, 0.6]}, {'range': [0, 1]}, {})
    """
    distinct = set(values)
    return {"range": sorted([0, min(1.2 * max(distinct), most)])} if len(distinct) == 1 and any(distinct) else {}


def place_legend(y: float = -0.25, **more: Any) -> Part:
    """Return a legend below the plot."""
    return {"orientation": "h", "y": y, "yanchor": "top"} | more


def cycle(options: Sequence[str], number: int) -> str:
    """Return the option of a number; options repeat cyclically."""
    return options[number % len(options)]


def style_line(number: int, width: float = 2) -> Part:
    """Return the line of a number: colours first, then dashes."""
    return {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": width}


def style_marker(number: int, size: int) -> Part:
    """Return the marker of a number: colours first, then symbols."""
    return {"color": cycle(PALETTE, number), "symbol": cycle(SYMBOLS, number // len(PALETTE)), "size": size}


def style_guide(dash: str) -> Part:
    """Return the style of a thin grey line for orientation."""
    return {"width": 1.5, "dash": dash, "color": GREY}


def draw_curve(name: str, points: Mapping[Any, float], line: Part, hover: str = "%{y:.3g}", **more: Any) -> Part:
    """Return a line through points; without points only its legend entry shows."""
    kept = thin_points(list(points.items()))
    x, y = ([at for at, _ in kept], shorten(value for _, value in kept)) if points else ([None], [None])
    hover_text = f"{name}: {hover}<extra></extra>"
    return (
        {"type": "scatter", "mode": "lines", "name": name, "hovertemplate": hover_text}
        | {"x": x, "y": y, "line": line}
        | more
    )


def draw_points(
    name: str, points: Sequence[tuple[float, float]], marker: Part, hover_texts: Sequence[str], **more: Any
) -> Part:
    """Return points, each with its hover text."""
    data = {"x": shorten(x for x, _ in points), "y": shorten(y for _, y in points), "marker": marker}
    hover = {"hovertext": list(hover_texts), "hovertemplate": "%{hovertext}<extra></extra>"}
    return {"type": "scatter", "mode": "markers", "name": name} | data | hover | more


def draw_legend_entry(name: str, symbol: str, group: Part) -> Part:
    """Return a grey symbol that is only in the legend."""
    marker = {"symbol": symbol, "color": GREY, "size": 9}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "marker": marker} | group


def group_legend(title: str) -> Part:
    """Return the group of a legend entry, with the group's title."""
    return {"legendgroup": title, "legendgrouptitle": {"text": title}}


def draw_intervals(cells: Iterable[Any]) -> Part:
    """Return the intervals of values as thin bars; a missing or infinite end has no length."""

    def reach(end: float | None, value: float) -> float:
        return abs(end - value) if end is not None and math.isfinite(end) else 0.0

    cells = list(cells)
    up, down = ([reach(end, x.value) for x, end in ((x, getattr(x, side)) for x in cells)] for side in ("high", "low"))
    return {"type": "data", "array": shorten(up), "arrayminus": shorten(down)} | INTERVAL


def list_ends(traces: Iterable[Part], form: str = "{:g}") -> str:
    """Return the names of curves with their last values, for an alternative text."""
    return ", ".join(f"{trace['name']} {form.format(trace['y'][-1])}" for trace in traces)


def shorten(values: Iterable[float]) -> list[float]:
    """Round to four digits: more than a screen shows, and the page stays small."""
    return [float(f"{value:.4g}") for value in values]
