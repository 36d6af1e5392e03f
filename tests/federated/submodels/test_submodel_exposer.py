"""Who is attacked at the end of a federation over sub-models: everybody, by the last update that each one sent."""

import pytest
import torch
from torch import nn

import tiny_submodels as tiny
from secateur.config.methods import choice, defense_of_clients
from secateur.federated.attacks.observer import Every
from secateur.federated.build import submodel_protection
from secateur.federated.checkpoint import FederationLog
from secateur.federated.faults import Faults
from secateur.federated.submodels.exposure import ExposureObserver, picture
from secateur.federated.submodels.local_baseline import LocalBaseline
from secateur.federated.submodels.membership_attacks import Asking
from secateur.models.resnet import Block

LABELS = {"model": "tiny", "dataset": "tiny", "defense": "none", "seed": 0, "extra": {"submodels": "mapp-fl"}}
YEOM = choice("attack", "yeom")


def watched(rule="mapp-fl", rounds=3, asking=None, **fields):
    """A federation, and who attacks it."""
    fields = {"model": tiny.net(dtype=torch.float32)} | fields
    terms = tiny.federation(rule, rounds=rounds, **fields).terms
    asking = asking or Asking(size=10, compare=False)
    exposer = ExposureObserver([YEOM], tiny.data(), LABELS, FederationLog(), terms, asking=asking)
    return tiny.federation(rule, rounds=rounds, observers=[exposer], **fields), exposer


def attacked(federation, exposer):
    """By client: the row of its advantage."""
    tiny.told(federation)
    exposer.attack(federation)
    rows = [row for row in exposer.log.rows if row.metric == "advantage" and row.extra["updates"] == 1]
    return {row.extra["client"]: row for row in rows if row.value is not None}


def test_all_are_looked_at_where_a_client_may_miss_the_last_round():
    for fields, pace in (({}, 3), ({"per_round": 5}, 3), ({"per_round": 2}, 1), ({"faults": Faults(nan=0.1)}, 1)):
        _, exposer = watched(**fields)
        assert [number for number in (1, 2, 3) if exposer.looks(number)] == list(range(pace, 4))


def test_clients_that_were_not_in_the_last_round_are_attacked_by_their_last_update():
    federation, exposer = watched(per_round=2, rounds=6)
    rounds = {}
    federation.panel.observers.append(Every(1, lambda seen: rounds.update({seen.client: seen.round})))
    found = attacked(federation, exposer)
    assert len(set(rounds.values())) > 1 and set(rounds) == set(range(5))
    assert {client: row.extra["answered"] for client, row in found.items() if client is not None} == rounds
    (drawn,) = exposer.log.figures
    assert None in found and len(drawn["trained"]) == 2  # cells are shown of the last round


def test_a_client_that_is_lost_in_the_last_round_is_attacked_too(monkeypatch):
    lost = iter([{}, {}, {2: "nan"}])
    monkeypatch.setattr(Faults, "draw", lambda self, *_: next(lost))
    found = attacked(*watched(faults=Faults(nan=0.1)))
    answered = {client: row.extra["answered"] for client, row in found.items() if client is not None}
    assert answered == {0: 3, 1: 3, 2: 2, 3: 3, 4: 3}


def test_a_client_that_never_answered_has_a_row_that_says_so():
    federation, exposer = watched(per_round=1, rounds=1)
    tiny.told(federation)
    exposer.attack(federation)
    rows = [row for row in exposer.log.rows if row.extra["scope"] == "client" and row.metric == "advantage"]
    silent = [row for row in rows if row.value is None]
    assert [row.extra["client"] for row in rows] == [0, 1, 2, 3, 4] and len(silent) == 4
    assert {row.note for row in silent} == {"excluded: none of its updates was seen"}


@pytest.mark.parametrize("defense", ["none", "pseudo-largest:rate=0.5"])
def test_what_is_kept_of_earlier_rounds_survives_being_saved(defense):
    fields = {"per_round": 2, "rounds": 6, "asking": Asking(size=10, compare=False, updates=2)}
    fields |= submodel_protection(defense_of_clients(defense))
    whole, wanted = watched(**fields)
    attacked(whole, wanted)
    half, _ = watched(**fields)
    for done in half.rounds():
        if done.number == 5:
            break
    again, exposer = watched(**fields)
    again.load(*half.state())
    attacked(again, exposer)
    assert [row.to_json() for row in exposer.log.rows] == [row.to_json() for row in wanted.log.rows]
    assert max(len(kept) for kept in exposer.sent.values()) == 2


def test_the_stateful_attacker_holds_the_same_updates_however_often_it_looks():
    asking = Asking(size=10, compare=False, updates=2)
    (seldom, one), (always, other) = (watched(rounds=6, asking=asking) for _ in range(2))
    other.loses = True
    for federation in (seldom, always):
        tiny.told(federation)
    assert not one.looks(2) and len(one.sent[0]) == 2
    for found, wanted in zip(other.sent.values(), one.sent.values(), strict=True):
        assert all(torch.equal(a[n], b[n]) for a, b in zip(found, wanted, strict=True) for n in a)


def test_what_is_withheld_is_attacked_as_the_server_had_sent_it():
    seen, kept = [], submodel_protection(defense_of_clients("pseudo-largest:rate=0.5"))
    federation, exposer = watched(rounds=1, **kept)
    federation.panel.observers.append(Every(1, seen.append))
    attacked(federation, exposer)
    (model,), one = exposer.sent[1], seen[1]
    hidden = ~one.covered["3.weight"]
    assert 0.3 < hidden.float().mean() < 0.7 and bool((one.sent["3.weight"][hidden] == 0).all())
    assert torch.equal(model["3.weight"][hidden], one.received["3.weight"][hidden])
    assert torch.equal(model["3.weight"][~hidden], one.sent["3.weight"][~hidden])
    assert bool((model["3.weight"][~hidden] != one.received["3.weight"][~hidden]).any())


def test_clients_alone_are_attacked_without_a_server():
    federation, exposer = watched("local", fields={"patience": 1})
    tiny.told(LocalBaseline(federation))
    exposer.attack(federation)
    rows = [row for row in exposer.log.rows if row.metric == "advantage"]
    assert [row.extra["client"] for row in rows] == [0, 1, 2, 3, 4] and not exposer.log.figures


@pytest.mark.parametrize(
    "fields",
    [{}, {"batchnorm": "reestimated"}, submodel_protection(defense_of_clients("pseudo-largest:rate=0.5"))],
    ids=["static", "reestimated", "withheld weights are put back"],
)
def test_accuracy_is_that_of_the_rounds(fields):
    federation, exposer = watched(**fields)
    judged = {m.client: m.value for m in tiny.told(federation) if m.metric == "test_accuracy" and m.round == 3}
    exposer.attack(federation)
    rows = [row for row in exposer.log.rows if row.metric == "test_accuracy"]
    assert {row.extra["client"]: row.value for row in rows} == pytest.approx(judged)


def test_a_model_whose_outputs_are_not_finite_is_said_and_stops_nothing():
    federation, exposer = watched(rounds=1, model=tiny.net(norm=False, dtype=torch.float32))
    tiny.told(federation)
    for name, value in exposer.sent[1][0].items():
        exposer.sent[1][0][name] = torch.full_like(value, 3e38)
    exposer.attack(federation)
    rows = {row.extra["client"]: row for row in exposer.log.rows if row.metric == "advantage"}
    assert rows[1].value is None and rows[1].note.startswith("excluded: returned NaN or infinite outputs")
    assert all(row.value is not None for client, row in rows.items() if client != 1)


def residual():
    """A stem and a block with a convolution on its shortcut."""
    stem = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), Block(4, 8, 2)]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def flattened(hidden):
    """A convolution whose pictures are the inputs of a linear layer."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Flatten(), nn.Linear(16, hidden), nn.Linear(hidden, 3))


@pytest.mark.parametrize(
    ("model", "rule", "fields", "layer", "shape"),
    [
        (residual(), "heterofl", {}, "2.conv1", (8, 4)),
        (residual(), "fdropout", {"coupling": "independent"}, "2.conv1", (8, 4)),
        (flattened(8), "heterofl", {}, "2", (8, 16)),
    ],
)
def test_the_picture_holds_the_cells_that_a_client_trains(model, rule, fields, layer, shape):
    federation = tiny.federation(rule, model=model, fields=fields)
    (drawn,) = picture(federation, [0, 3], LABELS)
    assert (drawn["layer"], (drawn["outputs"], drawn["inputs"])) == (layer, shape)
    large, small = drawn["trained"]
    assert large["client"] == 0 and len(large["outputs"]) * len(large["inputs"]) == shape[0] * shape[1]
    turn = federation.broadcast(federation.terms.rounds, 3)
    whole = torch.zeros(model.get_submodule(layer).weight.shape)
    trained = turn.cut.put(f"{layer}.weight", whole, torch.ones(turn.cut.shapes[f"{layer}.weight"]))
    wanted = trained.flatten(2).amax(2) if trained.ndim > 2 else trained
    found = torch.zeros(shape)
    found[torch.tensor(small["outputs"])[:, None], torch.tensor(small["inputs"])] = 1
    assert torch.equal(found, wanted) and found.sum() == shape[0] * shape[1] / 4


def test_a_layer_with_too_many_cells_is_not_drawn():
    assert picture(tiny.federation("heterofl", model=flattened(5000)), [0, 3], LABELS) == []
