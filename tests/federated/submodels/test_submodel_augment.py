"""Crops and flips in sub-model federations: by hand, equal every way, resumed, in Local and in shadow clients."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from test_submodel_clients import without_biases_before_norms
from torch.nn.functional import cross_entropy, pad

import secateur
import tiny_submodels as tiny
from secateur.cli import main
from secateur.config.methods import choice
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.federated.augment import CropAndFlip
from secateur.federated.checkpoint import FederationLog
from secateur.federated.spec import Adam
from secateur.federated.submodels import membership_attacks
from secateur.federated.submodels.clients import SubmodelTrainer
from secateur.federated.submodels.exposure import ExposureObserver
from secateur.federated.submodels.federation import StackedFederations
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.membership_attacks import Asking, shadow_clients
from secateur.federated.submodels.networks import batches, without_statistics
from secateur.interfaces import Batch
from secateur.runs.folder import load_rows

BLACK = 7.0
LOCAL = Adam(epochs=2, batch_size=tiny.BATCH, augment=CropAndFlip(2, (BLACK,)))


def augmented(rule="mapp-fl", **fields):
    return tiny.federation(rule, **{"local": LOCAL} | fields)


def by_hand(inputs, picks):
    """Each picture cut from a padded one and mirrored, one after the other."""
    made = []
    for row, down, right, mirrored in picks.tolist():
        whole = pad(inputs[row], (2, 2, 2, 2), value=BLACK)
        window = whole[:, 2 + down : 8 + down, 2 + right : 8 + right]
        made.append(window.flip(-1) if mirrored else window)
    return torch.stack(made)


def test_one_shifted_and_mirrored_picture_by_hand():
    first, second = torch.zeros(1, 3, 3), torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]])
    data = Batch(torch.stack([first, second]), torch.tensor([0, 1]))
    crowd = SubmodelTrainer(data, Adam(augment=CropAndFlip(1, (-1.0,))))
    picks = torch.tensor([[1, 1, 0, 0], [1, 0, -1, 0], [1, 1, -1, 1]])  # row, down, right, mirrored
    inputs, labels = crowd.batch(picks)
    assert labels.tolist() == [1, 1, 1]
    assert inputs[0, 0].tolist() == [[4, 5, 6], [7, 8, 9], [-1, -1, -1]]
    assert inputs[1, 0].tolist() == [[-1, 1, 2], [-1, 4, 5], [-1, 7, 8]]
    assert inputs[2, 0].tolist() == [[5, 4, -1], [8, 7, -1], [-1, -1, -1]]


def test_a_turn_is_torchs_adam_on_moved_pictures():
    federation = augmented("none")
    jobs = federation.begin(1)
    (made, *_), worker = federation.trainer(jobs), without_statistics(tiny.net()).train()
    optimiser = torch.optim.Adam(worker.parameters(), 1e-3)
    for picks in (picks for epoch in jobs[0].epochs for picks in batches(epoch, tiny.BATCH)):
        optimiser.zero_grad()
        inputs = by_hand(federation.train.inputs, picks)
        cross_entropy(worker(inputs), federation.train.labels[picks[:, 0]]).backward()
        optimiser.step()
    wanted = torch.cat([value.detach().flatten() for value in worker.parameters()])
    found, wanted = (without_biases_before_norms(federation, 0, flat) for flat in (made.flat, wanted))
    assert (found - wanted).abs().max() < 1e-9


@pytest.mark.parametrize("rule", ["mapp-fl", "none"])
def test_stacked_is_equal_to_one_by_one(rule):
    found = []
    for execution, local in (("stacked", LOCAL), ("sequential", LOCAL), ("sequential", replace(LOCAL, augment=None))):
        federation = tiny.federation(rule, execution=execution, widths=(0.5, 0.25), local=local)
        made = federation.trainer(federation.begin(1))
        found.append([without_biases_before_norms(federation, i, one.flat) for i, one in enumerate(made)])
    for stacked, alone, plain in zip(*found, strict=True):
        assert (stacked - alone).abs().max() < 1e-9
        assert (plain - alone).abs().max() > 1e-4


def test_draws_are_a_clients_own_in_its_round_whoever_else_trains():
    few, all_of_them = augmented(per_round=2), augmented()
    begun = few.begin(2)
    jobs = {turn.client: job for turn, job in zip(few._turns, begun, strict=True)}
    everybody, later = all_of_them.begin(2), all_of_them.begin(3)
    assert len(jobs) == 2
    for client, job in jobs.items():
        for own, same, other in zip(job.epochs, everybody[client].epochs, later[client].epochs, strict=True):
            assert torch.equal(own, same) and not torch.equal(own[:, 1:], other[:, 1:])
        assert not torch.equal(job.epochs[0][:, 1:], job.epochs[1][:, 1:])


def test_rows_are_in_the_order_that_they_have_without():
    moving, plain = augmented().begin(1), tiny.federation(local=replace(LOCAL, augment=None)).begin(1)
    for one, other in zip(moving, plain, strict=True):
        assert all(torch.equal(a[:, 0], b) for a, b in zip(one.epochs, other.epochs, strict=True))


def test_models_are_judged_by_pictures_as_they_are():
    one, other = augmented(), tiny.federation()
    judged = [each.judge(each.narrow(0), each.flat, each.terms.shares) for each in (one, other)]
    assert judged[0] == judged[1] and torch.equal(one.train.inputs, other.train.inputs)


@pytest.mark.parametrize("rule", ["mapp-fl", "local"])
def test_resumed_it_comes_to_the_same_numbers(rule):
    def made():
        return LocalBaseline(augmented(rule)) if rule == "local" else augmented(rule)

    whole, half, again = made(), made(), made()
    wanted = [list(done.measures) for done in whole.rounds()][1:]
    list(islice(half.rounds(), 1))
    again.load(*half.state())
    assert [list(done.measures) for done in again.rounds()] == wanted
    assert all(torch.equal(value, whole.state()[0][name]) for name, value in again.state()[0].items())


def test_together_each_comes_to_what_it_comes_to_alone():
    alone = [augmented(rule, execution="stacked") for rule in ("mapp-fl", "heterofl")]
    first = augmented(execution="stacked")
    both = StackedFederations([first, augmented("heterofl", beside=first)])
    for federation in alone:
        tiny.told(federation)
    list(both.rounds())
    for one, other in zip(alone, both.federations, strict=True):
        for name in (name for name in one.model() if name not in ("0.bias", "3.bias")):
            assert (one.model()[name] - other.model()[name]).abs().max() < 1e-9
    with pytest.raises(WrongInput, match="local training"):
        StackedFederations([first, tiny.federation(local=replace(LOCAL, augment=None), beside=first)])


def test_local_trains_on_moved_pictures_too():
    moving, plain = (
        LocalBaseline(augmented("local")),
        LocalBaseline(tiny.federation("local", local=replace(LOCAL, augment=None))),
    )
    job, same = moving._job(1, 0), plain._job(1, 0)
    assert torch.equal(job.epochs[0][:, 0], same.epochs[0]) and bool(job.epochs[0][:, 1:].any())
    assert moving._validate(0) == plain._validate(0)


def test_terms_say_it_where_it_is_on():
    assert augmented().terms.description["augment"] == "CropAndFlip(padding=2, black=(7.0,))"
    assert "augment" not in tiny.federation().terms.description
    assert tiny.federation(local=LOCAL).terms.description["local"] == repr(replace(LOCAL, augment=None))


# Shadow clients --------------------------------------------------------------------------------------------------
def test_shadow_clients_train_as_their_client_does(monkeypatch):
    told, real = [], membership_attacks.shadow_clients

    def noted(*given):
        told.append(given[-1])
        return real(*given)

    monkeypatch.setattr(membership_attacks, "shadow_clients", noted)
    labels = {"model": "tiny", "dataset": "tiny", "defense": "none", "seed": 0, "extra": {"submodels": "mapp-fl"}}
    asking = Asking(size=10, compare=False, shadows=4)
    for local in (LOCAL, replace(LOCAL, augment=None)):
        fields = {"local": local, "rounds": 1, "model": tiny.net(dtype=torch.float32)}
        arguments = [choice("attack", "lira")], tiny.data(), labels, FederationLog(), tiny.federation(**fields).terms
        exposer = ExposureObserver(*arguments, asking=asking)
        federation = tiny.federation(observers=[exposer], **fields)
        tiny.told(federation)
        exposer.attack(federation)
    assert told == [LOCAL.augment] * (len(told) // 2) + [None] * (len(told) // 2) and told


def test_a_shadow_client_sees_its_own_half_moved_and_nothing_else():
    seen, pool = [], tiny.data().batch.take(torch.arange(20))

    def moves(inputs, rng):
        seen.append(len(inputs))
        return LOCAL.augment(inputs, rng)

    net = without_statistics(tiny.net(dtype=torch.float32))
    start, rng = dict(net.state_dict()), torch.Generator().manual_seed(0)
    turn = membership_attacks.turn_of(Adam(batch_size=5))
    states, design = shadow_clients(net, start, pool, 2, turn, rng, moves)
    plain, _ = shadow_clients(net, start, pool, 2, turn, rng.manual_seed(0))
    assert seen == [5, 5] * 2 and design.sum(1).tolist() == [10, 10]
    assert not torch.allclose(states[0]["0.weight"], plain[0]["0.weight"])


# The command -----------------------------------------------------------------------------------------------------
TINY = ["federate", "--model", "digits-cnn", "--rounds", "2", "--clients", "3", "--batch-size", "16", "--augment"]
TINY += ["--set", "examples=120", "--partition", "iid", "--large-clients", "1"]


def test_rows_page_and_plan_say_it(tmp_path, capsys):
    flags = [*TINY, "--submodels", "mapp-fl,local", "--attack", "yeom"]
    assert main([*flags, "--dry-run"]) == 0
    assert "pictures cropped and flipped" in capsys.readouterr().out
    assert main([*flags, "--out", str(tmp_path)]) == 0
    rows = load_rows(tmp_path)
    assert rows and all(row.extra["augment"] is True for row in rows)
    assert "mapp-fl, digits-cnn, crops and flips" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--submodels", "mapp-fl", "--data", "breast_cancer", "--model", "mlp"],
            "augment: breast_cancer has no pictures",
        ),
        ([], "submodels: must be set with augment"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(flags, sentence, capsys):
    assert main(["federate", "--augment", *flags, "--dry-run"]) == 2
    assert sentence in capsys.readouterr().err


def test_from_python():
    data, given = tiny.data(), {"submodels": "mapp-fl", "clients": 3, "large_clients": 1, "rounds": 1}
    train, test = (data.inputs[:75], data.labels[:75]), (data.inputs[75:], data.labels[75:])
    moved, plain = (
        secateur.federate(tiny.net(dtype=None), train, test, **given, augment=augment) for augment in (True, False)
    )
    assert all(row.extra["augment"] for row in moved.rows) and not any("augment" in row.extra for row in plain.rows)
    assert not torch.allclose(moved.state["0.weight"], plain.state["0.weight"])


def test_data_that_does_not_fit_is_refused_from_python():
    with pytest.raises(WrongInput, match="black has 3 channels and tiny 1"):
        augmented(local=replace(LOCAL, augment=CropAndFlip(1, (0.0, 0.0, 0.0))))
    table = load("breast_cancer")
    with pytest.raises(WrongInput, match="no pictures"):
        CropAndFlip(1).check(table)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
@pytest.mark.parametrize("rule", ["mapp-fl", "none"])
def test_a_gpu_equals_a_cpu(rule):
    made = [augmented(rule, rounds=8, device=device) for device in ("cpu", "cuda")]
    for federation in made:
        tiny.told(federation)
    one, other = (federation.model() for federation in made)
    for name in (name for name in one if name not in ("0.bias", "3.bias")):
        torch.testing.assert_close(other[name].cpu(), one[name], rtol=0, atol=1e-8)
