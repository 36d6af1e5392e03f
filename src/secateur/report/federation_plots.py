"""Federations on the trade-off plane, before and after a defense, and the bytes that each of their clients moves.

What federations give away by the rate of their base pruning (priprune, Figs. 2, 3, A1 and A2).

The same training pictures by pruning rate and defense: what an attack made of them in every federation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from secateur.catalogue import split
from secateur.report import federation
from secateur.report.audit import View
from secateur.report.audit_plots import DASHES, SYMBOLS
from secateur.report.defenses import ACROSS, Sheet
from secateur.report.federation import Federated, brief, name, name_and_settings, places, titles
from secateur.report.inversion import Picture
from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.summary import Key
from secateur.runs.rows import Row

LEAKS = {"nmi": "NMI, 256 levels", "psnr": "PSNR"}
JOINED = "priprune"  # an arrow leads to it from its base pruning alone
SHAPES = [symbol + form for form in ("", "-open", "-dot") for symbol in SYMBOLS]  # there are more defenses than symbols
MEGA = 1e6

Curves = dict[tuple[str, str], dict[float, list[float]]]  # by base pruning, and by the rest: values at each rate

TRUTH = ("seed", "round", "client", "item")  # what tells one truth from another in all federations of a study
ORDER = ("base_pruning", "sparsity", "broadcast", "defense")
Labels = Mapping[str, Any]


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


def by_rate(rows: Sequence[Row]) -> list[View]:
    """One view a network and data set whose base prunings were run at several rates: leakage against the rate."""
    views = []
    for place, own in federation.attacked(rows).items():
        panels = []
        for metric, title in {"nmi_256": "NMI, 256 levels", "psnr": "PSNR"}.items():
            curves = _curves([row for row in own if row.metric == metric and row.value is not None])
            if any(len(points) > 1 for points in curves.values()):
                panels.append(_panel(title, curves))
        if panels:
            views.append(View(place, panels))
    return views


def _curves(rows: Sequence[Row]) -> Curves:
    curves: Curves = {}
    attacks = brief(str(row.attack) for row in rows)
    for row in rows:
        rest = [
            row.extra["broadcast"],
            attacks[str(row.attack)],
            *([] if row.defense == "none" else [str(row.defense)]),
        ]
        points = curves.setdefault((str(row.extra["base_pruning"]).partition(":")[0], ", ".join(rest)), {})
        points.setdefault(row.sparsity or 0.0, []).append(row.value or 0.0)
    return curves


def _panel(title: str, curves: Curves) -> Panel:
    """A base pruning has one colour; an attack on one kind of broadcast one dash."""
    bases, rests = (list(dict.fromkeys(key[side] for key in curves)) for side in (0, 1))
    traces: list[Part] = []
    for (base, rest), points in curves.items():
        means = {rate: sum(values) / len(values) for rate, values in sorted(points.items())}
        style = {"color": cycle(PALETTE, bases.index(base)), "dash": cycle(DASHES, rests.index(rest)), "width": 2}
        line = {"x": list(means), "y": short(means.values()), "name": f"{base}, {rest}", "line": style}
        traces.append({"type": "scatter", "mode": "lines+markers", "marker": {"size": 6}} | line)
    told = "; ".join(f"{x['name']} {x['y'][0]:g} at {x['x'][0]:g}, {x['y'][-1]:g} at {x['x'][-1]:g}" for x in traces)
    return panel(
        f"{title} by pruning rate",
        f"{title} by the base pruning's rate, means over attacked updates: {told}.",
        traces,
        360 + 24 * len(traces),
        {"title": "base pruning rate", "zeroline": False, "nticks": 10},
        {"title": title, "zeroline": False, "nticks": 6},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
    )


def is_federated(figure: Labels) -> bool:
    """Whether a figure is of a federation's round."""
    return figure["kind"] == "picture" and "base_pruning" in figure and "round" in figure


def sheets(figures: Iterable[Labels]) -> list[Sheet]:
    """One sheet an attack that met several federations, a line each, in the order of their base pruning and rate.

    The columns are the pictures that the attack came nearest to in any of them.
    """
    figures = [figure for figure in figures if is_federated(figure) and figure["png"]]
    called = titles(figures)
    truths: dict[str, dict[Key, Picture]] = {}
    groups: dict[tuple[str, str], dict[tuple[Any, ...], dict[Key, tuple[float, Picture]]]] = {}
    for figure in figures:
        place, key = federation.place(figure), tuple((each, figure.get(each)) for each in TRUTH)
        if figure["attack"] is None:
            truths.setdefault(place, {})[key] = Picture("truth", figure["png"], [])
            continue
        title = name(figure)
        line = (*(figure.get(each) or 0 for each in ORDER), title)
        near = float(figure["scores"].get("psnr") or 0.0)
        lines = groups.setdefault((place, _attack(str(figure["attack"]))), {})
        lines.setdefault(line, {})[key] = near, Picture(title, figure["png"], [])
    made = []
    for (place, attack), lines in groups.items():
        if len(lines) > 1:
            chosen = _nearest(lines.values())
            above = ("truth", [truths.get(place, {}).get(key) for key in chosen])
            below = [
                (called[line[-1]], [_picture(lines[line], key) for key in chosen]) for line in sorted(lines, key=str)
            ]
            made.append(Sheet(f"{attack}: {place}", [above, *below]))
    return made


def _nearest(lines: Iterable[Mapping[Key, tuple[float, Picture]]]) -> list[Key]:
    best: dict[Key, float] = {}
    for found in lines:
        for key, (near, _) in found.items():
            best[key] = max(near, best.get(key, near))
    return sorted(best, key=lambda key: -best[key])[:ACROSS]


def _picture(found: Mapping[Key, tuple[float, Picture]], key: Key) -> Picture | None:
    return found[key][1] if key in found else None


def _attack(text: str) -> str:
    first, *settings = split(text)
    return ", ".join([first, *(each.replace("adaptive=", "knowing: ") for each in settings if "adaptive" in each)])
