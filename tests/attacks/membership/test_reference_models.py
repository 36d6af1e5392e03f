import pytest
import torch
from tables import rng, rows, table

from secateur.attacks.membership import reference_models
from secateur.attacks.membership.reference_models import average, content, in_out_of
from secateur.attacks.membership.thresholds import shadow_sides
from secateur.interfaces import Batch, InOut, Shadow


def test_a_rows_key_is_its_content_not_its_place_or_layout():
    images = torch.randn(3, 2, 4, 4, generator=rng())
    keys = content(images)
    assert len(set(keys)) == 3
    assert content(images.flip(0)) == keys[::-1]
    assert content(images.contiguous(memory_format=torch.channels_last)) == keys


def test_an_average_over_the_chosen_models_and_nan_over_none():
    values = torch.tensor([[[1.0, 2.0]], [[3.0, 9.0]]])  # (M, Q, N)
    chosen = torch.tensor([[True, False], [True, False]])
    found = average(values, chosen)
    assert found.shape == (1, 2) and float(found[0, 0]) == 2 and found[0, 1].isnan()


def test_samples_stay_on_their_side_and_under_the_cap(monkeypatch):
    monkeypatch.setattr(reference_models, "ROWS", 12)
    membership = torch.arange(40).expand(2, -1) % 2 == torch.tensor([[0], [1]])
    models = InOut([table(0.5), table(0.6)], rows(*range(40)), membership)
    for box, batch, truth in shadow_sides(models, 12, rng()):
        row = batch.inputs[:, 0].long()
        assert batch.size == 3
        assert (membership[models.boxes.index(box), row] == truth).all()
    shadow = Shadow(table(0.5), rows(*range(20)), rows(*range(20, 40)))
    sampled = in_out_of([shadow], rng())
    assert sampled.pool.size == 12
    assert torch.equal(sampled.membership[0], sampled.pool.inputs[:, 0] < 20)


def test_in_out_models_are_their_own_design():
    models = InOut([table(0.5)], rows(0), torch.tensor([[True]]))
    assert in_out_of(models, rng()) is models


@pytest.mark.parametrize("seed", range(3))
def test_a_row_that_two_shadows_hold_counts_once(seed):
    order = torch.randperm(10, generator=rng(seed))
    first = Shadow(table(0.5), rows(*order[:5].tolist()), rows(*order[5:].tolist()))
    second = Shadow(table(0.5), rows(*order[3:8].tolist()), rows(*order[:3].tolist()))
    found = in_out_of([first, second], rng())
    assert sorted(found.pool.inputs[:, 0].tolist()) == list(range(10))
    inside = {int(x): tuple(m) for x, m in zip(found.pool.inputs[:, 0], found.membership.T.tolist(), strict=True)}
    assert all(inside[int(row)] == (place < 5, 3 <= place < 8) for place, row in enumerate(order))


def test_labels_travel_with_their_rows():
    inputs, labels = torch.randn(6, 2, generator=rng()), torch.arange(6)
    found = in_out_of([Shadow(table(0.5), Batch(inputs[:3], labels[:3]), Batch(inputs[3:], labels[3:]))], rng())
    for row, label in zip(found.pool.inputs, found.pool.labels, strict=True):
        assert torch.equal(row, inputs[label])
