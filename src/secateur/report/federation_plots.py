"""Plots of federations: accuracy against leakage, bytes of a client, leakage by pruning rate, and picture sheets.

Leakage by rate follows priprune, Figs. 2, 3, A1 and A2. A sheet shows the same training pictures in every federation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from secateur.catalogue import split
from secateur.report import federation
from secateur.report.audit import View
from secateur.report.audit_plots import DASHES, SYMBOLS
from secateur.report.defenses import ACROSS, Sheet
from secateur.report.federation import FederationLine, brief, name, name_and_settings, places, titles
from secateur.report.inversion import Picture
from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.summary import Key
from secateur.runs.rows import Row

LEAKS = {"nmi": "NMI, 256 levels", "psnr": "PSNR"}
JOINED = "priprune"  # an arrow leads to this defense from its base pruning alone
SHAPES = [symbol + form for form in ("", "-open", "-dot") for symbol in SYMBOLS]  # there are more defenses than symbols
MEGA = 1e6
TRUTH = ("seed", "round", "client", "item")  # labels that tell one truth from another in all federations of a study
ORDER = ("base_pruning", "sparsity", "broadcast", "defense")
Curves = dict[tuple[str, str], dict[float, list[float]]]  # by base pruning and by the rest: values at each rate
Labels = Mapping[str, Any]


def planes(rows: Sequence[Row]) -> list[View]:
    """Return one view a network and data set: accuracy against the strongest attacker's leakage, in two measures."""
    views = []
    for place, federations in places(rows).items():
        panels = []
        for leak, title in LEAKS.items():
            known = [line for line in federations if line.accuracy is not None and getattr(line, leak) is not None]
            if len(known) > 1:
                panels.append(_plane(leak, title, known))
        if panels:
            views.append(View(place, panels, _sentence(federations)))
    return views


def _plane(leak: str, title: str, federations: Sequence[FederationLine]) -> Panel:
    """Plot federations by accuracy and one measure of leakage, with arrows from no defense to PriPrune."""
    called = titles(line.labels for line in federations)
    bases = list(dict.fromkeys(map(_base, federations)))
    defenses = list(dict.fromkeys(map(_defense, federations)))
    colours = {base: cycle(PALETTE, number) for number, base in enumerate(bases)}
    symbols = {defense: cycle(SHAPES, number) for number, defense in enumerate(defenses)}
    traces: list[Part] = []
    for base in bases:
        same_base = [line for line in federations if _base(line) == base]
        marker = {"color": colours[base], "size": 11, "symbol": [symbols[_defense(line)] for line in same_base]}
        group = {"legendgroup": "base", "legendgrouptitle": {"text": "base pruning"}}
        traces.append(_points(base, same_base, leak, marker, called) | group)
    group = {"legendgroup": "defense", "legendgrouptitle": {"text": "defense"}}
    for defense, symbol in symbols.items() if len(symbols) > 1 else ():
        marker = {"symbol": symbol, "color": GREY, "size": 9}
        entry = {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": defense, "marker": marker}
        traces.append(entry | group)
    arrows = [_arrow(before, after, leak, colours[_base(before)]) for before, after in pairs(federations)]
    values = "; ".join(f"{called[x.name]} {100 * (x.accuracy or 0):.1f}%, {getattr(x, leak):.3g}" for x in federations)
    entries = max(len(bases), len(defenses))
    return panel(
        f"Accuracy against {title}",
        f"Test accuracy against {title} of the strongest attacker: {values}.",
        traces,
        380 + 20 * entries,
        {"title": "test accuracy", "tickformat": ".0%", "zeroline": False, "nticks": 8},
        {"title": f"{title} of the strongest attacker", "zeroline": False, "nticks": 8},
        annotations=arrows,
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "maxheight": 22 * (len(bases) + len(defenses)) + 80},
    )


def _base(line: FederationLine) -> str:
    """Return the key of a colour: a base pruning without its settings, the broadcast, and the server's view."""
    return name({**line.labels, "base_pruning": name_and_settings(line.labels["base_pruning"])[0], "defense": "none"})


def _defense(line: FederationLine) -> str:
    """Return the key of a shape: a defense without its settings."""
    return name_and_settings(line.labels["defense"])[0]


def _points(
    title: str, federations: Sequence[FederationLine], leak: str, marker: Part, called: Mapping[str, str]
) -> Part:
    """Return the federations of one base pruning as points."""
    hover_texts = []
    for line in federations:
        parts = [f"<b>{called[line.name]}</b>", f"accuracy {100 * (line.accuracy or 0):.1f}%"]
        parts.append(f"{LEAKS[leak]} {getattr(line, leak):.3g}")
        parts += [f"by chance {line.chance:.3g}"] if leak == "nmi" and line.chance is not None else []
        parts += [f"{line.up_client[1] / MEGA:.2f} MB up a client"] if line.up_client else []
        hover_texts.append("<br>".join(parts))
    settings = _settings(federations)
    return {
        "type": "scatter",
        "mode": "markers+text" if any(settings) else "markers",
        "name": title,
        "x": short(line.accuracy or 0.0 for line in federations),
        "y": short(getattr(line, leak) for line in federations),
        "marker": marker,
        "text": settings,
        "textposition": "top center",
        "hovertext": hover_texts,
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _settings(federations: Sequence[FederationLine]) -> list[str]:
    """Return the settings that tell federations of one colour and one shape apart, such as their rates."""
    texts = []
    for line in federations:
        alike = [other.labels for other in federations if _defense(other) == _defense(line)]
        shortened = [
            brief(str(x[label]) for x in alike)[str(line.labels[label])] for label in ("base_pruning", "defense")
        ]
        texts.append(", ".join(filter(None, (name_and_settings(text)[1] for text in shortened))))
    return texts


def _arrow(before: FederationLine, after: FederationLine, leak: str, colour: str) -> Part:
    """Return the arrow from a federation without a defense to the same under PriPrune."""
    ends: Mapping[str, Any] = {
        "ax": before.accuracy,
        "ay": getattr(before, leak),
        "x": after.accuracy,
        "y": getattr(after, leak),
    }
    axes = {"xref": "x", "yref": "y", "axref": "x", "ayref": "y"}
    head = {"showarrow": True, "arrowhead": 2, "arrowwidth": 2, "arrowcolor": colour, "standoff": 7, "startstandoff": 7}
    return {"text": "", **ends, **axes, **head}


def _sentence(federations: Sequence[FederationLine]) -> str:
    """Return the arrows in words."""
    called = titles(line.labels for line in federations)
    changes = [
        f"{called[before.name]}: {_worth(before)} alone, {_worth(after)} with {after.labels['defense']}"
        for before, after in pairs(federations)
    ]
    return f"{'; '.join(changes)}." if changes else ""


def _worth(line: FederationLine) -> str:
    """Return accuracy and NMI of a federation in words."""
    leak = "not attacked" if line.nmi is None else f"NMI {line.nmi:.3f}"
    chance = "" if line.chance is None else f" ({line.chance:.3f} by chance)"
    return f"{100 * (line.accuracy or 0):.1f}% right and {leak}{chance}"


def pairs(federations: Sequence[FederationLine]) -> list[tuple[FederationLine, FederationLine]]:
    """Return pairs: every federation without a defense, and the same under PriPrune."""
    undefended = {line.base: line for line in federations if line.labels["defense"] == "none"}
    return [
        (undefended[line.base], line)
        for line in federations
        if str(line.labels["defense"]).startswith(JOINED) and line.base in undefended
    ]


def traffic(rows: Sequence[Row]) -> list[View]:
    """Return one view a network and data set: bytes up and down of a client that took part, a bar each."""
    views = []
    for place, federations in places(rows).items():
        known = [line for line in federations if line.up_client and line.down_client]
        if known:
            views.append(View(place, [_bars(known)]))
    return views


def _bars(federations: Sequence[FederationLine]) -> Panel:
    """Plot the megabytes of a client as bars."""
    called = titles(line.labels for line in federations)
    names = [called[line.name].replace(", ", ",<br>") for line in federations]  # a phone is narrow
    traces: list[Part] = []
    for title, colour, field in (("up", PALETTE[0], "up_client"), ("down", PALETTE[1], "down_client")):
        means = short(getattr(line, field)[1] / MEGA for line in federations)
        spread = [getattr(line, field) for line in federations]
        text = [f"{low / MEGA:.2f} to {high / MEGA:.2f}" for low, _, high in spread]
        bars = {"type": "bar", "orientation": "h", "x": means, "y": names, "name": title, "marker": {"color": colour}}
        hover = "%{y}: %{x:.3g} MB " + title + " a client (%{customdata})<extra></extra>"
        traces.append(bars | {"customdata": text, "hovertemplate": hover})
    values = "; ".join(
        f"{name.replace('<br>', ' ')} {up:g} up, {down:g} down"
        for name, up, down in zip(names, traces[0]["x"], traces[1]["x"], strict=True)
    )
    return panel(
        "MB of a client over all rounds",
        f"Megabytes of a client, the mean of those that took part: {values}.",
        traces,
        120 + 34 * len(federations),
        {"title": "MB a client", "rangemode": "tozero", "nticks": 4},
        {"title": "", "autorange": "reversed", "ticksuffix": " "},
        barmode="group",
        legend={"orientation": "h", "y": 1, "yanchor": "bottom"},
    )


def by_rate(rows: Sequence[Row]) -> list[View]:
    """Return one view a network and data set with several base pruning rates: leakage against the rate."""
    views = []
    for place, place_rows in federation.attacked(rows).items():
        panels = []
        for metric, title in {"nmi_256": LEAKS["nmi"], "psnr": LEAKS["psnr"]}.items():
            curves = _curves([row for row in place_rows if row.metric == metric and row.value is not None])
            if any(len(points) > 1 for points in curves.values()):
                panels.append(_panel(title, curves))
        if panels:
            views.append(View(place, panels))
    return views


def _curves(rows: Sequence[Row]) -> Curves:
    """Return by base pruning and the rest the values at each rate."""
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
    """Plot leakage by rate: a base pruning has one colour, an attack on one kind of broadcast one dash."""
    bases, rests = (list(dict.fromkeys(key[side] for key in curves)) for side in (0, 1))
    traces: list[Part] = []
    for (base, rest), points in curves.items():
        means = {rate: sum(values) / len(values) for rate, values in sorted(points.items())}
        style = {"color": cycle(PALETTE, bases.index(base)), "dash": cycle(DASHES, rests.index(rest)), "width": 2}
        line = {"x": list(means), "y": short(means.values()), "name": f"{base}, {rest}", "line": style}
        traces.append({"type": "scatter", "mode": "lines+markers", "marker": {"size": 6}} | line)
    ends = "; ".join(f"{x['name']} {x['y'][0]:g} at {x['x'][0]:g}, {x['y'][-1]:g} at {x['x'][-1]:g}" for x in traces)
    return panel(
        f"{title} by pruning rate",
        f"{title} by the base pruning's rate, means over attacked updates: {ends}.",
        traces,
        360 + 24 * len(traces),
        {"title": "base pruning rate", "zeroline": False, "nticks": 10},
        {"title": title, "zeroline": False, "nticks": 6},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
    )


def sheets(figures: Iterable[Labels]) -> list[Sheet]:
    """Return one sheet for each attack on several federations, a line each, ordered by base pruning and rate.

    The columns are the pictures that the attack came nearest to in any federation.
    """
    figures = [figure for figure in figures if is_federated(figure) and figure["png"]]
    called = titles(figures)
    truths: dict[str, dict[Key, Picture]] = {}
    groups: dict[tuple[str, str], dict[tuple[Any, ...], dict[Key, tuple[float, Picture]]]] = {}
    for figure in figures:
        place, key = federation.place(figure), tuple((label, figure.get(label)) for label in TRUTH)
        if figure["attack"] is None:
            truths.setdefault(place, {})[key] = Picture("truth", figure["png"], [])
            continue
        title = name(figure)
        line = (*(figure.get(label) or 0 for label in ORDER), title)
        near = float(figure["scores"].get("psnr") or 0.0)
        lines = groups.setdefault((place, _attack(str(figure["attack"]))), {})
        lines.setdefault(line, {})[key] = near, Picture(title, figure["png"], [])
    result = []
    for (place, attack), lines in groups.items():
        if len(lines) > 1:
            chosen = _nearest(lines.values())
            truth_line = ("truth", [truths.get(place, {}).get(key) for key in chosen])
            guess_lines = [
                (called[line[-1]], [_picture(lines[line], key) for key in chosen]) for line in sorted(lines, key=str)
            ]
            result.append(Sheet(f"{attack}: {place}", [truth_line, *guess_lines]))
    return result


def is_federated(figure: Labels) -> bool:
    """Return True if a figure is of a federation's round."""
    return figure["kind"] == "picture" and "base_pruning" in figure and "round" in figure


def _nearest(lines: Iterable[Mapping[Key, tuple[float, Picture]]]) -> list[Key]:
    """Return the truths that any line came nearest to, nearest first."""
    best: dict[Key, float] = {}
    for pictures in lines:
        for key, (near, _) in pictures.items():
            best[key] = max(near, best.get(key, near))
    return sorted(best, key=lambda key: -best[key])[:ACROSS]


def _picture(pictures: Mapping[Key, tuple[float, Picture]], key: Key) -> Picture | None:
    return pictures[key][1] if key in pictures else None


def _attack(text: str) -> str:
    """Return the attack's name, and how it adapts."""
    first, *settings = split(text)
    return ", ".join([first, *(x.replace("adaptive=", "knowing: ") for x in settings if "adaptive" in x)])
