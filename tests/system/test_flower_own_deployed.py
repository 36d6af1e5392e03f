"""Two supernodes with data of their own, by the lines of docs/deploy.md: the model of all of it in one place."""

import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from deploying import HOST, Deployment, free_port, listens
from safetensors.torch import load_file

from secateur.config import Federate, read
from secateur.data.dataset import Dataset
from secateur.federated.build import build_spec, load_data, network_of
from secateur.federated.federation import Federation
from secateur.runs.folder import load_rows

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "deploy.md").read_text().split("\n## Two machines\n")[1].split("\n## ")[0]
LINES = re.findall(r"^ {4}(\S.*)$", re.sub(r"\\\n\s*", "", SECTION), re.MULTILINE)
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


class ByThePage(Deployment):
    """A deployment by the lines of the page, with this machine's names, ports and files."""

    def certify(self):
        """Run the page's lines for certificates, and write its configuration."""
        for line in LINES:
            if line.startswith(("openssl", "printf")):
                subprocess.run(line, shell=True, cwd=self.folder, check=True, capture_output=True)
        settings = [line for line in LINES if line.startswith(("[", "address", "root-certificates"))]
        text = "\n".join(settings).replace("/path/to/ca.crt", str(self.folder / "ca.crt"))
        (self.folder / "config.toml").write_text(text.replace("localhost:8000", f"localhost:{self.port}"))

    def words(self, start, **changes):
        """The words of the page's line that begins so."""
        (line,) = [line for line in LINES if line.startswith(start)]
        changes = {
            "localhost:8000": f"localhost:{self.port}",
            "fed.example.org:8000": f"localhost:{self.port}",
        } | changes
        for here, there in changes.items():
            line = line.replace(here, str(there))
        return shlex.split(line)


@pytest.mark.timeout(600)
def test_deployed_with_data_of_their_own_by_the_lines_of_the_page(tmp_path):
    config = read(Federate, None, SETTINGS)
    data, _ = load_data(config)
    page = tmp_path / "run" / "report.html"
    with ByThePage(tmp_path) as flower:
        place = {"0.0.0.0": HOST, "--port 8000": f"--port {flower.port}"}
        flower.start("superlink", *flower.words("flower-superlink", **place))
        flower.wait_for(lambda: listens(flower.port), "the superlink listens")
        flower.start("superexec", *flower.words("flower-superexec"))
        for client in (0, 1):
            name, own = f"hospital-{client}", tmp_path / f"own-{client}.npz"
            inputs, labels = cut(data, client * ROWS)
            np.savez(own, inputs=inputs.numpy(), labels=labels.numpy())
            subprocess.run(flower.words("ssh-keygen", **{"hospital-0": name}), cwd=tmp_path, check=True)
            flower.flwr(*flower.words(f"flwr supernode register {name}")[1:])
            changes = {"hospital-0": name, "partition-id=0": f"partition-id={client}", "/data/ours.npz": own}
            flower.start(name, *flower.words("flower-supernode", **changes), "--port", free_port())
        *command, _ = flower.words("flwr run", **{"examples/": f"{ROOT}/examples/", "--stream ": ""})
        settings = SETTINGS | {"out": str(page.parent), "deadline": 180.0, "patience": 120.0}
        told = " ".join(f"{key.replace('_', '-')}={value!r}".replace("'", '"') for key, value in settings.items())
        flower.flwr(*command[1:], told)
        flower.wait_for(page.exists, "the page", 400)

    rows = load_rows(page.parent)
    assert not [row for row in rows if row.metric == "lost_clients"]
    assert {row.extra["client"]: row.value for row in rows if row.metric == "own_examples"} == {0: ROWS, 1: ROWS}
    losses, model = in_one_place(config, data)
    assert [row.value for row in rows if row.metric == "test_loss"] == pytest.approx(losses, abs=1e-5)
    (file,) = page.parent.glob("artifacts/*.safetensors")
    for name, value in load_file(file).items():
        assert torch.allclose(value, model[name], rtol=0, atol=1e-5), name
