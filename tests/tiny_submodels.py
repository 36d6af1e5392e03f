"""A small federation over sub-models, for tests."""

import torch
from torch import nn

from secateur.catalogue import find
from secateur.data.dataset import Dataset
from secateur.federated.attacks.observer import Every
from secateur.federated.build import rates_of
from secateur.federated.spec import Adam, SubmodelSpec
from secateur.federated.submodels.federation import SubmodelFederation

SIZES = (29, 17, 12, 9, 8)  # with batches of 8: partial ones of 5, 1 (which joins), 4, 1 and none
BATCH = 8


def net(norm=True, dtype=torch.float64):
    """A small chain with static BatchNorm."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        layers = []
        for before, after in ((1, 8), (8, 8)):
            layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else []), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)).to(dtype)


def data():
    """Pictures of three classes that can be told apart, and a test part of 30."""
    rng, rows = torch.Generator().manual_seed(0), sum(SIZES) + 30
    labels = torch.arange(rows) % 3
    inputs = 0.5 * torch.randn(rows, 1, 6, 6, generator=rng)
    inputs[torch.arange(rows), 0, 2 * labels, 2 * labels] += 3
    return Dataset("tiny", inputs, labels, 3, sum(SIZES))


def shares():
    """Clients of unequal sizes."""
    return list(torch.arange(sum(SIZES)).split(list(SIZES)))


def federation(rule="mapp-fl", large=1, widths=(0.5,), seed=0, model=None, execution="auto", device="cpu", **fields):
    """A small one; `fields` are of its terms, of the federation or of the rule (as a dict)."""
    own = {name: fields.pop(name) for name in ("observers", "beside") if name in fields}
    given = {"rounds": 3, "evaluate_every": 1, "local": Adam(batch_size=BATCH), "test_batch": 10} | fields
    made = find("submodel", rule)(**given.pop("fields", {}))
    if "observers" in own:
        own["observers"] = [Every(*each) if isinstance(each, tuple) else each for each in own["observers"]]
    terms = SubmodelSpec(shares(), made, rates_of(shares(), large, widths), **given)
    return SubmodelFederation(
        net() if model is None else model, data(), terms, seed, device, execution=execution, **own
    )


def told(federation):
    """All measures of its rounds."""
    return [measure for done in federation.rounds() for measure in done.measures]
