"""The page as text: whole, safe, small, and of one or several runs."""

import json
import re

import pytest
from audited import attack_rows, audit_rows, figures_of, know_defense, labels_of

from secateur.errors import WrongInput
from secateur.evaluation.limits import Outcome, outcome
from secateur.report.page import Source, check_limits, render, write_page
from secateur.runs.artifacts import SCHEMA
from secateur.runs.rows import Row


def source(rows, name="mine", **more):
    environment = {"torch": "2"} | more.pop("environment", {})
    return Source(name, rows, more.pop("figures", []), more.pop("config", "model: digits-cnn\n"), environment)


def written(folder, rows, figures=()):
    folder.mkdir(parents=True)
    for name, objects in (("results.jsonl", [row.to_json() for row in rows]), ("figures.jsonl", figures)):
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in objects))
    (folder / "run.json").write_text(json.dumps({"schema": 1, "kind": "audit", "secateur": "0.1.0"}))
    return folder


def without_seed(labels):
    return {name: value for name, value in labels.items() if name != "seed"}


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
    assert page.count("<tr") == 1 + 9 + 1 + 18 + 1 + 9 + 1 + 9


def judged(rows, limits, name="mine"):
    one = source(rows, name, config=f"limits: {limits}")
    return render([one], check_limits([one]))


def test_the_answer_to_the_limits_comes_first():
    rows = know_defense(audit_rows())
    assert '<p class="badge">WITHIN THE LIMITS, against these attackers</p>' in judged(rows, "{auc: 0.9}")
    assert '<p class="badge">INCONCLUSIVE</p>' in judged(rows, "{auc: 0.74}")
    failed = judged(rows, "{auc: 0.57}")
    lines = re.findall(r"<li>(.*?): above the limit: ", failed)
    assert len(lines) == len(set(lines)) == 6  # one line a model, whatever the number of attacks
    assert failed.index("FAIL: above a limit") < failed.index("limit 0.57") < failed.index("leaks most")


def test_the_first_screen_has_the_magnitude_the_numbers_and_the_checks():
    labels = labels_of("snip", 0.5, "ppb", seed=0)
    numbers = {"auc": (0.8, 0.75, 0.85), "tpr_at_fpr_0.01": (0.234, 0.2, 0.27), "tpr_at_fpr_0.001": (0.05, 0.04, 0.06)}
    rows = [
        Row(**labels, attack="lira", metric=name, value=value, low=low, high=high)
        for name, (value, low, high) in numbers.items()
    ]
    checks = {"duplicates": (0.0, "3 of 9 non-members are members too"), "labels": (1.0, "all classes have members")}
    rows += [
        Row(**(labels | {"extra": {"check": name}}), attack=None, metric="valid", value=holds, note=sentence)
        for name, (holds, sentence) in checks.items()
    ]
    page = render([source(rows)])
    assert '<p class="badge">LEAKS STRONGLY</p>\n<p class="magnitude">Of 1,000 members an attacker names 234,' in page
    shown = re.findall(r"<dt>(.*?)</dt><dd><strong>(.*?)</strong><small>[^<]+</small> <small>(.*?)</small>", page)
    assert shown == [
        ("AUC", "0.800 [0.750, 0.850]", "lira on snip 0.5, ppb"),
        ("TPR at 1 % FPR", "23.4 % [20.0, 27.0]", "lira on snip 0.5, ppb"),
        ("TPR at 0.1 % FPR", "5.0 % [4.0, 6.0]", "lira on snip 0.5, ppb"),
    ]
    assert "<details open><summary>Validity of this audit: 1 of 2 checks hold</summary>" in page
    assert "<strong>Does not hold:</strong> 3 of 9 non-members are members too" in page


def test_the_most_exposed_records_are_those_of_the_strongest_attack_on_pruned_models():
    rows = audit_rows()
    records = [{"id": 41, "label": 7, "score": 3.5, "fpr": 0.0}, {"id": 6, "label": 2, "score": 3.0, "fpr": 0.015}]
    names = ("model", "dataset", "pruner", "sparsity", "defense", "adaptive", "attack", "seed")
    figures = [
        {name: getattr(row, name) for name in names} | {"kind": "exposed", "records": records}
        for row in rows
        if row.metric == "auc"
    ]
    page = render([source(rows, figures=figures)])
    section = page.split("<h2>Most exposed records</h2>")[1].split("</section>")[0]
    titles = re.findall(r"<summary>(.*?)</summary>", section)
    assert len(titles) == 8 and all(title.endswith("under samia") for title in titles)
    assert [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr><td.*?</tr>", section)][:2] == [
        ["41", "7", "0.0 %"],
        ["6", "2", "1.5 %"],
    ]
    assert "3.5" not in section  # scores stay in records.csv
    grouped = [figure | {"records": [records[0] | {"group": "ward 3"}]} for figure in figures]
    assert ">ward 3</td>" in render([source(rows, figures=grouped)])
    assert "Most exposed records" not in render([source(rows)])
    both = render([source(rows, name, figures=figures) for name in "ab"])
    titles = re.findall(r"<summary>(.*?) under samia</summary>", both)
    assert len(titles) == len(set(titles)) == 16  # the run is part of the name


def test_the_most_exposed_records_are_those_of_the_strongest_attacker():
    labels = labels_of("snip", 0.5, "ppb", attack="samia", seed=0)
    strong = labels | {"adaptive": True}
    rows = [*attack_rows(without_seed(labels), 0, 0.55), *attack_rows(without_seed(strong), 0, 0.7)]
    figures = [
        flat | {"kind": "exposed", "records": [{"id": row, "label": 0, "score": 1.0, "fpr": 0.0}]}
        for row, flat in ((41, labels), (97, strong))
    ]
    section = render([source(rows, figures=figures)]).split("<h2>Most exposed records</h2>")[1].split("</section>")[0]
    assert ">97<" in section and ">41<" not in section


def test_the_runs_own_limits_decide():
    assert outcome(check_limits([source(audit_rows(), config="limits: {auc: 0.9}")])) is Outcome.INCONCLUSIVE
    rows = know_defense(audit_rows())
    assert check_limits([source(rows)]) is None
    assert check_limits([source(rows, config="limits: {auc: null}")]) is None
    assert outcome(check_limits([source(rows, config="limits: {auc: 0.9}")])) is Outcome.WITHIN
    checks = check_limits([source(rows, config="limits: {auc: 0.57}")])
    # Eight pruned models; the first two leak .575 and .595 at most, and .57 lies inside their intervals.
    assert [check.outcome for check in checks] == [Outcome.INCONCLUSIVE] * 2 + [Outcome.ABOVE] * 6
    both = check_limits([source(rows, config="limits: {auc: 0.9}"), source(rows, "b", config="limits: {auc: 0.682}")])
    assert [check.sentence for check in both if check.outcome is Outcome.ABOVE] == [
        "b: l1-structured 0.9, ppb: auc 0.715 [0.685, 0.745] under samia is above the limit 0.682"
    ]


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


@pytest.mark.parametrize("seeds", [2, 3])
def test_the_page_says_what_its_brackets_cover(seeds):
    rows = [
        row
        for seed in range(seeds)
        for row in attack_rows(labels_of("snip", 0.5, "ppb") | {"attack": "lira", "adaptive": False}, seed, 0.6)
    ]
    assert f"In brackets 95 % intervals over {seeds} trainings and their" in render([source(rows)])
