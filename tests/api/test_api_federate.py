"""`secateur.federate` on a user's own model and tensors."""

import pytest
import torch
from torch import nn

import secateur


@pytest.mark.parametrize("terms", [{}, {"submodels": "mapp-fl", "large_clients": 0}])
def test_a_parameter_that_is_not_known_is_one_sentence(terms):
    train = torch.rand(8, 1, 4, 4), torch.arange(8) % 2
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    sentence = "^iterations: is not a parameter of federate; further ones here: .*evaluate_every"
    with pytest.raises(secateur.WrongInput, match=sentence):
        secateur.federate(net, train, clients=2, rounds=1, iterations=2, **terms)
