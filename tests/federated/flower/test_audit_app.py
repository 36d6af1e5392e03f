"""An audit of somebody else's app: its project, the probe in its clients, and the grid before its server."""

import copy
import itertools
from dataclasses import replace

import pytest
import talking
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import secateur
from secateur.config import AuditApp, read
from secateur.defenses.top_k import TopK
from secateur.errors import WrongInput
from secateur.experiments.audit_app import attack_turns, describe_change, describe_clients, list_rounds, plan
from secateur.federated.checkpoint import FederationLog
from secateur.federated.flower import app_run
from secateur.federated.flower.app_run import AppRound, AppRun, ObservedGrid
from secateur.federated.flower.app_turn import AppTurn, describe_training, name_arrays, scale_of
from secateur.federated.flower.link import arrays_of, tensors_of
from secateur.federated.flower.mod import decode_reply
from secateur.federated.flower.probe import ORDER, Probe, ProbedApp, read_optimiser
from secateur.federated.flower.project import read_project
from secateur.interfaces import Optimiser
from secateur.report.page import write_page
from secateur.report.update_verdict import judge_federations
from secateur.runs.folder import open_run

PROJECT = """
[project]
name = "mine"
[tool.flwr.app.components]
serverapp = "mine_server:app"
clientapp = "{client}:app"
[tool.flwr.app.config]
batch-size = 32
nested.lr = 0.1
"""
CLIENT = """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train()
def train(message, context):
    assert list(message.content) == ["arrays", "config"]  # the order of the probe is not there
    assert context.run_config["batch-size"] == 32
    if message.content["config"]["server-round"] == 3:
        raise OSError("the disk is full")
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)
"""
names = itertools.count()


@pytest.fixture
def project(tmp_path, monkeypatch):
    module = f"mine_client_{next(names)}"
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(client=module))
    (tmp_path / f"{module}.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def network(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3), nn.Sigmoid(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(108, 4)]
    return nn.Sequential(*layers)


def train(net, epochs=2, make=torch.optim.Adam, loss=cross_entropy, sizes=(2, 2, 1)):
    """Whole epochs in another order each, with an evaluation between them, as apps do."""
    torch.manual_seed(1)
    inputs, labels = 2 * torch.rand(sum(sizes), 1, 8, 8) - 1, torch.arange(sum(sizes)) % 4
    optimiser = make(net.parameters(), lr=0.01)
    for _ in range(epochs):
        for rows in torch.randperm(len(labels)).split(sizes):
            optimiser.zero_grad()
            loss(net(inputs[rows]), labels[rows]).backward()
            optimiser.step()
        with torch.no_grad():
            cross_entropy(net(inputs), labels)
    return inputs, labels


def turn_of(net, **how):
    sent = {name: value.clone() for name, value in net.state_dict().items()}
    with Probe(3) as probe:
        train(net, **how)
    return AppTurn(1, sent, {name: value.clone() for name, value in net.state_dict().items()}, probe.training)


def test_the_probe_sees_the_training_and_changes_nothing():
    net, other = network(), network()
    turn = turn_of(net)
    train(other)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in net.state_dict().items())
    training = turn.training
    assert training.net is net and training.optimiser == Optimiser("adam") and training.classes == 4
    assert [batch.size for batch in training.steps] == [2, 2, 1, 2, 2, 1]
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in training.trained.items())
    steps = len(training.steps)
    train(net)
    assert len(training.steps) == steps  # the hooks are gone


def test_a_turn_is_compared_imitated_and_known():
    turn = turn_of(network())
    assert turn.compare() == pytest.approx((0, 1, 1))
    assert turn.imitate() < 1e-4
    known, truth = turn.know((), (), torch.device("cpu")), turn.show(torch.device("cpu")).truth
    inputs, labels = train(network())
    assert truth.size == 10 and sorted(truth.labels[:5].tolist()) == sorted(labels.tolist())
    assert torch.allclose(truth.inputs[:5].sum(), inputs.sum())
    assert (known.local_epochs, known.local_batch, known.batch_size, known.local_steps) == (2, 2, 5, 6)
    assert known.mean.flatten().tolist() == known.std.flatten().tolist() == [0.5]
    assert "6 steps of 1 or 2 examples (2 passes over 5) by adam, learning rate 0.01" in describe_training(
        turn.training
    )


def test_dropout_is_seen_by_a_bad_imitation():
    assert turn_of(network(dropout=0.5)).imitate() > 0.1


def test_what_cannot_be_attacked_is_said():
    def squares(outputs, labels):
        return mse_loss(outputs, nn.functional.one_hot(labels, 4).float())

    for turn, reason in (
        (turn_of(network(), loss=squares), "its loss is mse_loss"),
        (turn_of(network(), make=torch.optim.RMSprop), "its optimiser is RMSprop"),
        (turn_of(network(), epochs=0), "its clients train 0 networks"),
    ):
        with pytest.raises(WrongInput, match=reason):
            turn.know((), (), torch.device("cpu"))


def test_optimisers_of_torch_as_ours():
    assert read_optimiser("SGD", {"momentum": 0.9, "dampening": 0, "foreach": None}, [0.1]) == Optimiser(momentum=0.9)
    assert read_optimiser("AdamW", {"betas": [0.9, 0.99]}, [0.1, 0.2]).schedule == (0.1, 0.2)
    with pytest.raises(WrongInput, match="amsgrad=True"):
        read_optimiser("Adam", {"amsgrad": True}, [0.1])


def test_arrays_without_names_are_named_by_their_order():
    net = network()
    values = {str(i): value for i, value in enumerate(net.state_dict().values())}
    assert list(name_arrays(values, net)) == list(net.state_dict())
    with pytest.raises(WrongInput, match="other arrays"):
        name_arrays({"0": torch.ones(2)}, net)


def test_the_scale_follows_from_the_range_unless_it_is_stated():
    inputs = torch.stack([torch.full((1, 2, 2), -2.0), torch.full((1, 2, 2), 3.0)])
    mean, std = scale_of((), (), inputs)
    assert (inputs * std + mean).flatten().tolist() == pytest.approx([0] * 4 + [1] * 4)
    assert scale_of([0.1], [0.2], inputs)[1].item() == pytest.approx(0.2)


def test_a_filter_that_does_nothing_is_called_so():
    assert "1 mod changes nothing" in describe_change(0.0, 1.0, 1.0, "none", 1)
    assert "unchanged" in describe_change(0.0, 1.0, 1.0, "none", 0)
    assert "changed by dgp: cosine 0.600" in describe_change(0.8, 0.6, 0.6, "dgp", 1)
    assert "dgp changes nothing" in describe_change(1e-8, 1.0, 1.0, "dgp", 0)


def test_a_project_with_settings_changed(project):
    app = read_project(project, "batch-size=8 nested.lr=1e-3")
    assert app.config == {"batch-size": 8, "nested.lr": 1e-3} and app.name == "mine"
    before = app.key
    next(project.glob("*.py")).write_text(CLIENT + "\n")
    assert app.key["code"] != before["code"]
    assert "once with each defense: none, dgp" in " ".join(
        plan(read(AuditApp, None, {"app": project, "defense": "none,dgp"}))
    )


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"run_config": "batch-sise=8"}, "did you mean 'batch-size'"),
        ({"run_config": "batch-size"}, "write key=value pairs"),
        ({"run_config": "batch-size=many"}, "is not readable"),
        ({"defense": "soteria"}, "needs the examples"),
        ({"defense": "ats"}, "does not act on a sent update"),
        ({"attack": "rob"}, "use a passive attack"),
        ({"mean": "0.5"}, "std: is missing"),
    ],
)
def test_wrong_settings_are_refused_before_the_run(project, fields, reason):
    with pytest.raises(WrongInput, match=reason):
        plan(read(AuditApp, None, {"app": project} | fields))


def test_folders_that_hold_no_app_are_refused(tmp_path, project):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'other'")
    with pytest.raises(WrongInput, match="is of no Flower app"):
        read_project(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project")
    with pytest.raises(WrongInput, match="is not TOML"):
        read_project(tmp_path)
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(client="absent_client"))
    with pytest.raises(WrongInput, match=r"cannot be imported \(ModuleNotFoundError"):
        read_project(tmp_path).load_client()


class Nodes:
    """A grid with two nodes: an app of ours that fails for the second."""

    def __init__(self, app):
        self.app, self.pending, self.homes = app, {}, {7: talking.context(0, 7), 8: talking.context(1, 8)}

    def get_node_ids(self):
        return list(self.homes)

    def push_messages(self, messages):
        for message in messages:
            ident = str(len(self.pending))
            self.pending[ident] = talking.delivered(copy.copy(message), ident)
            yield ident

    def pull_messages(self, idents):
        return [self.answer(self.pending[ident]) for ident in idents]

    def answer(self, message):
        node = message.metadata.dst_node_id
        if message.metadata.message_type == "evaluate":
            metrics = MetricRecord({"eval_acc": node / 10, "num-examples": 1 if node == 7 else 3})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        if node == 8:
            return Message(Error(1, "no data"), reply_to=message)
        return self.app(message, self.homes[node])


def test_the_grid_counts_decodes_and_orders_probes_that_the_app_does_not_see(project, tmp_path):
    app, words = ProbedApp(read_project(project), TopK(keep=0.5), 0), []
    grid = ObservedGrid(Nodes(app), [0], [1], tmp_path, words.append)
    model = {"w": torch.arange(4.0)}

    def ask(kind):
        content = RecordDict({"arrays": arrays_of(model), "config": ConfigRecord({"server-round": 1})})
        replies = grid.send_and_receive([Message(content, node, kind) for node in (7, 8)])
        return sorted(replies, key=lambda reply: reply.metadata.reply_to_message_id)

    replies = ask("train")
    assert torch.equal(tensors_of(replies[0].content["arrays"])["w"], model["w"])  # decoded: the app sent it unchanged
    assert ORDER not in replies[0].content and replies[1].has_error() and words == ["round 1"]
    ask("evaluate")
    record = grid.result.rounds[1]
    assert (record.arrived, record.errors) == (1, ["no data"]) and record.down > 0 < record.up
    assert record.accuracy == pytest.approx((0.7 + 3 * 0.8) / 4)
    (turn,) = grid.result.turns
    assert turn.training.client == 0 and turn.training.nets == [] and not list(tmp_path.glob("*.pt"))
    failed = app(talking.asked(model, 3), talking.context())
    assert failed.error.reason == "OSError: the disk is full"
    waiting = ObservedGrid(Nodes(app), [0], [1], tmp_path, words.append)
    with pytest.raises(WrongInput, match="waits for more than 2 clients"):
        for _ in range(1000):
            waiting.get_node_ids()
    grid.stopped = True
    with pytest.raises(KeyboardInterrupt):
        grid.pull_messages([])


def test_an_app_that_cannot_be_attacked_has_a_page_that_says_so(project, tmp_path):
    config = read(AuditApp, None, {"app": project, "attack": "ig:tv=0.1"})
    extra = {"app": True, "base_pruning": "none", "broadcast": "whole", "clients": 10, "view": "update", "settings": ""}
    labels = {"model": "Net", "dataset": "mine", "seed": 0, "defense": "none", "pruner": "none", "extra": extra}
    turn, log = turn_of(network(), make=torch.optim.RMSprop), FederationLog()
    log.rows += [*list_rounds(labels, {1: AppRound(up=10, down=20, arrived=1)}), *describe_clients(labels, [turn], 0)]
    attack_turns(config, [turn], labels, config.defense[0], torch.device("cpu"), log)
    (verdict,) = judge_federations(log.rows)
    assert (
        verdict.subject == "the app"
        and verdict.badge.text == "Nothing was measured"
        and "its optimiser is RMSprop" in verdict.text
    )
    with open_run(tmp_path / "run", "audit-app", {}) as run:
        run.add(log.rows)
    page = write_page([tmp_path / "run"]).read_text()
    assert "It cannot be imitated" in page and "What is sent is the trained model, unchanged." in page


def test_rounds_of_a_client_are_joined_and_other_examples_are_called_so(project):
    rounds = {"app": project, "attack": "ig:tv=0.1:rounds=2", "iterations": 2}
    with pytest.raises(
        WrongInput, match="attack_at: round 1 has too few before it, and an attack joins 2 rounds; use 2"
    ):
        read(AuditApp, None, rounds)
    config = read(AuditApp, None, rounds | {"attack_at": "3"})
    assert config.watched == [2, 3]
    extra = {"app": True, "base_pruning": "none", "broadcast": "whole", "clients": 10, "view": "update", "settings": ""}
    labels = {"model": "Net", "dataset": "mine", "seed": 0, "defense": "none", "pruner": "none", "extra": extra}
    net = network()
    same, again, other = (replace(turn_of(net, epochs=1, sizes=(n,)), round=r) for n, r in ((2, 2), (2, 3), (3, 2)))
    for earlier, history, note in ((same, 2, False), (other, 1, False), (shifted(same), 2, True)):
        log = FederationLog()
        attack_turns(config, [earlier, again], labels, config.defense[0], torch.device("cpu"), log)
        (row,) = (row for row in log.rows if row.metric == "psnr")
        assert (row.extra["round"], row.extra["history"], row.extra["same_rows"]) == (3, history, not note)
        assert ("are of other examples" in str(row.note)) == note


def shifted(turn):
    """The turn as one of other examples."""
    steps = [batch._replace(inputs=-batch.inputs) for batch in turn.training.steps]
    return replace(turn, training=replace(turn.training, steps=steps))


def test_an_app_is_audited_from_python(project, tmp_path, monkeypatch, capsys):
    result = AppRun({1: AppRound(up=10, down=20, arrived=1)}, [turn_of(network(), epochs=1, sizes=(2,))])
    monkeypatch.setattr(app_run, "run_app", lambda *_: result)
    settings = {"attack": "ig:tv=0.1", "iterations": 2, "run_config": "batch-size=2"}
    audited = secateur.audit_app(project, tmp_path / "run", **settings)
    assert {row.metric for row in audited.rows} >= {"psnr", "recognisable", "bytes_up"} and audited.figures
    assert audited.findings["none"][1] == "What is sent is the trained model, unchanged."
    audited.print()
    assert "PSNR" in capsys.readouterr().out
    assert "A client trains 466 weights" in audited.write(tmp_path / "page.html").read_text()
    with pytest.raises(WrongInput, match="run_config"):
        secateur.audit_app(project, tmp_path / "run", run_config="batch-sise=2")


def test_an_app_with_a_defense_on_the_wire_takes_a_further_one(project):
    """The line of the how-to page failed so: the second defense met bytes."""
    file = next(project.glob("*.py"))
    line = "ClientApp(mods=[upload_mod('top-k:keep=0.5', wire=True)])"
    code = CLIENT.replace("app = ClientApp()", f"from secateur.federated.flower import upload_mod\napp = {line}")
    code = code.replace(
        "return Message", "message.content['arrays']['w'] = Array(numpy.zeros(4, 'float32'))\n    return Message"
    )
    file.write_text(f"import numpy\nfrom flwr.app import Array\n{code}")
    app, model = ProbedApp(read_project(project), TopK(keep=0.25), 0), {"w": torch.arange(1.0, 5.0)}
    asked = talking.asked(model, 1)
    reply = app(asked, talking.context())
    assert not reply.has_error(), reply.error
    decode_reply(reply, model, asked.content)
    assert tensors_of(reply.content["arrays"])["w"].tolist() == [1, 2, 3, 0]
