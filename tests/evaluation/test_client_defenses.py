"""`secateur invert --defense`: the client's gradient goes through its upload, and what is said of it."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import secateur
from secateur import tree
from secateur.attacks.inversion.gradient_matching import aim_at
from secateur.attacks.inversion.updates import gradient_update
from secateur.cli import app
from secateur.config import Invert, defense, defense_of_clients, inversion, read
from secateur.defenses.adgp import AlignedDualGradientPruning as Adgp
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import RESIDUAL, ErrorFeedback
from secateur.defenses.noise import GaussianNoise
from secateur.defenses.ppb import PairBasedPosteriorBalancing
from secateur.errors import WrongInput
from secateur.evaluation.attack_strength import Strength, list_missing
from secateur.evaluation.client import AttackedClient, UploadDefense, add_cautions, caution, guard_of, loss_of
from secateur.experiments.invert import plan, run_invert
from secateur.interfaces import Batch, Knowledge
from secateur.models.small import lenet_zhu
from secateur.runs.rows import Row, select_comparable

PLAIN, REAPPLY, LAYER = (inversion(f"ig:iterations=2{more}") for more in ("", ":adaptive=reapply", ":adaptive=layer"))


@pytest.fixture
def client(rng):
    net = lenet_zhu((1, 8, 8), 10)
    shape = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    return AttackedClient(net, tree.state_of(net), Knowledge(net, (1, 8, 8), 10, *shape))


@pytest.fixture
def batch(rng):
    return Batch(torch.rand(1, 1, 8, 8, generator=rng), torch.tensor([3]))


def under(client, upload, **more):
    return dataclasses.replace(client, guard=UploadDefense(upload, **more))


def update(client, batch, attack=PLAIN, first=0):
    knowledge, ((view,),) = client.show_targets(attack.make(), [batch], None, first)
    return knowledge, view.update.values


def test_the_gradient_goes_through_the_upload(client, batch):
    upload = DualGradientPruning()
    plain = gradient_update(client.net, client.state, batch).values
    _, sent = update(under(client, upload), batch)
    assert all(torch.equal(sent[name], value) for name, value in upload.compress(plain).items())
    _, fed_back = update(under(client, ErrorFeedback(upload)), batch)  # nothing waits before the first round
    assert all(torch.equal(sent[name], value) for name, value in fed_back.items())


def test_a_residual_of_a_training_is_added(client, batch, tmp_path):
    plain = gradient_update(client.net, client.state, batch).values
    residual = {RESIDUAL + name: torch.full_like(value, 0.5) for name, value in plain.items()}
    save_file(residual, tmp_path / "residual.safetensors")
    guard = guard_of(defense("dgp:release=3+error-feedback"), tmp_path / "residual.safetensors", 0)
    _, sent = update(dataclasses.replace(client, guard=guard), batch)
    both = DualGradientPruning().compress({name: value + 0.5 for name, value in plain.items()})
    assert all(torch.equal(sent[name], value) for name, value in both.items())
    assert guard_of(defense("dgp"), tmp_path / "residual.safetensors", 0).residual is None


def test_a_residual_of_another_model_is_refused(client, batch, tmp_path):
    guard = UploadDefense(ErrorFeedback(DualGradientPruning()), {RESIDUAL + "0.weight": torch.zeros(12, 1, 5, 5)})
    with pytest.raises(WrongInput, match=r"residual: does not fit the gradient; missing: residual\.0\.bias"):
        update(dataclasses.replace(client, guard=guard), batch)
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(WrongInput, match=r"residual: .* cannot be read"):
        guard_of(defense("dgp+error-feedback"), tmp_path / "broken.safetensors", 0)


def test_no_defense_is_passed_over_in_silence():
    with pytest.raises(WrongInput, match="adv acts on fine-tuning, not on what is sent"):
        guard_of(defense("adv+dgp"), None, 0)


def test_the_command_takes_defenses_and_refuses_others():
    run = CliRunner().invoke(
        app, ["invert", "--defense", "none,dgp:p=.1", "--defense", "top-k+error-feedback", "--dry-run"]
    )
    assert "defend with none, dgp:p=0.1, top-k+error-feedback" in run.output


def test_every_attack_on_a_target_sees_the_same_noise_however_targets_are_grouped(client, batch):
    noisy = under(client, GaussianNoise())
    _, first = update(noisy, batch, first=3)
    _, again = update(noisy, batch, REAPPLY, first=3)
    _, other = update(noisy, batch, first=4)
    assert all(torch.equal(value, again[name]) and not torch.equal(value, other[name]) for name, value in first.items())


def test_only_who_applies_the_compression_again_is_told_it(client, batch):
    upload = DualGradientPruning(k1=0.1, k2=0.5)
    for wrapped in (upload, ErrorFeedback(upload)):
        guarded = under(client, wrapped)
        assert update(guarded, batch)[0].compression is None and "compression" not in guarded.knows
        assert update(guarded, batch, LAYER)[0].compression is None
        knowledge, sent = update(guarded, batch, REAPPLY)
        plain = gradient_update(client.net, client.state, batch).values
        assert all(torch.equal(sent[name], value) for name, value in knowledge.compression(plain).items())
        assert "the client's compression" in guarded.meet_attack(REAPPLY.make()).knows
    assert update(under(client, GaussianNoise()), batch, REAPPLY)[0].compression is None  # nobody can apply that again


def test_what_met_no_attacker_who_knows_of_it_says_so():
    assert caution(defense("none"), [PLAIN]) is None
    assert caution(defense("noise"), [PLAIN]) is None
    assert caution(defense("dgp"), [PLAIN]).startswith("dgp was attacked plainly only; ")
    assert "(adaptive: reapply or support) may see more" in caution(defense("dgp"), [PLAIN])
    fed_back = defense("dgp+error-feedback")  # the residual is a second weakness, of its own attacker
    assert "(adaptive: reapply or support or support+follows) may see more" in caution(fed_back, [PLAIN])
    assert "(adaptive: support+follows) may see more" in caution(fed_back, [REAPPLY])
    assert caution(defense("dgp"), [PLAIN, REAPPLY]) is None
    assert "was not attacked as its weakness asks for" in caution(defense("dgp"), [LAYER])
    assert caution(defense("soteria"), [LAYER]) is None
    assert "(adaptive: layer) may see more" in caution(defense("precode+dgp"), [REAPPLY])  # each part has its own
    assert caution(defense("precode+dgp"), [REAPPLY, LAYER]) is None


def test_withholding_asks_for_an_attacker_with_memory_who_compares_sent_entries():
    kinder = [inversion(name) for name in ("sgi", "sgi:follows=true", "sgi:adaptive=support")]
    for name in ("largest", "pseudo-mix", "priprune"):
        withholding = defense_of_clients(name)
        assert "(adaptive: support+follows) may see more" in caution(withholding, kinder)
        informed = inversion("sgi:adaptive=support:follows=true")
        assert caution(withholding, [*kinder, informed]) is None
        assert "(adaptive: fill) may see more" in caution(withholding, [informed, inversion("rob")])
        assert caution(withholding, [informed, inversion("rob:adaptive=fill")]) is None
    assert list_missing([Strength("sgi:adaptive=support", 20, frozenset(), True)], "largest")[0].endswith(
        "one who knows of it (adaptive=support:follows=true) may see more"
    )


def test_what_is_proved_stands_beside_the_numbers():
    rows = [Row(model="m", dataset="d", seed=0, metric=name, value=1.0, note="n") for name in ("psnr", "ssim")]
    first, second = add_cautions(rows, defense("dp:noise_multiplier=4.0"), [PLAIN])
    assert first.note.startswith("n; dp:noise_multiplier=4.0: epsilon 1.") and "for 1 update" in first.note
    assert second.note == "n"


def test_from_python_with_the_residual_of_a_training(client, batch, tmp_path):
    residual = {RESIDUAL + name: torch.ones_like(value) for name, value in client.net.named_parameters()}
    save_file(residual, tmp_path / "residual.safetensors")
    told = {"defense": "dgp+error-feedback", "iterations": 2}

    def of(given):
        report = secateur.invert(client.net, batch, "ig:tv=0.01", residual=given, **told)
        (row,) = [row for row in report.rows if row.metric == "psnr" and row.extra["target"] is None]
        return "its residual is empty" in row.note, report.pictures["ig:iterations=2:tv=0.01"][0]

    (empty, plain), (trained, shown) = of(None), of(residual)
    assert empty and not trained and not torch.equal(plain, shown)
    assert torch.equal(of(str(tmp_path / "residual.safetensors"))[1], shown)
    with pytest.raises(WrongInput, match="residual: belongs to error feedback"):
        secateur.invert(client.net, batch, "ig", defense="dgp", residual=residual)


def test_an_empty_residual_is_told():
    row = Row(model="m", dataset="d", seed=0, metric="psnr", value=1.0)
    (empty,) = add_cautions([row], defense("dgp+error-feedback"), [REAPPLY])
    assert empty.note.startswith("dgp+error-feedback: its residual is empty, as in the first round")
    met = [REAPPLY, inversion("ig:adaptive=support:follows=true")]
    assert add_cautions([row], defense("dgp+error-feedback"), met, trained=True)[0].note is None
    assert add_cautions([row], defense("dgp"), [REAPPLY])[0].note is None


def test_from_python(client, batch):
    report = secateur.invert(client.net, batch, "ig:tv=0.01", defense="dgp", iterations=2)
    (row,) = [row for row in report.rows if row.metric == "psnr" and row.extra["target"] is None]
    assert row.defense == "dgp" and "plainly only" in row.note
    joined = secateur.invert(client.net, batch, "ig:tv=0.01:rounds=3", defense="noise", iterations=2, repeats=3)
    assert any("its last 3 rounds are of the same examples" in row.extra.get("knows", "") for row in joined.rows)
    with pytest.raises(WrongInput, match="rounds: 3 cannot be joined"):
        secateur.invert(client.net, batch, "ig:tv=0.01:rounds=3", iterations=2)
    with pytest.raises(WrongInput, match="acts on the gradient of a batch"):
        secateur.invert(client.net, batch, "ig", defense="dgp", local_steps=1, iterations=2)
    with pytest.raises(WrongInput, match="adv acts on training"):
        secateur.invert(client.net, batch, "ig", defense="adv")
    with pytest.raises(WrongInput, match="dgp acts on updates"):
        secateur.audit(client.net, batch, (1 - batch.inputs, batch.labels), pruner="snip", defense="dgp")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"defense": "adv"}, "adv acts on training; use secateur audit or secateur prune"),
        ({"defense": "basic"}, "basic acts on training"),
        ({"defense": "error-feedback"}, "use for example dgp\\+error-feedback"),
        ({"defense": "dp+error-feedback"}, "residual cannot be added"),
        ({"defense": "dgp:k1=.5:k2=.5"}, "with a sum below 1"),
        ({"defense": "dgp", "local_steps": 2}, "cannot be combined with local steps"),
        ({"defense": "dgp", "residual": "e.safetensors"}, "residual: needs error feedback"),
        ({"defense": "dgp", "update": "u.safetensors", "weights": "w.safetensors"}, "captured already"),
    ],
)
def test_what_cannot_be_is_refused_with_one_sentence(given, sentence):
    with pytest.raises(WrongInput, match=sentence):
        read(Invert, None, given)


def settings(**more):
    return read(Invert, None, {"model": "lenet-zhu", "attack": "ig:iterations=2", "targets": 2, "images": False} | more)


def test_rows_carry_the_defense_and_a_run_repeats_from_what_it_wrote(tmp_path):
    texts = ["none", "dgp+error-feedback", "noise", "dp"]
    config = settings(defense=",".join(texts))
    assert any("defend with none, dgp+error-feedback" in line for line in plan(config))
    rows = run_invert(config, tmp_path / "a")
    whole = [row for row in rows if row.metric == "psnr" and row.extra["target"] is None]
    assert [row.defense for row in whole] == texts and all(row.attack == "ig:iterations=2" for row in whole)
    assert "plainly only" in whole[1].note and "plainly only" not in (whole[0].note or "")
    assert len({row.value for row in rows if row.metric == "attack_loss" and row.extra["target"] == 0}) == 4
    (epsilon,) = [row for row in rows if row.metric == "epsilon"]
    assert epsilon.defense == "dp" and epsilon.attack is None and epsilon.value > 0
    again = run_invert(read(Invert, tmp_path / "a" / "config.yaml", {}), tmp_path / "b")
    assert select_comparable(again) == select_comparable(rows)
    page = (tmp_path / "a" / "report.html").read_text()
    assert "dgp+error-feedback" in page and "plainly only" in page and "on noise" in page


def test_pictures_of_two_defenses_do_not_overwrite_each_other(tmp_path):
    run_invert(settings(defense="none,dgp", targets=1, images=True), tmp_path)
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {name.removeprefix("seed0-target0000-00-ig_iterations_2") for name in names if "ig" in name} == {
        ".png",
        "-dgp.png",
    }


def test_what_an_adaptive_attacker_is_told_is_printed(client):
    told = {
        adaptive: client.meet_attack(inversion(f"ig:adaptive={adaptive}").make()).knows
        for adaptive in ("none", "support", "layer", "reapply", "mask")
    }
    assert len(set(told.values())) == 5
    assert told["none"] in told["support"] and "that an entry of zero was dropped" in told["support"]
    assert "compressed, but not how" in told["reapply"]


def test_a_user_that_does_not_broadcast_follows_anothers_positions(client, batch):
    """What is sent lies inside I of the other user's gradient, and differs from what its own I would let pass."""
    other = Batch(batch.inputs.flip(-1) * 0.5, (batch.labels + 3) % 10)
    upload = Adgp(chosen=False)
    guard = UploadDefense(upload, other=lambda number: other)
    plain = gradient_update(client.net, client.state, batch)
    sent = guard(plain, client.state, batch, 0, client.knowledge)[0].values
    inside = upload.positions(gradient_update(client.net, client.state, other).values)
    assert all(not bool((sent[name] != 0)[~inside[name]].any()) for name in sent)
    own = UploadDefense(Adgp())(plain, client.state, batch, 0, client.knowledge)[0].values
    assert any(not torch.equal(sent[name], own[name]) for name in sent)
    assert guard.compression is None and UploadDefense(Adgp()).compression is not None
    with pytest.raises(WrongInput, match="follows another user"):
        UploadDefense(upload)(plain, client.state, batch, 0, client.knowledge)
    with pytest.raises(WrongInput, match="inside: is missing"):
        upload(plain.values, {}, None)


def test_users_that_follow_are_attacked_from_the_command_line_and_from_python(tmp_path):
    given = {
        "defense": "adgp,adgp:chosen=false+error-feedback",
        "attack": "ig:iterations=2,ig:iterations=2:adaptive=reapply",
    }
    rows = run_invert(read(Invert, None, given | {"targets": 2}), tmp_path / "run")
    assert {row.defense for row in rows if row.metric == "psnr"} == {"adgp", "adgp:chosen=false+error-feedback"}
    with pytest.raises(WrongInput, match="as many other users"):
        run_invert(read(Invert, None, given | {"targets": 20, "batch_size": 60}), tmp_path / "many")
    torch.manual_seed(0)
    net, two = lenet_zhu((1, 8, 8), 10), Batch(torch.rand(2, 1, 8, 8), torch.tensor([1, 2]))
    assert secateur.invert(net, two, "ig:iterations=2", defense="adgp:chosen=false", batch_size=1).rows
    with pytest.raises(WrongInput, match="at least two updates"):
        secateur.invert(net, two, "ig:iterations=2", defense="adgp:chosen=false")


# A client's loss -----------------------------------------------------------------------------------------------
def paired(client, rng):
    """A client that trains with PPB on two examples, and these."""
    batch = Batch(torch.rand(2, 1, 8, 8, generator=rng), torch.tensor([3, 5]))
    known = dataclasses.replace(client.knowledge, batch_size=2)
    return dataclasses.replace(client, knowledge=known, loss=loss_of(defense("ppb"), 2)), batch


def test_under_ppb_the_server_sees_the_gradient_of_that_loss(client, rng):
    balanced, batch = paired(client, rng)
    ppb = PairBasedPosteriorBalancing()
    wanted = gradient_update(client.net, client.state, batch, loss=ppb).values
    plain = gradient_update(client.net, client.state, batch).values
    unaware, sent = update(balanced, batch)
    assert all(torch.equal(sent[name], value) for name, value in wanted.items())
    assert any(not torch.allclose(sent[name], value) for name, value in plain.items())
    aware, _ = update(balanced, batch, inversion("ig:adaptive=loss"))
    assert unaware.loss is torch.nn.functional.cross_entropy and aware.loss == ppb
    assert "the client's loss" in balanced.meet_attack(inversion("ig:adaptive=loss").make()).knows


def test_only_an_attacker_who_knows_the_loss_matches_the_truth(client, rng):
    balanced, batch = paired(client, rng)
    balanced, losses = dataclasses.replace(balanced, loss=PairBasedPosteriorBalancing(100.0)), {}
    for mode in ("none", "loss"):
        attack = inversion(f"ig:adaptive={mode}").make()
        knowledge, (views,) = dataclasses.replace(balanced, tells_labels=True).show_targets(attack, [batch], None)
        trials = attack.trials([aim_at(attack, views, knowledge, 0)], [0], knowledge)
        state = trials.begin()
        state["inputs"].copy_(batch.inputs[None])
        losses[mode] = float(trials.look(state).matching)
    assert abs(losses["loss"]) < 1e-5 < 1e-4 < losses["none"]


def test_a_loss_of_pairs_is_refused_where_there_are_none():
    with pytest.raises(WrongInput, match="batch_size: ppb balances pairs of examples, and an update of one has none"):
        loss_of(defense("ppb"), 1)
    assert loss_of(defense("dgp"), 1) is None
    assert "(adaptive: loss) may see more" in caution(defense("ppb"), [PLAIN])
    with pytest.raises(WrongInput, match="ppb acts on the loss, which clients of a federation take from"):
        defense_of_clients("ppb")


def test_the_command_attacks_a_client_that_trains_with_ppb(tmp_path):
    fields = {"data": "digits", "attack": "ig:tv=0.01,ig:tv=0.01:adaptive=loss", "iterations": 2, "targets": 1}
    rows = run_invert(read(Invert, None, fields | {"batch_size": 2, "defense": "ppb+dgp"}), tmp_path / "run")
    assert {row.attack for row in rows if row.metric == "psnr" and row.attack} == {
        "ig:iterations=2:tv=0.01",
        "ig:adaptive=loss:iterations=2:tv=0.01",
    }
