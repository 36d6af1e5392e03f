"""The plots' data, by hand; what a screen shows of them is tested in the browser."""

import pytest
from audited import audit_rows, figures_of, labels_of

from secateur.report.audit_plots import (
    VISIBLE,
    StyledCurve,
    draw_class_means,
    draw_classes,
    draw_histogram,
    draw_histograms,
    draw_roc,
    draw_rocs,
    draw_tradeoffs,
    name_attack,
)
from secateur.report.plotting import PALETTE
from secateur.report.summary import Record, gather_figures, summarise


def record(kind, **content):
    return Record(kind, "confidence", labels_of("snip", 0.5, "basic"), content)


def contrast(one, other):
    def luminance(colour):
        parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        linear = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True)) + 0.05

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return high / low


@pytest.mark.parametrize("paper", ["#fbfbf9", "#141917"])
def test_every_colour_is_seen_on_both_papers(paper):
    assert all(contrast(colour, paper) >= 3 for colour in PALETTE)


def test_a_roc_curve_is_a_stair_of_its_corners_that_ends_at_the_axis():
    curve = record("roc", fpr=[0.0, 0.0, 0.02, 0.05, 0.3, 1.0], tpr=[0.0, 0.1, 0.1, 0.4, 0.4, 1.0])
    drawn = draw_roc("a", [StyledCurve("conf", 0.6, curve, 0)])
    line, guessing = drawn.data
    assert (line["x"], line["y"]) == ([0.01, 0.05, 1.0, 1.0], [0.1, 0.4, 1.0, 1.0])
    assert line["line"]["shape"] == "hv" and guessing["x"] == guessing["y"] == [0.01, 1]
    assert drawn.layout["xaxis"]["type"] == drawn.layout["yaxis"]["type"] == "log"
    assert "conf 0.600" in drawn.alt


def test_only_the_strongest_curves_are_drawn_at_first():
    curve = record("roc", fpr=[0.0, 0.1, 1.0], tpr=[0.0, 0.2, 1.0])
    drawn = draw_roc("a", [StyledCurve(f"attack-{i}", 0.5 + i / 100, curve, i) for i in range(14)]).data[:-1]
    assert [trace["name"][:9] for trace in drawn[:2]] == ["attack-13", "attack-12"]
    assert [trace["visible"] for trace in drawn] == [True] * VISIBLE + ["legendonly"] * (14 - VISIBLE)
    assert len({(trace["line"]["color"], trace["line"]["dash"]) for trace in drawn}) == 14


def test_a_histogram_has_both_sides_and_a_line_at_each_mean():
    content = {"edges": [0.0, 0.5, 1.0], "members": [0.1, 0.9], "nonmembers": [0.4, 0.6]}
    drawn = draw_histogram("a", record("histogram", **content, member_mean=0.7, nonmember_mean=0.55), 1.0)
    assert [trace["y"] for trace in drawn.data] == [[0.1, 0.9], [0.4, 0.6]]
    assert [trace["x"] for trace in drawn.data] == [[0.25, 0.75]] * 2
    assert [shape["x0"] for shape in drawn.layout["shapes"]] == [0.7, 0.55]
    assert drawn.title == "a: means 0.700 and 0.550, gap +0.150"


def test_classes_without_one_side_are_left_open():
    drawn = draw_classes("a", record("classes", members=[0.9, 0.8, None], nonmembers=[0.8, 0.5, 0.4]), 0.9)
    assert [trace["y"] for trace in drawn.data] == [[0.9, 0.8, None], [0.8, 0.5, 0.4]]
    assert drawn.title == "a: widest gap +0.300, class 1"


def test_the_tradeoff_has_a_point_a_model_and_the_front():
    (view,) = draw_tradeoffs(summarise(audit_rows()))
    front, *points = [trace for trace in view.panels[0].data if trace["x"] != [None]]
    assert (front["name"], front["x"], front["y"]) == ("Pareto front", [0.94], [0.575])
    assert sorted(x for trace in points for x in trace["x"]) == [0.87, 0.88, 0.89, 0.9, 0.91, 0.92, 0.93, 0.94, 0.95]
    assert view.text == "On the front, from least to most accurate: l1-unstructured 0.5, basic: AUC 0.575 at 94.0%."


def test_a_single_accuracy_keeps_an_axis_of_shares():
    rows = [row for row in audit_rows() if row.pruner == "none"]
    (view,) = draw_tradeoffs(summarise(rows))
    assert view.panels[0].layout["xaxis"]["range"] == [0, 1.005]  # 95 %
    (view,) = draw_tradeoffs(summarise(audit_rows()))
    assert "range" not in view.panels[0].layout["xaxis"]


def test_each_pruned_model_stands_beside_its_original():
    figures = figures_of(audit_rows())
    views = draw_histograms(figures)
    assert [view.label for view in views][:2] == ["l1-unstructured 0.5, basic", "l1-unstructured 0.5, ppb"]
    assert [panel.title.split(":")[0] for panel in views[0].panels] == ["original", "l1-unstructured 0.5, basic"] * 2
    sensitivity = [panel.layout["xaxis"]["range"] for panel in views[0].panels[2:]]
    assert sensitivity == [[0, 0.7]] * 2  # one scale, the wider of the two
    assert [len(view.panels) for view in draw_class_means(figures)] == [6] * 8


def test_an_audit_without_pruning_is_drawn_alone():
    rows = [row for row in audit_rows() if row.pruner == "none"]
    (view,) = draw_histograms(figures_of(rows))
    assert (view.label, len(view.panels)) == ("original", 2)


def test_curves_carry_the_tables_auc_and_what_the_attacker_knew():
    rows = audit_rows()
    views = draw_rocs(summarise(rows), figures_of(rows))
    assert (views[0].label, views[-1].label) == ("l1-unstructured 0.5, basic", "original")
    assert [trace["name"] for trace in views[0].panels[0].data] == ["samia · 0.575", "conf · 0.570", "guessing · 0.500"]
    labels = labels_of("snip", 0.5, "ppb", attack="samia") | {"adaptive": True, "protocol": "select"}
    assert name_attack(labels) == "samia, adaptive, protocol select"


def test_seeds_are_averaged():
    labels = labels_of("snip", 0.5, "ppb", attack="conf")
    curves = [
        {"kind": "roc", "fpr": [0.0, 0.1, 1.0], "tpr": [0.0, t, 1.0], "seed": s} for s, t in enumerate((0.2, 0.4))
    ]
    (mean,) = gather_figures([labels | curve for curve in curves])
    assert mean.content["tpr"][1] == pytest.approx(0.3)
    both = [
        {"kind": "classes", "members": [m, None], "nonmembers": [0.0, n], "seed": 0}
        for m, n in ((0.2, None), (0.4, 0.5))
    ]
    (mean,) = gather_figures([labels | each for each in both])
    assert mean.content == {"members": [pytest.approx(0.3), None], "nonmembers": [0.0, 0.5]}
