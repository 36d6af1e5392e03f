"""Error feedback starves what DGP always holds back: on digits, with what releasing it changes."""

from dataclasses import replace

import pytest
from torch import Generator

from secateur.data.load import load
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.top_k import TopK
from secateur.federated.collaborative import train_collaboratively
from secateur.models.create import create

UPLOADS = {
    "top-k": ErrorFeedback(TopK()),
    "dgp": ErrorFeedback(DualGradientPruning()),
    "release": ErrorFeedback(DualGradientPruning(release=5)),
}


@pytest.fixture(scope="module")
def histories():
    """Eight epochs of plain SGD on 300 digits, two users, 40 rounds."""
    data = replace(load("digits").at_most(300, Generator().manual_seed(0)), train_size=300)
    found = {}
    for name, upload in UPLOADS.items():
        rng = Generator().manual_seed(0)
        net = create("digits-cnn", data.input_shape, data.classes, rng)
        plain = {"momentum": 0.0, "weight_decay": 0.0}
        found[name] = train_collaboratively(net, data, 2, upload, [0.1] * 8, rng, **plain).history
    return found


def test_the_residual_stays_under_dgp_and_goes_with_the_gradient_under_top_k(histories):
    """Gradients fall by far more than ten times, and Top-k's residual with them; DGP's is still there in the end."""
    first, last = ({name: rows[i] for name, rows in histories.items()} for i in (0, -1))
    assert all(last[name]["gradient_square"] < first[name]["gradient_square"] / 25 for name in UPLOADS)
    assert last["top-k"]["residual_mean"] < first["top-k"]["residual_mean"] / 4
    assert last["dgp"]["residual_mean"] > first["dgp"]["residual_mean"] * 0.9
    assert last["dgp"]["residual_mean"] > 10 * last["top-k"]["residual_mean"]


def test_gamma_1_goes_to_1_under_dgp_alone(histories):
    last = {name: rows[-1]["gamma_1_whole"] for name, rows in histories.items()}
    assert last["top-k"] < 0.6 < last["release"] < 0.99 < last["dgp"] < 1


def test_entries_that_are_never_sent_are_left_by_dgp_alone(histories):
    never = {name: rows[-1]["never_sent"] for name, rows in histories.items()}
    assert never["dgp"] > 5 * max(never["top-k"], never["release"], 1)
    assert histories["dgp"][-1]["starved"] > 0.9 * never["dgp"]  # they have something to send


def test_releasing_brings_the_residual_down_again_and_learns_as_well(histories):
    release, dual = histories["release"], histories["dgp"]
    assert release[-1]["residual_mean"] < dual[-1]["residual_mean"] / 4
    assert release[-1]["train_loss"] < 1.5 * dual[-1]["train_loss"] < 0.3
