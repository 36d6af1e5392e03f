"""Common parts of the page's plots: colours for light and dark mode, and a plain layout for the style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Each colour has a contrast of at least 3:1 against the light and the dark background.
PALETTE = ("#2b86c5", "#cf6a22", "#26946a", "#b25cc0", "#d2505e", "#7b79d6", "#1c959b", "#8b8a2f", "#c4609a", "#8a7663")
MEMBERS, OTHERS, GREY = PALETTE[1], PALETTE[0], "#7b8681"
CLEAR = "rgba(0,0,0,0)"
Part = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """Plot with its title and its alternative text."""

    title: str
    alt: str
    data: list[Part]
    layout: Part


def panel(title: str, alt: str, traces: Sequence[Part], height: int, xaxis: Part, yaxis: Part, **layout: Any) -> Panel:
    """Return a plot without plotly's colours; plotly checks it in one call (part by part takes five times as long)."""
    import plotly.graph_objects as go

    axes = {name: _axis(**axis) for name, axis in (("xaxis", xaxis), ("yaxis", yaxis))}
    common = {
        "template": {},
        "height": height,
        "margin": {"l": 56, "r": 12, "t": 12, "b": 46},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": "system-ui, sans-serif", "size": 13},
    }
    figure = go.Figure(list(traces), common | axes | layout).to_dict()
    return Panel(title, alt, figure["data"], figure["layout"])


def _axis(title: str, **axis: Any) -> Part:
    title_style = {"text": title, "font": {"size": 13}, "standoff": 8}
    return {"title": title_style, "ticks": "outside", "ticklen": 5, "tickcolor": CLEAR, "automargin": True} | axis


def cycle(options: Sequence[str], number: int) -> str:
    """Return the option of a number; options repeat cyclically."""
    return options[number % len(options)]


def short(values: Iterable[float]) -> list[float]:
    """Round to four digits: more than a screen shows, and the page stays small."""
    return [float(f"{value:.4g}") for value in values]


def alone(values: Iterable[float], most: float = math.inf) -> Part:
    """Return an axis from 0 if all values are equal; plotly's default would be 2 wide around the value.

    Example:
        >>> alone([0.5, 0.5]), alone([0.95], most=1), alone([0.5, 0.6])
        ({'range': [0, 0.6]}, {'range': [0, 1]}, {})
    """
    distinct = set(values)
    return {"range": sorted([0, min(1.2 * max(distinct), most)])} if len(distinct) == 1 and any(distinct) else {}


def thin(dash: str) -> Part:
    """Return the style of a line for orientation."""
    return {"width": 1.5, "dash": dash, "color": GREY}
