"""Signed statements about updates, and the strategy that holds updates against an agreement."""

import copy
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from talking import answer, asked, context, delivered
from torch import nn

import secateur.federated.flower as flower_package
from secateur.defenses.effect import cosine, find_contradiction
from secateur.errors import WrongInput
from secateur.federated.flower import AgreedStrategy, DecodingStrategy, upload_mod
from secateur.federated.flower.link import arrays_of, tensors_of
from secateur.federated.flower.mod import read_upload
from secateur.federated.flower.statement import RECORD, digest_of, read_statement
from secateur.interfaces import Batch

MODEL = {"w": torch.randn(200, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(10)}
STEP = {name: torch.randn(v.shape, generator=torch.Generator().manual_seed(len(v))) for name, v in MODEL.items()}


class TwoNodes:
    def get_node_ids(self):
        return [7, 8]


def trains(message, home):
    number = message.content["config"]["server-round"]
    return answer(message, {name: value + number * STEP[name] for name, value in MODEL.items()})


def begin(strategy, number=1):
    """The round's messages by node, as their clients receive them."""
    messages = strategy.configure_train(number, arrays_of(MODEL), ConfigRecord(), TwoNodes())
    return {m.metadata.dst_node_id: delivered(m, f"{number}.{m.metadata.dst_node_id}") for m in messages}


def play(strategy, mods, homes, number=1, change=lambda replies: replies):
    messages = begin(strategy, number)
    replies = change([mods[node](messages[node], homes[node], trains) for node in sorted(messages)])
    return strategy.aggregate_train(number, replies)


def homes(**more):
    return {7: context(0, 7, **more), 8: context(1, 8, **more)}


def both(mod):
    return {7: mod, 8: mod}


@pytest.mark.parametrize("defense", ["dgp:k1=.05", "top-k+error-feedback", "noise:sigma=1", "outpost", "none"])
@pytest.mark.parametrize("wire", [False, True])
def test_updates_that_keep_the_agreement_are_averaged(defense, wire):
    strategy = AgreedStrategy(DecodingStrategy(FedAvg()) if wire else FedAvg(), defense)
    home, mod = homes(run={"secateur-defense": defense}), upload_mod(wire=wire)
    for number in (1, 2):
        arrays, metrics = play(strategy, both(mod), home, number)
        assert arrays is not None and not strategy.breaches
        assert metrics["secateur-breaches"] == 0
        if defense != "outpost":  # which sends some updates unchanged
            assert metrics["secateur-idle"] == (2 if defense == "none" else 0)
    assert len(strategy.statements) == 4 and strategy.statements[0].secateur


def test_a_statement_says_what_was_done():
    reply = upload_mod("dgp")(delivered(asked(MODEL, 3)), context(), trains)
    statement, _ = read_statement(reply.content)
    assert statement.defense == "DualGradientPruning(k1=0.05, k2=0.75)" and (statement.round, statement.node) == (3, 7)
    assert statement.digest == digest_of(reply.content) and statement.withheld == pytest.approx(0.8, abs=0.02)
    assert 0 < statement.cosine < 0.9 and not statement.idle


def without(replies):
    del replies[0].content[RECORD]
    return replies


def other_words(replies):
    record = replies[0].content[RECORD]
    text = json.loads(record["statement"]) | {"withheld": 0.99}
    record["statement"] = json.dumps(text).encode()
    return replies


def garbage(replies):
    replies[0].content[RECORD] = ConfigRecord({"statement": 3, "key": b"", "signature": b"x"})
    return replies


def other_arrays(replies):
    values = tensors_of(replies[0].content["arrays"])
    replies[0].content["arrays"] = arrays_of({name: value + 1 for name, value in values.items()})
    return replies


def more_examples(replies):
    replies[0].content["metrics"]["num-examples"] = 10**6
    return replies


def neighbours(replies):
    replies[0].content = copy.deepcopy(replies[1].content)
    return replies


BREACHES = {
    without: "is missing",
    other_words: "is forged",
    garbage: "is forged",
    other_arrays: "its digest is",
    more_examples: "its digest is",
    neighbours: "its node is",
}


@pytest.mark.parametrize("change", BREACHES)
@pytest.mark.parametrize("on_breach", ["refuse", "flag"])
def test_a_statement_that_does_not_hold_is_a_breach(change, on_breach):
    strategy = AgreedStrategy(FedAvg(), "top-k:keep=.2", on_breach=on_breach)
    mod = upload_mod("top-k")
    good = upload_mod("top-k")(delivered(asked(MODEL)), context(), trains)
    arrays, metrics = play(strategy, both(mod), homes(), change=change)
    (breach,) = strategy.breaches
    assert (breach.round, breach.node) == (1, 7) and BREACHES[change] in breach.reason
    assert metrics["secateur-breaches"] == 1
    if on_breach == "refuse":
        assert torch.equal(tensors_of(arrays)["w"], tensors_of(good.content["arrays"])["w"])


def test_other_defenses_and_other_keys_are_breaches():
    strategy, home = AgreedStrategy(FedAvg(), "top-k"), homes()
    play(strategy, {7: upload_mod("top-k:keep=0.9"), 8: upload_mod("top-k")}, home)
    assert "its defense is 'TopK(keep=0.9)', and must be 'TopK(keep=0.2)'" in strategy.breaches[0].reason
    play(strategy, both(upload_mod("top-k")), home | {8: context(1, 8)}, 2)  # a new context has a new key
    assert len(strategy.breaches) == 2 and "another key" in strategy.breaches[1].reason


def test_an_update_of_an_earlier_round_is_a_breach():
    strategy, home, mod = AgreedStrategy(FedAvg(), "top-k"), homes(), upload_mod("top-k")
    kept = {}

    def remember(replies):
        kept.update({reply.metadata.src_node_id: copy.deepcopy(reply.content) for reply in replies})
        return replies

    def replay(replies):
        replies[0].content = kept[7]
        return replies

    play(strategy, both(mod), home, change=remember)
    play(strategy, both(mod), home, 2, replay)
    assert "its round is 1, and must be 2" in strategy.breaches[0].reason

    def again(message, _):  # signed anew
        return answer(message, {name: value + STEP[name] for name, value in MODEL.items()})

    messages = begin(strategy, 3)
    strategy.aggregate_train(3, [mod(messages[7], home[7], again)])
    assert "replayed" in strategy.breaches[1].reason


def test_a_lie_that_the_update_contradicts_is_a_breach():
    class Lying(type(read_upload("top-k"))):
        def __call__(self, grads, state, context):
            return grads, state

        def __repr__(self):
            return "TopK(keep=0.2)"

    strategy = AgreedStrategy(FedAvg(), "top-k")
    play(strategy, {7: upload_mod(Lying()), 8: upload_mod("top-k")}, homes())
    assert "w has 200 entries that are not 0, and TopK(keep=0.2) sends 40 at most" in strategy.breaches[0].reason


@pytest.mark.parametrize(
    ("defense", "update", "visible"),
    [
        ("dgp+error-feedback", torch.ones(100), True),
        ("dgp:release=3", torch.ones(100), False),
        ("noise:sigma=0.1", torch.full((1000,), 0.01), True),
        ("noise:sigma=0.1", 0.1 * torch.randn(1000, generator=torch.Generator().manual_seed(1)), False),
        ("outpost", torch.ones(100), False),
    ],
)
def test_some_lies_are_visible(defense, update, visible):
    assert (find_contradiction(read_upload(defense), {"w": update}) is not None) == visible


def test_a_defense_that_does_nothing_is_called_so():
    strategy = AgreedStrategy(FedAvg(), "dgp:k1=0:k2=0")
    _, metrics = play(strategy, both(upload_mod("dgp:k1=0:k2=0")), homes())
    assert metrics["secateur-idle"] == 2 and all(statement.idle for statement in strategy.statements)
    assert (
        cosine({"w": torch.zeros(2)}, {"w": torch.zeros(2)}) == 1
        and cosine(STEP, {"w": 0 * STEP["w"], "b": 0 * STEP["b"]}) == 0
    )


def test_keys_of_nodes_are_files_that_ssh_keygen_and_openssl_write(tmp_path):
    commands = [
        ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", "ssh"],
        ["openssl", "ecparam", "-name", "secp384r1", "-genkey", "-noout", "-out", "pem"],
        ["openssl", "ec", "-in", "pem", "-pubout", "-out", "pem.pub"],
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "other"],
    ]
    for command in commands:
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    home = {7: context(0, 7, secateur_key=str(tmp_path / "ssh")), 8: context(1, 8, secateur_key=str(tmp_path / "pem"))}
    strategy = AgreedStrategy(FedAvg(), "top-k", keys=[tmp_path / "ssh.pub", tmp_path / "pem.pub"])
    play(strategy, both(upload_mod("top-k")), home)
    assert not strategy.breaches
    strict = AgreedStrategy(FedAvg(), "top-k", keys=[tmp_path / "ssh.pub"])
    play(strict, both(upload_mod("top-k")), home)
    assert [breach.node for breach in strict.breaches] == [8] and "unknown key" in strict.breaches[0].reason
    with pytest.raises(WrongInput, match="ecdsa"):
        AgreedStrategy(FedAvg(), "top-k", keys=[tmp_path / "other.pub"])
    refused = upload_mod("top-k")(asked(MODEL), context(secateur_key=str(tmp_path / "other")), trains)
    assert "another kind" in refused.error.reason


def test_the_lines_of_the_page_for_deployments_work(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text()
    blocks = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "Auditor(" not in block and "flare" not in block
    ]
    monkeypatch.chdir(tmp_path)
    for number in (0, 1):
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"hospital-{number}"]
        subprocess.run(command, check=True)

    def network():
        return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))

    batch = Batch(torch.zeros(2, 1, 28, 28), torch.arange(2))
    names = vars(flower_package) | {name: getattr(flower_package, name) for name in flower_package.__all__}
    names |= {"ClientApp": ClientApp, "FedAvg": FedAvg, "network": network, "batch": batch}
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert isinstance(names["strategy"], flower_package.SubmodelStrategy)


def test_errors_pass_and_wrong_settings_are_refused():
    strategy = AgreedStrategy(FedAvg(), "top-k")
    messages = begin(strategy)
    failed = Message(Error(1, "no data"), reply_to=messages[7])
    good = upload_mod("top-k")(messages[8], context(1, 8), trains)
    assert strategy.aggregate_train(1, [failed, good])[0] is not None and not strategy.breaches
    with pytest.raises(WrongInput, match="on_breach"):
        AgreedStrategy(FedAvg(), "top-k", on_breach="shout")
    with pytest.raises(WrongInput, match="needs the examples"):
        AgreedStrategy(FedAvg(), "soteria")
    stranger = upload_mod("top-k")(delivered(asked(MODEL, node=9)), context(2, 9), trains)
    stranger.content["metrics"] = MetricRecord({"num-examples": 1})
    strategy.aggregate_train(1, [stranger])
    assert len(strategy.breaches) == 1
