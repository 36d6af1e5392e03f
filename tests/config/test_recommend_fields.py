"""Run files of recommend: times, limits as flags, and the audit of one recipe."""

import pytest

from secateur.config import Recommend, dump, read
from secateur.errors import WrongInput


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5m", 90), ("2h", 7200), ("1h30m", 5400), (20, 20)])
def test_a_budget_is_a_time(text, seconds):
    assert read(Recommend, None, {"budget": text}).budget == seconds


@pytest.mark.parametrize("text", ["2 hours", "h", "", "2h 3", "-1h"])
def test_another_text_is_refused(text):
    with pytest.raises(WrongInput, match="budget"):
        read(Recommend, None, {"budget": text})


def test_flags_of_limits_override_those_of_the_file_and_are_kept():
    config = read(Recommend, None, {"limits": {"auc": 0.7, "epsilon": 3}, "max_auc": "0.6", "max_tpr_at_1": 0.03})
    assert config.limits.by_measure() == {"auc": 0.6, "epsilon": 3.0, "tpr_at_fpr_0.01": 0.03}
    assert read(Recommend, None, dump(config)).limits == config.limits


def test_the_budget_alone_ends_a_search_unless_a_number_is_set():
    assert read(Recommend, None, {}).most_candidates == 20
    assert read(Recommend, None, {"budget": "2h"}).most_candidates is None
    assert read(Recommend, None, {"budget": "2h", "candidates": 7}).most_candidates == 7


def test_the_attacker_of_a_recipe_knows_it():
    audit = read(Recommend, None, {"data": "digits", "train": {"epochs": 3}, "shadows": 4, "seed": 2}).to_audit()
    assert audit.adaptive and audit.shadows == 4 and audit.seeds == [2] and audit.train.epochs == 3
