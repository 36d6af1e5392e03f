"""What the page's plots share: colours seen in both modes, and a plain layout that the style sheet dresses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# Each is at least 3:1 against the light and against the dark paper.
PALETTE = ("#2b86c5", "#cf6a22", "#26946a", "#b25cc0", "#d2505e", "#7b79d6", "#1c959b", "#8b8a2f", "#c4609a", "#8a7663")
MEMBERS, OTHERS, GREY = PALETTE[1], PALETTE[0], "#7b8681"
CLEAR = "rgba(0,0,0,0)"
Part = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One plot: what stands above it, what a reader who cannot see it is told, and the plot itself."""

    title: str
    alt: str
    data: list[Part]
    layout: Part


def panel(title: str, alt: str, traces: Sequence[Part], height: int, xaxis: Part, yaxis: Part, **layout: Any) -> Panel:
    """A plot without plotly's own colours, checked by plotly as a whole (part by part takes five times as long)."""
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
    made = go.Figure(list(traces), common | axes | layout).to_dict()
    return Panel(title, alt, made["data"], made["layout"])


def _axis(title: str, **axis: Any) -> Part:
    named = {"text": title, "font": {"size": 13}, "standoff": 8}
    return {"title": named, "ticks": "outside", "ticklen": 5, "tickcolor": CLEAR, "automargin": True} | axis


def cycle(options: Sequence[str], number: int) -> str:
    """An option for each number, from the start again when they run out."""
    return options[number % len(options)]


def short(values: Iterable[float]) -> list[float]:
    """Four digits: more than a screen shows, and the page stays small."""
    return [float(f"{value:.4g}") for value in values]


def alone(values: Iterable[float], most: float = math.inf) -> Part:
    """An axis from 0 where all values are one: plotly's would be 2 wide around it, whatever its size.

    Example:
        >>> alone([0.5, 0.5]), alone([0.95], most=1), alone([0.5, 0.6])
        ({'range': [0, 0.6]}, {'range': [0, 1]}, {})
    """
    found = set(values)
    return {"range": sorted([0, min(1.2 * max(found), most)])} if len(found) == 1 and any(found) else {}


def thin(dash: str) -> Part:
    """A line that is only for orientation."""
    return {"width": 1.5, "dash": dash, "color": GREY}
