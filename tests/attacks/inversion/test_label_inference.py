"""Each label rule by hand, and on real gradients."""

import pytest
import scenes
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.attacks.inversion.label_inference import counts, infer, labels_right
from secateur.attacks.inversion.updates import gradient_update
from secateur.errors import WrongInput
from secateur.functional import classifier
from secateur.interfaces import Batch, Knowledge

NET = nn.Sequential(nn.Flatten(), nn.Linear(2, 3))


def known(net=NET, size=1, labels=None):
    one = torch.ones(1, 1, 1)
    return Knowledge(net, (1, 1, 2), 3, one, one, batch_size=size, labels=labels)


def last(weight, bias):
    return {"1.weight": torch.tensor(weight), "1.bias": torch.tensor(bias)}


def test_idlg_takes_the_lowest_row_sum_of_one_sign():
    """(p - y) h with p - y = (.3, -.7, .4) and h = (2, 1); the bias lies on purpose: it must not be read."""
    observed = last([[0.6, 0.3], [-1.4, -0.7], [0.8, 0.4]], [-9.0, 0.3, 0.4])
    labels, note = infer("idlg", observed, known())
    assert labels.tolist() == [1] and "row sums" in note


def test_idlg_reads_the_bias_where_features_have_both_signs():
    """h = (1, -3): row sums would say 2."""
    rows = [[0.3, -0.9], [-0.7, 2.1], [0.4, -1.2]]
    labels, note = infer("idlg", last(rows, [0.3, -0.7, 0.4]), known())
    assert labels.tolist() == [1] and "bias" in note
    labels, note = infer("idlg", last(rows, [0.3, 0.0, 0.0]), known())
    assert labels.tolist() == [1] and "opposed" in note, "the label's entry was pruned from the top"


def test_idlg_without_a_bias_takes_the_row_against_all_others():
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 3, bias=False))
    observed = {"1.weight": torch.tensor([[0.3, -0.9], [-0.7, 2.1], [0.4, -1.2]])}
    labels, note = infer("idlg", observed, known(net))
    assert labels.tolist() == [1] and "opposed" in note


def test_bias_rule_by_hand():
    assert infer("bias", last([[0.0, 0], [0, 0], [0, 0]], [0.2, 0.5, -0.7]), known())[0].tolist() == [2]


def test_gi_takes_the_smallest_minima_and_never_a_class_twice():
    weight = [[0.1, -0.5], [0.2, 0.3], [-0.1, 0.9]]
    assert infer("gi", last(weight, [0.0] * 3), known(size=2))[0].tolist() == [0, 2]
    assert infer("gi", last(weight, [0.0] * 3), known(size=1))[0].tolist() == [0]
    labels, note = infer("gi", last(weight, [0.0] * 3), known(size=4))
    assert len(labels) == 4 and "twice" in note


def test_counts_by_hand():
    """Labels 0 0 0 2 of B = 4 at uniform p: dL/db = 1/3 - n / 4."""
    bias = torch.tensor([1 / 3 - 3 / 4, 1 / 3, 1 / 3 - 1 / 4])
    assert counts(torch.zeros(3, 2), bias, 4).tolist() == [0, 0, 0, 2]
    weight = bias[:, None] * torch.tensor([2.0, 1.0])
    assert counts(weight, None, 4).tolist() == [0, 0, 0, 2]


def test_counts_know_the_sign_of_features():
    """Labels 0 1 of B = 2 at K = 4: dL/dz = (-.25, -.25, .25, .25) looks the same from both sides."""
    slope = torch.tensor([-0.25, -0.25, 0.25, 0.25])
    assert counts(slope[:, None] * torch.tensor([2.0, 1.0]), None, 2).tolist() == [0, 1], "features of one sign"
    pruned = torch.tensor([0.0, -0.25, 0.0, 0.0])
    assert counts(slope[:, None] * torch.tensor([2.0, -3.0]), pruned, 2).tolist() == [0, 1], "what is left of the bias"
    few = torch.tensor([-0.9, 0.3, 0.3, 0.3])
    assert counts(few[:, None] * torch.tensor([-2.0, 3.0]), None, 1).tolist() == [0], "few classes are labels"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.booleans())
def test_counts_of_an_uncertain_network_are_exact(labels, told):
    """The same p for all examples, nearly uniform: two classes differ by less than 1 / B, so the counts are exact."""
    net = scenes.network()
    nn.init.zeros_(net[-1].weight)
    nn.init.uniform_(net[-1].bias, -0.1, 0.1, torch.Generator().manual_seed(0))
    truth = Batch(scenes.batch(0, len(labels)).inputs, torch.tensor(labels))
    observed = scenes.view(net, truth).update.values
    given_labels = truth.labels[None] if told else None
    found, note = infer("idlg", observed, scenes.knowledge(net, batch_size=len(labels), labels=given_labels))
    assert sorted(found.tolist()) == sorted(labels)
    assert ("given" in note) == told


@pytest.mark.parametrize("rule", ["idlg", "bias", "gi"])
def test_one_label_is_exact_on_real_gradients(rule):
    net = scenes.network()
    for i in range(10):
        truth = scenes.batch(i)
        labels, _ = infer(rule, scenes.view(net, truth).update.values, scenes.knowledge(net))
        assert labels.tolist() == truth.labels.tolist()


def test_joint_oracle_and_refusals():
    observed = last([[0.0, 0], [0, 0], [0, 0]], [0.2, 0.5, -0.7])
    assert infer("joint", observed, known())[0] is None
    assert infer("joint", observed, known(labels=torch.tensor([[1], [2]])), target=1)[0].tolist() == [2]
    with pytest.raises(WrongInput, match="true labels"):
        infer("oracle", observed, known())
    with pytest.raises(WrongInput, match=r"\(targets, 2\)"):
        infer("oracle", observed, known(size=2, labels=torch.tensor([[1]])))
    with pytest.raises(WrongInput, match="has a bias"):
        net = nn.Sequential(nn.Flatten(), nn.Linear(2, 3, bias=False))
        infer("bias", {"1.weight": torch.zeros(3, 2)}, known(net))


def test_the_classifier_is_the_last_linear_layer_of_that_width():
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 5))
    assert classifier(net, 3) == "1" and classifier(nn.Linear(4, 3), 3) == ""
    with pytest.raises(WrongInput, match="with 7 outputs"):
        classifier(net, 7)


def test_a_network_that_is_one_layer_has_a_classifier_too():
    net = nn.Linear(2, 3)
    update = gradient_update(net, dict(net.named_parameters()), Batch(torch.ones(1, 2), torch.tensor([2])))
    assert infer("idlg", update.values, known(net))[0].tolist() == [2]


def test_label_accuracy_counts_multisets():
    assert labels_right(torch.tensor([1, 1, 2]), torch.tensor([2, 1, 3])) == 2
    assert labels_right(torch.tensor([1]), torch.tensor([1, 1])) == 1


def test_bounds_of_the_gradient_count_the_labels_that_signs_alone_do_not():
    """Mean p is 1/4 of 4 classes; 3 of 8 examples are 0, 4 are 1 and 1 is 2: rows -1/8, -1/4, 1/8, 1/4 times h.

    Entries above .2 show a lower bound alone. Signs say 0 and 1; a count by signs alone would take both alike.
    """
    features = torch.tensor([0.1, 0.4, 1.0])
    weight = torch.tensor([-1 / 8, -1 / 4, 1 / 8, 1 / 4])[:, None] * features
    low, high = weight - 1e-3, weight + 1e-3
    low, high = torch.where(weight < -0.2, -torch.inf, low), torch.where(weight > 0.2, torch.inf, high)
    low, high = torch.where(weight > 0.2, 0.2, low), torch.where(weight < -0.2, -0.2, high)
    one = torch.ones(1, 1, 1)
    known = Knowledge(nn.Linear(3, 4), (1, 1, 3), 4, one, one, batch_size=8)
    sign = {"weight": weight.sign(), "bias": torch.tensor([-1.0, -1.0, 1.0, 1.0])}
    bounds = ({"weight": low, "bias": sign["bias"]}, {"weight": high, "bias": sign["bias"]})
    labels, note = infer("idlg", sign, known, bounds=bounds)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 2] and "sizes that a step of Adam shows" in note
    assert infer("idlg", sign, known)[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
