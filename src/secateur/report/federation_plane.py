"""Federations on the trade-off plane, before and after a defense, and the bytes that each of their clients moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from secateur.report.federation_names import brief, name, name_and_settings, titles
from secateur.report.federation_table import Federated, places
from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View
from secateur.report.tradeoff import SYMBOLS
from secateur.rows import Row

LEAKS = {"nmi": "NMI, 256 levels", "psnr": "PSNR"}
JOINED = "priprune"  # an arrow leads to it from its base pruning alone
SHAPES = [symbol + form for form in ("", "-open", "-dot") for symbol in SYMBOLS]  # there are more defenses than symbols
MEGA = 1e6


def planes(rows: Sequence[Row]) -> list[View]:
    """One view a network and data set: accuracy against what the strongest attacker found, in two measures."""
    views = []
    for place, found in places(rows).items():
        panels = []
        for leak, title in LEAKS.items():
            known = [each for each in found if each.accuracy is not None and getattr(each, leak) is not None]
            if len(known) > 1:
                panels.append(_plane(leak, title, known))
        if panels:
            views.append(View(place, panels, _sentence(found)))
    return views


def traffic(rows: Sequence[Row]) -> list[View]:
    """One view a network and data set: bytes up and down of a client that took part, a bar each."""
    views = []
    for place, found in places(rows).items():
        known = [each for each in found if each.up_client and each.down_client]
        if known:
            views.append(View(place, [_bars(known)]))
    return views


def pairs(found: Sequence[Federated]) -> list[tuple[Federated, Federated]]:
    """Every federation alone, and the same under PriPrune."""
    alone = {each.base: each for each in found if each.labels["defense"] == "none"}
    return [
        (alone[each.base], each)
        for each in found
        if str(each.labels["defense"]).startswith(JOINED) and each.base in alone
    ]


def _plane(leak: str, title: str, found: Sequence[Federated]) -> Panel:
    called = titles(each.labels for each in found)
    bases = list(dict.fromkeys(map(_base, found)))
    defenses = list(dict.fromkeys(map(_defense, found)))
    colours = {base: cycle(PALETTE, number) for number, base in enumerate(bases)}
    symbols = {defense: cycle(SHAPES, number) for number, defense in enumerate(defenses)}
    traces: list[Part] = []
    for base in bases:
        own = [each for each in found if _base(each) == base]
        marker = {"color": colours[base], "size": 11, "symbol": [symbols[_defense(each)] for each in own]}
        group = {"legendgroup": "base", "legendgrouptitle": {"text": "base pruning"}}
        traces.append(_points(base, own, leak, marker, called) | group)
    group = {"legendgroup": "defense", "legendgrouptitle": {"text": "defense"}}
    for defense, symbol in symbols.items() if len(symbols) > 1 else ():
        marker = {"symbol": symbol, "color": GREY, "size": 9}
        entry = {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": defense, "marker": marker}
        traces.append(entry | group)
    arrows = [_arrow(before, after, leak, colours[_base(before)]) for before, after in pairs(found)]
    told = "; ".join(f"{called[x.name]} {100 * (x.accuracy or 0):.1f}%, {getattr(x, leak):.3g}" for x in found)
    entries = max(len(bases), len(defenses))
    return panel(
        f"Accuracy against {title}",
        f"Test accuracy against {title} of the strongest attacker: {told}.",
        traces,
        380 + 20 * entries,
        {"title": "test accuracy", "tickformat": ".0%", "zeroline": False, "nticks": 8},
        {"title": f"{title} of the strongest attacker", "zeroline": False, "nticks": 8},
        annotations=arrows,
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "maxheight": 22 * (len(bases) + len(defenses)) + 80},
    )


def _points(title: str, found: Sequence[Federated], leak: str, marker: Part, called: Mapping[str, str]) -> Part:
    told = []
    for each in found:
        parts = [f"<b>{called[each.name]}</b>", f"accuracy {100 * (each.accuracy or 0):.1f}%"]
        parts.append(f"{LEAKS[leak]} {getattr(each, leak):.3g}")
        parts += [f"by chance {each.chance:.3g}"] if leak == "nmi" and each.chance is not None else []
        parts += [f"{each.up_client[1] / MEGA:.2f} MB up a client"] if each.up_client else []
        told.append("<br>".join(parts))
    settings = _settings(found)
    return {
        "type": "scatter",
        "mode": "markers+text" if any(settings) else "markers",
        "name": title,
        "x": short(each.accuracy or 0.0 for each in found),
        "y": short(getattr(each, leak) for each in found),
        "marker": marker,
        "text": settings,
        "textposition": "top center",
        "hovertext": told,
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _arrow(before: Federated, after: Federated, leak: str, colour: str) -> Part:
    ends: Mapping[str, Any] = {
        "ax": before.accuracy,
        "ay": getattr(before, leak),
        "x": after.accuracy,
        "y": getattr(after, leak),
    }
    axes = {"xref": "x", "yref": "y", "axref": "x", "ayref": "y"}
    head = {"showarrow": True, "arrowhead": 2, "arrowwidth": 2, "arrowcolor": colour, "standoff": 7, "startstandoff": 7}
    return {"text": "", **ends, **axes, **head}


def _sentence(found: Sequence[Federated]) -> str:
    """The arrows in words."""
    called = titles(each.labels for each in found)
    told = [
        f"{called[before.name]}: {_worth(before)} alone, {_worth(after)} with {after.labels['defense']}"
        for before, after in pairs(found)
    ]
    return f"{'; '.join(told)}." if told else ""


def _worth(each: Federated) -> str:
    leak = "not attacked" if each.nmi is None else f"NMI {each.nmi:.3f}"
    chance = "" if each.chance is None else f" ({each.chance:.3f} by chance)"
    return f"{100 * (each.accuracy or 0):.1f}% right and {leak}{chance}"


def _bars(found: Sequence[Federated]) -> Panel:
    called = titles(each.labels for each in found)
    names = [called[each.name].replace(", ", ",<br>") for each in found]  # a phone is narrow
    traces: list[Part] = []
    for title, colour, field in (("up", PALETTE[0], "up_client"), ("down", PALETTE[1], "down_client")):
        values = short(getattr(each, field)[1] / MEGA for each in found)
        spread = [getattr(each, field) for each in found]
        text = [f"{low / MEGA:.2f} to {high / MEGA:.2f}" for low, _, high in spread]
        bars = {"type": "bar", "orientation": "h", "x": values, "y": names, "name": title, "marker": {"color": colour}}
        hover = "%{y}: %{x:.3g} MB " + title + " a client (%{customdata})<extra></extra>"
        traces.append(bars | {"customdata": text, "hovertemplate": hover})
    told = "; ".join(
        f"{name.replace('<br>', ' ')} {up:g} up, {down:g} down"
        for name, up, down in zip(names, traces[0]["x"], traces[1]["x"], strict=True)
    )
    return panel(
        "MB of a client over all rounds",
        f"Megabytes of a client, the mean of those that took part: {told}.",
        traces,
        120 + 34 * len(found),
        {"title": "MB a client", "rangemode": "tozero", "nticks": 4},
        {"title": "", "autorange": "reversed", "ticksuffix": " "},
        barmode="group",
        legend={"orientation": "h", "y": 1, "yanchor": "bottom"},
    )


def _base(each: Federated) -> str:
    """What has one colour: a base pruning without its settings, what was broadcast, and what the server sees."""
    return name({**each.labels, "base_pruning": name_and_settings(each.labels["base_pruning"])[0], "defense": "none"})


def _defense(each: Federated) -> str:
    """What has one shape: a defense without its settings."""
    return name_and_settings(each.labels["defense"])[0]


def _settings(found: Sequence[Federated]) -> list[str]:
    """Of federations of one colour what tells those of one shape apart, such as their rates."""
    told = []
    for each in found:
        alike = [other.labels for other in found if _defense(other) == _defense(each)]
        own = [brief(str(x[label]) for x in alike)[str(each.labels[label])] for label in ("base_pruning", "defense")]
        told.append(", ".join(filter(None, (name_and_settings(text)[1] for text in own))))
    return told
