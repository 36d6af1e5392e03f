"""The page as text: whole, safe, small, and of one or several runs."""

import json
import re

import pytest
from audited import attack_rows, audit_rows, figures_of, labels_of

from secateur.errors import WrongInput
from secateur.report.page import Source, list_broken_limits, render, write_page
from secateur.runs.artifacts import SCHEMA


def source(rows, name="mine", **more):
    environment = {"torch": "2"} | more.pop("environment", {})
    return Source(name, rows, more.pop("figures", []), more.pop("config", "model: digits-cnn\n"), environment)


def written(folder, rows, figures=()):
    folder.mkdir(parents=True)
    for name, objects in (("results.jsonl", [row.to_json() for row in rows]), ("figures.jsonl", figures)):
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in objects))
    (folder / "run.json").write_text(json.dumps({"schema": 1, "kind": "audit", "secateur": "0.1.0"}))
    return folder


def embedded(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_is_whole_and_asks_nothing_of_a_network():
    rows = audit_rows()
    page = render([source(rows, figures=figures_of(rows))])
    drawn = {name: len(views) for name, views in embedded(page).items() if views}
    assert drawn == {"tradeoff": 1, "roc": 9, "histograms": 8, "classes": 8}
    assert page.count("plotly.js v") == 1 and len(page) < 5_300_000
    own = page.replace(page[page.index("plotly.js v") : page.rindex("<script>")], "")
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!#)\w+:|https?://|@import", own)


def test_the_page_carries_the_schema_version():
    head = render([source(audit_rows())]).partition("</head>")[0]
    assert re.findall(r'<meta name="secateur-schema" content="(\d+)">', head) == [str(SCHEMA)]


def test_a_page_without_figures_has_tables_and_the_tradeoff():
    page = render([source(audit_rows())])
    assert {name for name, views in embedded(page).items() if views} == {"tradeoff"}
    assert page.count("<tr") == 1 + 18 + 1 + 9 + 1 + 9


def test_pass_and_fail_come_first():
    rows = audit_rows()
    assert '<p class="badge">PASS</p>\n<p>Every limit is kept.</p>' in render([source(rows)], [])
    failed = render([source(rows)], ["auc: samia reaches 0.7 on snip 0.5, above the limit of 0.6"])
    assert "<summary>3 more</summary>" in render([source(rows)], [f"sentence {i}" for i in range(8)])
    assert failed.index("FAIL") < failed.index("above the limit of 0.6") < failed.index("leaks most")


def test_the_runs_own_limits_decide():
    rows = audit_rows()
    assert list_broken_limits([source(rows)]) is None
    assert list_broken_limits([source(rows, config="limits: {auc: null}")]) is None
    assert list_broken_limits([source(rows, config="limits: {auc: 0.9}")]) == []
    assert len(list_broken_limits([source(rows, config="limits: {auc: 0.6}")])) == 9  # the low end decides
    assert list_broken_limits(
        [source(rows, config="limits: {auc: 0.9}"), source(rows, "b", config="limits: {auc: 0.68}")]
    ) == ["b: l1-structured 0.9, ppb, under samia, seed 0: auc 0.715 (at least 0.685) is above the limit 0.68"]


def test_a_page_of_a_run_that_is_not_finished_says_so():
    rows = audit_rows()
    half, whole = source(rows, "half", environment={"finished": None}), source(rows, environment={"finished": "today"})
    assert "<strong>This run is unfinished.</strong>" in render([half])
    assert "<strong>half is unfinished.</strong>" in render([half, whole])
    assert "unfinished" not in render([whole]).partition("<main>")[0]


def test_names_cannot_break_out_of_the_page():
    evil = "</script><script>alert(1)</script>"
    labels = labels_of("snip", 0.5, "ppb") | {"model": evil}
    rows = attack_rows(labels | {"attack": evil}, 0, 0.6)
    page = render([source(list(rows), config=evil, figures=[{**labels, "attack": evil, "seed": 0, "kind": "roc",
                                                              "fpr": [0, 1], "tpr": [0, 1]}])])  # fmt: skip
    assert evil not in page


def test_notes_are_numbered_and_linked():
    page = render([source(audit_rows())])
    assert page.count('<li id="note-') == 1 and 'href="#note-1"' in page


def test_several_runs_share_a_page_and_are_not_mixed_up(tmp_path):
    rows = audit_rows()
    folders = [written(tmp_path / name / "run", rows, figures_of(rows)) for name in "ab"]
    page = write_page(folders, tmp_path / "both.html").read_text()
    assert len(embedded(page)["tradeoff"]) == 2 and len(embedded(page)["roc"]) == 18
    assert page.count("leaks most") == 2 and str(tmp_path / "a" / "run") in page


def test_wrong_input_is_one_sentence(tmp_path):
    rows = audit_rows()
    folders = [written(tmp_path / name, rows) for name in "ab"]
    with pytest.raises(WrongInput, match="page of several runs needs a file"):
        write_page(folders)
    with pytest.raises(WrongInput, match="is a folder"):
        write_page(folders, tmp_path)
    with pytest.raises(WrongInput, match="no results yet"):
        write_page([written(tmp_path / "empty", [])])
    assert write_page(folders[:1]) == folders[0] / "report.html"
