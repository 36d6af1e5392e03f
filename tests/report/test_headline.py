"""The first screen: the answer, a sentence with a magnitude, three numbers, and one line a model."""

from dataclasses import replace

import pytest
from audited import attack_rows, know_defense, labels_of

from secateur.evaluation.limits import Policy, check, collect
from secateur.report.headline import build_headline, select_leaking
from secateur.runs.rows import Row


def measured(metric, value, width=0.02, attack="lira", seed=0, model=("snip", 0.5, "ppb"), **more):
    labels = labels_of(*model, attack=attack, seed=seed)
    return Row(**labels, metric=metric, value=value, low=value - width, high=value + width, **more)


def valid(holds, sentence):
    return Row(**labels_of("snip", 0.5, "ppb", seed=0), attack=None, metric="valid", value=float(holds), note=sentence)


ORIGINAL = ("none", 0.0, "basic")
LEAK = [measured("auc", 0.72), measured("tpr_at_fpr_0.01", 0.234, 0.03), measured("tpr_at_fpr_0.001", 0.05)]
BEFORE = [measured("auc", 0.65, model=ORIGINAL), measured("tpr_at_fpr_0.01", 0.18, 0.03, model=ORIGINAL)]


def test_the_sentence_has_a_magnitude_and_that_of_the_original():
    sentence = build_headline([*BEFORE, *LEAK]).sentences[0]
    assert sentence == (
        "Of 1,000 members an attacker names 234, with 10 false accusations among 1,000 others; before pruning 180."
    )
    assert build_headline(LEAK).sentences[0].endswith("among 1,000 others.")


def test_a_leak_without_rare_accusations_is_told_by_its_auc():
    blind = measured("tpr_at_fpr_0.01", 0.012, 0.01)
    sentence = build_headline([measured("auc", 0.6), blind]).sentences[0]
    assert sentence.startswith("An attacker recognises members better than by guessing: AUC 0.600 [0.580, 0.620] under")


def test_an_original_that_is_audited_alone_has_no_before():
    headline = build_headline(BEFORE)
    assert headline.badge.text == "LEAKS STRONGLY" and "before pruning" not in headline.sentences[0]


def test_checks_of_several_models_and_seeds_are_one_line_and_failures_are_named():
    def likeness(seed, holds, note):
        labels = labels_of("snip", 0.5, "ppb", seed=seed) | {"attack": None, "extra": {"check": "shadows"}}
        return Row(**labels, metric="valid", value=float(holds), note=note)

    rows = [*LEAK, *(likeness(seed, True, f"the shadows resemble the victim ({seed})") for seed in range(3))]
    first = "the shadows resemble the victim (0) [snip 0.5, ppb, seed 0; the check holds for 2 more]"
    assert build_headline(rows).checks == [(True, first)]
    rows += [likeness(3, False, "the shadows do not resemble the victim")]
    named = "snip 0.5, ppb, seed 3: the shadows do not resemble the victim"
    assert build_headline(rows).checks == [(True, first), (False, named)]
    assert build_headline([*LEAK, likeness(0, False, "no")]).checks == [(False, "no")]


def test_what_was_done_elsewhere_is_called_compression():
    elsewhere = [replace(row, pruner="given", sparsity=0.0, defense="given") for row in LEAK]
    assert build_headline([*BEFORE, *elsewhere]).sentences[0].endswith("; before compression 180.")


def test_each_number_is_that_of_the_strongest_attack_for_its_measure():
    rows = [*LEAK, measured("auc", 0.75, attack="conf"), measured("tpr_at_fpr_0.01", 0.02, attack="conf")]
    assert [(name, attack) for name, _, attack in build_headline(rows).numbers] == [
        ("AUC", "conf on snip 0.5, ppb"),
        ("TPR at 1 % FPR", "lira on snip 0.5, ppb"),
        ("TPR at 0.1 % FPR", "lira on snip 0.5, ppb"),
    ]


def test_a_measure_that_the_sample_does_not_support_is_no_number():
    few = replace(LEAK[1], value=0.9, note="not supported by the sample: 30 non-members, at least 100 needed")
    headline = build_headline([LEAK[0], few])
    assert headline.numbers[1] == ("TPR at 1 % FPR", "not known", few.note) and "0.9" not in str(headline)
    assert headline.badge.text == "LEAKS STRONGLY" and "rare accusations could not be measured" in headline.sentences[0]


def test_a_measure_that_the_score_does_not_support_keeps_its_number_and_reason():
    tied = replace(LEAK[1], value=None, low=None, high=None, note="not supported by the score: 9 non-members tie")
    assert build_headline([LEAK[0], tied]).numbers[1] == ("TPR at 1 % FPR", "not known", tied.note)


@pytest.mark.parametrize("noisy", [1, 5, 19])
def test_noisy_attacks_more_do_not_turn_a_leak_into_no_leak(noisy):
    noise = [measured("auc", 0.55, 0.2, attack=f"lira:queries={number}") for number in range(noisy)]
    weak = measured("auc", 0.56, 0.02, attack="conf")
    for rows in ([weak, *noise], [*noise, weak]):
        assert build_headline(rows).badge.text == "LEAKS"


def test_a_precise_attack_beside_a_noisy_one_of_a_higher_auc_still_shows_the_leak():
    noisy, precise = (
        measured("auc", 0.539, 0.040, attack="blindmi"),
        measured("auc", 0.519, 0.009, attack="correctness"),
    )
    for rows in ([precise], [noisy, precise], [precise, noisy]):
        assert build_headline(rows).badge.text == "LEAKS"


def test_many_attacks_together_keep_the_level():
    # By its own interval the first attack is above guessing, p = .014; of twenty attacks that is no surprise.
    lucky = measured("auc", 0.545, 0.04, attack="conf")
    others = [measured("auc", 0.5, 0.04, attack=f"lira:queries={number}") for number in range(19)]
    assert build_headline([lucky]).badge.text == "LEAKS"
    assert build_headline([lucky, *others]).badge.text == "NO LEAK SHOWN by these attackers"


def test_without_shadow_attacks_or_with_failed_checks_it_is_inconclusive_but_a_leak_stays_one():
    chance = measured("auc", 0.5, attack="conf")
    assert build_headline([chance]).badge.text == "INCONCLUSIVE"
    shadowed = [chance, measured("auc", 0.51)]
    assert build_headline(shadowed).badge.text == "NO LEAK SHOWN by these attackers"
    checked = build_headline([*shadowed, valid(False, "the shadows do not resemble the victim")])
    assert checked.badge.text == "INCONCLUSIVE"
    assert checked.checks == [(False, "the shadows do not resemble the victim")]
    assert build_headline([measured("auc", 0.9, attack="conf")]).badge.text == "LEAKS STRONGLY"
    assert "safe" not in str(build_headline(shadowed)).lower()


def test_no_attack_is_inconclusive():
    unable = Row(**labels_of("snip", 0.5, "ppb", attack="lira", seed=0), metric="auc", value=None, note="no shadows")
    for rows in ([], [unable]):
        assert build_headline(rows).badge.text == "INCONCLUSIVE: no attack was run"


def test_the_limits_have_one_line_a_model():
    other = [replace(row, sparsity=0.9) for row in LEAK]
    policy = Policy({"auc": 0.6, "tpr_at_fpr_0.01": 0.05, "tpr_at_fpr_0.001": 0.055})
    rows = [*LEAK, *other, measured("auc", 0.7, attack="rmia")]
    headline = build_headline(rows, check(rows, policy))
    assert headline.badge.text == "FAIL: above a limit"
    assert headline.limits[0] == (
        "snip 0.5, ppb: above the limit: AUC 0.720 [0.700, 0.740] under lira, limit 0.6; "
        "TPR at 1 % FPR 0.234 [0.204, 0.264] under lira, limit 0.05"
    )
    assert [line.partition(":")[0] for line in headline.limits] == ["snip 0.5, ppb", "snip 0.9, ppb"]
    kept = build_headline(LEAK, check(know_defense(LEAK), Policy({"auc": 0.8})))
    assert kept.limits == ["snip 0.5, ppb: within the limits: AUC 0.720 [0.700, 0.740] under lira, limit 0.8"]
    assert kept.badge.text == "WITHIN THE LIMITS, against these attackers"


def test_a_limit_on_the_worst_group_names_the_group():
    rows = [*LEAK, measured("worst_group_auc", 0.8, note="group east, the worst of 4; 2 groups have fewer rows")]
    (line,) = build_headline(rows, check(rows, Policy({"worst_group_auc": 0.6}))).limits
    assert "AUC of the worst group 0.800 [0.780, 0.820] under lira (group east, the worst of 4), limit 0.6" in line


@pytest.mark.parametrize(("change", "verb"), [(0.1, "raised"), (-0.1, "lowered"), (0.01, "did not measurably change")])
def test_the_change_by_pruning_is_paired_and_keeps_its_sign_over_seeds(change, verb):
    rows = [row for seed in (0, 1, 2) for row in (*(replace(x, seed=seed) for x in LEAK),)]
    rows += [measured("auc_change", change + step, 0.02, seed=seed) for seed, step in enumerate((-0.005, 0.0, 0.005))]
    sentence = build_headline(rows).sentences[1]
    assert sentence.startswith(f"Pruning {verb} the leakage: AUC {change:+.3f} [")
    low, high = (float(end) for end in sentence.partition("[")[2].partition("]")[0].split(", "))
    assert low < change < high and (low < 0 < high) == (verb == "did not measurably change")


def test_the_attacker_and_the_rows_are_named():
    counts = [
        replace(LEAK[0], attack=None, metric=name, value=n) for name, n in (("members", 1200), ("nonmembers", 900))
    ]
    sentence = build_headline([*LEAK, *counts]).sentences[-1]
    assert sentence.startswith("1,200 members and 900 non-members were asked about.")
    assert "has shadow models of its own" in sentence and "the rows of one training; another may differ" in sentence
    stronger = [measured("auc", 0.8, attack="conf"), *LEAK]
    assert "needs no shadow models; attackers with shadow models were weaker" in build_headline(stronger).sentences[-1]
    several = build_headline([*LEAK, *(replace(row, seed=1) for row in LEAK)]).sentences[-1]
    assert "2 trainings and their rows" in several


def test_a_strong_attacker_is_not_averaged_with_a_weak_one():
    weak = measured("auc", 0.52)
    for change in ({"adaptive": True}, {"extra": {"attacker_sparsity": 0.5, "protocol": "unknown-sparsity"}}):
        headline = build_headline([weak, replace(measured("auc", 0.9), **change)])
        assert headline.numbers[0][1].startswith("0.900 ")


def test_models_of_several_runs_are_not_mixed_up():
    weak = [replace(measured("auc", 0.52), extra={"run": "a"})]
    strong = [replace(row, extra={"run": "b"}) for row in LEAK]
    headline = build_headline([*weak, *strong])
    assert headline.numbers[0] == ("AUC", "0.720 [0.700, 0.740]", "lira on b: snip 0.5, ppb")


def test_the_sentence_and_the_number_are_of_the_same_attack():
    other = measured("tpr_at_fpr_0.01", 0.3, 0.29, model=("snip", 0.9, "ppb"))  # above guessing, but not shown to be
    headline = build_headline([*LEAK, other])
    assert "names 300," in headline.sentences[0] and headline.numbers[1][1].startswith("30.0 %")


def test_leaking_models_by_name():
    rows = [*LEAK, measured("auc", 0.5, model=("snip", 0.9, "ppb"))]
    assert select_leaking(collect(rows, ["auc"])) == {"snip 0.5, ppb"}


def test_a_leak_that_only_rare_accusations_show_is_one():
    few = [measured("auc", 0.505), measured("tpr_at_fpr_0.01", 0.09, 0.02), measured("tpr_at_fpr_0.001", 0.08, 0.02)]
    assert build_headline(few).badge.text == "LEAKS" and "names 90" in build_headline(few).sentences[0]
    chance = [measured("auc", 0.505), measured("tpr_at_fpr_0.01", 0.025, 0.012)]
    assert build_headline(chance).badge.text == "NO LEAK SHOWN by these attackers"


def test_members_that_differ_by_themselves_put_a_leak_in_doubt():
    failed = replace(valid(False, "members and non-members differ by themselves"), extra={"check": "blind"})
    headline = build_headline([*LEAK, failed])
    assert headline.badge.text == "INCONCLUSIVE" and any(
        "may not be the model's doing" in s for s in headline.sentences
    )


def test_trainings_that_differ_and_all_leak_are_shown_to_leak():
    """Three trainings with AUCs of .57, .61 and .70, each certain by its rows: Student's interval reaches below .5."""
    labels = labels_of("snip", 0.5, "basic", attack="conf")
    rows = [row for seed, auc in enumerate((0.57, 0.61, 0.7)) for row in attack_rows(labels, seed, auc)]
    (item,) = collect(rows, ["auc"])
    assert item.estimate.low < 0.5 < item.by_rows.low
    assert select_leaking([item]) == {item.subject}
    assert "better than guessing" not in " ".join(build_headline(rows).sentences)
