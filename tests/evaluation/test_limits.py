from dataclasses import replace
from xml.etree import ElementTree

import pytest

from secateur.evaluation.limits import Outcome, Policy, average_trainings, check, junit, outcome
from secateur.metrics.estimates import holm, p_above
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row

ABOVE, INCONCLUSIVE, WITHIN = Outcome.ABOVE, Outcome.INCONCLUSIVE, Outcome.WITHIN


def row(**fields):
    common = {"model": "m", "dataset": "d", "pruner": "snip", "sparsity": 0.7, "defense": "basic", "adaptive": False}
    return Row(**(common | {"attack": "lira", "seed": 0} | fields))


def auc(value, low, high, **fields):
    return row(metric="auc", value=value, low=low, high=high, **fields)


def decided(rows, limit=0.75, **policy):
    return check(rows, Policy({rows[0].metric: limit}, **policy))


@pytest.mark.parametrize(
    ("estimate", "decide", "wanted"),
    [
        ((0.813, 0.701, 0.909), "high", INCONCLUSIVE),
        ((0.813, 0.760, 0.866), "high", ABOVE),
        ((0.700, 0.600, 0.790), "high", INCONCLUSIVE),
        ((0.700, 0.660, 0.740), "high", WITHIN),
        ((0.700, 0.600, 0.790), "value", WITHIN),
        ((0.813, 0.701, 0.909), "value", ABOVE),
        ((0.813, 0.701, 0.909), "low", WITHIN),
        ((0.813, 0.790, 0.830), "low", ABOVE),
    ],
)
def test_the_named_end_of_the_interval_decides(estimate, decide, wanted):
    (only,) = decided([auc(*estimate)], decide=decide)
    assert only.outcome is wanted


def test_a_defended_model_passes_only_under_attackers_who_know_the_defense():
    plain = auc(0.55, 0.52, 0.58, defense="ppb")
    (only,) = decided([plain])
    assert only.outcome is INCONCLUSIVE and "one who knows of it (--adaptive) may see more" in only.reason
    for kinder in (replace(plain, adaptive=True), replace(plain, defense="basic"), replace(plain, pruner="none")):
        assert decided([kinder])[0].outcome is WITHIN
    assert decided([plain, replace(plain, attack="rmia", adaptive=True)])[0].outcome is WITHIN
    assert decided([plain], attacker="no-shadows")[0].outcome is WITHIN
    assert decided([auc(0.8, 0.77, 0.83, defense="ppb")])[0].outcome is ABOVE


def test_a_limit_that_holds_names_the_stronger_attackers_that_were_not_met():
    unmet = "did not meet lira or rmia on 16 in-out models"
    noted = auc(0.55, 0.52, 0.58, note=f"ties; {unmet}")
    checks = check(
        [noted, row(metric="tpr_at_fpr_0.01", value=0.01, low=0.0, high=0.02)],
        Policy({"auc": 0.75, "tpr_at_fpr_0.01": 0.1}),
    )
    assert all(item.passed and item.sentence.endswith(f"; it {unmet}") for item in checks) and len(checks) == 2
    assert decided([replace(noted, note=None)])[0].sentence.endswith("is within the limit 0.75")


@pytest.mark.parametrize(
    ("measure", "estimate", "limit", "wanted"),
    [
        ("tpr_at_fpr_0.01", (0.094, 0.02, 0.17), 0.05, INCONCLUSIVE),
        ("accuracy_drop", (0.105, 0.051, 0.159), 0.02, ABOVE),
    ],
)
def test_a_value_above_its_limit_never_passes_by_a_wide_interval(measure, estimate, limit, wanted):
    value, low, high = estimate
    (only,) = decided([row(metric=measure, value=value, low=low, high=high)], limit)
    assert only.outcome is wanted and not only.passed


def test_the_upper_end_decides_by_default_and_the_advice_is_a_number_of_rows():
    rows = [auc(0.70, 0.60, 0.80), row(metric="members", value=30, attack=None)]
    rows.append(row(metric="nonmembers", value=30, attack=None))
    (only,) = decided(rows)
    # An interval half as wide, .70 to .75, takes four times the rows.
    assert only.outcome is INCONCLUSIVE and only.reason == "about 240 rows would decide (now 60)"
    assert only.sentence.startswith("snip 0.7, basic: auc 0.700 [0.600, 0.800] under lira is inconclusive")


def test_the_strongest_attack_decides_and_originals_are_not_held_to_the_limits():
    rows = [
        auc(0.65, 0.62, 0.68),
        auc(0.78, 0.76, 0.80, attack="mentr"),
        auc(0.99, 0.98, 1.0, pruner="none"),
        row(metric="auc", value=None, attack="nn"),
    ]
    (only,) = decided(rows)
    assert only.sentence == "snip 0.7, basic: auc 0.780 [0.760, 0.800] under mentr is above the limit 0.75"


def test_a_weak_attack_more_changes_nothing():
    strong = auc(0.78, 0.76, 0.80)
    noise = [auc(0.52, 0.40, 0.64, attack=name) for name in ("blindmi", "correctness", "conf")]
    assert outcome(decided([strong])) is outcome(decided([*noise, strong])) is ABOVE


def test_a_weak_attacker_is_not_averaged_with_a_strong_one():
    strong = auc(0.78, 0.76, 0.80)
    for knowledge in ({"adaptive": True}, {"extra": {"protocol": "unknown-sparsity", "attacker_sparsity": 0.5}}):
        for rows in ([strong, auc(0.52, 0.5, 0.54, **knowledge)], [auc(0.52, 0.5, 0.54), replace(strong, **knowledge)]):
            (only,) = decided(rows)
            assert only.outcome is ABOVE and only.evidence.estimate.value == 0.78
    selected = [
        auc(value, value - 0.02, value + 0.02, seed=seed, extra={"protocol": "select", "attacker_sparsity": sparsity})
        for seed, (value, sparsity) in enumerate([(0.7, 0.5), (0.72, 0.9)])
    ]
    (only,) = decided(selected)  # an attacker may select another recipe for every seed
    assert only.evidence.trainings == 2 and only.evidence.estimate.value == pytest.approx(0.71)


def test_a_measure_that_the_sample_does_not_support_is_inconclusive():
    note = "not supported by the sample: 300 non-members, at least 1000 needed"
    rows = [row(metric="tpr_at_fpr_0.001", value=0.094, low=0.01, high=0.2, note=note)]
    (only,) = decided(rows, limit=0.05)
    assert only.outcome is INCONCLUSIVE and "300 non-members" in only.sentence
    sure = [row(metric="tpr_at_fpr_0.001", value=0.9, low=0.8, high=0.95, note=note)]
    assert outcome(decided(sure, limit=0.05)) is ABOVE


def test_an_attack_whose_score_ties_does_not_hide_one_that_does_not():
    tied = row(metric="tpr_at_fpr_0.01", value=None, attack="correctness", note="not supported by the score: ties")
    strong = row(metric="tpr_at_fpr_0.01", value=0.4, low=0.3, high=0.5)
    assert outcome(decided([tied, strong], limit=0.05)) is ABOVE
    assert outcome(decided([tied], limit=0.05)) is INCONCLUSIVE


def test_evidence_without_shadow_models_is_inconclusive_unless_the_policy_says_so():
    rows = [auc(0.6, 0.58, 0.62, attack="conf"), auc(0.55, 0.53, 0.57, attack="correctness")]
    (only,) = decided(rows)
    assert only.outcome is INCONCLUSIVE and "shadow models" in only.reason
    assert outcome(decided(rows, attacker="no-shadows")) is WITHIN
    assert outcome(decided([auc(0.9, 0.88, 0.92, attack="conf")])) is ABOVE  # a leak that is shown needs no shadows


def test_seeds_are_one_check_with_an_interval_over_trainings_and_rows():
    rows = [auc(value, value - 0.01, value + 0.01, seed=seed) for seed, value in enumerate((0.555, 0.587, 0.614))]
    (only,) = decided(rows, limit=0.62)
    # Student's interval by hand: mean .58533, deviation .02953, 4.3027 * .02953 / sqrt(3) = .07337
    assert only.evidence.estimate == pytest.approx((0.58533, 0.51196, 0.65871, None), abs=1e-4)
    assert only.outcome is INCONCLUSIVE and only.evidence.trainings == 3


def test_equal_trainings_keep_the_interval_of_their_rows_and_the_range():
    together = average_trainings([Estimate(0.99, 0.95, 1.03)] * 2)
    assert together.value == 0.99 and together.high == 1.0 and together.low == pytest.approx(0.99 - 0.04 / 2**0.5)


def test_the_accuracy_drop_is_the_measured_one():
    rows = [auc(0.5, 0.48, 0.52), row(metric="accuracy_drop", value=0.105, low=0.051, high=0.159, attack=None)]
    (drop,) = check(rows, Policy({"accuracy_drop": 0.02}))
    assert drop.outcome is ABOVE and drop.sentence.endswith("is above the limit 0.02")


def test_rows_that_would_decide_are_named_on_either_side_of_the_limit():
    rows = [auc(0.80, 0.60, 0.90), row(metric="members", value=30, attack=None)]
    (only,) = decided(rows)  # the lower half width of .2 must become .05: sixteen times the rows
    assert only.sentence.endswith("about 480 rows would decide (now 30)")


def test_what_a_ci_server_reads():
    rows = [auc(0.8, 0.76, 0.84), auc(0.70, 0.60, 0.80, sparsity=0.5)]
    suite = ElementTree.fromstring(junit(decided(rows)).encode())
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "1")
    assert "is above the limit" in suite.find(".//failure").get("message")
    assert "is inconclusive" in suite.find(".//error").get("message")


def test_silence_is_not_a_pass():
    (only,) = decided([row(metric="auc", value=None, note="needs shadow models")])
    assert only.outcome is INCONCLUSIVE and "needs shadow models" in only.sentence
    (drop,) = check([auc(0.5, 0.4, 0.6)], Policy({"accuracy_drop": 0.02}))
    assert drop.outcome is INCONCLUSIVE and "was not measured" in drop.sentence and "(--before)" in drop.sentence


def test_an_original_that_is_audited_alone_is_held_to_the_limits():
    (only,) = decided([auc(0.9, 0.8, 0.95, pruner="none", sparsity=0.0)])
    assert only.outcome is ABOVE and only.sentence.startswith("the original, basic")


def test_many_comparisons_keep_one_level_where_the_low_end_decides():
    # One of twenty lies above by its own 95 % interval; by Holm it does not: p = .0125, times 20.
    alone = auc(0.62, 0.5152, 0.72, attack="mentr")
    others = [auc(0.4, 0.3, 0.5, attack=f"lira:queries={i}") for i in range(19)]
    assert outcome(decided([alone], limit=0.5, decide="low")) is ABOVE
    assert outcome(decided([alone, *others], limit=0.5, decide="low")) is WITHIN


def test_holm_and_p_values_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([]) == []
    assert p_above(Estimate(0.6, 0.5, 0.7), 0.5) == pytest.approx(0.025, abs=1e-4)


def test_a_limit_that_one_model_lacks_is_inconclusive_for_that_model():
    proved = row(metric="epsilon", value=3.0, attack=None, defense="dp-sgd")
    rows = [auc(0.5, 0.48, 0.52), auc(0.5, 0.48, 0.52, defense="dp-sgd"), proved]
    checks = check(rows, Policy({"auc": 0.6, "epsilon": 5}))
    assert {(c.subject, c.measure): c.outcome for c in checks if c.measure == "epsilon"} == {
        ("snip 0.7, dp-sgd", "epsilon"): WITHIN,
        ("snip 0.7, basic", "epsilon"): INCONCLUSIVE,
    }


def test_the_same_rows_asked_again_do_not_narrow_the_interval():
    (once,), (often,) = (decided([auc(0.7, 0.6, 0.8)] * number) for number in (1, 40))
    assert often.evidence.estimate[:3] == pytest.approx(once.evidence.estimate[:3], abs=1e-9)
    assert once.outcome is often.outcome is INCONCLUSIVE


def test_a_leak_of_members_that_differ_by_themselves_is_inconclusive():
    failed = row(metric="valid", value=0.0, attack=None, note="members differ", extra={"check": "blind"})
    (only,) = decided([auc(0.9, 0.88, 0.92), failed])
    assert only.outcome is INCONCLUSIVE and "differ" in only.reason
    shadows = row(metric="valid", value=0.0, attack=None, note="shadows differ", extra={"check": "shadows"})
    assert outcome(decided([auc(0.9, 0.88, 0.92), shadows])) is ABOVE  # weak shadows can only hide a leak
    assert outcome(decided([auc(0.6, 0.58, 0.62), shadows])) is INCONCLUSIVE


def test_originals_of_different_training_are_kept_apart():
    rows = [auc(0.9, 0.88, 0.92, pruner="none"), auc(0.6, 0.58, 0.62, pruner="none", extra={"original": "slimming"})]
    assert [c.subject for c in decided(rows)] == ["the original, basic", "the original (slimming), basic"]


def test_few_trainings_have_heavier_tails():
    # One half-width above the bound is p = .025 by both; two are p = .006 by Student's (2 degrees), 4e-5 by a normal.
    assert p_above(Estimate(0.6, 0.5, 0.7), 0.5, freedom=2) == pytest.approx(0.025, abs=1e-4)
    assert p_above(Estimate(0.6, 0.5, 0.7), 0.4, freedom=2) == pytest.approx(0.0066, abs=1e-3)
    assert p_above(Estimate(0.6, 0.5, 0.7), 0.4) == pytest.approx(4.4e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("attack", "defense", "updates", "reason"),
    [
        ("ig", "none", 3, ""),
        ("ig:iterations=20", "none", 3, "ig took 20 of its 2500 iterations"),
        ("ig", "none", 1, "1 update attacked"),
        ("ig:iterations=20", "dgp", 3, "attacked plainly only"),
        ("ig:iterations=20", "dgp", 3, "ig took 20 of its 2500 iterations"),
    ],
)
def test_pictures_are_within_limits_only_of_an_attacker_at_full_strength(attack, defense, updates, reason):
    labels = {"pruner": None, "sparsity": None, "attack": attack, "defense": defense}
    rows = [row(metric="psnr", value=8.0, low=7.0, high=9.0, **labels), row(metric="updates", value=updates, **labels)]
    (only,) = decided(rows, limit=30.0)
    assert only.passed is not bool(reason) and reason in only.reason
    (above,) = decided(rows, limit=5.0)
    assert above.outcome is ABOVE  # a weak attack that sees too much has shown enough


def test_a_doubt_about_the_model_itself_is_named_before_one_about_another():
    other, same = (
        row(metric="valid", value=0.0, attack=None, note=note, pruner=pruner, extra={"check": "shadows"})
        for note, pruner in (("of the original", "none"), ("of this model", "snip"))
    )
    (only,) = decided([auc(0.6, 0.59, 0.61), other, same])
    assert only.outcome is INCONCLUSIVE and only.reason == "of this model"
