import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from secateur.data.partition import in_out, split_trained, victim_shadow
from secateur.errors import WrongInput

seeds = st.integers(0, 2**31 - 1)


def sizes(part):
    return len(part.train), len(part.validation), len(part.test)


def rows(part):
    return torch.cat([part.train, part.validation, part.test])


@pytest.mark.parametrize(
    ("n", "wanted"),
    [(60_000, (13_500, 3_000, 13_500)), (5_010, (1_126, 251, 1_128)), (8, (1, 1, 2))],  # CIFAR, Location, the least
)
def test_the_papers_sizes(n, wanted, rng):
    split = victim_shadow(n, 5, rng)
    assert [sizes(part) for part in (split.victim, *split.shadows)] == [wanted] * 6


@given(n=st.integers(8, 400), shadows=st.integers(0, 4), seed=seeds)
def test_no_row_is_on_both_sides_and_the_parts_cover_their_half(n, shadows, seed):
    split = victim_shadow(n, shadows, Generator().manual_seed(seed))
    assert len(split.shadows) == shadows
    victim = set(rows(split.victim).tolist())
    others = set(range(n)) - victim
    assert len(victim) == n // 2 == len(rows(split.victim))
    for part in (split.victim, *split.shadows):
        assert min(sizes(part)) >= 1
        assert 0 <= len(part.test) - len(part.train) <= 2
        assert part.train.dtype == torch.int64
    for part in split.shadows:
        assert len(rows(part)) == len(others)
        assert set(rows(part).tolist()) == others


def test_every_shadow_is_split_anew(rng):
    one, two = victim_shadow(100, 2, rng).shadows
    assert set(one.train.tolist()) != set(two.train.tolist())


def test_the_generator_alone_decides():
    one, two, other = (victim_shadow(100, 1, Generator().manual_seed(seed)).victim.train for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@given(n=st.integers(0, 200), half=st.integers(1, 16), seed=seeds)
def test_every_row_is_in_exactly_half_of_the_models(n, half, seed):
    membership = in_out(n, 2 * half, Generator().manual_seed(seed))
    assert membership.shape == (2 * half, n)
    assert membership.dtype == torch.bool
    assert (membership.sum(0) == half).all()


def test_in_out_favours_no_model(rng):
    # Each model has half of 4000 rows give or take: five standard deviations are 158.
    assert (in_out(4000, 8, rng).sum(1) - 2000).abs().max() < 158


@pytest.mark.parametrize("models", [-2, 0, 1, 5])
def test_an_odd_number_of_models_is_refused(models, rng):
    with pytest.raises(WrongInput, match=r"^models: .* must be an even number"):
        in_out(10, models, rng)


def test_too_little_to_split_is_refused(rng):
    with pytest.raises(WrongInput, match=r"^data: 7 rows .* at least 8"):
        victim_shadow(7, 5, rng)
    with pytest.raises(WrongInput, match=r"^shadows: -1"):
        victim_shadow(100, -1, rng)


@given(members=st.integers(1, 60), others=st.integers(10, 90), seed=st.integers(0, 100))
def test_without_shadows_all_other_rows_are_asked_about(members, others, seed):
    split = split_trained(members + others, members, 0, Generator().manual_seed(seed))
    tenth = others // 10
    assert split.shadows == () and split.victim.train.tolist() == list(range(members))
    assert sizes(split.victim) == (members, tenth, others - tenth)
    outside = torch.cat([split.victim.validation, split.victim.test])
    assert sorted(outside.tolist()) == list(range(members, members + others))


def test_shadows_take_half_of_the_rows_that_a_trained_victim_did_not_see(rng):
    split = split_trained(300, 100, 3, rng)
    assert sizes(split.victim) == (100, 20, 90) and [sum(sizes(part)) for part in split.shadows] == [90] * 3
    assert not torch.isin(rows(split.victim), torch.cat([rows(part) for part in split.shadows])).any()


@pytest.mark.parametrize(("shadows", "least"), [(0, 10), (1, 17)])
def test_too_few_rows_outside_the_members_are_refused(shadows, least, rng):
    split_trained(50 + least, 50, shadows, rng)
    with pytest.raises(WrongInput, match=f"^data: {least - 1} rows lie outside the members"):
        split_trained(50 + least - 1, 50, shadows, rng)
    with pytest.raises(WrongInput, match=r"^data: all 50 rows are members, as if train_size were missing"):
        split_trained(50, 50, shadows, rng)
