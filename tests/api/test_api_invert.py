"""`secateur.invert` on a user's own model and tensors."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

import secateur
import tiny_attack
from secateur.interfaces import Batch, Gradient, Weights


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    tiny_attack.install(monkeypatch)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return tiny_attack.linear((1, 4, 4), 3)


@pytest.fixture
def batch(rng):
    return Batch(torch.rand(4, 1, 4, 4, generator=rng), torch.tensor([0, 1, 2, 0]))


def gradient_of(net, batch):
    loss = cross_entropy(net(batch.inputs), batch.labels)
    return {
        name: grad
        for (name, _), grad in zip(net.named_parameters(), torch.autograd.grad(loss, [*net.parameters()]), strict=True)
    }


def test_one_update_of_each_example(net, batch, tmp_path, capsys):
    report = secateur.invert(net, batch, "tiny", batch_size=1)
    (pictures,) = report.pictures.values()
    torch.testing.assert_close(torch.cat(pictures).float(), batch.inputs, atol=1e-4, rtol=0)
    whole = {row.metric: row.value for row in report.rows if row.extra["target"] is None}
    assert whole["label_accuracy"] == 1.0 and whole["psnr_min"] > 80
    report.print()
    assert "tiny" in capsys.readouterr().out
    page = report.write(tmp_path / "page.html").read_text()
    assert page.count('class="picture" aria-label') == 8


def test_a_batch_is_one_update(net, batch):
    report = secateur.invert(net, batch, ["tiny", "meddling"])
    assert {row.extra["target"] for row in report.rows} == {0, None}
    assert {row.extra["batch_size"] for row in report.rows} == {4} and len(report.pictures) == 2


def test_normalised_inputs_and_double_precision(net, batch):
    scaled = Batch((batch.inputs.double() - 0.4) / 0.2, batch.labels)
    report = secateur.invert(net.double(), scaled, "tiny", batch_size=1, mean=[0.4], std=[0.2], iterations=60)
    torch.testing.assert_close(
        torch.cat(report.pictures["tiny:iterations=60"]), batch.inputs.double(), atol=1e-6, rtol=0
    )


def test_an_update_captured_elsewhere(net, batch, tmp_path):
    one = batch.take(torch.tensor([1]))
    gradient = gradient_of(net, one)
    save_file(gradient, tmp_path / "update.safetensors")
    given = [Gradient(gradient), tmp_path / "update.safetensors", str(tmp_path / "update.safetensors")]
    after = {name: value.detach() - 0.5 * gradient[name] for name, value in net.named_parameters()}
    for update, more in [*((each, {}) for each in given), (Weights(after), {"learning_rate": 0.5})]:
        report = secateur.invert(net, update, "tiny", input_shape=(1, 4, 4), **more)
        torch.testing.assert_close(report.pictures["tiny"][0].float(), one.inputs, atol=1e-4, rtol=0)
        assert not [row for row in report.rows if row.metric == "psnr"]
        assert [row.value for row in report.rows if row.metric == "attack_loss"]


def test_the_model_is_left_as_it_was(net, batch):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    secateur.invert(net, batch, "tiny")
    assert net.training and all(value.grad is None for value in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda net, x: (net, (x.inputs[:0], x.labels[:0])), "batch: 0 inputs"),
        (lambda net, x: (net, (x.inputs, x.labels[:2])), "batch: 4 inputs and labels of the shape"),
        (lambda net, x: (net, (x.inputs, x.labels + 2)), "batch: labels from 2 to 4; allowed by the model"),
        (lambda net, x: (net, (x.inputs - 1, x.labels)), "data: inputs lie in"),
        (lambda net, x: (net, (x.inputs.flatten(1), x.labels)), "batch: the batch has examples of the shape \\(16,\\)"),
        (lambda net, x: (net, (x.inputs[..., :3], x.labels)), "model: must accept inputs of the shape \\(1, 4, 3\\)"),
        (lambda net, x: (nn.Flatten(0), x), "model: answers \\(16,\\) for one example"),
        (lambda net, x: (net, Gradient(gradient_of(net, x))), "input_shape: must be given"),
        (lambda net, x: (net, (x.inputs / 0, x.labels)), "batch: its inputs hold NaN or infinity"),
        (lambda net, x: (net, None), "batch: NoneType is not allowed"),
        (lambda net, x: (net.forward, x), "model: is method; must be a torch.nn.Module"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(net, batch, change, sentence):
    model, given = change(net, batch)
    with pytest.raises(secateur.WrongInput, match=sentence):
        secateur.invert(model, given, "tiny")


def test_options_that_do_not_fit(net, batch):
    shaped = {"input_shape": (1, 4, 4)}
    for given, more, sentence in [
        (batch, {"batch_size": 3}, "batch_size: 3 does not divide the 4 examples"),
        (batch, {"batch_size": 0}, "batch_size: 0 is not allowed"),
        (batch, {"labels": "orakel"}, "labels: 'orakel' is not known; did you mean 'oracle'"),
        (batch, {"batchnorm": "train"}, "batchnorm: 'train' is not known; allowed: batch, eval"),
        (batch, {"local_steps": 0}, "local_steps: 0 is not allowed"),
        (batch, {"learning_rate": -1.0}, "learning_rate: -1.0 is not allowed"),
        (batch, {"mean": [0.5], "std": [2.0]}, "mean: with std it puts the pixels in"),
        (batch, {"depth": 3}, "attack.tiny: 'depth' is not known"),
        (batch, {"mean": [0.1, 0.2], "std": [1.0, 1.0]}, "mean: must be one mean and one std"),
        (batch, {"local_steps": 2}, "attack tiny: needs one local step"),
        (Gradient({"x": torch.zeros(1)}), shaped, "update: the update does not fit the model; missing: 1.weight"),
        (Gradient(gradient_of(net, batch)), shaped | {"labels": "oracle"}, "labels: an update that was captured"),
    ]:
        with pytest.raises(secateur.WrongInput, match=sentence):
            secateur.invert(net, given, "tiny", **more)
    with pytest.raises(secateur.WrongInput, match="attack: must name at least one"):
        secateur.invert(net, batch, [])
    with pytest.raises(secateur.WrongInput, match="meddling changes the model before it is sent"):
        secateur.invert(net, Gradient(gradient_of(net, batch)), "meddling", **shaped)
