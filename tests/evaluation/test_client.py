"""What the attacker of a client is told, and nothing else."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from secateur import tree
from secateur.config import inversion
from secateur.errors import WrongInput
from secateur.evaluation.client import AttackedClient, check_shape, scale
from secateur.interfaces import Batch, Knowledge, Weights

IG = inversion("ig:iterations=1").make()


@pytest.fixture
def client():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).eval()
    zero = torch.zeros(1, 1, 1)
    return AttackedClient(net, tree.state_of(net), Knowledge(net, (1, 4, 4), 3, zero, zero + 1, batch_size=2))


@pytest.fixture
def batch(rng):
    return Batch(torch.rand(2, 1, 4, 4, generator=rng), torch.tensor([2, 0]))


def seen(client, batch):
    knowledge, views = client.show_targets(IG, [batch], torch.Generator())
    return knowledge, views[0][0]


def test_labels_and_statistics_are_told_only_where_that_was_asked(client, batch):
    knowledge, _ = seen(client, batch)
    assert knowledge.labels is None and knowledge.statistics is None and knowledge.compression is None
    assert client.knows == "2 examples an update, how pixels become inputs"
    told = replace(client, tells_labels=True, tells_statistics=True)
    knowledge, _ = seen(told, batch)
    assert knowledge.labels.tolist() == [[2, 0]]
    features = client.net[0](batch.inputs)
    torch.testing.assert_close(knowledge.statistics[0]["1.mean"], features.mean((0, 2, 3)))
    assert "the labels" in told.knows and "the batch's BatchNorm statistics" in told.knows


def test_weights_are_sent_with_steps_and_rate_told(client, batch):
    sends = replace(client, sends_weights=True, knowledge=replace(client.knowledge, local_steps=3, learning_rate=0.1))
    assert isinstance(seen(sends, batch)[1].update, Weights)
    assert sends.sends == "weights after 3 local steps" and "the client's steps and learning rate" in sends.knows
    with pytest.raises(WrongInput, match="learning_rate: must be given"):
        seen(replace(sends, knowledge=client.knowledge), batch)


def test_pictures_and_their_scale():
    for shape in ((446,), (2, 8, 8), (1, 0, 8)):
        with pytest.raises(WrongInput, match="data: d has examples of the shape"):
            check_shape("data", "d", shape)
    pixels = torch.rand(2, 3, 4, 4)
    assert [value.flatten().tolist() for value in scale([], [], pixels)] == [[0.0] * 3, [1.0] * 3]
    for mean, std, field in (([], [], "data"), ([0.5], [0.5], "mean"), ([0.5] * 3, [0.0] * 3, "mean")):
        with pytest.raises(WrongInput, match=field):
            scale(mean, std, pixels * 2 - 1)
