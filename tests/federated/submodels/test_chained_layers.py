"""A chain of layers over many clients at once against vmap over one client's network."""

import pytest
import torch
from torch import nn, vmap

from secateur.federated.submodels.networks import Chain, Narrow, fits
from secateur.models.create import create
from secateur.models.mapp import Scaler, mapp_cnn


@pytest.mark.parametrize(("rate", "owns"), [(1.0, False), (0.5, True), (0.3, False)])
def test_losses_and_gradients_are_those_of_one_client_after_the_other(rate, owns, rng):
    net = mapp_cnn(4, (3, 9, 8), 5, rate).double()
    narrow = Narrow(net, rate, True, torch.device("cpu"))
    size = sum(value.numel() for value in net.parameters())
    flat = torch.randn(3, size, generator=rng, dtype=torch.float64).requires_grad_()
    inputs = torch.randn(3, 6, 3, 9, 8, generator=rng, dtype=torch.float64)
    labels = torch.randint(5, (3, 6), generator=rng)
    owned = torch.randint(2, (3, 5), generator=rng).double() if owns else None
    assert narrow.chain is not None
    found = narrow.losses(flat, inputs, labels, owned, ())
    exact = vmap(narrow.loss, in_dims=(0, 0, 0, 0 if owns else None))(flat, inputs, labels, owned)
    gradients = [torch.autograd.grad(losses.sum(), flat)[0] for losses in (found, exact)]
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-11)


def test_the_networks_of_the_paper_are_chains_and_residual_ones_are_not(rng):
    assert all(fits(create(f"mapp-cnn-{unit}", (3, 32, 32), 10, rng)) for unit in (8, 16, 32, 64))
    assert not fits(create("resnet18-w16", (3, 32, 32), 10, rng))


def _net(*layers):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Sequential(*layers), nn.Flatten(), nn.Linear(4, 2)
    )


def _hooked():
    layer = nn.ReLU()
    layer.register_forward_hook(lambda *_: None)
    return layer


def _twice():
    layer = nn.Conv2d(4, 4, 1)
    return nn.Sequential(layer, layer)


KNOWN = [nn.AvgPool2d(2), nn.MaxPool2d(2), Scaler(0.5), nn.Conv2d(4, 4, (1, 5), padding="same"), nn.Identity()]
UNKNOWN = [
    nn.Conv2d(4, 4, 3, padding=1, stride=2),
    nn.Conv2d(4, 4, 3),
    nn.Conv2d(4, 4, 2, padding=1),
    nn.Conv2d(4, 4, 3, padding=1, bias=False),
    nn.Conv2d(4, 4, 3, padding=1, groups=2),
    nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    nn.MaxPool2d(3),
    nn.MaxPool2d(2, padding=1),
    nn.BatchNorm2d(4, track_running_stats=False),  # without a ReLU behind it
    nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()),  # that sends its statistics
    nn.Dropout(),
    nn.GroupNorm(2, 4),
    _hooked(),
    _twice(),
]


@pytest.mark.parametrize(
    ("layer", "known"), [*((layer, True) for layer in KNOWN), *((layer, False) for layer in UNKNOWN)]
)
def test_what_is_not_known_is_left_to_vmap(layer, known):
    assert fits(_net(layer)) is known


@pytest.mark.parametrize("layer", KNOWN)
def test_a_layer_that_is_known_is_itself(layer, rng):
    net = _net(layer, nn.AdaptiveAvgPool2d(1)).double()
    flat = torch.cat([value.detach().flatten() for value in net.parameters()])
    inputs = torch.randn(2, 3, 3, 4, 6, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(
        Chain(net)(torch.stack([flat, flat]), inputs), torch.stack([net(each) for each in inputs])
    )
