"""The verdict's sentences, from hand-made rows."""

from audited import attack_rows, labels_of, model_rows

from secateur.report.summary import SummaryCell, summarise
from secateur.report.table import format_measure, name_measure, order_measures
from secateur.report.verdict import write_verdict


def table(*models):
    """Models given by pruner, defense, accuracy and AUC."""
    rows = []
    for pruner, defense, accuracy, auc in models:
        labels = labels_of(pruner, 0.5 if pruner != "none" else 0.0, defense)
        rows += [*model_rows(labels, 0, accuracy), *attack_rows(labels | {"attack": "conf"}, 0, auc)]
    return summarise(rows)


def test_the_sentences_say_most_least_and_the_best_that_stays_accurate():
    pruned = [("snip", "basic", 0.89, 0.70), ("snip", "ppb", 0.885, 0.65), ("snip", "adv", 0.7, 0.55)]
    found = table(("none", "basic", 0.90, 0.60), *pruned)
    assert write_verdict(found) == [
        "Before pruning, the strongest attack on the original reaches AUC 0.600 [0.570, 0.630] under conf, "
        "at a test accuracy of 90.0% [88.0, 92.0].",
        "snip 0.5 (basic) leaks most: AUC 0.700 [0.670, 0.730] under conf, at a test accuracy of 89.0% [87.0, 91.0].",
        "snip 0.5 (adv) leaks least: AUC 0.550 [0.520, 0.580] under conf, at a test accuracy of 70.0% [68.0, 72.0].",
        "Among those that lose at most 2 points of the original's accuracy, snip 0.5 (ppb) leaks least: "
        "AUC 0.650 [0.620, 0.680] under conf, at a test accuracy of 88.5% [86.5, 90.5].",
    ]


def test_without_attacks_it_says_so():
    found = summarise(model_rows(labels_of("snip", 0.5, "ppb"), 0, 0.9))
    assert write_verdict(found) == ["No attack was run: the leakage of these models is unknown."]


def test_an_attack_that_could_not_run_does_not_count():
    labels = labels_of("snip", 0.5, "ppb", attack="samia")
    rows = [row for row in attack_rows(labels, 0, 0.6) if row.metric != "auc"]
    assert write_verdict(summarise(rows)) == ["No attack was run: the leakage of these models is unknown."]


def test_numbers_as_a_person_reads_them():
    assert format_measure(SummaryCell(0.975, 0.955, 0.987), "test_accuracy") == "97.5% [95.5, 98.7]"
    assert format_measure(SummaryCell(7.36, 7.36, 7.36, "one target: no interval"), "psnr") == "7.4 dB"
    assert format_measure(SummaryCell(0.6123, 0.6, 0.62), "auc", interval=False) == "0.612"
    few = "not supported by the sample: 30 non-members, at least 100 needed"
    assert format_measure(SummaryCell(0.0, 0.0, 0.94, few), "tpr_at_fpr_0.01") == "-"
    assert format_measure(SummaryCell(25978, None, None), "bytes_masked") == "25,978"
    assert format_measure(SummaryCell(33646666, None, None), "parameters_masked") == "33.65 M"
    assert format_measure(SummaryCell(0.0012, None, None), "seconds_masked") == "1.20 ms"
    assert format_measure(None, "auc") == format_measure(SummaryCell(None, None, None), "auc") == "-"
    assert name_measure("tpr_at_fpr_0.01") == "TPR at 1 % FPR" and name_measure("own_measure") == "own measure"
    assert order_measures(["own", "epsilon", "test_accuracy"], ["test_accuracy", "epsilon"]) == [
        "test_accuracy",
        "epsilon",
        "own",
    ]
