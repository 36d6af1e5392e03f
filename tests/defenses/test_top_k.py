"""Top-k by hand."""

import pytest
import torch

from secateur.defenses.top_k import TopK
from secateur.errors import WrongInput


def test_the_largest_of_every_tensor_stay_by_hand():
    grads = {"w": torch.tensor([[0.1, -5.0, 0.3, 0.2], [4.0, 0.0, -0.6, 0.5]]), "b": torch.tensor([1.0, -1.0])}
    sent, state = TopK(keep=0.25)(grads, {}, None)
    assert sent["w"].tolist() == [[0, -5, 0, 0], [4, 0, 0, 0]]
    assert sent["b"].tolist() == [1, 0]  # 2 - int(1.5) = 1 stays, the earlier of two equal ones
    assert state == {}


def test_eighty_per_cent_are_pruned_as_the_paper_does_and_ninety_five_in_table_7(rng):
    grads = {"w": torch.randn(100, 10, generator=rng)}
    for keep, number in ((0.2, 200), (0.05, 50), (1.0, 1000)):
        sent = TopK(keep).compress(grads)["w"]
        assert int((sent != 0).sum()) == number
        assert sent.abs()[sent != 0].min() >= grads["w"].abs()[sent == 0].max() if number < 1000 else True


@pytest.mark.parametrize("keep", [0, -0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(keep):
    with pytest.raises(WrongInput, match=r"keep: .* is not allowed"):
        TopK(keep)
