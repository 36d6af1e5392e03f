"""A model that was brought along is audited on the inputs that it was trained on, or not at all."""

import json
import re

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn

from secateur.cli import main
from secateur.data.load import from_arrays
from secateur.errors import WrongInput
from secateur.evaluation.setup import choose_scaling
from secateur.seeding import derive

MODULE = """
from torch import nn
def net():
    head = [nn.ReLU(), nn.Flatten(), nn.Linear(24 * 36, 4)]
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), *head)
def double(pixels): return pixels * 2
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Return a folder with a network that learnt 160 digits in [0, 1] by heart, with random labels, and its answers."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "scaled_net.py").write_text(MODULE)
    rng = np.random.default_rng(0)
    pictures = np.repeat((120 + load_digits().images[:400, None] * 8).astype(np.uint8), 3, axis=1)  # far from mean 0
    labels = rng.integers(0, 4, 400)
    torch.manual_seed(0)
    head = [nn.ReLU(), nn.Flatten(), nn.Linear(24 * 36, 4)]
    net = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), *head)
    inputs, targets = torch.from_numpy(pictures).float() / 255, torch.from_numpy(labels)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(inputs[:160]), targets[:160]).backward()
        optimiser.step()
    save_file(net.state_dict(), folder / "w.safetensors")
    with torch.no_grad():
        net.eval()
        confidence = net(inputs).softmax(1).gather(1, targets[:, None])[:, 0].numpy()
    np.savez(folder / "bytes.npz", x=pictures, y=labels, train_size=160)
    np.savez(folder / "floats.npz", x=pictures / 255, y=labels, train_size=160)
    np.savez(folder / "large.npz", x=pictures.astype(np.float32), y=labels, train_size=160)
    np.savez(folder / "said.npz", x=pictures, y=labels, train_size=160, mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0])
    return folder, confidence


def audit(folder, out, capsys, *flags):
    given = ["--model", "scaled_net:net", "--weights", folder / "w.safetensors", "--pruner", "none", "--attack", "conf"]
    code = main(["audit", *map(str, [*given, *flags, "--out", out, "--json"])])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if code == 0 else [], captured.err


def sklearn_auc(confidence, rows):
    """Return scikit-learn's AUC on the same rows: a tenth of the outsiders is left out of the audit."""
    ids = [int(line.split(",")[2]) for line in rows]
    return roc_auc_score([i < 160 for i in ids], confidence[ids])


@pytest.mark.parametrize(
    "flags",
    [
        ["--data", "bytes.npz"],
        ["--data", "floats.npz"],
        ["--data", "large.npz"],
        ["--data", "said.npz"],
        ["--data", "bytes.npz", "--inputs-are", "pixels"],
        ["--data", "bytes.npz", "--mean", "0,0,0", "--std", "1,1,1"],
    ],
)
def test_the_auc_is_that_of_the_inputs_it_was_trained_on(own, tmp_path, capsys, monkeypatch, flags):
    folder, confidence = own
    monkeypatch.chdir(folder)
    code, rows, _ = audit(folder, tmp_path / "run", capsys, *flags)
    assert code == 0
    (auc,) = (row["value"] for row in rows if row["metric"] == "auc")
    lines = (tmp_path / "run" / "records.csv").read_text().splitlines()[1:]
    assert auc > 0.85 and auc == pytest.approx(sklearn_auc(confidence, lines), abs=1e-3)
    (said,) = {row["note"] for row in rows if row.get("check") == "scaling"}
    assert said in (tmp_path / "run" / "report.html").read_text().replace("&#39;", "'")
    if len(flags) == 2 and "said" not in flags[1]:
        first = r"members' accuracy is 9\d(\.\d)? % with pixels in \[0, 1\], "
        assert re.match(first + r".*: pixels in \[0, 1\] are used, as nothing was said; .* set mean and std$", said)
        assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["inputs_are"] == "pixels"


def test_no_scaling_that_is_plausible_is_refused(own, tmp_path, capsys, monkeypatch):
    folder, _ = own
    monkeypatch.chdir(folder)
    negative = 3 - 5 * np.load("floats.npz")["x"]  # no pixels, and nothing that the network knows
    np.savez("other.npz", x=negative, y=np.load("floats.npz")["y"], train_size=160)
    code, _, err = audit(folder, tmp_path / "run", capsys, "--data", "other.npz")
    assert code == 2 and "none is plausible" in err and not (tmp_path / "run").exists()
    code, rows, _ = audit(folder, tmp_path / "run", capsys, "--data", "other.npz", "--inputs-are", "normalised")
    assert code == 0 and any(row["metric"] == "valid" and row["value"] == 0 for row in rows)


def test_scalings_that_cannot_be_told_apart_are_refused():
    pictures, labels = np.arange(64, dtype=np.uint8).reshape(16, 1, 2, 2), np.arange(16) % 2
    data = from_arrays("own", pictures, labels)
    order = torch.randperm(16, generator=derive(0, "scaling"))
    knows = nn.functional.one_hot(data.labels[order], 2).float()
    with pytest.raises(WrongInput, match=r"inputs_are: .*\[0, 1\] and .* cannot be told apart; say it by inputs_are"):
        choose_scaling(data, lambda inputs: knows)
    # a network without biases is as right on larger inputs, which are no reason to doubt
    chosen, said = choose_scaling(data, lambda inputs: knows if bool((inputs >= 0).all()) else 1 - knows)
    assert chosen.scaling == "pixels in [0, 1]" and "100 % with pixels in [0, 255]" in said.sentence


def test_a_scaling_that_is_better_by_chance_only_is_refused():
    """Of 400 members 390 are right with pixels, 382 with the pool's statistics: two points, but 28 rows differ."""
    data = from_arrays("own", (np.arange(1600) % 251).astype(np.uint8).reshape(400, 1, 2, 2), np.arange(400) % 2)
    labels = data.labels[torch.randperm(400, generator=derive(0, "scaling"))]

    def answer_wrong(count, start=0):
        wrong = (torch.arange(400) >= start) & (torch.arange(400) < start + count)
        return nn.functional.one_hot(torch.where(wrong, 1 - labels, labels), 2).float()

    def predict(inputs, rival):
        if float(inputs.min()) < 0:
            return rival if float(inputs.max()) > 1.1 else answer_wrong(200)  # standardised, and [-1, 1]
        return answer_wrong(10 if float(inputs.max()) <= 1 else 200)  # [0, 1] and [0, 255]

    with pytest.raises(WrongInput, match=r"97.5 % with .*95.5 % with .* cannot be told apart"):
        choose_scaling(data, lambda inputs: predict(inputs, answer_wrong(18, start=20)))
    chosen, _ = choose_scaling(data, lambda inputs: predict(inputs, answer_wrong(60)))
    assert chosen.scaling == "pixels in [0, 1]"


def test_the_terminal_names_the_scaling(own, tmp_path, capsys, monkeypatch):
    folder, _ = own
    monkeypatch.chdir(folder)
    given = ["--model", "scaled_net:net", "--weights", "w.safetensors", "--pruner", "none", "--attack", "conf"]
    assert main(["audit", *given, "--data", "bytes.npz", "--out", str(tmp_path / "run")]) == 0
    assert "pixels in [0, 1] are used" in " ".join(capsys.readouterr().out.split())


def test_statements_that_contradict_are_refused(own, tmp_path, capsys, monkeypatch):
    folder, _ = own
    monkeypatch.chdir(folder)
    code, _, err = audit(folder, tmp_path / "run", capsys, "--data", "bytes.npz", "--mean", ".5")
    assert code == 2 and "std: is missing" in err
    both = ["--transform", "scaled_net:double", "--inputs-are", "pixels"]
    code, _, err = audit(folder, tmp_path / "run", capsys, "--data", "bytes.npz", *both)
    assert code == 2 and "transform: cannot be combined" in err
