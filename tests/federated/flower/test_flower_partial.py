"""Pruned and sub-model federations as strategies: what is sent, what is averaged, and what any app's client needs."""

import copy

import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM
from talking import answer, context, delivered
from torch import nn

from secateur import tree
from secateur.errors import WrongInput
from secateur.federated.flower import AgreedStrategy, PrunedStrategy, SubmodelStrategy, network_of, upload_mod
from secateur.federated.flower.link import arrays_of, size_of, tensors_of
from secateur.federated.submodels.rules import RuleContext
from secateur.interfaces import Batch

SHAPE = (1, 6, 6)


def network(norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        middle = [nn.BatchNorm2d(8)] if norm else []
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)]
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *middle, nn.ReLU(), *head)


NET = network()
STATE = tree.state_of(NET)
BATCH = Batch(torch.randn(20, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3)


class Nodes:
    def get_node_ids(self):
        return [9, 7, 8]


def step_of(node, name, value):
    """What a client adds to a tensor: another constant for every client, so that an average shows who is in it."""
    return torch.full_like(value, float(node))


def trains(message, _):
    node, sent = message.metadata.dst_node_id, tensors_of(message.content["arrays"])
    return answer(message, {name: value + step_of(node, name, value) for name, value in sent.items()}, node)


def play(strategy, arrays, number=1, client=lambda message: trains(message, None)):
    messages = strategy.configure_train(number, arrays, ConfigRecord({"lr": 0.1}), Nodes())
    messages = [delivered(message, f"{number}.{message.metadata.dst_node_id}") for message in messages]
    replies = [client(message) for message in messages]
    return messages, replies, strategy.aggregate_train(number, replies)


def size(replies):
    return sum(size_of(reply.content["arrays"]) for reply in replies)


def test_a_pruned_model_stays_pruned_with_unchanged_clients():
    strategy = PrunedStrategy(FedAvg(), "snip:rate=0.5", NET, BATCH)
    messages, _, (arrays, _) = play(strategy, arrays_of(STATE))
    total, kept = (sum(int(f(keep)) for keep in strategy.mask.values()) for f in (torch.numel, torch.sum))
    assert kept == total - int(0.5 * total)
    mean = (7 * 7 + 8 * 8 + 9 * 9) / 24
    for name, value in tensors_of(arrays).items():
        keep = strategy.mask.get(name, torch.ones_like(value, dtype=torch.bool))
        assert torch.equal(value[~keep], torch.zeros_like(value[~keep]))
        assert torch.allclose(value[keep], STATE[name][keep] + mean)
        assert all(bool((tensors_of(m.content["arrays"])[name][~keep] == 0).all()) for m in messages)
    assert messages[0].content is messages[1].content and messages[0].content["config"]["lr"] == 0.1
    (evaluated, *_) = strategy.configure_evaluate(1, arrays_of(STATE), ConfigRecord(), Nodes())
    sent = tensors_of(evaluated.content["arrays"])
    assert all(bool((sent[name][~keep] == 0).all()) for name, keep in strategy.mask.items())


@pytest.mark.parametrize("wire", [False, True])
def test_a_client_that_knows_the_mask_sends_the_kept_entries_alone(wire):
    homes, mod = {node: context(node=node) for node in (7, 8, 9)}, upload_mod("none", wire=wire)
    strategy = AgreedStrategy(PrunedStrategy(FedAvg(), "snip:rate=0.9", NET, BATCH), "none")
    plain = PrunedStrategy(FedAvg(), "snip:rate=0.9", NET, BATCH)

    sizes = []

    def client(message):
        reply = mod(message, homes[message.metadata.dst_node_id], trains)
        sizes.append(size_of(reply.content["arrays"]))  # before the server decodes it
        return reply

    _, _, (arrays, _) = play(strategy, arrays_of(STATE), client=client)
    _, dense, (expected, _) = play(plain, arrays_of(STATE))
    assert not strategy.breaches and (sum(sizes) < 0.6 * size(dense)) == wire
    for name, value in tensors_of(expected).items():
        assert torch.allclose(tensors_of(arrays)[name], value, atol=1e-6)


@pytest.mark.parametrize("defense", ["noise:sigma=30", "dgp", "outpost"])
def test_defended_updates_of_a_pruned_model_keep_the_agreement(defense):
    homes, mod = {node: context(node=node) for node in (7, 8, 9)}, upload_mod(defense, wire=True)
    strategy = AgreedStrategy(PrunedStrategy(FedAvg(), "snip:rate=0.8", NET, BATCH), defense)
    play(strategy, arrays_of(STATE), client=lambda m: mod(m, homes[m.metadata.dst_node_id], trains))
    assert len(strategy.statements) == 3 and not strategy.breaches


def test_a_weight_that_comes_back_resumes_its_value():
    strategy = PrunedStrategy(FedAvg(), "random:rate=0.5:every=2", NET, BATCH)
    arrays, masks = arrays_of(STATE), []
    for number in (1, 2):
        _, _, (arrays, _) = play(strategy, arrays, number)
        masks.append(copy.deepcopy(strategy.mask))
    name = "0.weight"
    back = masks[1][name] & ~masks[0][name]
    assert bool(back.any()) and torch.equal(tensors_of(arrays)[name][back], STATE[name][back])
    assert bool((tensors_of(arrays)[name][~masks[1][name]] == 0).all())


def test_prunefl_grows_where_the_squared_updates_are_largest():
    base = "prunefl:rate=0.5:every=1:iterations=1:samples=20"
    strategy = PrunedStrategy(FedAvg(), base, NET, BATCH)
    steep = {}

    def client(message):
        sent = tensors_of(message.content["arrays"])
        assert "secateur-mask" not in message.content["config"]
        steep.update({name: ~keep for name, keep in strategy.mask.items()})
        moved = {n: v - 5.0 * steep[n] if n in steep else v for n, v in sent.items()}  # only dropped weights move
        return answer(message, moved)

    play(strategy, arrays_of(STATE), client=client)
    grown = sum(int((keep & steep[name]).sum()) for name, keep in strategy.mask.items())
    assert grown > 0 and tree.share_kept(strategy.mask) == pytest.approx(0.5, abs=0.01)


def test_pruned_strategies_refuse_what_does_not_fit():
    with pytest.raises(WrongInput, match="lets clients choose"):
        PrunedStrategy(FedAvg(), "feddst", NET, BATCH)
    with pytest.raises(WrongInput, match="does not fit the arrays"):
        play(PrunedStrategy(FedAvg(), "snip", NET, BATCH), arrays_of({"w": torch.zeros(3)}))


RATES = (1.0, 0.5, 0.25)  # of the nodes 7, 8 and 9


@pytest.mark.parametrize("rule", ["mapp-fl", "heterofl", "fdropout"])
@pytest.mark.parametrize("inner", [FedAvg, lambda: FedAvgM(server_learning_rate=1.0, server_momentum=0.0)])
def test_every_number_is_averaged_over_the_clients_that_trained_it(rule, inner):
    strategy = SubmodelStrategy(inner(), NET, SHAPE, rates=RATES, rule=rule)
    arrays = arrays_of(STATE)
    if isinstance(strategy.inner, FedAvgM):
        strategy.inner.current_arrays = arrays
    messages, _, (arrays, _) = play(strategy, arrays, 3)
    expected = {name: value.clone() for name, value in STATE.items()}
    weight = {name: torch.zeros_like(value) for name, value in STATE.items()}
    total = {name: torch.zeros_like(value) for name, value in STATE.items()}
    for client, (node, rate) in enumerate(zip((7, 8, 9), RATES, strict=True)):  # by hand, without the index of a cut
        depths = [(0, 8, 0), (1, 12, 1)]
        kept = [
            torch.from_numpy(strategy.rule(RuleContext(client, 3, 3, layer, depth, -int(-rate * of // 1), of)))
            if rate < 1
            else torch.arange(of)
            for layer, of, depth in depths
        ]
        rows = {"0": kept[0], "4": kept[1], "6": torch.arange(3)}
        columns = {"0": torch.arange(1), "4": kept[0], "6": kept[1]}
        for layer in rows:
            where = torch.zeros_like(STATE[f"{layer}.weight"], dtype=torch.bool)
            where[rows[layer][:, None], columns[layer][None]] = True
            biased = torch.zeros_like(STATE[f"{layer}.bias"], dtype=torch.bool)
            biased[rows[layer]] = True
            for name, cells in ((f"{layer}.weight", where), (f"{layer}.bias", biased)):
                total[name] += torch.where(cells, node * (STATE[name] + node), 0)
                weight[name] += node * cells
    for name, value in tensors_of(arrays).items():
        wanted = torch.where(weight[name] > 0, total[name] / weight[name].clamp_min(1), expected[name])
        assert torch.allclose(value, wanted, atol=1e-5), name
    sizes = {m.metadata.dst_node_id: size_of(m.content["arrays"]) for m in messages}
    assert sizes[7] > sizes[8] > sizes[9]
    assert [m.content["config"]["secateur-width"] for m in sorted(messages, key=lambda m: m.metadata.dst_node_id)] == [
        *RATES
    ]


def test_a_client_builds_the_network_that_it_was_sent():
    net = network(norm=True)
    strategy = SubmodelStrategy(FedAvg(), net, SHAPE, rates=RATES, rule="heterofl")
    messages = {
        m.metadata.dst_node_id: m
        for m in strategy.configure_train(1, arrays_of(tree.state_of(net)), ConfigRecord(), Nodes())
    }
    for node, channels in ((7, 8), (8, 4), (9, 2)):
        narrow = network_of(messages[node], network(norm=True), SHAPE)
        assert narrow[0].out_channels == channels and torch.equal(narrow[0].weight, net[0].weight[:channels])
        assert narrow(BATCH.inputs).shape == (20, 3) and narrow.training
        assert set(narrow.state_dict()) == set(tensors_of(messages[node].content["arrays"]))
    arrays, _ = strategy.aggregate_train(1, [trains(delivered(m), None) for m in messages.values()])
    assert torch.equal(tensors_of(arrays)["1.running_var"], torch.ones(8))  # the server's own


def test_sub_models_on_the_wire_are_defended_and_held_against_the_agreement():
    home, mod = {node: context(node=node) for node in (7, 8, 9)}, upload_mod("top-k", wire=True)
    strategy = AgreedStrategy(SubmodelStrategy(FedAvg(), NET, SHAPE, rates=RATES), "top-k")
    _, _, (arrays, metrics) = play(
        strategy, arrays_of(STATE), client=lambda m: mod(m, home[m.metadata.dst_node_id], trains)
    )
    assert metrics["secateur-breaches"] == 0 and not torch.equal(tensors_of(arrays)["0.weight"], STATE["0.weight"])


def test_a_wrong_reply_is_left_out_and_wrong_settings_are_refused():
    strategy = SubmodelStrategy(FedAvg(), NET, SHAPE, rates=RATES)

    def client(message):
        node = message.metadata.dst_node_id
        return answer(message, STATE) if node == 9 else trains(message, None)  # a whole model from the narrowest

    _, _, (arrays, _) = play(strategy, arrays_of(STATE), client=client)
    biggest = torch.cat([(tensors_of(arrays)[n] - v).flatten() for n, v in STATE.items()]).max()
    assert 7 <= biggest <= 8
    for rule in ("none", "local"):
        with pytest.raises(WrongInput, match="cuts no sub-models"):
            SubmodelStrategy(FedAvg(), NET, SHAPE, rates=RATES, rule=rule)
    with pytest.raises(WrongInput, match="without channels"):
        SubmodelStrategy(FedAvg(), NET, SHAPE, rates=[0.01])
    with pytest.raises(WrongInput, match="the arrays do not"):
        play(strategy, arrays_of({"w": torch.zeros(3)}))
