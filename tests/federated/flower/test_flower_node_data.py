"""Clients with data of their own: they train on it, weigh as much as they say, and are not attacked."""

import json
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import talking
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from near import Near

from alone import pictures
from secateur.config import Federate, dump, read
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.experiments.federate import run_federate
from secateur.federated.attacks.observer import Every
from secateur.federated.client_training import LocalTraining
from secateur.federated.flower.app import client_app, clients_of, restrict_task
from secateur.federated.flower.client import (
    Clients,
    KnownPanel,
    describe_data,
    fit_to_server,
    load_own_data,
    read_description,
)
from secateur.federated.flower.federation import FlowerFederation
from secateur.federated.flower.link import HELLO, INLINE, MOST, SMALL, Link, inline, pack, restore
from tiny_rules import ROWS, federation, run

SIZES = [4, 6, 8, 10, 12]
WHOLE = LocalTraining(steps=None, epochs=1, batch_size=64, learning_rate=0.1)  # one batch of all rows: no draw matters


def unequal(**terms):
    """Clients with so many rows each, in process."""
    here = federation(shares=list(torch.arange(ROWS).split(SIZES)), local=WHOLE, per_round=5, **terms)
    here.data = pictures(ROWS, 8)
    return here


def with_own(here, owners, says=None, **more):
    """The same over a Grid, where `owners` have their rows at home and the server has others in their place."""
    total, terms = len(here.terms.shares), here.terms
    at_home = {
        client: Clients(
            here.net, here.train.take(rows), replace(terms, shares=[torch.arange(len(rows))] * total), 0, "cpu"
        )
        for client, rows in enumerate(terms.shares)
        if client in owners
    }
    common = Clients(here.net, here.train, terms, here.seed, here.device)

    def answer(content, home):
        return at_home.get(content.config_records["turn"]["client"], common).answer(content, home)

    says = says or (lambda client: len(terms.shares[client]) if client in owners else 0)
    grid = Near(answer, total, examples=says)
    strange = here.data.inputs.clone()
    for client in owners:
        strange[terms.shares[client]] = 0
    data = replace(here.data, inputs=strange)
    shares = [rows[:1] if client in owners else rows for client, rows in enumerate(terms.shares)]
    link = Link(grid, 0.5, patience=1)
    return FlowerFederation(link, "{}", here.net, data, replace(terms, shares=shares), here.seed, **more)


@pytest.mark.parametrize("owners", [[0, 1, 2, 3, 4], [1, 4]])
def test_the_model_is_that_of_the_same_rows_in_one_place(owners):
    here = unequal()
    there = with_own(here, owners)
    run(here), run(there)
    for name, value in here.model().items():
        assert torch.allclose(value, there.model()[name], atol=1e-10), name


def test_rows_say_who_has_data_of_its_own():
    told = [each for each in run(with_own(unequal(), [1, 4])) if each.metric == "own_examples"]
    assert [(each.client, each.value) for each in told] == [(1, 6), (4, 12)]
    assert all("not attacked" in each.note for each in told)


class Greedy(Every):
    """Would have everybody tampered with."""

    waits = False

    def finish(self):
        pass

    def victims(self, number, clients):
        return clients


@pytest.mark.parametrize("view", ["update", "sum"])
def test_what_cannot_be_scored_is_not_shown(view):
    seen = []
    there = with_own(unequal(view=view), [1, 4], observers=[Every(1, seen.append)])
    run(there)
    assert {each.client for each in seen} == ({0, 2, 3} if view == "update" else set())
    assert KnownPanel([Greedy(1, seen.append)], there, {1: 6, 4: 12}).victims(1, [0, 1, 2, 4]) == {0, 2}


def test_a_client_that_says_too_much_takes_no_memory():
    there = with_own(unequal(rounds=1), [1], says=lambda client: 10**15 if client == 1 else -5)
    run(there)
    assert there.link.examples == {1: MOST} and len(there.terms.shares[1]) == MOST


@pytest.mark.parametrize("said", [{"says": lambda c: "me" if c == 1 else c}, {"examples": lambda c: [1.5, "x"][c % 2]}])
def test_a_greeting_that_cannot_be_read_ends_nothing(said, caplog):
    link = Link(Near(None, 3, **said), 0.5, patience=0)
    link.clients = 3
    link.greet_nodes()
    assert link.nodes == ({0: 100, 2: 102} if "says" in said else {}) and "ignoring node 101" in caplog.text


def whole(name="all", shape=(1, 4, 4), classes=3, rows=6, mean=(0.2,), std=(0.4,)):
    inputs = torch.rand(rows, *shape, generator=torch.Generator().manual_seed(0))
    return Dataset(name, inputs, torch.arange(rows) % classes, classes, rows, None, mean, std)


def test_pixels_are_put_into_the_servers_units(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "ours.npz", x=pixels, y=np.arange(10) % 2, train_size=8)
    own = load_own_data(str(tmp_path / "ours.npz"), None)
    assert own.train_size == 8 == len(own.inputs)
    said = json.loads(describe_data(whole(), 5))
    found = fit_to_server(own, said)
    assert torch.allclose(found.inputs, (torch.from_numpy(pixels[:8, None] / 255).float() - 0.2) / 0.4, atol=1e-5)
    assert found.classes == 3 and said["clients"] == 5


def test_numbers_are_taken_as_they_are():
    own = whole("ours", mean=(), std=())
    assert torch.equal(fit_to_server(own, json.loads(describe_data(whole(), 2))).inputs, own.inputs)


def test_data_that_does_not_fit_is_refused():
    with pytest.raises(WrongInput, match=r"shape \(1, 5, 5\); the federation's have \(1, 4, 4\)"):
        fit_to_server(whole("ours", shape=(1, 5, 5)), json.loads(describe_data(whole(), 2)))
    with pytest.raises(WrongInput, match="labels from 0 to 4; allowed: 0 to 2"):
        fit_to_server(whole("ours", classes=5), json.loads(describe_data(whole(), 2)))


# The app ----------------------------------------------------------------------------------------------------------


class Nodes(Near):
    """Nodes that run the app, each with its configuration."""

    def __init__(self, configs):
        super().__init__(None, len(configs))
        self.app, self.objects = client_app(), []
        for node, config in zip(self.nodes, configs, strict=True):
            self.homes[node].node_config.clear()
            self.homes[node].node_config.update(config)

    def _reply(self, message):
        with torch.enable_grad():
            reply = self.app(message, self.homes[message.metadata.dst_node_id])
        self.objects += [len(get_all_nested_objects(each)) for each in (message, reply)]
        return reply


def npz(path, data, rows):
    np.savez(path, inputs=data.inputs[rows].numpy(), labels=data.labels[rows].numpy())
    return str(path)


SETTINGS = {"model": "digits-cnn", "clients": 3, "per_round": 3, "rounds": 2, "local_steps": 1, "batch_size": 8}
SETTINGS |= {"engine": "flower", "evaluate_every": 1, "deadline": 60}


def test_nodes_of_the_app_bring_their_own(tmp_path):
    data = load("digits")
    configs = [
        {"partition-id": 0, "own-data": npz(tmp_path / "a.npz", data, slice(0, 30))},
        {"partition-id": 1},
        {"own-data": npz(tmp_path / "b.npz", data, slice(30, 80))},
    ]
    config = read(Federate, None, SETTINGS | {"defense": "dgp+error-feedback"})
    rows = run_federate(config, tmp_path / "run", Link(Nodes(configs), 60, patience=1))
    assert {row.extra["client"]: row.value for row in rows if row.metric == "own_examples"} == {0: 30, 2: 50}
    assert not [row for row in rows if row.metric == "lost_clients"]
    assert all(row.value < 2.5 for row in rows if row.metric == "test_loss")


def test_deployed_nodes_get_the_same_messages_in_fewer_objects(tmp_path, monkeypatch):
    monkeypatch.setattr("secateur.federated.flower.link.shorten_pulls", lambda limit: None)  # of a whole process
    config, results = read(Federate, None, SETTINGS | {"rounds": 1, "defense": "dgp+error-feedback"}), {}
    for deployed in (False, True):
        grid = Nodes([{"partition-id": number} for number in range(3)])
        rows = run_federate(config, tmp_path / str(deployed), Link(grid, 60, patience=1, deployed=deployed))
        kept = {row.metric: row.value for row in rows if row.metric in ("test_loss", "bytes_up", "bytes_down")}
        results[deployed] = kept, max(grid.objects)
    assert results[True][0] == results[False][0] and "test_loss" in results[True][0]
    assert results[True][1] == 4 and results[False][1] >= 6  # each is a request to the superlink, on either side


def test_a_large_message_keeps_its_arrays_and_a_forged_one_is_read_as_far_as_it_goes():
    large = RecordDict({"update": pack(values=bytes(SMALL + 1))})
    assert inline(large) is large and restore(large) is large
    forged = restore(RecordDict({INLINE: ConfigRecord({"update/values": b"1", "": b"2", "update/sent": 3})}))
    assert list(forged.array_records["update"]) == ["values"] and not forged.config_records


@pytest.mark.parametrize("over", [{}, {"submodels": "mapp-fl", "model": "mapp-cnn-8", "local_steps": None}])
def test_a_node_that_cannot_take_part_is_lost_and_named(tmp_path, over, caplog):
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, inputs=np.zeros((9, 5), np.float32), labels=np.zeros(9, np.int64))
    configs = [{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 2, "own-data": str(wrong)}]
    config = read(Federate, None, SETTINGS | over)
    rows = run_federate(config, tmp_path / "run", Link(ForgivingNodes(configs), 60, patience=1))
    lost = [row for row in rows if row.metric == "lost_clients"]
    assert lost and all("client 2 answered with an error" in row.note for row in lost)
    assert "own-data" in caplog.text


class ForgivingNodes(Nodes):
    """What an app raises is an error message, as a runtime makes it."""

    def _reply(self, message):
        try:
            return super()._reply(message)
        except Exception as error:
            return Message(Error(1, str(error)), reply_to=message)


def test_hello_says_how_many_examples_there_are(tmp_path):
    home = talking.context()
    home.node_config["own-data"] = npz(tmp_path / "a.npz", load("digits"), slice(0, 30))
    asked = talking.delivered(Message(RecordDict({"turn": ConfigRecord({"hello": True})}), 7, HELLO))
    told = client_app()(asked, home).content.config_records["turn"]
    assert dict(told) == {"client": 0, "examples": 30}


# A server that is not trusted ---------------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module whose import and whose functions leave a mark on the node."""
    mark = tmp_path / "ran"
    text = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n\ndef call(*_):\n    raise SystemExit\n"
    (tmp_path / "trap.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trap", raising=False)
    return mark


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "trap:call"),
        ("data", "trap:call"),
        ("data", "/etc/passwd"),
        ("data", "../secrets.npz"),
        ("transform", "trap:call"),
        ("model", "timm:resnet18"),
    ],
)
def test_a_server_cannot_run_code_or_read_files_on_a_node(trap, field, value):
    config = dump(read(Federate, None, SETTINGS)) | {field: value}
    task = json.dumps({"config": config, "seed": 0, "rule": "none", "defense": "none"})
    with pytest.raises(WrongInput, match=f"{field}: .*refused"):
        clients_of(task, "{}", "{}")
    assert not trap.exists()


TASK = {"config": {"model": "mlp", "data": "digits"}, "seed": 0, "rule": "none", "defense": "none"}


@pytest.mark.parametrize(
    "task",
    [
        *([], 7, None, "x", {}, TASK | {"config": []}, TASK | {"config": None}, TASK | {"seed": "0"}),
        *(TASK | {"rule": 3}, TASK | {"rule": "no"}, TASK | {"defense": "no"}, TASK | {"defense": "x" * 5000}),
    ],
)
def test_a_task_of_another_form_is_one_sentence(task):
    with pytest.raises(WrongInput) as refused:
        clients_of(json.dumps(task), "{}", "{}")
    assert refused.value.field in ("task", "rule", "defense") and len(str(refused.value)) < 1500


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[1, 2]"])
def test_a_task_that_is_no_mapping_is_one_sentence(text):
    with pytest.raises(WrongInput, match="task: is refused: it must be a JSON object with config, seed, rule, defense"):
        clients_of(text, "{}", "{}")


@pytest.mark.parametrize(
    "change",
    [
        *({"clients": 10**12}, {"clients": True}, {"classes": 10**12}, {"classes": "10"}, {"shape": 8}),
        *({"mean": ["x"]}, {"mean": [float("nan")]}, {"std": [[1]]}, {"mean": [10**400]}, {"shape": [None]}),
    ],
)
def test_a_description_of_data_of_another_form_takes_no_memory(change):
    said = {"shape": [1, 8, 8], "classes": 10, "clients": 4, "mean": [0.5], "std": [0.5], "whole": False}
    assert read_description(json.dumps(said)) == said
    with pytest.raises(WrongInput, match="task: is refused"):
        read_description(json.dumps(said | change))
    with pytest.raises(WrongInput, match="task: is refused"):
        read_description(json.dumps([said]))


def test_a_node_reads_its_own_folder_and_downloads_nothing():
    config = dump(read(Federate, None, SETTINGS)) | {"data_folder": "/root", "weights": "/w", "threads": 10**6}
    safe = restrict_task(config, [], has_data=False)
    assert not {"data_folder", "weights"} & safe.keys()
    assert safe["download"] is False and safe["threads"] <= os.cpu_count()


def test_a_model_that_the_operator_names_is_allowed():
    config = dump(read(Federate, None, SETTINGS)) | {"model": "my_models:net"}
    assert restrict_task(config, ["my_models:net"], has_data=False)["model"] == "my_models:net"
    with pytest.raises(WrongInput, match="model"):
        restrict_task(config, ["my_models:other"], has_data=False)
