"""Sub-model federations over a Grid: other shapes for every client, and the model that they come to in process."""

import pytest
import torch
from flwr.app import RecordDict
from near import Near

import tiny_submodels as tiny
from secateur.config import defense_of_clients
from secateur.federated.augment import CropAndFlip
from secateur.federated.build import submodel_protection
from secateur.federated.faults import Faults
from secateur.federated.flower.federation import FlowerSubmodels, NarrowClients
from secateur.federated.flower.link import Link, pack
from secateur.wire import encode

RULES = {
    "mapp-fl": {"rule": "mapp-fl"},
    "heterofl": {"rule": "heterofl", "large": 0, "widths": (0.5, 0.25), "own_labels": True},
    "fdropout": {"rule": "fdropout", "uncovered": "zero", "averaging": "weighted"},
    "sampled": {"rule": "mapp-fl", "per_round": 3, "rounds": 4},
    "augmented": {"rule": "mapp-fl", "local": tiny.Adam(batch_size=tiny.BATCH, augment=CropAndFlip(2))},
}
DEFENSES = ["none", "dgp+error-feedback", "pseudo-largest", "mix"]


def plain():
    return tiny.net(norm=False)


def over_flower(here, spoil=None):
    data, terms = tiny.data(), here.terms
    clients = NarrowClients(plain(), data, terms, here.seed, here.device)
    grid = Near(clients.answer, len(terms.shares), spoil)
    return FlowerSubmodels(Link(grid, 0.5, patience=1), "{}", plain(), data, terms, here.seed), grid


def near(one, other):
    return all(torch.allclose(value, other[name], atol=1e-9) for name, value in one.items())


@pytest.mark.parametrize("defense", DEFENSES)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_comes_to_the_same_model_as_in_process(rule, defense):
    # without BatchNorm: biases before one have no gradient, and Adam makes steps of their round-off
    given = RULES[rule] | submodel_protection(defense_of_clients(defense))
    here = tiny.federation(**given, model=plain(), faults=Faults(nan=0.2))
    there, _ = over_flower(here)
    lost = [(each.round, each.note) for each in tiny.told(here) if each.metric == "lost_clients"]
    assert lost == [(each.round, each.note) for each in tiny.told(there) if each.metric == "lost_clients"]
    assert near(here.model(), there.model())


def test_a_clients_message_holds_its_own_channels():
    here = tiny.federation(large=1, model=plain())
    there, grid = over_flower(here)
    sizes = {}
    pushed = grid.push_messages

    def push(messages):
        for message in messages:
            if "model" in message.content.array_records:
                sizes[message.metadata.dst_node_id - 100] = len(message.content.array_records["model"]["model"].data)
        return pushed(messages)

    grid.push_messages = push
    tiny.told(there)
    assert sizes[0] > 2 * max(sizes[client] for client in (1, 2, 3, 4))


def test_a_wrong_update_is_left_out_and_named():
    def spoil(client, number, content):
        wrong = encode({"0.weight": torch.zeros(2, 2, dtype=torch.float64)})
        return content if client != 1 else RecordDict({"update": pack(values=wrong)})

    here = tiny.federation(rounds=1, model=plain())
    there, _ = over_flower(here, spoil)
    (lost,) = [each for each in tiny.told(there) if each.metric == "lost_clients"]
    assert "client 1 returned a wrong shape" in lost.note
