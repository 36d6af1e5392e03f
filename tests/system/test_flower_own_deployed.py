"""Two supernodes with data of their own, and a server that has neither: the model of all of it in one place."""

from pathlib import Path

import numpy as np
import pytest
import torch
from deploying import Deployment
from safetensors.torch import load_file

from secateur.config import Federate, read
from secateur.data.dataset import Dataset
from secateur.federated.build import build_spec, load_data, network_of
from secateur.federated.federation import Federation
from secateur.runs.folder import load_rows

pytestmark = pytest.mark.system

APP = Path(__file__).parents[2] / "examples" / "flower-app"
SETTINGS = {"model": "digits-cnn", "clients": 2, "per_round": 2, "rounds": 2, "local_steps": 2, "batch_size": 8}
SETTINGS |= {"defense": "dgp+error-feedback", "evaluate_every": 1, "learning_rate": 0.1}
ROWS = 90  # of each node


def cut(data, first):
    """Rows that a node holds: pictures that the server's data set does not have."""
    rows = slice(first, first + ROWS)
    return data.inputs[rows].flip(3), data.labels[rows]


def in_one_place(config, data):
    """The federation over the nodes' rows, judged by the server's test part."""
    parts = [cut(data, 0), cut(data, ROWS), (data.inputs[data.train_size :], data.labels[data.train_size :])]
    inputs, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    pooled = Dataset("pooled", inputs, labels, data.classes, 2 * ROWS, None, data.mean, data.std)
    shares = list(torch.arange(2 * ROWS).split(ROWS))
    terms = build_spec(config, pooled, 0, config.base_pruning[0], config.defense[0], shares)
    federation = Federation(network_of(config, pooled, 0), pooled, terms, 0)
    told = [each for done in federation.rounds() for each in done.measures]
    return [each.value for each in told if each.metric == "test_loss"], federation.model()


@pytest.mark.timeout(600)
def test_deployed_with_data_of_their_own(tmp_path):
    config = read(Federate, None, SETTINGS)
    data, _ = load_data(config)
    page = tmp_path / "run" / "report.html"
    with Deployment(tmp_path) as flower:
        flower.superlink()
        flower.superexec()
        for place, name in enumerate(("first", "second")):
            inputs, labels = cut(data, place * ROWS)
            np.savez(tmp_path / f"{name}.npz", inputs=inputs.numpy(), labels=labels.numpy())
            flower.supernode(name, place, also=f'own-data="{tmp_path / name}.npz"')
        flower.run(APP, **SETTINGS, out=str(page.parent), deadline=180.0, patience=120.0)
        flower.wait_for(page.exists, "the page", 400)

    rows = load_rows(page.parent)
    assert not [row for row in rows if row.metric == "lost_clients"]
    assert {row.extra["client"]: row.value for row in rows if row.metric == "own_examples"} == {0: ROWS, 1: ROWS}
    losses, model = in_one_place(config, data)
    assert [row.value for row in rows if row.metric == "test_loss"] == pytest.approx(losses, abs=1e-5)
    (file,) = page.parent.glob("artifacts/*.safetensors")
    for name, value in load_file(file).items():
        assert torch.allclose(value, model[name], rtol=0, atol=1e-5), name
