"""The weight of total variation that an attacker chooses on pictures of its own."""

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

import secateur
from secateur.config import Invert, inversion, read
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.evaluation.calibration import WEIGHTS, effort_of, is_open
from secateur.experiments.invert import plan, run_invert
from secateur.experiments.invert_targets import own_rows, rows_of
from secateur.federated.client_training import LocalTraining
from secateur.models.create import create
from secateur.runs.rows import select_comparable
from secateur.seeding import derive


def photographs(side):
    """Parts of the two photographs that scikit-learn brings, as pixels in [0, 1]."""
    from sklearn.datasets import load_sample_images

    parts = []
    for photograph in load_sample_images().images:
        pixels = torch.tensor(photograph).permute(2, 0, 1)[None] / 255
        parts += [pixels[..., y : y + 192, x : x + 192] for y in (0, 200) for x in (0, 200, 400)]
    return torch.cat([interpolate(part, size=(side, side), mode="area") for part in parts])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    inputs = photographs(32)
    path = tmp_path_factory.mktemp("photographs") / "photographs.npz"
    np.savez(path, inputs=inputs.numpy(), labels=np.arange(len(inputs)) % 10)
    return path


def settings(file, **more):
    return read(Invert, None, {"data": str(file), "targets": 3, "iterations": 150, "images": False} | more)


def values(rows, metric):
    return {row.attack: row.value for row in rows if row.metric == metric and row.extra["target"] is None}


def test_a_calibrated_attack_recognises_photographs_that_a_small_weight_hides(file, tmp_path, monkeypatch):
    """Finding 1: at 1e-4 nothing was recognisable, and nothing suggested another weight."""
    config = settings(file, attack="ig,ig:tv=0.0001")
    rows = run_invert(config, tmp_path / "run")
    psnr, recognisable = (values(rows, metric) for metric in ("psnr", "recognisable"))
    chosen, fixed = "ig:iterations=150", "ig:iterations=150:tv=0.0001"
    assert psnr[chosen] > psnr[fixed] + 4  # 15.7 and 10.0 dB were measured
    assert recognisable[chosen] > recognisable[fixed]
    whole = next(row for row in rows if row.metric == "psnr" and row.attack == chosen and row.extra["target"] is None)
    assert whole.extra["total_variation"] in WEIGHTS[1:] and "pictures of its own" in whole.extra["knows"]
    assert f"total variation {whole.extra['total_variation']:g}, chosen by" in whole.note
    assert "50 % of the attack's own cost" in whole.note

    def refuse(*arguments):
        raise AssertionError("the choice is a stage, and is not made again")

    monkeypatch.setattr("secateur.evaluation.calibration._try", refuse)
    assert select_comparable(run_invert(config, tmp_path / "run")) == select_comparable(rows)


def test_own_pictures_are_no_targets_and_decide_alone(file):
    config = settings(file)
    data = load(str(file))
    own, targets = own_rows(config, data, 0), rows_of(config, data, 0)
    assert own.shape == (2, 1) and not set(own.flatten().tolist()) & set(targets.flatten().tolist())
    assert not len(own_rows(settings(file, targets=12), data, 0))  # none is left
    assert any("choose the total variation of ig:iterations=150 among 0.0001, 0.001" in line for line in plan(config))
    assert sum("attack with ig" in line for line in plan(settings(file, targets=12))) == len(WEIGHTS)


def test_without_own_pictures_every_weight_is_shown_and_none_is_picked():
    inputs = photographs(8)[:2, :1]
    batch = inputs, torch.tensor([0, 1])
    net = create("digits-cnn", (1, 8, 8), 10, derive(0, "net"))
    report = secateur.invert(net, batch, "ig", batch_size=1, iterations=2)
    assert set(report.pictures) == {f"ig:iterations=2:tv={weight}" for weight in WEIGHTS}
    public = photographs(8)[6:8, :1], torch.tensor([0, 1])
    report = secateur.invert(net, batch, "ig", batch_size=1, iterations=2, public=public)
    assert set(report.pictures) == {"ig:iterations=2"}
    with pytest.raises(WrongInput, match="public: has the shape"):
        secateur.invert(net, batch, "ig", iterations=2, public=(public[0][:, :, :4], public[1]))


def test_only_a_weight_that_nobody_set_is_chosen_at_half_the_cost_at_most():
    assert is_open(inversion("ig:adaptive=support"))
    assert not any(is_open(inversion(text)) for text in ("ig:tv=0.0001", "ig-dgp", "ig-geiping", "gi", "sgi"))
    for targets in (1, 2, 3, 20):
        for restarts in (1, 4):
            attack = inversion("ig", restarts=restarts)
            effort = effort_of(attack, targets)
            spent = len(WEIGHTS) * effort.updates * effort.iterations
            assert spent <= targets * restarts * 2500 / 2
            assert effort.share == spent / (targets * restarts * 2500)


def test_inside_a_federation_the_weight_is_chosen_on_rows_that_no_client_has():
    net = create("lenet-zhu", (1, 8, 8), 10, derive(0, "net"))
    pictures, labels = load("digits").batch.take(torch.arange(40))
    pixels = pictures * 0.3760 + 0.3053
    terms = {"clients": 2, "rounds": 1, "local": LocalTraining(1, None, 2, 0.1), "attack": "ig:iterations=4"}
    train, test = (pixels[:30].clamp(0, 1), labels[:30]), (pixels[30:].clamp(0, 1), labels[30:])
    rows = [row for row in secateur.federate(net, train, test, **terms).rows if row.metric == "psnr"]
    assert {row.attack for row in rows} == {"ig:iterations=4"} and all(row.extra["calibrated"] for row in rows)
    assert "chosen by the squared error on pictures of the attacker's own" in rows[0].note
    rows = [row for row in secateur.federate(net, train, **terms).rows if row.metric == "psnr"]
    assert {row.attack for row in rows} == {f"ig:iterations=4:tv={weight}" for weight in WEIGHTS}
