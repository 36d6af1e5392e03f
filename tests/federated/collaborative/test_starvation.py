"""Error feedback starves what DGP always holds back, and undoes what DGP is for: on digits, and with a release."""

from dataclasses import replace

import pytest
import torch
from torch import Generator

from dgp_theorems import share_of_top_sent
from secateur.data.load import load
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.top_k import TopK
from secateur.federated.collaborative.training import train_collaboratively
from secateur.models.create import create
from secateur.theory.gradient_distance import cosine_distance

INNER = {"top-k": TopK(), "dgp": DualGradientPruning(), "release": DualGradientPruning(release=5)}


class Watched(ErrorFeedback):
    """Notes of every user and round which of the gradient's own largest entries went out, and how far off it was."""

    def __call__(self, grads, state, turning):
        sent, after = super().__call__(grads, state, turning)
        NOTES.append((share_of_top_sent(grads, sent, 0.05), cosine_distance(grads, sent)))
        return sent, after


NOTES = []


@pytest.fixture(scope="module")
def trained():
    """Eight epochs of plain SGD on 300 digits, two users, 40 rounds: (history, notes (users x rounds, 2)) by upload."""
    data = replace(load("digits").limit_rows(300, Generator().manual_seed(0)), train_size=300)
    net, found = create("digits-cnn", data.input_shape, data.classes, Generator().manual_seed(0)), {}
    for name, inner in INNER.items():
        NOTES.clear()
        plain = {"momentum": 0.0, "weight_decay": 0.0}
        rows = train_collaboratively(net, data, 2, Watched(inner), [0.1] * 8, Generator().manual_seed(0), **plain)
        found[name] = rows.history, torch.tensor(NOTES)
    return found


def last(trained, what):
    return {name: history[-1][what] for name, (history, _) in trained.items()}


def test_the_residual_stays_under_dgp_and_goes_with_the_gradient_under_top_k(trained):
    """Gradients fall as the model learns, and Top-k's residual with them; DGP's is still there in the end."""
    first = {name: history[0]["residual_mean"] for name, (history, _) in trained.items()}
    residual = last(trained, "residual_mean")
    assert residual["top-k"] < first["top-k"] / 4
    assert residual["dgp"] > first["dgp"] * 0.9
    assert residual["dgp"] > 10 * residual["top-k"]


def test_gamma_1_goes_to_1_under_dgp_alone(trained):
    gamma = last(trained, "gamma_1_whole")
    assert gamma["top-k"] < 0.6 < gamma["release"] < 0.99 < gamma["dgp"] < 1


def test_entries_that_are_never_sent_are_left_by_dgp_alone(trained):
    never, starved = last(trained, "never_sent"), last(trained, "starved")
    assert never["dgp"] > 5 * max(never["top-k"], never["release"], 1)
    assert starved["dgp"] > 0.9 * never["dgp"]  # they have something to send


def test_releasing_brings_the_residual_down_again_and_learns_as_well(trained):
    residual, loss = last(trained, "residual_mean"), last(trained, "train_loss")
    assert residual["release"] < residual["dgp"] / 4
    assert loss["release"] < 1.5 * loss["dgp"] < 0.3


def test_with_a_trained_residual_dgp_sends_the_largest_entries_that_it_promised_to_hold_back(trained):
    """The starved entries fill the top for good, so that this round's largest ones lie below them, and are sent.

    Without a residual none is sent. In the second half of the rounds DGP sends about as many of them as Top-k does, and
    is hardly farther from the gradient; releasing what is starved keeps more of both.
    """
    assert trained["dgp"][1][:2, 0].tolist() == [0, 0]  # the first round of both users
    later = {name: notes[len(notes) // 2 :].mean(0).tolist() for name, (_, notes) in trained.items()}
    share, distance = ({name: both[i] for name, both in later.items()} for i in (0, 1))
    assert share["release"] + 0.1 < share["dgp"] < share["top-k"] and share["dgp"] > 0.65
    assert (
        distance["top-k"] < distance["dgp"] < 1.25 * distance["top-k"] and distance["release"] > 1.2 * distance["dgp"]
    )
