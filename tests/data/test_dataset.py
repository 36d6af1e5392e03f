import dataclasses

import numpy as np
import pytest
import torch

from secateur.data.dataset import Dataset, normalise_bytes
from secateur.errors import WrongInput


def make(**changes):
    fields = {"name": "mine", "inputs": torch.zeros(4, 3), "labels": torch.tensor([0, 1, 2, 0]), "classes": 3}
    return Dataset(**(fields | {"train_size": 3} | changes))


def test_a_good_one_gives_its_batch_and_shape():
    data = make(writers=torch.tensor([5, 5, 7, 7]))
    assert data.input_shape == (3,)
    assert data.batch.size == 4
    assert data.batch.take(torch.tensor([0, 2])).labels.tolist() == [0, 2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.classes = 4


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("labels", {"labels": torch.tensor([0, 1, 3, 0])}),
        ("labels", {"labels": torch.tensor([0, -1, 2, 0])}),
        ("labels", {"labels": torch.tensor([0, 1, 2])}),
        ("labels", {"labels": torch.tensor([0.0, 1, 2, 0])}),
        ("inputs", {"inputs": torch.tensor([[0.0, 1, 2]] * 3 + [[0, float("nan"), 1]])}),
        ("inputs", {"inputs": torch.tensor([[0.0, 1, 2]] * 3 + [[0, float("inf"), 1]])}),
        ("inputs", {"inputs": torch.zeros(4, 3, dtype=torch.float64)}),
        ("inputs", {"inputs": torch.zeros(0, 3)}),
        ("writers", {"writers": torch.tensor([1, 2])}),
        ("train_size", {"train_size": 5}),
        ("train_size", {"train_size": 0}),
    ],
)
def test_wrong_fields_are_named(field, changes):
    with pytest.raises(WrongInput) as caught:
        make(**changes)
    assert caught.value.field == field


def test_normalised_is_per_channel_and_can_be_undone():
    pixels = np.arange(2 * 3 * 2 * 2, dtype=np.uint8).reshape(2, 3, 2, 2) * 10
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.125)
    inputs = normalise_bytes(pixels, mean, std)
    assert inputs.dtype == torch.float32
    assert inputs[1, 2, 0, 1].item() == pytest.approx((pixels[1, 2, 0, 1] / 255 - 0.3) / 0.125, abs=1e-6)
    back = (inputs * torch.tensor(std).view(1, 3, 1, 1) + torch.tensor(mean).view(1, 3, 1, 1)) * 255
    assert torch.equal(back.round().to(torch.uint8), torch.from_numpy(pixels))


def test_at_most_so_many_rows_in_their_order(rng):
    data = make(inputs=torch.arange(12.0).view(4, 3), writers=torch.tensor([5, 6, 7, 8]))
    assert data.limit_rows(4, rng) is data
    part = data.limit_rows(3, rng)
    kept = (part.writers - 5).tolist()
    assert len(kept) == 3 and kept == sorted(set(kept))
    assert torch.equal(part.inputs, data.inputs[kept]) and torch.equal(part.labels, data.labels[kept])
    assert part.train_size == sum(row < 3 for row in kept) and part.classes == 3
