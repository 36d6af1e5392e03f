"""Plots of federations: accuracy against leakage, bytes of a client, leakage by pruning rate, and picture sheets.

Leakage by rate follows priprune, Figs. 2, 3, A1 and A2. A sheet shows the same training pictures in every federation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from secateur.attacks.inversion.adaptive import PLAIN
from secateur.catalogue import split
from secateur.evaluation.attack_strength import read_mode
from secateur.report import federation, plotting
from secateur.report.federation import CHANCE, NMI, name_federation, name_group, shorten_names, split_method
from secateur.report.inversion import Sheet, build_sheets
from secateur.report.plotting import DASHES, PALETTE, SYMBOLS, Panel, Part, View, cycle, number_axis
from secateur.report.summary import Labels, SummaryLine, average_along, group_by, select_rows
from secateur.runs.rows import Row

LEAKS = {NMI: "NMI, 256 levels", "psnr": "PSNR"}
ACCURACY = "test_accuracy"
JOINED = "priprune"  # an arrow leads to this defense from its base pruning alone
SHAPES = [symbol + form for form in ("", "-open", "-dot") for symbol in SYMBOLS]  # there are more defenses than symbols
MEGA = 1e6
TRUTH = ("seed", "round", "client", "item")  # labels that tell one truth from another in all federations of a study
ORDER = ("base_pruning", "sparsity", "broadcast", "defense")


def draw_planes(lines: Iterable[SummaryLine]) -> list[View]:
    """Return one view a network and data set: accuracy against the strongest attacker's leakage, in two measures."""
    views = []
    for group, federations in group_by(lines, lambda line: name_group(line.labels)).items():
        panels = []
        for leak, title in LEAKS.items():
            known = [line for line in federations if ACCURACY in line.cells and leak in line.cells]
            if len(known) > 1:
                panels.append(_draw_plane(leak, title, known))
        if panels:
            views.append(View(group, panels, _describe_pairs(federations)))
    return views


def _draw_plane(leak: str, title: str, federations: Sequence[SummaryLine]) -> Panel:
    """Plot federations by accuracy and one measure of leakage, with arrows from no defense to PriPrune."""
    names = shorten_names(line.labels for line in federations)
    bases = group_by(federations, _name_base)
    defenses = dict.fromkeys(map(_name_defense, federations))
    colours = {base: cycle(PALETTE, number) for number, base in enumerate(bases)}
    symbols = {defense: cycle(SHAPES, number) for number, defense in enumerate(defenses)}
    traces: list[Part] = []
    for base, same in bases.items():
        marker = {"color": colours[base], "size": 11, "symbol": [symbols[_name_defense(line)] for line in same]}
        points = [(line.rank(ACCURACY), line.rank(leak)) for line in same]
        texts = [_write_hover_text(line, leak, names[_name(line)]) for line in same]
        settings = _list_settings(same)
        shown = {"mode": "markers+text" if any(settings) else "markers", "text": settings, "textposition": "top center"}
        group = plotting.group_legend("base pruning")
        traces.append(plotting.draw_points(base, points, marker, texts, **shown, **group))
    for defense, symbol in symbols.items() if len(symbols) > 1 else ():
        traces.append(plotting.draw_legend_entry(defense, symbol, plotting.group_legend("defense")))
    arrows = [_draw_arrow(before, after, leak, colours[_name_base(before)]) for before, after in _pair(federations)]
    values = "; ".join(f"{names[_name(x)]} {x.rank(ACCURACY):.1%}, {x.rank(leak):.3g}" for x in federations)
    alt = f"Test accuracy against {title} of the strongest attacker: {values}."
    x_axis = plotting.share_axis("test accuracy")
    y_axis = number_axis(f"{title} of the strongest attacker")
    return plotting.draw_panel(
        f"Accuracy against {title}",
        alt,
        traces,
        380 + 20 * max(len(bases), len(defenses)),
        x_axis,
        y_axis,
        annotations=arrows,
        legend=plotting.place_legend(-0.2, maxheight=22 * (len(bases) + len(defenses)) + 80),
    )


def _name(line: SummaryLine) -> str:
    return name_federation(line.labels)


def _name_base(line: SummaryLine) -> str:
    """Return the key of a colour: a base pruning without its settings, the broadcast, and the server's view."""
    base, _ = split_method(line.labels["base_pruning"])
    return name_federation({**line.labels, "base_pruning": base, "defense": "none"})


def _name_defense(line: SummaryLine) -> str:
    """Return the key of a shape: a defense without its settings."""
    return split_method(line.labels["defense"])[0]


def _write_hover_text(line: SummaryLine, leak: str, name: str) -> str:
    """Return the hover text of a federation."""
    chance, up = line.value(CHANCE.get(leak, "")), line.value("client_bytes_up")
    parts = [f"<b>{name}</b>", f"accuracy {line.rank(ACCURACY):.1%}", f"{LEAKS[leak]} {line.rank(leak):.3g}"]
    parts += [f"by chance {chance:.3g}"] if chance is not None else []
    parts += [f"{up / MEGA:.2f} MB up a client"] if up is not None else []
    return "<br>".join(parts)


def _list_settings(federations: Sequence[SummaryLine]) -> list[str]:
    """Return the settings that tell federations of one colour and one shape apart, such as their rates."""
    texts = []
    for line in federations:
        same = [other.labels for other in federations if _name_defense(other) == _name_defense(line)]
        methods = [(str(line.labels[name]), [str(x[name]) for x in same]) for name in ("base_pruning", "defense")]
        settings = [split_method(federation.shorten_methods(others)[method])[1] for method, others in methods]
        texts.append(", ".join(filter(None, settings)))
    return texts


def _draw_arrow(before: SummaryLine, after: SummaryLine, leak: str, colour: str) -> Part:
    """Return the arrow from a federation without a defense to the same under PriPrune."""
    start = {"ax": before.value(ACCURACY), "ay": before.value(leak), "axref": "x", "ayref": "y"}
    end = {"x": after.value(ACCURACY), "y": after.value(leak), "xref": "x", "yref": "y"}
    head = {"showarrow": True, "arrowhead": 2, "arrowwidth": 2, "arrowcolor": colour, "standoff": 7, "startstandoff": 7}
    return {"text": "", **start, **end, **head}


def _describe_pairs(federations: Sequence[SummaryLine]) -> str:
    """Return the arrows in words."""
    names = shorten_names(line.labels for line in federations)
    changes = [
        f"{names[_name(before)]}: {_describe(before)} alone, {_describe(after)} with {after.labels['defense']}"
        for before, after in _pair(federations)
    ]
    return f"{'; '.join(changes)}." if changes else ""


def _describe(line: SummaryLine) -> str:
    """Return accuracy and NMI of a federation in words."""
    accuracy, nmi, chance = (line.value(metric) for metric in (ACCURACY, NMI, CHANCE[NMI]))
    right = "accuracy unknown" if accuracy is None else f"{accuracy:.1%} right"
    leak = "not attacked" if nmi is None else f"NMI {nmi:.3f}"
    return f"{right} and {leak}" + ("" if chance is None else f" ({chance:.3f} by chance)")


def _pair(federations: Sequence[SummaryLine]) -> list[tuple[SummaryLine, SummaryLine]]:
    """Return pairs: every federation without a defense, and the same under PriPrune."""
    undefended = {_base_key(line): line for line in federations if line.labels["defense"] == "none"}
    defended = [line for line in federations if str(line.labels["defense"]).startswith(JOINED)]
    return [(undefended[_base_key(line)], line) for line in defended if _base_key(line) in undefended]


def _base_key(line: SummaryLine) -> tuple[Any, ...]:
    """Return the base pruning, the broadcast and the server's view, without the defense."""
    return line.labels["base_pruning"], line.labels["broadcast"], line.labels.get("view", "update")


def draw_traffic(lines: Iterable[SummaryLine]) -> list[View]:
    """Return one view a network and data set: bytes up and down of a client that took part, a bar each."""
    known = [line for line in lines if "client_bytes_up" in line.cells and "client_bytes_down" in line.cells]
    return [View(group, [_draw_bars(same)]) for group, same in group_by(known, lambda x: name_group(x.labels)).items()]


def _draw_bars(federations: Sequence[SummaryLine]) -> Panel:
    """Plot the megabytes of a client as bars."""
    names = shorten_names(line.labels for line in federations)
    labels = [names[_name(line)].replace(", ", ",<br>") for line in federations]  # a phone is narrow
    traces: list[Part] = []
    for title, colour in (("up", PALETTE[0]), ("down", PALETTE[1])):
        cells = [line.cells[f"client_bytes_{title}"] for line in federations]
        means = plotting.shorten((cell.value or 0) / MEGA for cell in cells)
        text = [f"{(cell.low or 0) / MEGA:.2f} to {(cell.high or 0) / MEGA:.2f}" for cell in cells]
        bars = {"type": "bar", "orientation": "h", "x": means, "y": labels, "name": title, "marker": {"color": colour}}
        hover = "%{y}: %{x:.3g} MB " + title + " a client (%{customdata})<extra></extra>"
        traces.append(bars | {"customdata": text, "hovertemplate": hover})
    values = "; ".join(
        f"{label.replace('<br>', ' ')} {up:g} up, {down:g} down"
        for label, up, down in zip(labels, traces[0]["x"], traces[1]["x"], strict=True)
    )
    alt = f"Megabytes of a client, the mean of those that took part: {values}."
    x_axis = {"title": "MB a client", "rangemode": "tozero", "nticks": 4}
    y_axis = {"title": "", "autorange": "reversed", "ticksuffix": " "}
    return plotting.draw_panel(
        "MB of a client over all rounds",
        alt,
        traces,
        120 + 34 * len(federations),
        x_axis,
        y_axis,
        barmode="group",
        legend={"orientation": "h", "y": 1, "yanchor": "bottom"},
    )


def draw_rates(rows: Iterable[Row]) -> list[View]:
    """Return one view a network and data set with several base pruning rates: leakage against the rate."""
    attacked = [
        row
        for row in select_rows(rows, *LEAKS)
        if federation.is_federated(row)
        and row.attack is not None
        and "target" in row.extra
        and not federation.is_pooled(row)
    ]
    views = []
    for group, same in group_by(attacked, lambda row: name_group(federation.row_labels(row))).items():
        curves = {title: _average_rates(select_rows(same, metric)) for metric, title in LEAKS.items()}
        several = {title: x for title, x in curves.items() if any(len(points) > 1 for points in x.values())}
        if several:
            views.append(View(group, [_draw_rate_panel(title, x) for title, x in several.items()]))
    return views


def _average_rates(rows: Sequence[Row]) -> dict[tuple[str, str], dict[Any, float]]:
    """Return by base pruning, and by broadcast, attack and defense, the mean value at each rate."""
    attacks = federation.shorten_methods(str(row.attack) for row in rows)

    def key(row: Row) -> tuple[str, str]:
        defense = [] if row.defense == "none" else [str(row.defense)]
        rest = [row.extra["broadcast"], attacks[str(row.attack)], *defense]
        return str(row.extra["base_pruning"]).partition(":")[0], ", ".join(rest)

    return {curve: average_along(same, lambda row: row.sparsity or 0.0) for curve, same in group_by(rows, key).items()}


def _draw_rate_panel(title: str, curves: Mapping[tuple[str, str], Mapping[Any, float]]) -> Panel:
    """Plot leakage by rate: a base pruning has one colour, an attack on one kind of broadcast one dash."""
    bases, rests = (list(dict.fromkeys(key[side] for key in curves)) for side in (0, 1))
    traces: list[Part] = []
    for (base, rest), points in curves.items():
        line = {"color": cycle(PALETTE, bases.index(base)), "dash": cycle(DASHES, rests.index(rest)), "width": 2}
        more: Part = {"mode": "lines+markers", "marker": {"size": 6}}
        traces.append(plotting.draw_curve(f"{base}, {rest}", points, line, **more))
    ends = "; ".join(f"{x['name']} {x['y'][0]:g} at {x['x'][0]:g}, {x['y'][-1]:g} at {x['x'][-1]:g}" for x in traces)
    alt = f"{title} by the base pruning's rate, means over attacked updates: {ends}."
    x_axis = number_axis("base pruning rate", 10)
    y_axis = number_axis(title, 6)
    return plotting.draw_panel(
        f"{title} by pruning rate",
        alt,
        traces,
        360 + 24 * len(traces),
        x_axis,
        y_axis,
        legend=plotting.place_legend(-0.2),
    )


def build_federation_sheets(figures: Iterable[Labels]) -> list[Sheet]:
    """Return one sheet for each attack on several federations, a line each, ordered by base pruning and rate.

    The columns are the pictures that the attack came nearest to in any federation.
    """
    federated = [figure for figure in figures if is_federation_picture(figure) and figure["png"]]
    names = shorten_names(federated)
    ordered = sorted(federated, key=lambda figure: str([figure.get(label) or 0 for label in ORDER]))
    return build_sheets(
        ordered, name_group, _name_attack, lambda x: names[name_federation(x)], TRUTH, nearest_first=True
    )


def is_federation_picture(figure: Labels) -> bool:
    """Return True if a figure is a picture of a federation's round."""
    return figure["kind"] == "picture" and "base_pruning" in figure and "round" in figure


def _name_attack(text: str) -> str:
    """Return the attack's name, and how it adapts."""
    mode = read_mode(text)
    return split(text)[0] + ("" if mode == PLAIN else f", adapts by: {mode}")
