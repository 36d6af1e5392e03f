"""PruneFL's rules, computed by hand."""

import pytest
import torch
from torch import nn

from secateur import tree
from secateur.errors import WrongInput
from secateur.federated.base_pruning.prunefl import (
    COMMUNICATION,
    PER_PLACE,
    PruneFL,
    equal,
    greedy,
    read_times,
    times_of,
)
from secateur.federated.client_training import binary_cross_entropy
from secateur.interfaces import Batch
from secateur.models.small import conv_2
from secateur.models.vgg import vgg_11

ANY = torch.Generator()
# Two layers of 5 weights, 4 and 3 of them kept: at rate .3 7 stay. Half of the kept are candidates at round 0.
WEIGHTS = {
    "a": torch.tensor([[4.0, -1.0, 3.0, 0.7, 2.0]]),
    "b": torch.tensor([[5.0, 0.2, -6.0, 0.1, 0.9]]),
    "bias": torch.tensor([9.0]),
}
MASK = {"a": torch.tensor([[1, 1, 1, 0, 1]]).bool(), "b": torch.tensor([[1, 1, 1, 0, 0]]).bool()}
RULE = PruneFL(rate=0.3, fraction=0.5, every=1, halving=1, iterations=1, seconds=(1.0, 2.0))


def adjusted(rule, found, mask=MASK, number=0):
    weights, kept = rule.adjust(WEIGHTS, mask, {name: torch.tensor([row]) for name, row in found.items()}, number, ANY)
    assert weights is WEIGHTS  # so that what comes back resumes the value that the server has
    return [kept[name][0].int().tolist() for name in mask]


def test_the_rate_is_held_by_the_best_candidates():
    # Of a the two smallest kept (-1, 2) and the pruned one are candidates, of b the smallest (.2) and two pruned ones;
    # 4, 3 and 5, -6 stay, so 3 come in. Squares / seconds: a 3, 5, 1; b 8 / 2, 1 / 2, 9 / 2.
    found = {"a": [0.0, 3.0, 0.0, 5.0, 1.0], "b": [0.0, 8.0, 0.0, 1.0, 9.0]}
    assert adjusted(RULE, found) == [[1, 0, 1, 1, 0], [1, 1, 1, 0, 1]]
    # Without the time of a layer b would take the place of a's: 8 and 9 before 5, then 5.
    cheap = PruneFL(rate=0.4, fraction=0.5, every=1, halving=1, iterations=1, seconds=(1.0, 1.0))
    assert adjusted(cheap, found) == [[1, 0, 1, 0, 0], [1, 1, 1, 0, 1]]


def test_the_share_of_candidates_halves():
    found = {"a": [0.0, 0.0, 0.0, 5.0, 0.0], "b": [0.0, 0.0, 0.0, 0.0, 9.0]}
    assert adjusted(RULE, found, number=0) == [[1, 1, 1, 1, 0], [1, 0, 1, 0, 1]]  # one of the equal zeros: the first
    # A round later a quarter: a's -1 alone, none of b's three. 6 stay, and the best of all the others comes in.
    assert adjusted(RULE, found, number=1) == [[1, 0, 1, 1, 1], [1, 1, 1, 0, 0]]


def test_a_mask_that_keeps_too_much_reaches_the_rate_at_once():
    whole = {name: torch.ones_like(keep) for name, keep in MASK.items()}
    rule = PruneFL(rate=0.6, every=1, iterations=1, seconds=(1.0, 1.0))
    found = {"a": [0.0] * 5, "b": [1.0] * 5}
    kept = adjusted(rule, found, whole)
    assert sum(map(sum, kept)) == 4
    assert kept == [[1, 0, 1, 0, 0], [1, 0, 1, 0, 0]]  # the largest of each, because 60 % of each are candidates


def test_a_layer_never_loses_its_largest_weight():
    mask = {"a": torch.tensor([[0, 0, 0, 0, 1]]).bool(), "b": torch.ones(1, 5).bool()}
    rule = PruneFL(rate=0.7, every=1, iterations=1, seconds=(1.0, 1.0))
    assert adjusted(rule, {"a": [0.0] * 5, "b": [1.0] * 5}, mask) == [[0, 0, 0, 0, 1], [1, 0, 1, 0, 0]]


def test_its_own_rule_takes_candidates_while_they_raise_the_ratio():
    # 4, 3 and 5, -6 stay with squares 1 each: sum 4, seconds 1 + 1 + 2 + 2 = 6, ratio 2 / 3. Candidates by ratio: 9 / 2
    # of b comes in (13 / 8 = 1.6), then 3 of a (16 / 9 = 1.8); the next, 1 of a and 2 / 2 of b, are below: stop.
    rule = PruneFL(fraction=0.5, hold="time", every=1, halving=1, iterations=1, seconds=(1.0, 2.0))
    found = {"a": [1.0, 1.0, 1.0, 3.0, 0.0], "b": [1.0, 2.0, 1.0, 0.0, 9.0]}
    assert adjusted(rule, found) == [[1, 0, 1, 1, 0], [1, 0, 1, 0, 1]]
    # The constant time of a round lowers the ratio: 16 / 19 is below 1, so that both of these come in.
    rule = PruneFL(fraction=0.5, hold="time", every=1, halving=1, iterations=1, seconds=(1.0, 2.0), constant=10.0)
    assert adjusted(rule, found) == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]


def test_the_greedy_rule_is_the_loop_of_the_paper():
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        gained, spent = torch.rand(2, 40, generator=rng, dtype=torch.float64)
        kept = torch.rand(40, generator=rng) < 0.4
        chosen, total, time = kept.clone(), gained[kept].sum(), 0.5 + spent[kept].sum()
        for row in sorted((~kept).nonzero()[:, 0].tolist(), key=lambda r: -float(gained[r] / spent[r])):
            if gained[row] / spent[row] <= total / time:
                break
            chosen[row], total, time = True, total + gained[row], time + spent[row]
        assert torch.equal(greedy(kept, gained, spent, 0.5), chosen)


def test_the_loss_is_binary_for_every_class():
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    assert float(binary_cross_entropy(logits, torch.tensor([0, 1]))) == pytest.approx(0.6931472)


def test_it_adjusts_every_fifty_rounds():
    assert [number for number in range(1, 151) if PruneFL().adjusts(number)] == [50, 100, 150]


def test_the_initial_pruning_is_one_clients_training():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    rng = torch.Generator().manual_seed(0)
    state = {name: torch.randn(value.shape, generator=rng) * 0.3 for name, value in net.state_dict().items()}
    inputs = torch.randn(40, 6, generator=rng)
    inputs[:, 3:] = 0  # nothing to learn from these
    batch = Batch(inputs, (inputs[:, 0] > 0).long())
    rule = PruneFL(every=20, iterations=400, samples=30)
    mask = rule.start(net, state, batch, torch.Generator().manual_seed(1))
    assert round(1 - tree.share_kept(mask), 9) == 19 / 64  # int(.3 * 64)
    assert int(mask["0.weight"][:, :3].sum()) > int(mask["0.weight"][:, 3:].sum())
    changed = Batch(torch.cat([inputs[:30], 100 * inputs[30:]]), batch.labels)  # beyond its samples
    again = rule.start(net, state, changed, torch.Generator().manual_seed(1))
    assert all(torch.equal(keep, again[name]) for name, keep in mask.items())


def test_the_times_that_were_measured():
    with torch.device("meta"):
        conv, vgg = conv_2(classes=10), vgg_11()
    found = times_of(conv, (1, 28, 28))
    assert found.weights[0] == COMMUNICATION and found.constant == pytest.approx(6.2464)
    assert found.weights[1] == pytest.approx(5 * 7.09885e-6 + 5.561621e-6)
    assert len(times_of(vgg, (3, 32, 32)).weights) == 11
    shapes = [value.shape for name, value in conv.named_parameters() if name.endswith("weight")]
    assert read_times(shapes) == found and read_times(shapes[:-1]) is None


def test_other_networks_are_timed_by_their_places_and_without_them_all_weights_cost_the_same():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    found = times_of(net, (1, 4, 4))
    assert found.weights == pytest.approx((COMMUNICATION + 20 * PER_PLACE, COMMUNICATION + 5 * PER_PLACE))
    assert found.constant == 0 and PruneFL().bound(net, (1, 4, 4)).seconds == found.weights
    assert equal(2).weights == (COMMUNICATION, COMMUNICATION)
    assert PruneFL(seconds=(1.0,)).bound(net, (1, 4, 4)).seconds == (1.0,)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(WrongInput, match="seconds: has 1 layers"):
        adjusted(PruneFL(every=1, iterations=1, seconds=(1.0,)), {"a": [0.0] * 5, "b": [0.0] * 5})
    for fields in ({"hold": "both"}, {"fraction": 0.0}, {"every": 0}, {"iterations": 10}, {"seconds": (0.0,)}):
        with pytest.raises(WrongInput):
            PruneFL(**fields)
