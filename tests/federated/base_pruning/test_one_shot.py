"""Base prunings that are pruners used once, and random draws: scored at the server's model, redrawn by hand."""

import pytest
import torch
from torch import nn

from secateur.federated.base_pruning.one_shot import GraspOnce, NoPruning, RandomPruning, SnipOnce, SynFlowOnce
from secateur.interfaces import Batch

NET = nn.Linear(2, 2, bias=False)
BATCH = Batch(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))
RNG = torch.Generator()


def test_snip_scores_the_model_that_the_server_has_not_the_modules_own_tensors():
    # Both logits are 5 and 5: p = (.5, .5), dL/dz = (-.5, .5), dL/dW = dz x^T = ((-.5, -1), (.5, 1)).
    # |w g|: (.5 * 1, 1 * 2), (.5 * 5, 1 * 0): the two lowest go.
    state = {"weight": torch.tensor([[1.0, 2.0], [5.0, 0.0]])}
    assert SnipOnce(rate=0.5).start(NET, state, BATCH, RNG)["weight"].tolist() == [[False, True], [True, False]]


def test_synflow_needs_no_data():
    # R is the sum of all |w|: every dR/dw is 1, and the score is |w|.
    state = {"weight": torch.tensor([[1.0, -2.0], [5.0, 0.5]])}
    assert SynFlowOnce(rate=0.5).start(NET, state, BATCH, RNG)["weight"].tolist() == [[False, True], [True, False]]


def test_grasp_removes_the_largest_of_minus_w_times_hg():
    # Logits / 200; p = (.5, .5), so g = (-a, -2a, a, 2a) with a = .5 / 200, and H = h * (1, -1)(1, -1)^T (x) x x^T with
    # h = .25 / 200^2: Hg = h * 2 * -a * |x|^2 * (x, -x) = -c (1, 2, -1, -2). w * Hg = -c (1 * 1, 2 * 2, -5, 0): the
    # lowest, whose -w * Hg is largest, are the first two.
    state = {"weight": torch.tensor([[1.0, 2.0], [5.0, 0.0]])}
    assert GraspOnce(rate=0.5).start(NET, state, BATCH, RNG)["weight"].tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("rule", [SnipOnce(), SynFlowOnce(), GraspOnce(), NoPruning(), RandomPruning(fixed=True)])
def test_one_shot_is_one_shot(rule):
    assert not any(rule.adjusts(number) for number in range(1, 200))


def test_random_masks_are_drawn_anew_and_returning_weights_have_the_servers_values():
    net = nn.Linear(10, 10)
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    rule, rng = RandomPruning(every=5), torch.Generator().manual_seed(0)
    first = rule.start(net, state, BATCH, rng)
    weights, second = rule.adjust(state, first, None, 5, rng)
    back = second["weight"] & ~first["weight"]
    assert int(back.sum()) > 5 and rule.keeps_dropped
    assert torch.equal(weights["weight"][back], state["weight"][back])
    _, third = rule.adjust(state, second, None, 10, rng)
    assert not torch.equal(second["weight"], third["weight"])
