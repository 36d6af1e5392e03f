"""Averages by hand."""

import pytest
import torch

from secateur.errors import WrongInput
from secateur.federated.averaging import Average, alive_of

OLD = {"w": torch.tensor([9.0, 9.0, 9.0])}
ONE, TWO = {"w": torch.tensor([2.0, 4.0, 0.0])}, {"w": torch.tensor([6.0, 0.0, 0.0])}
SENT = [{"w": torch.tensor([True, True, False])}, {"w": torch.tensor([True, False, False])}]


@pytest.mark.parametrize(
    "how, wanted",
    [
        ("weighted", [5.0, 1.0, 0.0]),  # (1 * 2 + 3 * 6) / 4, (1 * 4 + 3 * 0) / 4: the withheld zero counts
        ("uniform", [4.0, 2.0, 0.0]),
        ("coverage", [5.0, 4.0, 9.0]),  # the second by the one that sent it; the third nobody sent
    ],
)
@pytest.mark.parametrize("asked", [False, True])
def test_by_hand(how, wanted, asked):
    average = Average(how, OLD)
    alive = torch.tensor(True) if asked else None
    average.add(ONE, 1, SENT[0], alive)
    average.add(TWO, 3, SENT[1], alive)
    if asked:  # one that went astray changes nothing
        broken = {"w": torch.tensor([torch.nan, torch.inf, 1.0])}
        average.add(broken, 100, None, alive_of(broken))
    assert average.result(OLD)["w"].tolist() == wanted


@pytest.mark.parametrize("how", ["weighted", "uniform", "coverage"])
@pytest.mark.parametrize("own", [False, True])
def test_many_at_once_are_one_by_one(how, own):
    rng = torch.Generator().manual_seed(0)
    old = {"w": torch.randn(4, 3, generator=rng).double(), "b": torch.randn(3, generator=rng).double()}
    sent = {name: torch.rand((5, *value.shape), generator=rng) > 0.6 for name, value in old.items()}
    values = {name: torch.randn(where.shape, generator=rng).double() * where for name, where in sent.items()}
    values["w"][2, 0, 0], values["b"][3] = torch.nan, torch.inf
    alive, sizes = torch.tensor([True, True, False, False, True]), torch.tensor([1.0, 4, 2, 7, 3]).double()
    one, many = (Average(how, old, by_entry=own) for _ in range(2))
    for i in range(5):
        given = ({name: part[name][i] for name in old} for part in (values, sent))
        one.add(next(given), int(sizes[i]), next(given), alive[i])
    many.add_stacked(values, sizes, sent, alive)
    assert float(many.weight) == float(one.weight)
    for name, value in one.result(old).items():
        torch.testing.assert_close(many.result(old)[name], value, rtol=0, atol=1e-12)


def test_two_clients_one_withholds():
    """PriPrune's trap 4: printed w / 2, normalised by coverage w."""
    w, zero, old = {"w": torch.tensor([3.0])}, {"w": torch.tensor([0.0])}, {"w": torch.tensor([7.0])}
    for how, wanted in (("weighted", 1.5), ("uniform", 1.5), ("coverage", 3.0)):
        average = Average(how, old)
        average.add(w, 1, {"w": torch.tensor([True])})
        average.add(zero, 1, {"w": torch.tensor([False])})
        assert float(average.result(old)["w"]) == wanted


@pytest.mark.parametrize("how", ["weighted", "uniform", "coverage"])
def test_nobody_leaves_the_old(how):
    assert Average(how, OLD).result(OLD)["w"].tolist() == [9.0, 9.0, 9.0]
    average = Average(how, OLD)
    average.add(ONE, 1, None, torch.tensor(False))
    assert average.result(OLD)["w"].tolist() == [9.0, 9.0, 9.0]


def test_finite_or_not():
    assert bool(alive_of(ONE))
    for wrong in (torch.nan, torch.inf, -torch.inf):
        assert not bool(alive_of(ONE | {"v": torch.tensor([1.0, wrong])}))
    assert not bool(alive_of({"v": torch.tensor([torch.inf, -torch.inf])}))


def test_unknown():
    with pytest.raises(WrongInput, match="weighted"):
        Average("weigthed", OLD)
