"""The front by intervals, the choice within limits, and the limits that stand in the way."""

from secateur.evaluation.limits import Outcome
from secateur.evaluation.selection import (
    Assessment,
    beats,
    check_measures,
    choose,
    choose_better,
    explain_limits,
    find_gain,
    list_excesses,
    select_front,
    tighten_limits,
)
from secateur.metrics.membership import Estimate


def recipe(number, drop, auc, size, width=0.0, rung=2):
    measures = {"accuracy_drop": drop, "auc": auc, "bytes": size}
    known = {name: Estimate(x, x - width, x + width) for name, x in measures.items() if x is not None}
    return Assessment(number, f"recipe {number}", rung, known)


def test_a_recipe_is_beaten_only_beyond_the_intervals():
    better, worse = recipe(0, 0.01, 0.5, 0.2), recipe(1, 0.02, 0.6, 0.2)
    assert beats(better, worse) and not beats(worse, better)
    assert not beats(recipe(0, 0.01, 0.5, 0.2, width=0.05), recipe(1, 0.02, 0.6, 0.2, width=0.06))
    assert not beats(better, better)


def test_the_front_keeps_trade_offs_and_unknown_measures():
    items = [recipe(0, 0.0, 0.6, 0.5), recipe(1, 0.05, 0.5, 0.5), recipe(2, 0.05, 0.7, 0.5), recipe(3, 0.2, None, 0.1)]
    assert [item.number for item in select_front(items)] == [0, 1, 3]


def test_the_choice_leaks_least_within_the_limits():
    items = [recipe(0, 0.01, 0.60, 0.2), recipe(1, 0.01, 0.55, 0.2), recipe(2, 0.01, 0.50, 0.9)]
    assert choose(items, {"bytes": 0.25}).number == 1
    assert choose(items, {}).number == 2
    assert explain_limits(items, {"bytes": 0.25}) == []


def test_a_limit_that_is_to_be_shown_prefers_the_whole_interval():
    items = [recipe(0, 0.015, 0.5, 0.2, width=0.02), recipe(1, 0.01, 0.6, 0.2, width=0.005)]
    assert choose(items, {"accuracy_drop": 0.02}).number == 0
    assert choose(items, {"accuracy_drop": 0.02}, shown=["accuracy_drop"]).number == 1


def test_below_guessing_the_more_accurate_recipe_is_chosen():
    assert choose([recipe(0, 0.05, 0.40, 0.2), recipe(1, 0.01, 0.48, 0.2)], {}).number == 1


def test_the_nearest_recipe_has_the_least_excess_in_units_of_the_limits():
    items = [recipe(0, 0.03, 0.6, 0.2), recipe(1, 0.01, 0.5, 0.5)]
    limits = {"accuracy_drop": 0.02, "bytes": 0.1}
    assert list_excesses(items[0], limits) == {"accuracy_drop": 0.4999999999999999, "bytes": 1.0}
    assert list_excesses(items[1], limits) == {"bytes": 4.0}
    assert choose(items, limits).number == 0


def test_an_impossible_limit_is_named_with_the_best_value():
    items = [recipe(0, 0.03, 0.6, 0.2), recipe(1, 0.01, 0.5, 0.5)]
    (sentence,) = explain_limits(items, {"accuracy_drop": 0.02, "bytes": 0.1})
    assert sentence == (
        "No recipe holds the limit 0.1 on share of the original's bytes: the lowest value is 0.200, by recipe 0."
    )


def test_limits_that_hold_only_one_by_one_are_named_in_pairs():
    items = [recipe(0, 0.03, 0.6, 0.2), recipe(1, 0.01, 0.5, 0.5)]
    sentences = explain_limits(items, {"accuracy_drop": 0.02, "bytes": 0.25})
    assert len(sentences) == 2
    assert "Without that on accuracy drop, recipe 0 holds the others and has 0.030." in sentences[0]
    assert "Without that on share of the original's bytes, recipe 1 holds the others" in sentences[1]


def test_bytes_are_held_against_their_limit():
    measures = {"bytes": Estimate(0.3, 0.3, 0.3)}
    above, unknown = check_measures("it", measures, {"bytes": 0.25, "latency": 0.5})
    assert (above.outcome, unknown.outcome) == (Outcome.ABOVE, Outcome.INCONCLUSIVE)
    assert check_measures("it", measures, {"bytes": 0.3})[0].passed


def test_the_whole_interval_decides_where_a_policy_says_so():
    measures = {"psnr": Estimate(12.0, 10.0, 14.0, "ig")}
    answers = [check_measures("it", measures, {"psnr": limit}, "high")[0] for limit in (14.0, 13.0, 9.0)]
    assert [answer.outcome for answer in answers] == [Outcome.WITHIN, Outcome.INCONCLUSIVE, Outcome.ABOVE]
    assert answers[0].evidence.attack == "ig"


def test_an_original_is_beaten_only_by_a_whole_interval_beyond_the_limit():
    items = [recipe(0, 0.01, 0.5, 1.0, width=0.01), recipe(1, -0.10, 0.6, 1.0, width=0.02)]
    assert find_gain(items, 0.07).number == 1
    assert find_gain(items, 0.09) is None and find_gain([recipe(2, None, 0.5, 1.0)], 0.0) is None


def test_a_reference_stays_unless_another_recipe_is_shown_to_be_better():
    yours = recipe(0, 0.02, 0.70, 0.5, width=0.02)
    limits = tighten_limits({"accuracy_drop": 0.03, "latency": 0.9}, yours)
    assert limits == {"accuracy_drop": 0.02, "auc": 0.70, "bytes": 0.5, "latency": 0.9}
    near, sure = recipe(1, 0.01, 0.50, 0.5, width=0.02), recipe(2, -0.01, 0.60, 0.2, width=0.02)
    assert choose_better([yours, near], yours, limits, "high") is yours  # its accuracy is not shown
    assert choose_better([yours, near], yours, limits, "value") is near
    assert choose_better([yours, near, sure], yours, limits, "high") is sure
    larger, lossy, leaky = recipe(3, 0.0, 0.5, 0.6), recipe(4, 0.03, 0.5, 0.5), recipe(5, 0.0, 0.7, 0.5)
    assert choose_better([yours, larger, lossy, leaky], yours, limits, "value") is yours


def test_a_limit_that_is_stricter_than_the_reference_stays():
    assert tighten_limits({"auc": 0.6}, recipe(0, 0.02, 0.7, 0.5))["auc"] == 0.6
