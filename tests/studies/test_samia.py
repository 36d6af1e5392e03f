"""A study's table follows from its rows by hand; one tiny study runs from the command line to its table."""

import json
import math
from dataclasses import replace
from operator import sub

import pytest

from secateur import catalogue
from secateur.cli import main
from secateur.metrics.estimates import combine, correlation, mean_of
from secateur.metrics.membership import Estimate
from secateur.runs.archive import Archive
from secateur.runs.rows import Row
from secateur.studies.results import AuditResults, VictimKey
from secateur.studies.samia import AuditStep
from secateur.studies.samia.attacks import (
    compare_attacks,
    face_adaptive,
    face_plain,
    gaps,
    marks,
    risk_by_accuracy,
    risk_by_sparsity,
    vary_pruning,
    vary_sparsity,
)
from secateur.studies.samia.behaviour import by_class, by_class_defended, histograms, histograms_defended, utility
from secateur.studies.study import read_scales
from secateur.studies.table import StudyTable, TableLine, equals, format_estimate, judge, sparkline, verdict

ORIGINAL = ("none", 0.0, "basic")
NARROW = 0.001


def row(model, metric, value, attack=None, seed=0, setting=("digits-cnn", "digits"), **extra):
    pruner, sparsity, defense = model
    return Row(
        model=setting[0],
        dataset=setting[1],
        pruner=pruner,
        sparsity=sparsity,
        defense=defense,
        attack=attack,
        seed=seed,
        metric=metric,
        value=value,
        low=value - NARROW,
        high=value + NARROW,
        extra=extra,
    )


def attacked(model, test, conf, samia, **extra):
    """A model's prediction accuracy, and two attacks' accuracy and AUC (five points more)."""
    rows = [row(model, "test_accuracy", test, **extra)]
    for attack, value in (("conf", conf), ("samia:epochs=5", samia)):
        rows += [
            row(model, "attack_accuracy", value, attack, **extra),
            row(model, "auc", value + 0.05, attack, **extra),
        ]
    return rows


def pruned(pruner, sparsity, defense="basic"):
    return (pruner, sparsity, defense)


def said(findings, *words):
    (found,) = [finding for finding in findings if all(word in finding.claim for word in words)]
    return found.verdict


def said_of(findings, *words):
    (found,) = [finding for finding in findings if all(word in finding.claim for word in words)]
    return found.measured


# Numbers -------------------------------------------------------------------------------------------------------
def test_several_seeds_are_compared_seed_by_seed():
    one, two = ({s: Estimate(v, v, v) for s, v in enumerate(values)} for values in ((0.9, 0.7, 0.5), (0.8, 0.5, 0.2)))
    found = combine(sub, one, two)  # differences .1 .2 .3: mean .2, deviation .1, t(2) = 4.3027
    assert found.value == pytest.approx(0.2)
    assert found.high - found.value == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert combine(sub, one, {7: Estimate(0, 0, 0)}) is None


def test_one_seed_adds_the_squares_of_the_intervals():
    found = combine(sub, {0: Estimate(0.8, 0.77, 0.84)}, {0: Estimate(0.7, 0.66, 0.73)})
    assert found[:3] == pytest.approx((0.1, 0.1 - math.hypot(0.03, 0.03), 0.1 + math.hypot(0.04, 0.04)))


def test_one_value_has_no_interval():
    assert mean_of([0.3]) == (0.3, -math.inf, math.inf, None)
    assert format_estimate(mean_of([0.3])) == "30.0%"


def test_correlation_by_hand():
    pairs = [(1.0, 2.0), (2.0, 4.0), (3.0, 5.0), (4.0, 4.0), (5.0, 5.0)]  # r = 6 / sqrt(10 * 6)
    found = correlation(pairs)
    assert found.value == pytest.approx(6 / math.sqrt(60))
    assert found.low == pytest.approx(math.tanh(math.atanh(6 / math.sqrt(60)) - 1.959964 / math.sqrt(2)))
    assert correlation([(1.0, 1.0), (1.0, 2.0)]) is None
    assert correlation([(1.0, 1.0), (2.0, 2.0)])[1:3] == (-1.0, 1.0)


# Verdicts ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("above", "against", "cases", "need", "expected"),
    [
        (3, 0, 5, "most", "supported"),
        (2, 1, 4, "most", "undecided"),
        (2, 2, 4, "most", "not supported"),
        (4, 0, 4, "every", "supported"),
        (3, 1, 4, "every", "not supported"),
        (3, 0, 4, "every", "undecided"),
        (2, 2, 4, "some", "supported"),
        (1, 3, 4, "some", "undecided"),
        (0, 4, 4, "some", "not supported"),
        (0, 3, 4, "some", "undecided"),
        (0, 0, 0, "every", "undecided"),
    ],
)
def test_verdicts_follow_from_the_cases(above, against, cases, need, expected):
    assert verdict(above, against, cases, need) == expected


def test_a_claim_is_held_against_the_whole_interval():
    cases = {"a": Estimate(0.03, 0.01, 0.05), "b": Estimate(0.01, -0.01, 0.03), "c": Estimate(-0.04, -0.06, -0.02)}
    found = judge("up", cases)
    assert found.verdict == "undecided"
    assert found.measured == "1 of 3, 1 against, 1 undecided; mean +0.0 points"
    assert judge("up", {"a": cases["a"], "none": None}).measured == "a: +3.0 points [+1.0, +5.0]"
    assert judge("up", {}).measured == "not measured here"
    assert equals("number", Estimate(0.05, 0.04, 0.06), 0.0477).verdict == "supported"
    assert equals("number", Estimate(0.05, 0.04, 0.06), 0.2683).verdict == "not supported"
    assert equals("number", mean_of([0.05]), 0.05).verdict == "undecided"


# Tables --------------------------------------------------------------------------------------------------------
def test_the_papers_pairing_can_say_more_than_the_same_attack_on_both():
    rows = attacked(ORIGINAL, 0.9, conf=0.60, samia=0.70)
    rows += attacked(pruned("l1-unstructured", 0.5), 0.9, conf=0.60, samia=0.65)
    rows += attacked(pruned("l1-structured", 0.5), 0.9, conf=0.55, samia=0.62)
    lines, findings = risk_by_sparsity(AuditResults(rows))
    assert said(findings, "as the paper pairs them") == "supported"  # .65 and .62 against .60
    assert said(findings, "SAMIA on both)") == "not supported"  # against .70
    assert said_of(findings, "as the paper pairs them").endswith("; by the paper's pairing only")
    assert [line.labels["model"] for line in lines] == ["original", "l1-unstructured 0.5", "l1-structured 0.5"]
    assert lines[1].cells["change, SAMIA from Conf on the original"].value == pytest.approx(0.05)
    assert lines[1].cells["change, samia on both"].value == pytest.approx(-0.05)
    _, findings = risk_by_accuracy(AuditResults(rows))
    assert said(findings, "L1 unstructured and slimming leak more") == "supported"
    assert said(findings, "L1 structured leaks least") == "supported"
    assert said(findings, "predict worse", "SAMIA on both)") == "undecided"  # no model predicts worse


def test_slimming_is_compared_with_its_own_original():
    own = {"original": "slimming"}
    rows = attacked(ORIGINAL, 0.9, 0.5, 0.5) + attacked(ORIGINAL, 0.8, 0.7, 0.7, **own)
    rows += attacked(pruned("slimming", 0.5), 0.8, 0.6, 0.6, **own)
    lines, _ = risk_by_sparsity(AuditResults(rows))
    assert lines[-1].cells["change, samia on both"].value == pytest.approx(-0.1)


def test_what_the_authors_code_gave_stands_beside():
    setting = {"setting": ("mlp", "location")}
    place = pruned("l1-unstructured", 0.7)
    rows = attacked(ORIGINAL, 0.5, 0.8, 0.8, **setting) + attacked(place, 0.5, 0.81, 0.85, **setting)
    lines, findings = compare_attacks(AuditResults(rows))
    told = {(line.labels["model"], line.labels["attack"]): line.paper for line in lines}
    assert told["l1-unstructured 0.7", "samia"] == "authors' code: samia 0.842 (attack accuracy)"
    assert told["original", "samia"] == ""
    assert said(findings, "highest attack accuracy") == "supported"


def test_a_study_with_other_attacks_leaves_open_what_it_did_not_measure():
    rows = [r for r in attacked(pruned("l1-unstructured", 0.5), 0.9, 0.6, 0.6) if r.attack != "conf"]
    for tabulate in (compare_attacks, risk_by_accuracy, risk_by_sparsity, gaps, face_plain, face_adaptive):
        _, findings = tabulate(AuditResults(rows))
        assert "not measured here" in {finding.measured for finding in findings}


def test_prediction_accuracy_by_sparsity():
    values = {0.5: (0.93, 0.88), 0.6: (0.91, 0.88), 0.9: (0.80, 0.60)}
    rows = [row(ORIGINAL, "test_accuracy", 0.9)]
    for sparsity, (loose, strict) in values.items():
        rows.append(row(pruned("l1-unstructured", sparsity), "test_accuracy", loose))
        rows.append(row(pruned("l1-structured", sparsity), "test_accuracy", strict))
    _, findings = utility(AuditResults(rows))
    assert said(findings, "falls") == said(findings, "unstructured pruning") == "supported"
    assert said(findings, "more accurate than the original") == "supported"  # two of six
    assert said(findings, "close to the original") == "undecided"  # +1 point, and -2 with its interval


def test_gaps_and_their_correlation():
    rows = []
    for number, model in enumerate([ORIGINAL, *(pruned("l1-unstructured", s) for s in (0.5, 0.6, 0.7, 0.8))]):
        rows += attacked(model, 0.9, 0.6, 0.6 + 0.02 * number)
        rows.append(row(model, "confidence_gap", 0.1 + 0.01 * number))
        rows.append(row(model, "sensitivity_gap_size", 0.2 - 0.01 * number))
        rows.append(row(model, "sensitivity_gap", -0.2 + 0.01 * number))
        rows.append(row(model, "generalisation_gap", 0.1))
    _, findings = gaps(AuditResults(rows))
    assert said(findings, "confidence gap", "attack accuracy are strongly") == "supported"
    assert said(findings, "sensitivity gap", "attack accuracy are strongly") == "not supported"
    assert said(findings, "generalisation gap", "attack accuracy are strongly") == "undecided"  # it does not vary
    assert said(findings, "increases the confidence gap") == "supported"
    assert said(findings, "matters most") == "undecided"  # one seed
    assert "r over the models of one seed: 1.000" in said_of(findings, "confidence gap", "accuracy are strongly")


def test_a_correlation_is_one_of_models_within_a_seed():
    """r is .8 and 1 by hand: 1, 2, 3, 4 against 1, 2, 4, 3 and 1, 2, 3, 4; another level of a seed changes nothing."""
    rows = []
    models = [ORIGINAL, *(pruned("l1-unstructured", s) for s in (0.5, 0.6, 0.7))]
    for seed, order in enumerate([(1, 2, 4, 3), (1, 2, 3, 4), (1, 2, 4, 3)]):
        for number, model in enumerate(models):
            rows += attacked(model, 0.9, 0.6, 0.3 + 0.2 * seed + 0.01 * order[number], seed=seed)
            rows.append(row(model, "confidence_gap", 0.1 + 0.01 * number, seed=seed))
            rows.append(row(model, "generalisation_gap", 0.1 - 0.01 * number, seed=seed))
    _, findings = gaps(AuditResults(rows))
    centre = math.tanh((2 * math.atanh(0.8) + math.atanh(1 - 1e-12)) / 3)
    measured = said_of(findings, "confidence gap", "accuracy are strongly")
    assert measured.startswith(f"r over models within a seed: {centre:.3f} [")
    assert said(findings, "matters most") == "supported"  # the other gap goes the other way; sensitivity has no rows


def test_experiments_of_a_seed_count_once():
    """Losses .05 and .15 of seed 0 and .2 of seed 1: their mean is .15 by seed, [.15 - 12.706 * .05, ...]."""
    rows = []
    for seed, number, guessed in ((0, 0, 0.76), (0, 1, 0.68), (1, 0, 0.64)):
        for shadows, value in (("l1-structured", 0.8), ("slimming", guessed)):
            extra = {"experiment": number, "attacker_pruner": shadows, "attacker_sparsity": 0.5}
            target = pruned("l1-structured", 0.5)
            rows.append(
                row(target, "attack_accuracy", value, "samia", seed, setting=("resnet18-w16", "cifar10"), **extra)
            )
    lines, findings = vary_pruning(AuditResults(rows))
    assert lines[-1].cells["loss"][:3] == pytest.approx((0.15, 0.15 - 12.7062 * 0.05, 0.15 + 12.7062 * 0.05), rel=1e-4)
    assert said_of(findings, "the paper's").endswith(
        "against the paper's 4.77% (resnet18-pool), 1 or 2 experiments a seed"
    )


def test_a_matrix_of_sparsities():
    shadows = {0.0: "none", 0.5: "l1-unstructured"}
    rows = []
    for target, shadow, value in ((0.0, 0.0, 0.8), (0.0, 0.5, 0.6), (0.5, 0.0, 0.82), (0.5, 0.5, 0.8)):
        guess = {"attacker_pruner": shadows[shadow], "attacker_sparsity": shadow}
        rows.append(row((shadows[target], target, "basic"), "attack_accuracy", value, "samia", **guess))
    lines, findings = vary_sparsity(AuditResults(rows))
    cells = [[line.cells[f"shadows {s:g}, attack_accuracy"].value for s in (0, 0.5)] for line in lines]
    assert cells == [[0.8, 0.6], [0.82, 0.8]]
    assert said(findings, "not affected too much") == "not supported"  # one of two loses a quarter
    assert said(findings, "even raises it") == "supported"


def test_the_loss_of_unknown_pruning():
    setting = ("resnet18-pool", "cifar10")
    rows = []
    for number, (known, guessed) in enumerate([(0.80, 0.76), (0.90, 0.81), (0.70, None)]):
        target = pruned("l1-structured", 0.5)
        own = {"experiment": number, "attacker_pruner": "l1-structured", "attacker_sparsity": 0.5}
        other = own if guessed is None else own | {"attacker_pruner": "slimming", "attacker_sparsity": 0.8}
        for extra, value in ((own, known), (other, known if guessed is None else guessed)):
            rows.append(row(target, "attack_accuracy", value, "samia", setting=setting, **extra))
    lines, findings = vary_pruning(AuditResults(rows))
    assert [line.cells["loss"].value for line in lines] == pytest.approx([0.05, 0.10, 0.0, 0.05])
    assert lines[-1].paper == "4.77%" and lines[1].labels["shadows"] == "slimming 0.8"
    assert said(findings, "the paper's") == said(findings, "still effective") == "supported"


def points():
    rows = attacked(ORIGINAL, 0.9, 0.6, 0.7)
    for defense, test, samia in (
        ("basic", 0.80, 0.70),
        ("ppb:strength=4", 0.78, 0.52),
        ("ppb:strength=16", 0.50, 0.50),  # below 75 % of Basic's accuracy: 0.60
        ("adv:alpha=1", 0.75, 0.75),  # above Basic's attack accuracy
        ("dp-sgd:noise_multiplier=1", 0.20, 0.50),
    ):
        rows += attacked(pruned("l1-unstructured", 0.6, defense), test, samia, samia)
    return AuditResults(rows)


def test_points_that_the_paper_left_out_are_shown_and_marked():
    lines, findings = face_plain(points())
    left_out = {line.labels["model"].split()[-1]: line.mark for line in lines if line.mark}
    assert left_out == {
        "ppb:strength=16": "left out by the paper: below 75 % of Basic's accuracy",
        "adv:alpha=1": "left out by the paper: above Basic's attack accuracy",
        "dp-sgd:noise_multiplier=1": "left out by the paper: below 75 % of Basic's accuracy",
    }
    assert len(lines) == 6
    assert said(findings, "around 50 %") == "supported"  # .52 at strength 4
    assert said(findings, "ranking") == "not supported"  # AUC .57
    assert said(findings, "little prediction accuracy") == "supported"
    assert said(findings, "ADV lowers") == "not supported"  # judged by .75, though the paper leaves it out
    assert said(findings, "lower than DP") == "supported"  # no useful DP point: its owner stays with Basic
    assert said(findings, "PPB brings it lower than ADV") == "undecided"  # no structured pruner here
    assert said(findings, "better trade-off") == "supported"  # .78 - .52 against .75 - .75 and Basic's .80 - .70


def test_defenses_against_adaptive_attacks():
    _, findings = face_adaptive(points())
    assert said(findings, "attack accuracy of adaptive") == "supported"
    assert said(findings, "PPB is one of the best two") == "supported"
    assert said(findings, "ADV is one of the best two") == "not supported"
    assert said(findings, "PPB lowers the AUC of the strongest") == "supported"  # SAMIA alone: from .75 to .57
    assert said(findings, "DP lowers the AUC of the strongest") == "undecided"  # no useful DP point to ask
    rows = [*points().rows, row(pruned("l1-unstructured", 0.6, "ppb:strength=4"), "auc", 0.9, "lira")]
    _, findings = face_adaptive(AuditResults(rows))
    assert said(findings, "PPB lowers the AUC of the strongest") == "not supported"  # LiRA finds more than SAMIA did
    assert marks(points(), VictimKey("l1-unstructured", 0.6, "basic", None)) == []


def test_the_strongest_attacker_is_asked_the_claims_of_those_who_do_not_know():
    """LiRA has .68 on PPB 4, where SAMIA has .52; on Basic SAMIA stays the best with .70."""
    lira = row(pruned("l1-unstructured", 0.6, "ppb:strength=4"), "attack_accuracy", 0.68, "lira")
    results = AuditResults([*points().rows, lira, row(pruned("l1-unstructured", 0.6), "attack_accuracy", 0.6, "lira")])
    _, findings = catalogue.find("study", "samia-fig19").make().tabulate(results)
    asked = {finding.key: finding for finding in findings if finding.key.endswith(".strongest")}
    assert asked["non_adaptive.near.strongest"].measured.startswith("l1-unstructured: -15.0 points")  # .53 - .68
    assert asked["adaptive.lowers.strongest"].measured.startswith("l1-unstructured: +2.0 points")
    assert {finding.claim.startswith("ours, ") for finding in asked.values()} == {True}
    assert not any(finding.key.startswith("non_adaptive") for finding in findings if finding not in asked.values())
    undefended = AuditResults(attacked(pruned("l1-unstructured", 0.5), 0.9, 0.6, 0.6))
    assert undefended.under_strongest() is None


def test_an_attack_of_one_seed_does_not_stand_for_one_of_several():
    model = pruned("l1-unstructured", 0.6, "ppb:strength=4")
    rows = [row(model, "auc", value, "samia", seed) for seed, value in enumerate((0.6, 0.7, 0.8))]
    strongest = AuditResults([*rows, row(model, "auc", 0.9, "lira", 0)]).under_strongest()
    found = strongest.of(VictimKey(*model, None), "auc", "samia")
    assert [estimate.value for estimate in found.values()] == [0.6, 0.7, 0.8]


def test_an_archive_keeps_all_attackers_that_it_names():
    rows = [
        replace(row, adaptive=row.attack and True)
        for row in [*points().rows, row(pruned("l1-unstructured", 0.6), "auc", 0.9, "mentr")]
    ]
    stranger = replace(rows[-1], attack="rmia", adaptive=False)  # one who does not know is of another study
    for name, attacks in (
        ("samia-fig19", ["conf", "samia", "mentr"]),
        ("samia-fig10", ["conf", "samia", "mentr", "rmia"]),
    ):
        study = catalogue.find("study", name).make()
        (results,) = study.gather(study, Archive({}, [*rows, stranger], [])).values()
        assert results.attacks == attacks


def test_samia_is_compared_with_the_papers_attacks():
    rows = attacked(pruned("l1-unstructured", 0.5), 0.9, conf=0.6, samia=0.7)
    rows.append(row(pruned("l1-unstructured", 0.5), "attack_accuracy", 0.9, "rmia"))
    assert said(compare_attacks(AuditResults(rows))[1], "highest attack accuracy") == "supported"


def drawn(model, members, others, seed=0):
    """Figures of one quantity's class means and histogram, the same for both quantities."""
    pruner, sparsity, defense = model
    labels = {"pruner": pruner, "sparsity": sparsity, "defense": defense, "seed": seed}
    for quantity in ("confidence", "sensitivity"):
        yield labels | {"kind": "classes", "quantity": quantity, "members": members, "nonmembers": others}
        means = {"member_mean": members[0], "nonmember_mean": others[0]}
        yield labels | {"kind": "histogram", "quantity": quantity, "members": [0, 1], "nonmembers": [1, 0]} | means


def portraits(*models):
    """Rows and figures of models with so large a gap in class 0 and class 1, over three seeds."""
    rows, figures = [], []
    for seed in range(3):
        for model, (first, second) in models:
            wobble = 0.001 * seed
            rows.append(row(model, "confidence_gap", first + wobble, seed=seed))
            rows.append(row(model, "sensitivity_gap_size", first + wobble, seed=seed))
            rows.append(row(model, "sensitivity_gap", first + wobble, seed=seed))
            figures += drawn(model, [0.9, 0.9], [0.9 - first, 0.9 - second - wobble], seed)
    return AuditResults(rows, figures)


def test_gaps_before_and_after_pruning():
    found = portraits((ORIGINAL, (0.1, 0.2)), (pruned("l1-unstructured", 0.7), (0.2, 0.3)))
    lines, findings = histograms(found)
    assert {finding.verdict for finding in findings} == {"supported"}
    assert lines[0].cells["members, histogram"] == "▁█"
    lines, findings = by_class(found)
    assert [line.labels["class"] for line in lines] == ["0", "1", "0", "1"]
    assert lines[0].cells["l1-unstructured 0.7, divergence"].value == pytest.approx(0.2)
    assert {finding.verdict for finding in findings} == {"supported"}


def test_classes_count_within_a_seed_and_seeds_between():
    """Means over two classes change by .10, .20 and .03 on three seeds: .11, and t(2) = 4.3027."""
    figures = []
    for seed, (first, second) in enumerate([(0.05, 0.15), (0.15, 0.25), (0.02, 0.04)]):
        figures += drawn(ORIGINAL, [0.9, 0.9], [0.8, 0.8], seed)
        figures += drawn(pruned("l1-unstructured", 0.7), [0.9, 0.9], [0.8 - first, 0.8 - second], seed)
    rows = [row(model, "confidence_gap", 0.1) for model in (ORIGINAL, pruned("l1-unstructured", 0.7))]
    _, findings = by_class(AuditResults(rows, figures))
    radius = 4.30265 * math.sqrt((0.01**2 + 0.09**2 + 0.08**2) / 2 / 3)
    wide = format_estimate(Estimate(0.11, 0.11 - radius, 0.11 + radius), "points")
    assert said_of(findings, "confidence by class is increased") == f"l1-unstructured 0.7: {wide}"
    # class 1 has the most on the other seeds, so the gaps are .10, .10 and .02
    radius = 4.30265 * math.sqrt((2 * 0.8**2 + 1.6**2) * (0.1 / 3) ** 2 / 2 * (1 / 3 + 1 / 2))
    wide = format_estimate(Estimate(0.22 / 3, 0.22 / 3 - radius, 0.22 / 3 + radius), "points")
    assert said_of(findings, "confidence differs") == f"l1-unstructured 0.7: {wide}"
    _, findings = by_class(AuditResults(rows, [figure for figure in figures if figure["seed"] == 0]))
    assert "(over the classes of one seed): +10.0 points" in said_of(findings, "confidence by class is increased")


def test_gaps_with_ppb():
    place = "l1-unstructured", 0.7
    basic, ppb = pruned(*place), pruned(*place, "ppb:strength=4")
    found = portraits((ORIGINAL, (0.1, 0.2)), (basic, (0.3, 0.4)), (ppb, (0.1, 0.2)))
    assert {finding.verdict for finding in histograms_defended(found)[1]} == {"supported"}
    assert {finding.verdict for finding in by_class_defended(found)[1]} == {"supported"}
    worse = portraits((ORIGINAL, (0.1, 0.2)), (basic, (0.2, 0.3)), (ppb, (0.3, 0.4)))
    assert {finding.verdict for finding in histograms_defended(worse)[1]} == {"not supported"}
    assert {finding.verdict for finding in by_class_defended(worse)[1]} == {"not supported"}


def test_a_table_as_text_and_as_rows():
    facts = {"study": "samia-fig0", "scale": "small", "seeds": [0], "shadows": 2}
    cells = {"test_accuracy": Estimate(0.5, 0.4, 0.6), "auc": mean_of([0.7]), "shape": sparkline([0.5, 1])}
    table = StudyTable("A title.", facts, [TableLine({"model": "a|b"}, cells, mark="odd")], [judge("up", {})])
    text = table.markdown()
    assert "| a\\|b  | 50.0% [40.0, 60.0] | 0.700 | ▅█    | odd  |" in text
    assert "one seed" in text and "**undecided**" in text
    first, second, claim = map(json.loads, table.jsonl().splitlines())
    assert (first["metric"], first["value"], first["low"], first["scale"]) == ("test_accuracy", 0.5, 0.4, "small")
    assert second["low"] is None and claim["verdict"] == "undecided" and claim["shadows"] == 2


# Settings ------------------------------------------------------------------------------------------------------
def test_full_is_the_papers_setting():
    (study,) = catalogue.find("study", "samia-fig16").make().read_steps(AuditStep)
    fields = study.settings("full", {})
    assert (fields["data"], fields["model"], fields["shadows"]) == ("cifar10", "resnet18-pool", 5)
    assert fields["sparsity"] == [0.6] and len(fields["pruner"]) == 4
    assert len(fields["defense"]) == 1 + 5 + 6 + 5
    assert fields["attack"] == ["conf", "samia:early_stopping=false", "lira", "rmia"] and fields["in_out"] == 16
    assert "train" not in fields  # the paper's own epochs
    assert AuditStep().settings("full", {})["sparsity"] == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert read_scales("samia")["full"].experiments == 20


def test_small_on_tables_and_on_images():
    (study,) = catalogue.find("study", "samia-fig8").make().read_steps(AuditStep)
    table, images = study.settings("small", {}), study.settings("small", {"data": "cifar10"})
    assert (table["data"], table["model"], table["pruner"]) == ("location", "mlp", ["l1-unstructured"])
    assert images["model"] == "resnet18-w16" and images["shadows"] < 5 and len(images["pruner"]) == 4
    assert images["examples"] == 3000 and study.settings("full", {})["examples"] is None


def test_every_result_of_the_paper_is_a_study():
    names = {f"samia-fig{n}" for n in (1, 4, *range(6, 20))} | {"samia-table1"}
    assert names <= catalogue.methods("study").keys()


# One study from end to end -------------------------------------------------------------------------------------
def test_a_study_runs_and_is_resumed(tmp_path, capsys):
    command = ["reproduce", "samia-fig1", "--scale", "tiny", "--out", str(tmp_path / "fig1"), "--set", "examples=500"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "fig1" / "table.md").read_text()
    assert text in printed and "pruning makes the confidence gap" in text
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "fig1" / "artifacts").iterdir()}
    assert main([*command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == [json.loads(line) for line in (tmp_path / "fig1" / "table.jsonl").read_text().splitlines()]
    assert {row["scale"] for row in rows} == {"tiny"} and {row["shadows"] for row in rows} == {1}
    assert {row["examples"] for row in rows} == {500}
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "fig1" / "artifacts").iterdir()}
    assert (tmp_path / "fig1" / "report.html").exists()
    gap = next(row for row in rows if row["metric"] == "gap")
    assert gap["low"] < gap["value"] < gap["high"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["samia-fig2"], "study: 'samia-fig2' is not known"),
        (["samia-fig1", "--scale", "huge"], "scale: 'huge' is not allowed"),
        (["samia-fig1", "--scale", "tiny", "--seeds", "none"], "seeds"),
        (["samia-fig1", "--scale", "tiny", "--data", "digit"], "did you mean 'digits'"),
        (["samia-table1", "--scale", "tiny", "--set", "protocol=known"], "another study"),
    ],
)
def test_wrong_input(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    said_so = capsys.readouterr()
    assert expected in said_so.err and said_so.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_studies_are_listed(capsys):
    assert main(["list", "studies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"tiny", "small", "full"} == set(listed[0]["scales"])
