"""A client in mid-training: its residual, the entries that it sent last, and rounds that are of the same examples."""

from dataclasses import replace

import pytest
import torch

from secateur import tree
from secateur.attacks.inversion.adaptive import support
from secateur.attacks.inversion.gradient_matching import aim_at
from secateur.attacks.inversion.updates import gradient_update
from secateur.config import Invert, defense_of_updates, inversion, read
from secateur.data.load import load
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import RESIDUAL
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import Strength, list_missing
from secateur.experiments.context import SeedContext
from secateur.experiments.invert import describe_rounds, run_invert
from secateur.experiments.invert_targets import client_of, rows_of, targets_of
from secateur.experiments.rounds_before import split_rows, train_before
from secateur.runs.folder import open_run

PLAIN, FOLLOWS = inversion("ig:tv=0.01"), inversion("ig:tv=0.01:adaptive=support:follows=true")
DGP = defense_of_updates("dgp+error-feedback")
CPU = torch.device("cpu")


def settings(**more):
    fields = {"data": "digits", "attack": "ig:tv=0.01", "iterations": 2, "targets": 2, "defense": "dgp+error-feedback"}
    rounds = {"rounds_before": 3, "users": 2, "batch_before": 4, "learning_rate": 0.1}
    return read(Invert, None, fields | rounds | more)


@pytest.fixture(scope="module")
def digits():
    return load("digits")


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    """A client after three rounds, the first of its targets, and its configuration."""
    config = settings()
    with open_run(tmp_path_factory.mktemp("run") / "a", "invert", {}, device="cpu", seeds=[0]) as run:
        context = SeedContext(run, config, digits, CPU, 0)
        client = client_of(config, digits, CPU, 0, DGP)
        return train_before(client, config, context, DGP), targets_of(config, digits, CPU, 0)[0], config


def view_of(client, batch, attack=FOLLOWS):
    knowledge, ((*views,),) = client.show_targets(attack.make(), [batch], None)
    return knowledge, views


def test_the_upload_is_the_compressed_sum_of_gradient_and_residual(trained):
    client, batch, _ = trained
    _, (view,) = view_of(client, batch)
    gradient = gradient_update(client.net, client.state, batch).values
    both = {name: value + client.guard.residual[RESIDUAL + name] for name, value in gradient.items()}
    assert all(torch.equal(view.update.values[n], v) for n, v in DualGradientPruning().compress(both).items())
    (ratio,) = client.measure_residual([batch])
    residual = torch.cat([client.guard.residual[RESIDUAL + name].flatten() for name in gradient])
    assert ratio == pytest.approx(float(residual.norm() / torch.cat([v.flatten() for v in gradient.values()]).norm()))


def test_an_entry_that_was_sent_last_holds_this_gradient_alone(trained):
    client, batch, _ = trained
    knowledge, (view,) = view_of(client, batch)
    gradient = gradient_update(client.net, client.state, batch).values
    aim, plain = (aim_at(attack.make(), [view], knowledge, 0) for attack in (FOLLOWS, PLAIN))
    (mask,) = aim.masks
    matched = sum(int(value.sum()) for value in mask.values())
    assert matched > 100 and all(torch.equal(aim.observed[0][n][m], gradient[n][m]) for n, m in mask.items())
    late = {name: value != gradient[name] for name, value in plain.observed[0].items() if value.any()}
    assert any(bool((late[name] & (plain.observed[0][name] != 0)).any()) for name in late)  # others hold a residual
    assert torch.equal(aim.labels, plain.labels)  # the label is read off all entries
    assert "which entries the client sent last" in client.meet_attack(FOLLOWS.make()).knows
    assert "sent last" not in client.meet_attack(PLAIN.make()).knows


def test_the_training_moves_the_model_and_its_rows_are_the_clients_own(trained, digits):
    client, _, config = trained
    assert any(not torch.equal(client.state[n], v) for n, v in tree.state_of(client.net).items())
    mine, other = split_rows(config, digits, 0)
    targets = rows_of(config, digits, 0).flatten()
    assert set(targets.tolist()) <= set(mine.tolist()) and not set(mine.tolist()) & set(other.tolist())
    assert describe_rounds(config, client) == {"rounds_before": 3, "residual": "from training"}


def test_the_attackers_own_updates_have_the_residual_of_another_user(trained):
    client, batch, _ = trained
    mine = client.guard.imitate(1, lambda number: batch)
    assert mine.residual is client.guard.colleague.state and mine.sent is client.guard.colleague.sent
    assert any(not torch.equal(mine.residual[n], client.guard.residual[n]) for n in mine.residual)


def test_rows_say_how_long_it_trained_and_how_large_the_residual_is(tmp_path):
    rows = run_invert(settings(targets=2, defense="none,dgp+error-feedback"), tmp_path / "run")
    assert {(row.extra["stage"], row.extra["rounds_before"]) for row in rows} == {("after 3 rounds", 3)}
    ratios = [row for row in rows if row.metric == "residual_ratio"]
    assert {row.defense for row in ratios} == {"dgp+error-feedback"} and all(row.value > 0 for row in ratios)
    assert not any("residual is empty" in (row.note or "") for row in rows)


def test_an_empty_residual_is_missing_evidence():
    empty = Strength("ig:adaptive=support", 20, frozenset(), True, empty=True)
    said = list_missing([empty], "dgp+error-feedback")
    assert any("residual was empty" in text for text in said)
    assert not any("residual" in text for text in list_missing([replace(empty, empty=False)], "dgp+error-feedback"))


# Rounds of the same examples -----------------------------------------------------------------------------------
def test_rounds_of_one_batch_send_its_gradients_in_the_end(digits):
    config = settings(rounds_before=0, users=None, batch_before=None, repeats=4)
    client = client_of(config, digits, CPU, 0, DGP)
    batch = targets_of(config, digits, CPU, 0)[0]
    _, views = view_of(client, batch, inversion("ig:tv=0.01:rounds=4"))
    summed, latest = {}, views[0]
    for view, after in zip(views[:0:-1], views[-2::-1], strict=True):  # the earliest first
        moved = {name: view.sent[name] - 0.1 * value for name, value in view.update.values.items()}
        assert all(torch.equal(after.sent[name], value) for name, value in moved.items())
        assert all(torch.equal(after.last[name], value) for name, value in support(view.update.values).items())
    gradients = [gradient_update(client.net, view.sent, batch).values for view in views]
    summed = {name: sum(view.update.values[name] for view in views) for name in latest.update.values}
    whole = {name: sum(gradient[name] for gradient in gradients) for name in summed}
    sent_now = support(latest.update.values)
    for name, value in summed.items():  # nothing is lost: an entry that was just sent has been sent in full
        assert torch.allclose(value[sent_now[name]], whole[name][sent_now[name]], atol=1e-5)
    assert views[-1].last is None  # before the first round nothing was held back


def test_rounds_of_other_examples_cannot_be_joined(digits):
    config = settings(rounds_before=0, users=None, batch_before=None, learning_rate=None)
    client = client_of(config, digits, CPU, 0, DGP)
    batch = targets_of(config, digits, CPU, 0)[0]
    with pytest.raises(WrongInput, match="rounds: 3 cannot be joined: the client makes every update of other examples"):
        view_of(client, batch, inversion("ig:tv=0.01:rounds=3"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounds_before": 0, "learning_rate": None}, "users: is about the rounds before"),
        ({"local_steps": 1, "defense": "none"}, "rounds_before: cannot be combined with local steps"),
        ({"targets": 900}, "targets: 900 updates of 1 are more than the client's"),
        ({"repeats": 2, "statistics": True}, "repeats: cannot be combined with statistics"),
    ],
)
def test_contradictions_are_refused(fields, message, tmp_path):
    with pytest.raises(WrongInput, match=message):
        run_invert(settings(**fields), tmp_path / "run")
