"""FedDST's rules, computed by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.federated.base_pruning import count_removed
from secateur.federated.base_pruning.feddst import FedDST, erk


def test_densities_by_hand():
    # Sides over product: a (4 + 2) of 8, b (10 + 8) of 80. At rate .5 44 of 88 stay: scale 44 / 24 = 1.833, so that
    # a would need 11 of 8 and is dense; b takes the other 36.
    assert erk({"a": torch.ones(4, 2), "b": torch.ones(10, 8)}, 0.5) == {"a": 8, "b": 36}
    # At rate .9: 88 - 79 = 9 stay, scale 9 / 24: a 2.25, b 6.75: the larger remainder is rounded up.
    assert erk({"a": torch.ones(4, 2), "b": torch.ones(10, 8)}, 0.9) == {"a": 2, "b": 7}
    # A convolution counts its kernel's sides: (2 + 1 + 3 + 3) of 18 and (2 + 20) of 40; 58 - 43 = 15, scale 15 / 31.
    assert erk({"conv": torch.ones(2, 1, 3, 3), "linear": torch.ones(2, 20)}, 0.75) == {"conv": 4, "linear": 11}


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    rate=st.floats(0, 0.99),
)
def test_the_counts_are_exact_and_no_layer_has_more_than_all(shapes, rate):
    mask = {str(number): torch.ones(shape) for number, shape in enumerate(shapes)}
    total = sum(keep.numel() for keep in mask.values())
    counts = erk(mask, rate)
    assert sum(counts.values()) == total - count_removed(rate, total)
    assert all(0 <= counts[name] <= keep.numel() for name, keep in mask.items())


# One layer of 10 weights, 8 of which stay at rate .2; alpha .25 prunes 2 of them and grows 2.
RULE = FedDST(rate=0.2, alpha=0.25, every=15)
WEIGHTS = {"w": torch.tensor([[5.0, -1.0, 2.0, 0.0, -4.0], [3.0, 0.5, 0.0, 6.0, -7.0]]), "b": torch.tensor([1.0, 2.0])}
MASK = {"w": torch.tensor([[1, 1, 1, 0, 1], [1, 1, 0, 1, 1]]).bool()}


def test_a_client_prunes_the_smallest_and_grows_the_steepest():
    gradient = {"w": torch.tensor([[9.0, 0.1, 9.0, -3.0, 9.0], [9.0, 0.2, 1.0, 9.0, 9.0]]), "b": torch.ones(2)}
    found = RULE.local(WEIGHTS, gradient, MASK, round=15)["w"]
    # .5 and -1 go; of the four that are out the gradients are -3, 1, .1, .2: the two that were out before come in.
    assert found.tolist() == [[True, False, True, True, True], [True, False, True, True, True]]
    grown = found & ~MASK["w"]
    assert bool((WEIGHTS["w"][grown] == 0).all())  # what is new begins at 0


def test_what_was_just_pruned_may_come_back_at_once():
    gradient = {"w": torch.tensor([[0.0, 8.0, 0.0, 1.0, 0.0], [0.0, 9.0, 2.0, 0.0, 0.0]]), "b": torch.ones(2)}
    assert torch.equal(RULE.local(WEIGHTS, gradient, MASK, round=30)["w"], MASK["w"])


def test_a_layer_without_a_share_to_prune_stays_as_it_is():
    rule = FedDST(rate=0.2, alpha=0.01)  # 1 % of 8 weights is none
    assert torch.equal(rule.local(WEIGHTS, WEIGHTS, MASK, round=15)["w"], MASK["w"])


def test_the_server_keeps_the_largest_of_every_layer_and_no_other_values():
    # Two clients of 1 and 3 examples: sum n m w / sum n m where both or one keep a weight, computed outside.
    first, second = torch.tensor([4.0, 1.0, 0.0, 8.0, 2.0]), torch.tensor([4.0, 0.0, -3.0, 4.0, 2.0])
    masks = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 1]])
    share = torch.tensor([[1.0], [3.0]]) * masks
    average = (share * torch.stack([first, second])).sum(0) / share.sum(0)
    assert average.tolist() == [4.0, 1.0, -3.0, 5.0, 2.0]
    weights, mask = FedDST(rate=0.2).adjust({"w": average[None]}, {"w": masks[:1].bool()}, None, 15, torch.Generator())
    assert mask["w"].tolist() == [[True, False, True, True, True]]
    assert weights["w"].tolist() == [[4.0, 0.0, -3.0, 5.0, 2.0]]


def test_it_readjusts_every_fifteen_rounds():
    assert [number for number in range(1, 46) if FedDST().adjusts(number)] == [15, 30, 45]
