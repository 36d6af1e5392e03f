"""Layerwise inversion: hand-computed equations of one layer, and pictures through ReLU, max-pooling and Adam."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secateur.attacks.inversion.layerwise import (
    Layerwise,
    factorise,
    find_scale,
    prepare_layers,
    read_bounds,
    read_features,
)
from secateur.attacks.inversion.layerwise_network import PooledLayer, read_network
from secateur.attacks.inversion.layerwise_solver import (
    LayerEvidence,
    condition,
    input_slopes,
    likelihood_of_gradient,
    likelihood_of_outputs,
    truncate,
    weight_gradient,
)
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.data.embedded import digits
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Knowledge, Optimiser, ServerView
from secateur.training.optimisers import LocalSteps
from secateur.tree import state_of
from silent_watch import Silent


class Small(nn.Module):
    """Two convolutions with functions for ReLU and flattening, as in Flower's first app."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 24, 3), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(96, 48), nn.Linear(48, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = F.relu(self.conv2(x))
        return self.fc2(F.relu(self.fc1(x.view(-1, 96))))


def scene(make=Small, optimiser=None, row=0, **more):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = make().eval()
    data = digits()
    batch = Batch(data.inputs[row : row + 1].float(), data.labels[row : row + 1])
    mean, std = torch.full((1, 1, 1), 0.3053), torch.full((1, 1, 1), 0.3760)
    known = Knowledge(net, (1, 8, 8), 10, mean, std, learning_rate=0.01, **more)
    state = state_of(net)
    if optimiser is None:
        return ServerView(state, gradient_update(net, state, batch)), known, batch
    turn = LocalSteps(((0,),), (0.01,), optimiser)
    return ServerView(state, weights_update(net, state, batch, turn=turn)), replace(known, optimiser=optimiser), batch


def one_layer():
    """Two outputs of a 1 x 2 input and kernels of one pixel, pooled: y = w x, cells {x0, x1}."""
    weight = torch.tensor([1.0, 2.0]).double().view(2, 1, 1, 1)
    return PooledLayer("conv", weight, torch.zeros(2).double(), (1, 1, 2), pool=(1, 2), rectified=True)


def evidence_of(slopes):
    free = torch.zeros(2, 1).double()
    outputs = torch.tensor([3.0, 6.0]).double()
    return LayerEvidence(outputs, torch.zeros(2).double(), torch.tensor(slopes).double(), free, free)


def test_a_layer_pools_the_largest_of_a_cell() -> None:
    assert one_layer().forward(torch.tensor([[1.0, 3.0], [-1.0, -2.0]]).double()).tolist() == [[3, 6], [0, 0]]


def test_the_gradient_of_a_routing_is_that_by_hand() -> None:
    layer, x = one_layer(), torch.tensor([1.0, 3.0]).double()
    routing = torch.tensor([[0.0, 1.0], [0.5, 0.5]]).double()
    # dL/dw of the first output is 2 * x1 = 6, of the second 1 * (x0 + x1) / 2 = 2
    assert weight_gradient(layer, x, evidence_of([2.0, 1.0]), routing).flatten().tolist() == [6, 2]
    # dL/dx0 = 1/2 * 1 * 2, dL/dx1 = 1 * 2 * 1 + 1/2 * 1 * 2
    assert input_slopes(layer, evidence_of([2.0, 1.0]), routing).tolist() == [1, 3]


def test_the_gradient_tells_the_position_by_hand() -> None:
    layer, x = one_layer(), torch.tensor([1.0, 3.0]).double()
    routing = torch.full((2, 2), 0.5).double()
    evidence = evidence_of([2.0, 1.0])
    gap = torch.tensor([[6.0], [1.0]]).double() - weight_gradient(layer, x, evidence, routing)
    likely = likelihood_of_gradient(layer, x, evidence, routing, gap, torch.ones(2, 1).double())
    # -(6 - 2 x)^2 / 2 and -(1 - x)^2 / 2 differ by 8 for the first output and by 2 for the second
    assert (likely[:, 1] - likely[:, 0]).tolist() == [8, -2]


def test_the_output_tells_the_position_by_hand() -> None:
    likely = likelihood_of_outputs(torch.tensor([[1.0, 0.0]]), torch.tensor([1.0]), torch.tensor(1.0))
    below = math.log(0.5 * (1 + math.erf(1 / math.sqrt(2))))
    assert likely[0].tolist() == pytest.approx([below, -0.5 + math.log(0.5)])


def test_intervals_become_equations() -> None:
    low, high = torch.tensor([2.0, 0.0]).double(), torch.tensor([2.0, math.inf]).double()
    values, variances = truncate(torch.zeros(2).double(), torch.ones(2).double(), low, high)
    assert values[0] == 2 and variances[0] == 1  # an exact value
    slope = math.sqrt(2 / math.pi)  # of log Phi at 0, and its curvature is the square
    assert float(values[1]) == pytest.approx(1 / slope) and float(variances[1]) == pytest.approx(1 / slope**2)


def test_both_forms_of_the_gaussian_are_equal() -> None:
    rng = torch.Generator().manual_seed(0)
    rows, values = torch.randn(3, 3, generator=rng).double(), torch.randn(3, generator=rng).double()
    variances = torch.full((3,), 0.1).double()
    wide = condition(rows, values, variances, rng).mean
    padded = torch.cat([rows, torch.zeros(3, 1).double()], 1)  # a fourth unknown that no equation holds
    torch.testing.assert_close(condition(padded, values, variances, rng).mean[:3], wide)
    by_hand = torch.linalg.solve(torch.eye(3).double() + 10 * rows.T @ rows, 10 * rows.T @ values)
    torch.testing.assert_close(wide, by_hand)


def test_factors_leave_out_open_entries_unless_nothing_else_is_known() -> None:
    rng = torch.Generator().manual_seed(0)
    d, x = (10.0 ** (3 * torch.rand(size, generator=rng, dtype=torch.float64)) for size in (40, 7))
    x[3] = 1e6  # all entries of this column are open
    matrix = torch.outer(d, x)
    limit = matrix.flatten().quantile(0.3)
    closed = matrix <= limit
    low, high = torch.where(closed, 0.95 * matrix, limit), torch.where(closed, 1.05 * matrix, torch.inf)
    _, found = factorise(low, high)
    known = closed.any(0)
    assert known.sum() >= 3 and not known[3]
    torch.testing.assert_close(found.values[known] / found.values[known][0], x[known] / x[known][0], rtol=0.01, atol=0)
    assert found.values[3] / found.values[known][0] > 0  # from the bounds that it has


def test_a_scale_is_found_between_the_points_of_the_grid() -> None:
    assert float(find_scale(lambda s: (s - 3.21).abs(), 1.0)) == pytest.approx(3.21, rel=1e-9)


@pytest.mark.parametrize("optimiser", [None, Optimiser("sgd", momentum=0.9)])
def test_features_of_the_first_linear(optimiser) -> None:
    view, known, batch = scene(optimiser=optimiser)
    network = read_network(known, view.sent)
    features, _, slopes = read_features(network, read_bounds(view, known), known.loss, batch.labels)
    inputs = batch.inputs.flatten(1).double()
    for layer in network.layers:
        inputs = layer.forward(inputs)
    leaf = inputs.clone().requires_grad_()
    net = known.net.double()
    F.cross_entropy(net.fc2(F.relu(net.fc1(leaf))), batch.labels).backward()
    known.net.float()
    torch.testing.assert_close(features, inputs[0], rtol=0.02, atol=1e-4)
    torch.testing.assert_close(slopes, leaf.grad[0], rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("optimiser", [None, Optimiser("sgd", momentum=0.9), Optimiser("adam")])
def test_pictures_come_back(optimiser) -> None:
    view, known, batch = scene(optimiser=optimiser)
    attack = Layerwise()
    attack.check(known, view)
    ((_, found),) = attack.reconstruct([[view]], known, [torch.Generator().manual_seed(0)], Silent())
    wanted, grey = known.pixels(batch.inputs), torch.full_like(batch.inputs, 0.5)
    error = (known.pixels(found.batch.inputs) - wanted).square().mean()
    assert error < (grey - wanted).square().mean() / 2 and found.batch.labels.equal(batch.labels)


def test_priors_of_later_layers_are_moments_of_pictures() -> None:
    view, known, _ = scene()
    first, second = prepare_layers(read_network(known, view.sent), known)
    assert not first.positive and second.positive and (second.prior.mean > 0).all()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(72, 10)), "Sigmoid"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)), "not followed by ReLU"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "needs a convolution"),
        (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 1), nn.Flatten()), "overlap"),
    ],
)  # fmt: skip
def test_refuses_other_networks(make, reason) -> None:
    view, known, _ = scene(make)
    with pytest.raises(WrongInput, match=reason):
        Layerwise().check(known, view)


def test_refuses_batches_and_several_steps() -> None:
    view, known, _ = scene()
    with pytest.raises(WrongInput, match="recovers one image"):
        Layerwise().check(replace(known, batch_size=2), view)
    view, known, _ = scene(optimiser=Optimiser("adam"))
    with pytest.raises(WrongInput, match="needs one local step"):
        Layerwise().check(replace(known, local_steps=3), view)
