"""Distances and priors by hand; one trial and many give the same."""

import math

import pytest
import torch

from secateur.attacks.inversion import problem as objective
from secateur.attacks.inversion.problem import (
    COLOURS,
    CONTRAST,
    Compared,
    Matching,
    Problem,
    compare,
    cosine,
    euclidean,
    natural_basis,
)

PICTURE = torch.tensor([[0.0, 1.0, 3.0], [2.0, 2.0, 2.0]]).view(1, 1, 2, 3)


def test_an_unknown_sign_is_the_trials():
    """Sizes 3 and 4, the first with its sign, against a trial of 2 and -5: 3 * 2 + 4 * 5; |g*|^2 = 25; gap 1 + 1."""
    trial, aim = {"w": torch.tensor([2.0, -5.0])}, {"w": torch.tensor([3.0, 4.0])}
    problem = Problem(torch.nn.Identity(), {}, {"w": aim["w"][None]})
    result = compare(problem, trial, aim, None, unsigned={"w": torch.tensor([False, True])})
    assert [float(part) for part in result[:4]] == [26, 29, 25, 2]


def test_total_variation_by_hand():
    """|dx| = 1 2 0 0, |dy| = 2 1 1: the mean of each over the differences that exist, summed."""
    assert float(objective.total_variation(PICTURE)) == pytest.approx(3 / 4 + 4 / 3)
    assert float(objective.total_variation(torch.ones(1, 1, 1, 1))) == 0
    both = objective.total_variation(torch.stack([PICTURE, 2 * PICTURE]))
    assert both.tolist() == pytest.approx([25 / 12, 25 / 6])


def test_squared_norm_and_disagreement_by_hand():
    assert float(objective.squared_norm(PICTURE)) == 22
    assert float(objective.disagreement(PICTURE, {"consensus": PICTURE - 2})) == 24


def test_batchnorm_prior_by_hand():
    """First layer ||(3, 4)|| + ||(0, 0)||, times 10; second ||1|| + ||2||."""
    seen = [(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 1.0])), (torch.tensor([1.0]), torch.tensor([3.0]))]
    fixed = {
        "batchnorm.0.mean": torch.zeros(2),
        "batchnorm.0.var": torch.ones(2),
        "batchnorm.1.mean": torch.zeros(1),
        "batchnorm.1.var": torch.ones(1),
    }
    assert float(objective.statistics_gap(seen, fixed, 10)) == pytest.approx(53)
    assert float(objective.statistics_gap(seen, {k: v for k, v in fixed.items() if ".0." in k}, 10)) == pytest.approx(
        50
    )


def test_the_distance_of_equals_has_no_gradient():
    a = torch.ones(3, requires_grad=True)
    objective.distance(a, torch.ones(3)).backward()
    assert a.grad.tolist() == [0, 0, 0]


def test_consensus_is_the_mean_of_a_targets_living_restarts():
    inputs = torch.tensor([1.0, 3.0, 10.0, torch.nan]).view(4, 1, 1, 1, 1)
    assert objective.consensus(inputs, 2).flatten().tolist() == [2, 2, 10, 10]


def found(g, aim):
    problem = Problem(torch.nn.Identity(), {}, {"w": torch.tensor([aim])})
    return compare(problem, {"w": torch.tensor(g)}, {"w": torch.tensor(aim)}, None)


def test_distances_by_hand():
    """<(3, 4), (4, 3)> = 24 of 25; the gap is 1 + 1."""
    assert float(cosine(found([3.0, 4.0], [4.0, 3.0]))) == pytest.approx(1 / 25)
    assert float(cosine(found([6.0, 8.0], [4.0, 3.0]))) == pytest.approx(1 / 25)
    assert float(euclidean(found([3.0, 4.0], [4.0, 3.0]))) == 2
    assert float(cosine(found([0.0, 0.0], [4.0, 3.0]))) == 1
    assert float(cosine(found([-3.0, -4.0], [3.0, 4.0]))) == pytest.approx(2)  # the other way is not the same


def test_the_cosine_is_one_over_all_parameters():
    problem = Problem(torch.nn.Identity(), {}, {"a": torch.ones(1, 1), "b": torch.ones(1, 1)})
    aim = {"a": torch.tensor([4.0]), "b": torch.tensor([3.0])}
    assert float(cosine(compare(problem, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, aim, None))) == (
        pytest.approx(1 / 25)
    )


def test_the_whole_is_the_weighted_sum_and_the_part_has_no_priors():
    objective = Matching("euclidean", scale=0.5, tv=2, l2=0.1, group=0.25)
    total, matching = objective(found([3.0, 4.0], [4.0, 3.0]), {"inputs": PICTURE}, {"consensus": PICTURE - 2})
    assert float(matching) == 2
    assert float(total) == pytest.approx(1 + 2 * 25 / 12 + 2.2 + 6)
    assert objective.needs_gap and not objective.needs_statistics and Matching(batchnorm=1).needs_statistics


def test_natural_coordinates_by_hand():
    """A grey picture is the origin; the mean of 2 x 2 pixels that are all 1 is the first cosine, of amplitude s.

    Amplitudes are 1 / sqrt(1 + f^2 + g^2), of f, g in {0, 1}, with a mean square of CONTRAST^2: 1, 1/2, 1/2, 1/3.
    """
    half = torch.full((1, 1, 1), 0.5, dtype=torch.float64)
    basis = natural_basis((1, 2, 2), half, half)
    assert basis.coordinates(torch.zeros(1, 2, 2, dtype=torch.float64)).abs().max() == 0
    first = CONTRAST / math.sqrt((1 + 1 / 2 + 1 / 2 + 1 / 3) / 4)
    white = basis.coordinates(torch.ones(1, 2, 2, dtype=torch.float64)).flatten().tolist()
    assert white == pytest.approx([2 * 0.5 / first, 0, 0, 0])
    total, matching = Matching("euclidean", natural=3.0, basis=basis)(
        found([3.0, 4.0], [4.0, 3.0]), {"inputs": torch.ones(1, 1, 2, 2, dtype=torch.float64)}, {}
    )
    assert float(matching) == 2 and float(total) == pytest.approx(2 + 3 * (1 / first) ** 2 / 4)


def test_natural_coordinates_go_forth_and_back():
    rng = torch.Generator().manual_seed(0)
    mean, std = (torch.rand(3, 1, 1, generator=rng, dtype=torch.float64) + 0.1 for _ in range(2))
    basis = natural_basis((3, 5, 4), mean, std)
    inputs, other = torch.randn(2, 7, 3, 5, 4, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(basis.grey + basis.move(basis.coordinates(inputs)), inputs)
    torch.testing.assert_close((basis.move(inputs) * other).sum(), (inputs * basis.pull(other)).sum())  # adjoint
    drawn = basis.move(torch.randn(4000, 3, 5, 4, generator=rng, dtype=torch.float64)) * std
    assert float(drawn.std()) == pytest.approx(CONTRAST, rel=0.02)
    assert float(torch.corrcoef(drawn.movedim(1, 0).flatten(1))[0, 1]) == pytest.approx(COLOURS, abs=0.02)


def test_many_trials_are_one_trial_many_times():
    objective = Matching(tv=0.3, l2=0.1, batchnorm=0.2, group=0.4)
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(5, *shape, generator=rng, dtype=torch.float64)

    seen = [(draw(3), draw(3)), (draw(2), draw(2))]
    many = Compared(draw(), draw(), draw(), draw(), seen)
    inputs = draw(2, 3, 4, 4)
    fixed = {f"batchnorm.{i}.{what}": draw(n) for i, n in ((0, 3), (1, 2)) for what in ("mean", "var")}
    fixed["consensus"] = draw(2, 3, 4, 4)
    together = objective(many, {"inputs": inputs}, fixed)
    for i in range(5):
        one = Compared(*(value[i] for value in many[:4]), [(m[i], v[i]) for m, v in seen])
        alone = objective(one, {"inputs": inputs[i]}, {name: value[i] for name, value in fixed.items()})
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[i], b)
