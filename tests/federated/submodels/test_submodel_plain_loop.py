"""A whole federation equals plain PyTorch loops that share no code with it, mapp_fl's rules written out again."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from secateur.catalogue import find
from secateur.data.dataset import Dataset
from secateur.federated.spec import Adam, SubmodelSpec
from secateur.federated.submodels.federation import SubmodelFederation
from secateur.seeding import derive

SIZES, BATCH, ROUNDS, SEED = (21, 14, 11), 8, 3, 7
CHANNELS = (4, 8, 8)


def cnn(channels):
    """The paper's network (Figure 5) without its Scaler, which a BatchNorm cancels."""
    layers, before = [], 2
    for after in channels:
        norm = nn.BatchNorm2d(after, track_running_stats=False)
        layers += [nn.Conv2d(before, after, 3, padding=1), norm, nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 3)).double()


def heterofl(place, number, layer, of):
    return list(range(of // 2))


def mapp_fl(place, number, layer, of):
    group = place % 4
    second = group == 3 or (group == 1 and layer % 2 == 0) or (group == 2 and layer % 2 == 1)
    return list(range(of // 2, of)) if second else list(range(of // 2))


def fdropout(place, number, layer, of):
    drawn = np.random.RandomState((place + len(SIZES) * number + 1) * (layer + 1)).permutation(of)
    return sorted(drawn[: of // 2].tolist())


def places(rule, client, number):
    """By parameter, where a client's tensor lies in the server's."""
    place = np.random.RandomState(number).permutation(len(SIZES))[client]
    found, inputs = {}, [0, 1]
    for layer, of in enumerate(CHANNELS):
        kept = list(range(of)) if client == 0 else rule(place, number, layer, of)
        found[f"{3 * layer}.weight"] = np.ix_(kept, inputs)
        for name in (f"{3 * layer}.bias", f"{3 * layer + 1}.weight", f"{3 * layer + 1}.bias"):
            found[name] = np.ix_(kept)
        inputs = kept
    last = 3 * len(CHANNELS) + 2
    return found | {f"{last}.weight": np.ix_(range(3), inputs), f"{last}.bias": np.ix_(range(3))}


def plain(server, rule, inputs, labels, shares):
    """Cut, train by torch.optim.Adam, add up and count; cells that nobody trained become zero."""
    for number in range(1, ROUNDS + 1):
        total, count = ({name: torch.zeros_like(value) for name, value in server.items()} for _ in range(2))
        for client, rows in enumerate(shares):
            where = places(rule, client, number)
            net = cnn(CHANNELS if client == 0 else [of // 2 for of in CHANNELS])
            net.load_state_dict({name: server[name][at] for name, at in where.items()})
            optimiser = torch.optim.Adam(net.parameters(), 1e-3)
            order = rows[torch.randperm(len(rows), generator=derive(SEED, "rows", number, client))]
            for batch in order.split(BATCH):
                optimiser.zero_grad()
                cross_entropy(net(inputs[batch]), labels[batch]).backward()
                optimiser.step()
            for name, value in net.state_dict().items():
                total[name][where[name]] += value
                count[name][where[name]] += 1
        server = {name: total[name] / count[name].clamp_min(1) for name in total}
    return server


@pytest.mark.parametrize(("name", "rule"), [("heterofl", heterofl), ("mapp-fl", mapp_fl), ("fdropout", fdropout)])
def test_three_rounds_are_those_of_plain_loops(name, rule):
    rng = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(sum(SIZES), 2, 8, 8, generator=rng), torch.arange(sum(SIZES)) % 3
    shares = list(torch.arange(sum(SIZES)).split(list(SIZES)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = cnn(CHANNELS)
    begun = {key: value.clone() for key, value in net.state_dict().items()}
    terms = SubmodelSpec(
        shares,
        find("submodel", name)(),
        [1.0, 0.5, 0.5],
        rounds=ROUNDS,
        local=Adam(batch_size=BATCH),
        uncovered="zero",
        scaler=False,
    )
    federation = SubmodelFederation(net, Dataset("plain", inputs, labels, 3, len(labels)), terms, SEED)
    list(federation.rounds())
    wanted, found = plain(begun, rule, inputs.double(), labels, shares), federation.model()
    before_norms = {f"{3 * layer}.bias" for layer in range(len(CHANNELS))}  # whose gradient is round-off alone
    for key in wanted.keys() - before_norms:
        assert (found[key] - wanted[key]).abs().max() < 1e-9
    assert any((wanted[key] - begun[key]).abs().max() > 1e-3 for key in wanted)
