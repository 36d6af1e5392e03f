"""Rows become lines: seeds gathered, attacks beside their models, the front by hand."""

from dataclasses import replace

from audited import attack_rows, audit_rows, labels_of, model_rows
from hypothesis import given
from hypothesis import strategies as st

from secateur.report.summary import (
    SummaryCell,
    SummaryLine,
    find_original,
    group_by_setting,
    name_model,
    select_attacks,
    select_front,
    select_models,
    select_rows,
    select_strongest,
    summarise,
)
from secateur.runs.rows import Row


def point(accuracy, auc, pruner="l1-unstructured"):
    cells = {"test_accuracy": SummaryCell(accuracy, None, None), "auc": SummaryCell(auc, None, None)}
    return SummaryLine(labels_of(pruner, 0.5, "basic", attack="conf"), cells)


def test_one_seed_keeps_its_interval_and_several_give_one_over_trainings_and_rows():
    labels = labels_of("snip", 0.5, "basic", attack="conf")
    one = summarise(attack_rows(labels, 0, 0.6))
    assert (one[0].cells["auc"].low, one[0].cells["auc"].high) == (0.57, 0.63)
    three = summarise(row for seed, auc in enumerate((0.5, 0.6, 0.7)) for row in attack_rows(labels, seed, auc))
    assert len(three) == 1 and {row.seed for row in three[0].rows} == {0, 1, 2}
    cell = three[0].cells["auc"]
    radius = 4.302653 * 0.1 / 3**0.5  # Student's with two degrees of freedom, the deviation of the values is 0.1
    assert [round(end, 6) for end in (cell.value, cell.low, cell.high)] == [
        0.6,
        *(round(0.6 + x, 6) for x in (-radius, radius)),
    ]
    two = summarise(row for seed, auc in enumerate((0.5, 0.7)) for row in attack_rows(labels, seed, auc))
    assert (two[0].cells["auc"].low, two[0].cells["auc"].high) == (0.0, 1.0)  # .6 +- 12.7 * .1, and a share


def test_a_measure_without_intervals_has_students_over_the_seeds_and_no_seed_is_an_end():
    labels = labels_of("snip", 0.5, "basic")

    def ends(metric, *values):
        rows = [Row(**labels, attack=None, seed=i, metric=metric, value=x) for i, x in enumerate(values)]
        cell = summarise(rows)[0].cells[metric]
        return round(cell.low, 3), round(cell.high, 3)

    assert ends("bytes_masked", 100.0, 100.0) == (100.0, 100.0)
    assert ends("seconds_masked", 0.2, 0.4, 0.6) == (0.0, 0.897)  # a time is above 0, and may be above 1
    assert ends("advantage", 0.02, 0.04) == (-0.097, 0.157)
    assert ends("test_accuracy", 0.9, 0.98) == (0.432, 1.0)


def test_an_attack_stands_beside_its_model_whatever_the_attacker_knew():
    labels = labels_of("snip", 0.5, "ppb")
    knowing = labels | {"attack": "samia", "adaptive": True, "extra": {"protocol": "select"}}
    found = select_attacks(summarise([*model_rows(labels, 0, 0.9), *attack_rows(knowing, 0, 0.6)]))
    assert [line.value("test_accuracy") for line in found] == [0.9]


def test_the_strongest_attack_is_one_a_model_over_adaptive_and_not():
    labels = labels_of("snip", 0.5, "ppb")
    rows = [*attack_rows(labels | {"attack": "conf"}, 0, 0.6)]
    rows += attack_rows(labels | {"attack": "samia", "adaptive": True}, 0, 0.7)
    assert [line.labels["attack"] for line in select_strongest(summarise(rows))] == ["samia"]
    assert len(select_strongest(summarise(audit_rows()))) == 9


def test_an_attack_without_a_value_is_missing_and_not_0():
    labels = labels_of("snip", 0.5, "ppb")
    rows = [Row(**labels, seed=0, attack="none", metric="advantage", value=None, note="could not run")]
    assert select_strongest(summarise(rows), "advantage") == []
    rows += [Row(**labels, seed=0, attack=name, metric="advantage", value=x) for name, x in (("a", -0.2), ("b", -0.1))]
    for ordered in (rows, rows[::-1]):
        (line,) = select_strongest(summarise(ordered), "advantage")
        assert (line.labels["attack"], line.value("advantage")) == ("b", -0.1)
    assert line.value("auc") is None and line.rank("auc") < -1e9


def test_rows_are_selected_by_metric_and_labels():
    rows = [
        *attack_rows(labels_of("snip", 0.5, "ppb", attack="conf"), 0, 0.6),
        *model_rows(labels_of("snip", 0.5, "ppb"), 0, 0.9),
    ]
    assert [row.metric for row in select_rows(rows, "auc", "test_accuracy")] == ["auc", "test_accuracy"]
    assert {row.attack for row in select_rows(rows, attack=None)} == {None} and select_rows(rows, round=3) == []
    assert select_rows([replace(rows[0], value=None)]) == [] and len(select_rows(rows, round=None)) == len(rows)


def test_the_front_by_hand():
    a, b, c, d = point(0.9, 0.6), point(0.8, 0.55), point(0.85, 0.62), point(0.8, 0.57)
    assert select_front([a, b, c, d], "test_accuracy", "auc") == [b, a]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_every_line_is_on_the_front_or_beaten_by_one_that_is(pairs):
    found = [point(accuracy / 10, auc / 10) for accuracy, auc in pairs]
    edge = select_front(found, "test_accuracy", "auc")
    values = [(line.value("test_accuracy"), line.value("auc")) for line in edge]
    assert values == sorted(set(values)) and [y for _, y in values] == sorted({y for _, y in values})
    for line in found:
        assert any(x >= line.value("test_accuracy") and y <= line.value("auc") for x, y in values)


def test_a_pruned_model_came_from_its_pruners_own_original():
    common, own = labels_of("none", 0.0, "basic"), labels_of("none", 0.0, "basic", original="slimming")
    assert find_original(labels_of("slimming", 0.5, "ppb"), [common, own]) is own
    assert find_original(labels_of("snip", 0.5, "ppb"), [own, common]) is common
    assert find_original(labels_of("snip", 0.5, "ppb", run="other"), [own, common]) is None


def test_titles():
    assert name_model(labels_of("none", 0.0, "basic")) == "original"
    assert name_model(labels_of("none", 0.0, "dp-sgd-scratch", original="slimming")) == (
        "original (slimming), dp-sgd-scratch"
    )
    assert name_model(labels_of("snip", 0.90, "ppb")) == "snip 0.9, ppb"


def test_different_data_are_never_compared():
    other = {"dataset": "breast_cancer"}
    rows = [*audit_rows(), *model_rows(labels_of("none", 0.0, "basic") | other, 0, 0.9)]
    groups = group_by_setting(select_models(summarise(rows)))
    assert [len(group) for group in groups] == [9, 1]
