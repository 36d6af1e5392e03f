"""Importance of settings, against effects that are known."""

import pytest
import torch

from secateur.metrics.importance import importance


def trials(repeats=3):
    return [
        {"pruner": pruner, "sparsity": sparsity, "same": "x"}
        for pruner in ("a", "b", "c")
        for sparsity in (0.5, 0.7, 0.9)
        for _ in range(repeats)
    ]


def test_an_additive_outcome_has_the_shares_of_its_variances(rng):
    values = [{"a": 0.0, "b": 1.0, "c": 2.0}[trial["pruner"]] + 5 * trial["sparsity"] for trial in trials()]
    shares = importance(trials(), values, rng)
    # Var(pruner) = 2/3 and Var(5 * sparsity) = 25 * 0.08/3 = 2/3: half of the variance each
    assert shares["pruner"].value == pytest.approx(0.5, abs=0.1) and shares["sparsity"].value == pytest.approx(
        0.5, abs=0.1
    )
    assert shares["same"] == (0.0, 0.0, 0.0, None)
    assert all(share.low <= share.value <= share.high for share in shares.values())


def test_an_interaction_counts_for_both_settings(rng):
    values = [float((trial["pruner"] == "a") ^ (trial["sparsity"] == 0.9)) for trial in trials()]
    shares = importance(trials(), values, rng)
    assert shares["pruner"].value + shares["sparsity"].value > 1.1


def test_few_trials_say_nothing_and_a_constant_outcome_has_no_cause(rng):
    assert importance(trials()[:3], [1.0, 2.0, 3.0], rng) == {}
    assert all(share.value == 0 for share in importance(trials(), [1.0] * 27, rng).values())


def test_equal_generators_give_equal_shares():
    values = [trial["sparsity"] for trial in trials()]
    one, other = (importance(trials(), values, torch.Generator().manual_seed(4), replicates=10) for _ in range(2))
    assert one == other
