"""Federations over a Grid come to the same model as in process, and leave out and name what is wrong."""

import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from near import Near, over_flower

from alone import pictures
from secateur import tree
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.withholding import Rates
from secateur.errors import WrongInput
from secateur.federated.base_pruning.prunefl import PruneFL
from secateur.federated.client_training import LocalTraining
from secateur.federated.faults import Faults
from secateur.federated.flower.client import Clients
from secateur.federated.flower.link import Link, pack, unpack
from secateur.federated.traffic import messages
from secateur.wire import decode, encode
from tiny_rules import ROWS, Half, Moving, Noisy, Stale, Withhold, bn_net, federation, run

BASES = {"none": {}, "half": {"base": Half()}, "stale": {"base": Stale()}, "moving": {"base": Moving()}}
BASES["prunefl"] = {"base": PruneFL(every=2, iterations=2)}
RULES = {
    "plain": {},
    "withhold": {"withholding": Withhold()},
    "real": {"withholding": Withhold(pseudo=False)},
    "own": {"custom_turn": Noisy()},
    "upload": {"upload": ErrorFeedback(DualGradientPruning(0.1, 0.5))},
    "coverage": {"withholding": Withhold(), "averaging": "coverage"},
    "dense": {"broadcast": "dense"},
    "gradients": {"method": "fedsgd", "local": LocalTraining(steps=1, batch_size=4)},
    "momentum": {"server_momentum": 0.5},
}


def made(**terms):
    here = federation(**terms)
    here.data = pictures(ROWS, 8)
    return here


def near(one, other, atol=1e-10):
    assert one.keys() == other.keys()
    return all(torch.allclose(value.double(), other[name].double(), atol=atol) for name, value in one.items())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("base", BASES)
def test_every_rule_comes_to_the_same_model_and_bytes_as_in_process(base, rule):
    """In process one update of each kind is encoded, of the others values are counted: their positions cost as much."""
    given = BASES[base] | RULES[rule] | {"per_round": 3 if base == "half" else 5}
    if base == "moving" and ("upload" in given or given.get("method") == "fedsgd"):
        with pytest.raises(WrongInput, match="choose masks for weights"):
            made(**given)
        return
    here = made(**given)
    there, _ = over_flower(here)
    measures = run(here)
    found = run(there)
    assert near(here.model(), there.model())
    names = ("test_accuracy", "test_loss", "density", "withheld_of_all", "withheld_of_kept")
    pairs = [
        [(each.metric, each.round, each.value) for each in some if each.metric in names] for some in (measures, found)
    ]
    assert [each[:2] for each in pairs[0]] == [each[:2] for each in pairs[1]]
    assert [each[2] for each in pairs[0]] == pytest.approx([each[2] for each in pairs[1]], abs=1e-9)
    assert here.ledger.traffic.up == pytest.approx(there.ledger.traffic.up, rel=0.03)
    if rule == "plain" and base in ("none", "half", "prunefl"):
        assert here.ledger.traffic.up == there.ledger.traffic.up
        assert here.ledger.traffic.down == there.ledger.traffic.down


@pytest.mark.parametrize("squares", ["all", "shared"])
def test_the_bytes_of_the_squares_tell_of_withheld_weights_only_if_told_to(squares):
    here = made(base=PruneFL(every=2, iterations=2, squares=squares), withholding=Withhold())
    here.server.broadcast()
    clients = Clients(here.net, here.train, here.terms, here.seed, torch.device("cpu"))
    client, mask = here.sampler(1).clients[0], here.server.model.mask
    update = clients.turn(1, client, here.server.received, mask, None)
    shapes = {name: tuple(value.shape) for name, value in update.summed.items()}
    leaving = decode(messages(update, mask, squares=True)["squares"], shapes)
    told = [bool(leaving[name][where].any()) for name, where in update.withheld.items()]
    assert told == [squares == "all"] * len(told) and told


def test_batchnorm_and_dropout_and_epochs_too():
    here = made(net=bn_net(), local=LocalTraining(steps=None, epochs=2, batch_size=3, learning_rate=0.1))
    there, _ = over_flower(here)
    run(here), run(there)
    assert near(here.model(), there.model())


def spoiler(client, kind):
    """One client whose updates are wrong."""

    def spoil(who, number, content):
        if who != client:
            return content
        given = unpack(content.array_records["update"])
        shapes = {"0.weight": torch.full((3, 1, 3, 3), torch.nan), "0.bias": torch.zeros(3)}
        shapes |= {"4.weight": torch.zeros(3, 27), "4.bias": torch.zeros(3)}
        if kind == "nan":
            values = encode({name: value.double() for name, value in shapes.items()})
        elif kind == "shape":
            values = encode(
                {name: value.double() for name, value in shapes.items()} | {"4.bias": torch.zeros(4).double()}
            )
        elif kind == "damaged":
            values = given["values"][:-1]
        elif kind == "precision":
            values = encode({name: torch.nan_to_num(value) for name, value in shapes.items()})
        elif kind == "rates":
            shares = MetricRecord({name: float("nan") for name in Rates._fields})
            return RecordDict({"update": pack(**given), "withheld": shares})
        elif kind == "nothing":
            return RecordDict({"update": pack()})
        elif kind == "other":
            return RecordDict({"hello": ConfigRecord({})})
        else:
            values = given["values"] + bytes(1 << 18)
        return RecordDict({"update": pack(values=values)})

    return spoil


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("nan", "NaN"),
        ("shape", "wrong shape"),
        ("damaged", "cannot be read"),
        ("precision", "cannot be read"),
        ("rates", "cannot be read"),
        ("nothing", "cannot be read"),
        ("other", "cannot be read"),
        ("size", "oversized"),
    ],
)
def test_a_wrong_update_is_left_out_and_named(kind, said):
    whole = made(rounds=1, per_round=5, faults=Faults())
    there, _ = over_flower(whole, spoiler(2, kind))
    measures = run(there)
    lost = [each for each in measures if each.metric == "lost_clients"]
    assert len(lost) == 1 and lost[0].value == 1
    assert "client 2" in lost[0].note and said in lost[0].note
    assert all(bool(value.isfinite().all()) for value in there.model().values())
    others, _ = over_flower(whole, silent=[2], deadline=0.5)
    run(others)
    assert near(there.model(), others.model())


def test_a_client_whose_turn_was_not_taken_goes_on_from_before():
    """In process a lost turn leaves a client's residual alone; a client elsewhere is told, and rolls back."""
    terms = {"upload": ErrorFeedback(DualGradientPruning(0.1, 0.5)), "per_round": 5, "rounds": 5}
    here = made(**terms, faults=Faults(nan=0.4))
    there, _ = over_flower(here)
    lost = [each for each in run(here) if each.metric == "lost_clients"]
    run(there)
    assert lost and near(here.model(), there.model())


def test_who_does_not_answer_in_time_and_who_is_not_there():
    here = made(rounds=2, per_round=5)
    there, grid = over_flower(here, silent=[1], deadline=0.4)
    grid.nodes.remove(103)
    there.link.patience = 0
    lost = {each.round: each.note for each in run(there) if each.metric == "lost_clients"}
    assert "client 1 missed the deadline" in lost[1] and "client 3 was not connected" in lost[1]
    grid.nodes.append(103)


def test_an_error_at_a_client_is_named_and_the_mask_is_sent_again():
    here = made(base=Half(every=100), rounds=3, per_round=5)
    there, grid = over_flower(here)
    rounds = there.rounds()
    next(rounds)
    grid.homes[102].state.clear()  # a node that was started anew has lost its mask
    grid.homes[102].state.config_records.clear()
    told = [each for done in rounds for each in done.measures if each.metric == "lost_clients"]
    assert [each.round for each in told] == [2] and "client 2 answered with an error" in told[0].note


def test_nodes_that_do_not_say_who_they_are_are_given_numbers():
    grid = Near(None, 4, says=lambda node: {0: 2, 1: -1, 2: -1, 3: 9}[node])
    link = Link(grid, deadline=0.3, patience=0.5)
    link.clients = 3
    link.greet_nodes()
    assert link.nodes == {2: 100, 0: 101, 1: 102}


def test_bytes_are_those_of_the_messages():
    here = made(base=Half(every=100), rounds=2, per_round=5)
    there, _ = over_flower(here)
    run(there)
    down, up = there.ledger.traffic.down, there.ledger.traffic.up
    assert len(set(down.values())) == 1 and all(each > 0 for each in up.values())
    dense = sum(value.numel() * 8 for value in here.server.weights.values())
    assert up[0] < 2 * dense  # half of the weights, in two rounds, and tables


@pytest.mark.parametrize("evaluate_every", [1, 4])
@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_bytes_after_a_change_of_the_mask_do_not_wait_for_an_evaluation(execution, evaluate_every):
    here = made(base=Half(), rounds=8, evaluate_every=evaluate_every, execution=execution)
    there, _ = over_flower(here)
    run(here), run(there)
    assert here.ledger.traffic.up == there.ledger.traffic.up and here.ledger.traffic.down == there.ledger.traffic.down


@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_squares_of_weights_without_a_gradient_cost_nothing(execution):
    """Half of the hidden units never fire: their squares are 0, and neither engine sends or counts them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    net[1].bias.data[:32] = -100.0
    here = made(net=net.double(), base=PruneFL(every=100, iterations=100), rounds=2, per_round=5, execution=execution)
    there, _ = over_flower(here)
    run(here), run(there)
    up = there.ledger.traffic.up
    assert here.ledger.traffic.up == pytest.approx(up, rel=0.01)
    alive = 8 * (36 * 32 + 32 + 32 * 3 + 3)  # bytes of the squares that are not 0
    kept = 8 * (int(sum(keep.sum() for keep in here.server.mask.values())) + 64 + 3)  # of the weights, and all biases
    assert list(up.values()) == pytest.approx([2 * (alive + kept)] * 5, rel=0.05)


def test_a_resumed_federation_is_the_same():
    terms = {"upload": ErrorFeedback(DualGradientPruning(0.1, 0.5)), "rounds": 4, "per_round": 5}
    here = made(**terms)
    first, grid = over_flower(here)
    rounds = first.rounds()
    next(rounds), next(rounds)
    tensors, data = first.state()
    kept = tree.clone(tensors), data
    next(rounds)  # a round that the server forgets, and the clients do not
    again, _ = over_flower(here)
    again.link = Link(grid, 0.5)
    again.link.clients = 5
    again.load(*kept)
    run(again), run(here)
    assert near(here.model(), again.model())
