"""Pages of many rows and runs: bounded in bytes, and every part that is left out is said to be."""

import json
import re

import plotly.graph_objects as go
import pytest
from audited import attack_rows, audit_rows, figures_of, labels_of, model_rows
from hypothesis import given
from hypothesis import strategies as st

from secateur.report.audit import MOST_MODELS
from secateur.report.audit_plots import CURVES
from secateur.report.page import MOST_RUNS, MOST_VERDICTS, Source, render
from secateur.report.plotting import POINTS, VIEWS, View, draw_views, thin_points
from secateur.report.summary import SummaryCell, SummaryLine, select_front
from secateur.report.table import MOST_LINES, Column, build_table, to_rich

MODELS = 2 * MOST_LINES
ROOM = 3 << 20  # bytes beside the plotting library, which takes 4.6 MiB of the page's 8


def many_models():
    rows = []
    for number in range(MODELS):
        labels = labels_of("l1-unstructured", 0.5, f"dp:sigma={number}")
        rows += model_rows(labels, 0, 0.9)
        for rank in range(2):
            rows += attack_rows(labels | {"attack": f"attack-{rank}"}, 0, 0.5 + 0.4 * number / MODELS + 0.01 * rank)
    exposed = [
        {"kind": "exposed", "seed": 0, "records": [{"id": 7, "label": 3, "fpr": 0.1}] * 20, "attack": "attack-1"}
        | labels_of("l1-unstructured", 0.5, f"dp:sigma={number}")
        for number in range(40)
    ]
    return rows, figures_of(rows[:1500]) + exposed


@pytest.fixture(scope="module")
def page():
    rows, figures = many_models()
    return render([Source("mine", rows, figures, "model: digits-cnn\n", {})])


def embedded(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_of_many_models_is_bounded(page):
    library = page[page.index("plotly.js v") : page.rindex("<script>")]
    assert len(page) - len(library) < ROOM


def test_lines_that_are_left_out_are_counted_and_the_strongest_stay(page):
    assert (
        f"{MOST_LINES} of {2 * MODELS:,} lines are shown, those of the highest AUC; all are in results.jsonl." in page
    )
    table = re.search(r'id="attacks".*?</table>', page, re.DOTALL)[0]
    assert table.count("<tr") == MOST_LINES + 1
    assert f"sigma={MODELS - 1}<" in table and "sigma=0<" not in table


def test_plots_that_are_left_out_are_counted(page):
    views = embedded(page)["roc"]
    assert 1 < len(views) <= VIEWS
    assert all(re.search(r"The first \d+ of \d+ are drawn; all are in figures.jsonl", view["text"]) for view in views)
    (tradeoff,) = embedded(page)["tradeoff"]
    assert sum(len(trace["x"]) for trace in tradeoff["panels"][0]["data"]) >= MODELS


def test_exposed_records_of_the_strongest_models_alone_are_shown(page):
    section = re.search(r'id="exposed".*?</section>', page, re.DOTALL)[0]
    assert section.count("<details") == MOST_MODELS and "Of 40 models these leak most" in section


def test_a_page_of_many_runs_counts_those_that_it_does_not_show():
    rows = [row for row in audit_rows() if row.pruner == "none"]
    page = render([Source(f"run-{i}", rows, [], "model: m\n", {"finished": None}) for i in range(MOST_RUNS + 10)])
    assert f"The first {MOST_RUNS} of {MOST_RUNS + 10} runs" in page
    assert page.count(": configuration and environment</summary>") == MOST_RUNS
    assert f"{MOST_RUNS + 10 - MOST_VERDICTS} more settings are left out here" in page
    assert f"and {MOST_RUNS + 10 - MOST_VERDICTS} more are unfinished" in page


def test_all_panels_fit_plotlys_schema(page):
    rows = audit_rows(attacks=[f"attack-{i}" for i in range(CURVES + 2)])
    small = render([Source("mine", rows, figures_of(rows), "", {})])
    assert f"The {CURVES} strongest of {CURVES + 2} attacks are drawn." in small
    for views in (*embedded(page).values(), *embedded(small).values()):
        for panel in (panel for view in views[:2] for panel in view["panels"]):
            go.Figure(panel["data"], panel["layout"])


def test_views_beyond_the_room_of_a_section_are_left_out():
    views = [View(str(i), [], "x" * 100_000) for i in range(9)]
    kept = draw_views(views, lambda view: view)
    assert [view.label for view in kept] == ["0", "1"]
    assert "The first 2 of 9 are drawn" in kept[0].text
    assert draw_views(views[:1], lambda view: view) == views[:1]


def test_a_thinned_curve_keeps_its_ends_and_extremes():
    points = [(x, 0.0) for x in range(100_000)]
    points[31_415] = (31_415, 9.0)
    points[70_000] = (70_000, -9.0)
    thin = thin_points(points)
    assert len(thin) <= POINTS and thin == sorted(thin)
    assert {points[0], points[-1], points[31_415], points[70_000]} <= set(thin)


def test_a_terminal_says_what_a_table_leaves_out():
    table = build_table("", range(MOST_LINES + 5), [Column("n", str)])
    assert table.lines[-1][0].text == str(MOST_LINES - 1)
    said = to_rich(table).caption
    assert said == f"{MOST_LINES} of {MOST_LINES + 5} lines are shown, the first; all are in results.jsonl."
    assert to_rich(build_table("", range(5), [Column("n", str)])).caption is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12), st.booleans())
def test_the_front_has_no_line_that_another_one_beats(values, keep_equal):
    lines = [
        SummaryLine({"n": n}, {"acc": SummaryCell(a, None, None), "auc": SummaryCell(b, None, None)})
        for n, (a, b) in enumerate(values)
    ]
    front = {line.labels["n"] for line in select_front(lines, "acc", "auc", keep_equal=keep_equal)}
    for n, (a, b) in enumerate(values):
        beaten = any((c, d) != (a, b) and c >= a and d <= b for c, d in values)
        assert (n in front) == (not beaten and (keep_equal or (a, b) not in values[:n]))
