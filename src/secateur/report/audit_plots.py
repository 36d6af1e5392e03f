"""Plots of audits: ROC curves, members beside non-members (samia_ppb, Figs. 1 and 4), the trade-off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from secateur.report import plotting, summary
from secateur.report.audit import COMMON, name_view
from secateur.report.plotting import GREY, MEMBERS, OTHERS, PALETTE, SYMBOLS, Panel, Part, View, cycle, shorten
from secateur.report.summary import Labels, Record, SummaryLine, attack_key, model_key, name_model
from secateur.report.table import format_measure
from secateur.report.verdict import GUESSING

QUANTITIES = ("confidence", "sensitivity", "accuracy")
VISIBLE = 6  # curves drawn at first: the strongest attacks
SIDES = (("members", "members", MEMBERS), ("nonmembers", "non-members", OTHERS))
MODELS = 1000  # points of a trade-off
CORNERS = 80  # of a ROC curve
CURVES = 20  # ROC curves of a plot: the strongest attacks


@dataclass(frozen=True)
class StyledCurve:
    """One attack's ROC curve and its style."""

    name: str
    auc: float | None  # None: not measured
    record: Record
    style: int  # the same attack looks the same on every plot

    @property
    def score(self) -> str:
        """The AUC in words."""
        return "-" if self.auc is None else f"{self.auc:.3f}"


def draw_tradeoffs(lines: Sequence[SummaryLine]) -> list[View]:
    """Return one trade-off view for each run, network and data set."""
    views = []
    for group in summary.group_by_setting(lines):
        best = summary.select_strongest(group)
        if any(line.value("test_accuracy") is not None for line in best):
            name = summary.name_setting(best[0].labels)
            views.append(View(name, [draw_tradeoff(name, best)], describe_front(best) + _select_points(best)[1]))
    return views


def _select_points(best: Sequence[SummaryLine]) -> tuple[list[SummaryLine], str]:
    """Return the models that a trade-off draws, and a sentence if there are more: the front, then the first ones."""
    points = [line for line in best if line.value("test_accuracy") is not None]
    if len(points) <= MODELS:
        return points, ""
    front = {id(line) for line in _select_edge(points)}
    first = sorted(points, key=lambda line: (id(line) not in front, line.pruned))[:MODELS]
    return first, f" {MODELS} of {len(points):,} models are drawn, those on the front among them."


def draw_rocs(lines: Sequence[SummaryLine], figures: Iterable[Labels]) -> list[View]:
    """Return one view for each model, pruned models first, with the ROC curves of all attacks on the model."""
    aucs = {attack_key(line.labels): line.value("auc") for line in summary.select_attacks(lines)}
    models = _group_by_model(figures, "roc")
    names = dict.fromkeys(name_attack(summary.figure_labels(x)) for same in models.values() for x in same)
    styles = {name: number for number, name in enumerate(names)}
    several = _has_several_settings(models.values())

    def draw(same: Sequence[Labels]) -> View:
        records = summary.gather_figures(same)
        named = [(name_attack(record.labels), record) for record in records]
        curves = [StyledCurve(name, aucs.get(attack_key(x.labels)), x, styles[name]) for name, x in named]
        label = name_view(records[0].labels, several)
        left = f"The {CURVES} strongest of {len(curves)} attacks are drawn." if len(curves) > CURVES else ""
        return View(label, [draw_roc(label, curves)], left)

    ordered = sorted(models.values(), key=lambda same: not summary.is_pruned(same[0]))
    return plotting.draw_views(ordered, draw)


def draw_histograms(figures: Iterable[Labels]) -> list[View]:
    """Return one view for each pruned model beside its original: histograms of answers for members and non-members."""

    def draw(pair: Sequence[Record]) -> list[Panel]:
        means = [record.content[name] for record in pair for name in ("member_mean", "nonmember_mean")]
        top = max([record.content["edges"][-1] for record in pair] + means)
        return [draw_histogram(name_model(record.labels), record, top) for record in pair]

    return _draw_beside_originals(_group_by_model(figures, "histogram"), draw)


def draw_class_means(figures: Iterable[Labels]) -> list[View]:
    """Return one view for each pruned model beside its original: the means of every class."""

    def draw(pair: Sequence[Record]) -> list[Panel]:
        every = [x for record in pair for x in record.content["members"] + record.content["nonmembers"]]
        top = max((x for x in every if x is not None), default=0.0) or 1.0
        return [draw_classes(name_model(record.labels), record, top) for record in pair]

    return _draw_beside_originals(_group_by_model(figures, "classes"), draw)


def name_attack(labels: Labels) -> str:
    """Name an attack, and the attacker's knowledge if the labels hold it."""
    known = {name: value for name, value in labels.items() if name not in COMMON}
    facts = [f"{name.removeprefix('attacker_')} {value}" for name, value in known.items() if value is not None]
    return ", ".join([str(labels["attack"]), *(["adaptive"] if labels["adaptive"] else []), *facts])


def _draw_beside_originals(
    models: dict[summary.Key, list[Labels]], draw: Callable[[Sequence[Record]], list[Panel]]
) -> list[View]:
    """Return each pruned model's view: for every quantity the original's panel, then the model's."""
    every = [summary.figure_labels(same[0]) for same in models.values()]
    several = _has_several_settings(models.values())

    def draw_model(labels: Labels) -> View:
        before = summary.find_original(labels, every) if summary.is_pruned(labels) else None
        shown = [models[model_key(model)] for model in (before, labels) if model is not None]
        records = [record for same in shown for record in summary.gather_figures(same)]
        pairs = [[record for record in records if record.quantity == quantity] for quantity in QUANTITIES]
        return View(name_view(labels, several), [panel for pair in pairs if pair for panel in draw(pair)])

    return plotting.draw_views([labels for labels in every if summary.is_pruned(labels)] or every, draw_model)


def _group_by_model(figures: Iterable[Labels], kind: str) -> dict[summary.Key, list[Labels]]:
    """Return the figures of each model, of all seeds: they are averaged where they are drawn."""
    return summary.group_by((figure for figure in figures if figure["kind"] == kind), model_key)


def _has_several_settings(models: Iterable[Sequence[Labels]]) -> bool:
    return len({summary.setting_key(same[0]) for same in models}) > 1


def draw_roc(title: str, curves: Sequence[StyledCurve]) -> Panel:
    """Plot ROC curves on logarithmic axes, which show the low false positive rates that an attacker can afford."""
    ranked = sorted(curves, key=lambda curve: math.inf if curve.auc is None else -curve.auc)[:CURVES]
    least = min((x for curve in ranked for x in curve.record.content["fpr"] if x > 0), default=0.1)
    decades = max(1, math.ceil(-math.log10(least) - 1e-9))
    traces = [_draw_stair(curve, 10.0**-decades, rank < VISIBLE) for rank, curve in enumerate(ranked)]
    ends = [10.0**-decades, 1]
    guide = plotting.style_guide("dash")
    traces.append(plotting.draw_curve("guessing · 0.500", dict(zip(ends, ends, strict=True)), guide, hoverinfo="skip"))
    ticks = [10.0**-k for k in range(decades, -1, -1)]
    percents = [f"{100 * rate:g} %" for rate in ticks]
    axis = {"type": "log", "range": [-decades, 0.02], "tickvals": ticks, "ticktext": percents}
    alt = f"ROC curves on logarithmic axes, {title}. AUC: {', '.join(f'{x.name} {x.score}' for x in ranked)}."
    x_axis = {"title": "false positive rate"} | axis
    y_axis = {"title": "true positive rate"} | axis
    return plotting.draw_panel(
        title, alt, traces, 460, x_axis, y_axis, legend={"title": {"text": "attack · AUC", "font": {"size": 13}}}
    )


def _draw_stair(curve: StyledCurve, floor: float, visible: bool) -> Part:
    """Return a curve that rises at thresholds only: between two of them an attacker has the lower rate."""
    fpr, tpr = (shorten(max(x, floor) for x in curve.record.content[side]) for side in ("fpr", "tpr"))
    points = list(dict(zip(fpr, tpr, strict=True)).items())  # of each FPR the last TPR, the highest
    corners = [points[0], *(p for before, p in pairwise(points) if p[1] > before[1]), points[-1]]
    corners = list(plotting.thin_points(corners, CORNERS))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _ in corners],
        "y": [y for _, y in corners],
        "name": f"{curve.name} · {curve.score}",
        "line": plotting.style_line(curve.style) | {"shape": "hv"},
        "visible": True if visible else "legendonly",
        "hovertemplate": f"{curve.name}: %{{y:.3p}} of members<br>at %{{x:.3p}} false alarms<extra></extra>",
    }


def draw_histogram(title: str, record: Record, top: float) -> Panel:
    """Plot the shares of members and non-members by confidence or sensitivity, their means as lines (Fig. 1)."""
    content = record.content
    edges, inside, outside = content["edges"], content["member_mean"], content["nonmember_mean"]
    hover, centres = "%{{y:.1%}} of {} near %{{x:.3g}}", shorten((a + b) / 2 for a, b in pairwise(edges))
    opacity = dict.fromkeys(("members", "nonmembers"), 0.55)
    traces = [
        bar | {"x": centres, "y": shorten(content[side]), "width": edges[1] - edges[0]}
        for side, bar in _draw_bars(hover, opacity).items()
    ]
    means = f"means {inside:.3f} and {outside:.3f}, gap {inside - outside:+.3f}"
    alt = f"Histogram of the {record.quantity} of members and non-members, {title}: {means}."
    x_axis = {"title": f"{record.quantity} of the true class", "range": [0, top], "zeroline": False}
    y_axis = {"title": "share", "tickformat": ".0%", "rangemode": "tozero", "nticks": 6}
    return plotting.draw_panel(
        f"{title}: {means}",
        alt,
        traces,
        280,
        x_axis,
        y_axis,
        barmode="overlay",
        showlegend=False,
        shapes=[_draw_upright(inside, MEMBERS), _draw_upright(outside, OTHERS)],
    )


def _draw_bars(hover: str, opacity: dict[str, float]) -> dict[str, Part]:
    """Return the bars of members and of non-members, without their values."""
    return {
        side: {
            "type": "bar",
            "name": name,
            "marker": {"color": colour, "opacity": opacity[side], "line": {"width": 0}},
            "hovertemplate": f"{hover.format(name)}<extra></extra>",
        }
        for side, name, colour in SIDES
    }


def _draw_upright(mean: float, colour: str) -> Part:
    """Return a vertical dashed line at a mean."""
    line = {"color": colour, "width": 2, "dash": "dash"}
    return {"type": "line", "x0": mean, "x1": mean, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def draw_classes(title: str, record: Record, top: float) -> Panel:
    """Plot the mean of each class over members, wide bars, and over non-members, narrow bars in front (Fig. 4)."""
    traces = []
    for side, bar in _draw_bars("class %{{x}}: %{{y:.3f}} ({})", {"members": 0.6, "nonmembers": 1}).items():
        means = [None if mean is None else float(f"{mean:.4g}") for mean in record.content[side]]
        traces.append(bar | {"x0": 0, "dx": 1, "y": means, "width": 0.86 if side == "members" else 0.43})
    pairs = zip(record.content["members"], record.content["nonmembers"], strict=True)
    gaps = {label: a - b for label, (a, b) in enumerate(pairs) if a is not None and b is not None}
    widest = max(gaps, key=lambda label: abs(gaps[label]), default=None)
    widest_gap = f"widest gap {gaps[widest]:+.3f}, class {widest}" if widest is not None else "no class has both"
    alt = f"Mean {record.quantity} by class of members and non-members, {title}: {widest_gap}."
    x_axis = {"title": "class", "nticks": 12, "tickformat": "d"}
    y_axis = {"title": str(record.quantity), "range": [0, 1.04 * top], "nticks": 6}
    return plotting.draw_panel(
        f"{title}: {widest_gap}", alt, traces, 260, x_axis, y_axis, barmode="overlay", showlegend=False
    )


def draw_tradeoff(title: str, best: Sequence[SummaryLine]) -> Panel:
    """Plot each model's accuracy against the AUC of the strongest attack, with the Pareto front as a stair.

    Colours are defenses, shapes are pruners.
    """
    points, _ = _select_points(best)
    pruners = dict.fromkeys(line.labels["pruner"] for line in points if line.pruned)
    shapes = {name: cycle(SYMBOLS, number) for number, name in enumerate(pruners)}
    kinds = summary.group_by(points, lambda line: line.labels["defense"] if line.pruned else "original")
    traces = [_draw_front(points)]
    for number, (name, models) in enumerate(kinds.items()):
        symbols = [shapes.get(line.labels["pruner"], "star") for line in models]
        marker = {"color": cycle(PALETTE, number), "size": 11, "symbol": symbols}
        intervals = plotting.draw_intervals(line.cells["auc"] for line in models)
        texts = map(_write_hover_text, models)
        more = plotting.group_legend("defense") | {"error_y": intervals}
        traces.append(plotting.draw_points(name, list(map(_locate, models)), marker, list(texts), **more))
    if len(shapes) > 1:
        group = plotting.group_legend("pruner")
        traces += [plotting.draw_legend_entry(name, shape, group) for name, shape in shapes.items()]
    guessing: dict[str, Any] = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": GUESSING, "y1": GUESSING}
    alt = f"{title}: test accuracy against AUC. {describe_front(best)}"
    x_axis = plotting.share_axis("test accuracy") | plotting.fit_single(
        (_locate(line)[0] for line in points), most=1.005
    )
    y_axis = plotting.number_axis("AUC of the strongest attack")
    return plotting.draw_panel(
        title, alt, traces, 460, x_axis, y_axis, shapes=[guessing | {"line": plotting.style_guide("dot")}]
    )


def describe_front(best: Sequence[SummaryLine]) -> str:
    """Return the front in words, for readers who print the page or cannot see the plot."""
    models = "; ".join(
        f"{name_model(line.labels)}: AUC {format_measure(line.cells['auc'], 'auc', False)} "
        f"at {format_measure(line.cells['test_accuracy'], 'test_accuracy', False)}"
        for line in _select_edge(best)
    )
    return f"On the front, from least to most accurate: {models}." if models else "No accuracy was measured."


def _select_edge(best: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the front of the pruned models, or of all models if none was pruned."""
    return summary.select_front([line for line in best if line.pruned] or best, "test_accuracy", "auc")


def _draw_front(points: Sequence[SummaryLine]) -> Part:
    """Return the Pareto front as a stair."""
    corners = list(map(_locate, _select_edge(points)))
    line = {"shape": "vh", "width": 2, "color": GREY}  # an accuracy in between leaks as much as the next better model
    data = {"x": shorten(x for x, _ in corners), "y": shorten(y for _, y in corners), "line": line}
    return {"type": "scatter", "mode": "lines", "name": "Pareto front", "hoverinfo": "skip"} | data


def _locate(line: SummaryLine) -> tuple[float, float]:
    """Return the accuracy and the AUC of a model."""
    return line.rank("test_accuracy"), line.rank("auc")


def _write_hover_text(line: SummaryLine) -> str:
    """Return the hover text of a model."""
    auc, accuracy = (format_measure(line.cells[name], name) for name in ("auc", "test_accuracy"))
    return f"<b>{name_model(line.labels)}</b><br>AUC {auc} under {line.labels['attack']}<br>test accuracy {accuracy}"
