"""Adaptive attackers by hand."""

from dataclasses import replace

import pytest
import scenes
import torch
from torch import nn

from secateur import tree
from secateur.attacks.inversion import adaptive
from secateur.attacks.inversion.gradient_matching import GradientMatching, aim_at
from secateur.attacks.inversion.sgi import SGI
from secateur.attacks.inversion.updates import gradient_update, read_gradient
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Gradient, Knowledge, ServerView, Weights

UPDATE = {"a.weight": torch.tensor([0.0, 2.0, -3.0]), "b.weight": torch.tensor([1.0, 1.0]), "b.bias": torch.zeros(1)}


def test_support_is_what_is_not_zero():
    assert {k: v.tolist() for k, v in adaptive.support(UPDATE).items()} == {
        "a.weight": [False, True, True],
        "b.weight": [True, True],
        "b.bias": [False],
    }


def test_the_emptiest_layer_is_left_out():
    """a lacks 1 of 3, b 1 of 3: the first; with b's bias alone empty in two, b."""
    assert adaptive.find_defended_layer(UPDATE, nn.Identity(), 3) == "a"
    fuller = UPDATE | {"a.weight": torch.ones(3)}
    assert adaptive.find_defended_layer(fuller, nn.Identity(), 3) == "b"
    assert set(adaptive.without_layer(UPDATE, "b")) == {"a.weight"}
    with pytest.raises(WrongInput, match=r"'c' is not known; allowed: a, b$"):
        adaptive.without_layer(UPDATE, "c")


def test_where_nothing_is_zero_the_classifier_is_left_out():
    net = scenes.network()
    observed = {name: torch.ones_like(value) for name, value in net.named_parameters()}
    assert adaptive.find_defended_layer(observed, net, scenes.CLASSES) == "4"


def test_otsu_by_hand():
    """Of 1 2 8 9 the widest parting is between 2 and 8."""
    assert float(adaptive.otsu(torch.tensor([9.0, 1.0, 8.0, 2.0]))) == 5
    assert float(adaptive.otsu(torch.tensor([4.0, 4.0]))) == 3


def test_the_mask_is_found_again_under_noise():
    values = torch.tensor([1.0, -2.0, 1e-4, -2e-4, 3e-4, 0.0])
    assert adaptive.mask_larger_heap(values).tolist() == [True, True, False, False, False, False]
    assert adaptive.mask_larger_heap(torch.zeros(3)).tolist() == [False] * 3
    weights = ServerView({}, Weights({"a": torch.tensor([0.0, 1e-9])}))
    assert adaptive.mask_again(weights, {"a": torch.tensor([5.0, 5.0])})["a"].tolist() == [False, True]


def test_a_compression_is_estimated_from_what_survived():
    """Four of ten survive, of sizes 2 to 5. Of a trial's 1..10 one lies below and five above, so of the six that go
    five go from the top: 2 3 4 5 stay. Twice as large a trial: none lies below 2, so all six go from the top."""
    sent = torch.tensor([0.0, 2.0, 0.0, -5.0, 0.0, 3.0, 0.0, 4.0, 0.0, 0.0])
    compress = adaptive.estimate_compression({"a": sent})
    trial = torch.tensor([10.0, -9, 8, 7, 6, 5, 4, -3, 2, 1])
    assert compress({"a": trial})["a"].tolist() == [0, 0, 0, 0, 0, 5, 4, -3, 2, 0]
    assert compress({"a": 2 * trial})["a"].tolist() == [0, 0, 0, 0, 0, 0, 8, -6, 4, 2]
    assert compress({"a": trial / 100})["a"].abs().gt(0).tolist() == [True] * 4 + [False] * 6, "top-k"


def test_an_estimated_compression_of_a_whole_update_changes_nothing():
    trial = torch.tensor([3.0, 0.0, -1.0])
    assert torch.equal(adaptive.estimate_compression({"a": torch.tensor([1.0, 2.0, 3.0])})({"a": trial})["a"], trial)


def test_what_each_attacker_aims_at():
    net = scenes.network()
    truth = scenes.batch(0)
    whole = scenes.view(net, truth)
    known = scenes.knowledge(net)
    pruned = {name: torch.where(v.abs() >= v.abs().median(), v, 0) for name, v in whole.update.values.items()}
    view = ServerView(whole.sent, Gradient(pruned))

    def aim(name, known=known, **more):
        return aim_at(GradientMatching(adaptive=name, **more), [view], known, 0)

    assert aim("none").masks is None and aim("none").compression is None
    assert torch.equal(aim("support").masks[0]["4.weight"], pruned["4.weight"] != 0)
    assert set(aim("layer", layer="4").observed[0]) == {"0.weight", "0.bias"} and "4" in aim("layer").note
    masked = aim("mask")
    assert torch.equal(masked.observed[0]["0.weight"] != 0, masked.masks[0]["0.weight"])
    assert "estimated" in aim("reapply").note
    own = scenes.knowledge(net, compression=lambda gradient: gradient)
    assert aim("reapply", own).compression is own.compression and "own" in aim("reapply", own).note


def test_sgi_masks_the_difference_where_weights_were_pruned():
    """PriPrune, Algorithm 2: (w - w_i) * mask, mask = w_i != 0."""
    net = scenes.network()
    moved = scenes.weights_view(net, scenes.batch(0), learning_rate=0.5)
    kept = {name: torch.where(v.abs() > 0.2, v, 0) for name, v in moved.update.values.items()}
    known = scenes.knowledge(net, learning_rate=0.5)
    aim = aim_at(GradientMatching(target="unpruned"), [ServerView(moved.sent, Weights(kept))], known, 0)
    for name, value in kept.items():
        torch.testing.assert_close(aim.observed[0][name], (moved.sent[name] - value) / 0.5 * (value != 0))


def withhold(net, truth, withheld, rate=0.5):
    """A client's update after one step, 0 where it withholds, with the squares of all its gradients."""
    moved = scenes.weights_view(net, truth, learning_rate=rate)
    gradient = {name: (moved.sent[name] - value) / rate for name, value in moved.update.values.items()}
    kept = {name: torch.where(withheld(name, value), 0, value) for name, value in moved.update.values.items()}
    squares = {name: value.square() for name, value in gradient.items()}
    return ServerView(moved.sent, Weights(kept), squares=squares), gradient


def test_squares_show_sizes_and_rows_show_signs():
    """The Linear layer's inputs are sigmoids and its bias was sent, so all its signs are known; of the convolution,
    whose inputs are pixels, only those that were sent with the size that the square shows."""
    net = scenes.network()
    known = scenes.knowledge(net, learning_rate=0.5)
    view, true = withhold(net, scenes.batch(0), lambda name, value: (value > 0) if value.ndim > 1 else value > 9)
    late = view.update.values["0.weight"].clone()
    late.view(-1)[int(late.flatten().ne(0).nonzero()[0])] += 1.0  # holds changes of earlier rounds
    view = ServerView(view.sent, Weights(view.update.values | {"0.weight": late}), squares=view.squares)
    gradient, unsigned = adaptive.read_magnitudes(view, read_gradient(view, known), known)
    torch.testing.assert_close(gradient["4.weight"], true["4.weight"])
    assert not any(unsigned[name].any() for name in ("4.weight", "4.bias", "0.bias"))
    sent = (late == view.sent["0.weight"] - 0.5 * true["0.weight"]) & (late != 0)
    assert torch.equal(unsigned["0.weight"], ~sent) and 0 < int(sent.sum()) < int((late != 0).sum())
    torch.testing.assert_close(gradient["0.weight"], torch.where(sent, true["0.weight"], true["0.weight"].abs()))
    with pytest.raises(WrongInput, match="clients send none"):
        adaptive.read_magnitudes(ServerView(view.sent, view.update), read_gradient(view, known), known)


def test_squares_bring_back_a_picture_whose_weights_were_all_withheld():
    """Only biases were sent: nothing comes back from them; with the squares of the weights the picture does."""
    net, truth = scenes.network(), scenes.batch(1)
    known = scenes.knowledge(net, learning_rate=0.5)
    view, _ = withhold(net, truth, lambda name, value: torch.full_like(value, value.ndim > 1, dtype=torch.bool))
    attack = SGI(iterations=150, learning_rate=0.1, tv=0.0, labels="idlg", adaptive="support")
    errors = [
        scenes.mse(dict(one.reconstruct([[view]], known, [scenes.rng()], scenes.Diary()))[0], truth)
        for one in (attack, replace(attack, follows=True), replace(attack, magnitudes=True))
    ]
    assert min(errors[:2]) > 0.1 > 100 * errors[2]


@pytest.mark.parametrize(
    ("mode", "settings"), [("magnitudes", "magnitudes=true"), ("support+follows+magnitudes", None)]
)
def test_a_mode_is_written_as_settings(mode, settings):
    attack = SGI(magnitudes=True, **({} if settings else {"adaptive": "support", "follows": True}))
    assert adaptive.mode_of_attack(attack) == mode
    assert adaptive.settings_of_mode(mode) == (settings or "adaptive=support:follows=true:magnitudes=true")


# Several rounds of a client ------------------------------------------------------------------------------------
def linear_scene():
    """A linear layer on four pixels whose weights of pixels 2 and 3 are equal: swapping these changes no answer."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)).double()
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0, 2, 3, 3], [0, 1, -1, -1], [2, 0, 1, 1]]))
    truth = Batch(torch.tensor([0.1, 0.2, 0.7, 0.4], dtype=torch.float64).view(1, 1, 2, 2), torch.tensor([1]))
    unit = torch.zeros(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, 1, dtype=torch.float64)
    return net, truth, Knowledge(net, (1, 2, 2), 3, *unit, labels=truth.labels[None])


def columns(gradient, *kept):
    """The update of a client that sends the weights of these pixels alone."""
    mask = torch.zeros_like(gradient)
    mask[:, list(kept)] = 1
    return Gradient({"1.weight": gradient * mask})


def matching(attack, views, knowledge, inputs):
    """The matching loss of one picture."""
    trials = attack.trials([aim_at(attack, views, knowledge, 0)], [0], knowledge)
    state = trials.begin()
    state["inputs"].copy_(inputs[None])
    return float(trials.look(state).matching)


def test_joined_supports_tell_apart_what_one_round_does_not():
    net, truth, knowledge = linear_scene()
    swapped = truth.inputs[..., [0, 1]].clone()
    swapped[0, 0, 1] = swapped[0, 0, 1].flip(0)
    rounds = []
    for step, kept in ((0.0, (2, 3)), (0.1, (0, 1))):  # the latest first; the model moves in between
        sent = {"1.weight": net[1].weight.detach() + step}
        gradient = gradient_update(net, sent, truth).values["1.weight"]
        rounds.append(ServerView(sent, columns(gradient, *kept)))
    attack = GradientMatching(distance="euclidean", adaptive="support", labels="idlg")
    one, both = rounds[1:], rounds
    assert matching(attack, one, knowledge, truth.inputs) == pytest.approx(0, abs=1e-20)
    assert matching(attack, one, knowledge, swapped) == pytest.approx(0, abs=1e-20)  # pixels 2 and 3 were not sent
    assert matching(attack, both, knowledge, truth.inputs) == pytest.approx(0, abs=1e-20)
    gap = 2 * 0.3**2 * float((both[0].update.values["1.weight"][:, 2] / 0.7).square().sum())
    assert matching(attack, both, knowledge, swapped) == pytest.approx(gap)  # |p - y|^2 (.3^2 + .3^2)


def test_joined_rounds_reconstruct_every_pixel():
    """Each round sends two of four pixels' weights; together they determine the picture."""
    net, truth, knowledge = linear_scene()
    sent = tree.state_of(net)
    gradient = gradient_update(net, sent, truth).values["1.weight"]
    views = [ServerView(sent, columns(gradient, *kept)) for kept in ((0, 1), (2, 3))]
    attack = GradientMatching(distance="euclidean", adaptive="support", iterations=400, learning_rate=0.05)
    errors = []
    for seen in (views, views[:1]):
        chance = [torch.Generator().manual_seed(0)]
        ((_, found),) = attack.reconstruct([seen], knowledge, chance, scenes.Diary())
        errors.append(float((found.batch.inputs - truth.inputs).abs().max()))
    assert errors[0] < 1e-3 and errors[1] > 0.05  # one round shows the sum of pixels 2 and 3 alone


def test_an_attacker_that_follows_leaves_out_what_came_late():
    """Entry 0 was not sent the last time, so it holds two gradients: it is matched by nobody who follows."""
    net, truth, knowledge = linear_scene()
    sent = tree.state_of(net)
    gradient = gradient_update(net, sent, truth).values["1.weight"]
    late = torch.zeros_like(gradient, dtype=torch.bool)
    late[:, 0] = True
    view = ServerView(sent, Gradient({"1.weight": gradient * (1 + late)}), {"1.weight": ~late})
    for follows in (False, True):
        attack = GradientMatching(distance="euclidean", adaptive="support", follows=follows)
        loss = matching(attack, [view], knowledge, truth.inputs)
        assert loss == pytest.approx(0 if follows else float(gradient[:, 0].square().sum()), abs=1e-20)
    masked = aim_at(GradientMatching(adaptive="mask", follows=True), [view], knowledge, 0)
    assert not masked.masks[0]["1.weight"][:, 0].any()
