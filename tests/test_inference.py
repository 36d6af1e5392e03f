import pytest
import torch

from secateur.errors import WrongInput
from secateur.inference import probabilities
from secateur.interfaces import BlackBox


def answering(rows, **options):
    return BlackBox(lambda inputs: torch.tensor(rows), **options)


def test_probabilities_are_passed_on_as_they_are():
    rows = [[0.25, 0.75], [1.0, 0.0]]
    assert probabilities(answering(rows), torch.zeros(2, 1)).tolist() == rows
    rounded = [[0.3333, 0.3333, 0.3333]]
    assert probabilities(answering(rounded), torch.zeros(1, 1)).shape == (1, 3)


@pytest.mark.parametrize("rows", [[[0.5, 0.6]], [[1.5, -0.5]], [[float("nan"), 1.0]], [[2.0, 1.0]]])
def test_what_is_no_probability_is_refused(rows):
    with pytest.raises(WrongInput, match="sum to one"):
        probabilities(answering(rows), torch.zeros(1, 1))


@pytest.mark.parametrize("rows", [[0.5, 0.5], [[0.5, 0.5]] * 3])
def test_one_row_an_input(rows):
    with pytest.raises(WrongInput, match="one row an input"):
        probabilities(answering(rows), torch.zeros(2, 1))


def test_labels_only_says_which_attacks_can_run():
    with pytest.raises(WrongInput, match="correctness"):
        probabilities(answering([[1.0, 0.0]], labels_only=True), torch.zeros(1, 1))
