"""A federation in process, in Flower's simulation and deployed over TLS comes to one model, whatever goes wrong."""

from pathlib import Path

import pytest
import torch
from deploying import TREE, Deployment

from secateur.cli import main
from secateur.config import Federate, read
from secateur.federated.build import build_spec, load_data, network_of
from secateur.federated.federation import Federation
from secateur.runs.folder import load_rows

pytestmark = pytest.mark.system

APP = Path(__file__).with_name("faulty_app")
SETTINGS = {"model": "digits-cnn", "clients": 2, "per_round": 2, "local_steps": 1, "batch_size": 8, "evaluate_every": 1}
SETTINGS |= {"defense": "dgp+error-feedback", "learning_rate": 0.1}
ROUNDS, HELD = 8, 7
FAULTS = {4: "returned NaN", 5: "wrong shape", 6: "oversized", 7: ""}  # killed: late, or found to be gone before


class Without(Federation):
    """In process, without what client 1 is refused elsewhere."""

    def _updates(self, number, drawn, faults):
        for client, rows, update in super()._updates(number, drawn, faults):
            if client == 0 or number < min(FAULTS):
                yield client, rows, update


def in_process():
    """The loss of each round."""
    config = read(Federate, None, SETTINGS | {"rounds": ROUNDS})
    data, device = load_data(config)
    terms = build_spec(config, data, 0, config.base_pruning[0], config.defense[0])
    federation = Without(network_of(config, data, 0), data, terms, 0, device)
    measures = [measure for done in federation.rounds() for measure in done.measures]
    return [each.value for each in measures if each.metric == "test_loss"], federation.model()


def losses(folder):
    return [row.value for row in load_rows(folder) if row.metric == "test_loss"]


def kept_model(folder):
    from safetensors.torch import load_file

    (file,) = folder.glob("artifacts/federate-*.safetensors")
    return load_file(file)


def test_in_simulation(tmp_path):
    flags = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    engines = {}
    for engine in ("here", "flower"):
        out = tmp_path / engine
        assert main(["federate", *flags, "--rounds", "3", "--engine", engine, "--out", str(out)]) == 0
        engines[engine] = kept_model(out)
        assert (out / "report.html").exists()
    for name, value in engines["here"].items():
        assert torch.allclose(value, engines["flower"][name], rtol=0, atol=1e-5), name
    assert losses(tmp_path / "flower") == pytest.approx(in_process()[0][:3], abs=1e-5)


@pytest.mark.timeout(900)
def test_deployed(tmp_path):
    """Three good rounds, three bad updates, a superlink that is restarted, a node that is killed, and a stranger."""
    page = tmp_path / "run" / "report.html"
    with Deployment(tmp_path) as flower:
        flower.superlink()
        flower.superexec()
        for place, name in enumerate(("first", "second")):
            flower.supernode(name, place, program=TREE)
        flower.supernode("stranger", 1, registered=False)
        settings = SETTINGS | {"rounds": ROUNDS, "out": str(page.parent), "deadline": 180.0, "patience": 120.0}
        settings |= {"attack": "ig", "iterations": 10}
        flower.run(APP, **settings, stage=str(tmp_path), held=HELD, stuck=HELD)
        flower.wait_for((tmp_path / "held").exists, f"the round before {HELD}", 500)
        assert flower.processes["stranger"].wait(timeout=300) != 0
        assert "Failed to activate" in flower.said("stranger")
        flower.end("superlink")
        flower.superlink()
        (tmp_path / "go").touch()
        flower.wait_for((tmp_path / "stuck").exists, "client 1 in the middle of its round", 200)
        flower.end("second")
        flower.wait_for(page.exists, "the page", 300)

    rows = load_rows(page.parent)
    lost = {row.extra["round"]: row.note for row in rows if row.metric == "lost_clients"}
    for number, said in FAULTS.items():
        assert "client 1" in lost[number] and said in lost[number]
    assert set(lost) == {*FAULTS, ROUNDS} and "client 1" in lost[ROUNDS]
    expected, model = in_process()
    assert losses(page.parent) == pytest.approx(expected, abs=1e-5)
    for name, value in kept_model(page.parent).items():
        assert torch.allclose(value, model[name], rtol=0, atol=1e-5), name
    audited = [row for row in rows if row.attack is not None and row.metric == "psnr"]
    assert audited and {row.extra["round"] for row in audited} == {ROUNDS}
