"""Update files captured elsewhere: what they are read as, and what is refused."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from secateur.errors import WrongInput
from secateur.evaluation.update_files import read_update
from secateur.interfaces import Gradient, Weights


@pytest.fixture
def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


@pytest.fixture
def gradient(net, rng):
    return {name: torch.randn(value.shape, generator=rng) for name, value in net.named_parameters()}


def test_what_the_file_says_goes_before_what_the_caller_says(net, gradient, tmp_path):
    path = tmp_path / "update.safetensors"
    for metadata, weights, kind in (
        (None, False, Gradient),
        (None, True, Weights),
        ({"kind": "weights"}, False, Weights),
        ({"kind": "gradient"}, True, Gradient),
    ):
        save_file(gradient, path, metadata)
        found = read_update(path, net, weights)
        assert type(found) is kind and all(torch.equal(found.values[name], gradient[name]) for name in gradient)


def test_of_weights_the_buffers_are_left_out(net, tmp_path):
    save_file(net.state_dict(), tmp_path / "sent.safetensors", {"kind": "weights"})
    found = read_update(tmp_path / "sent.safetensors", net, False)
    assert list(found.values) == [name for name, _ in net.named_parameters()]


def test_weights_are_not_taken_for_a_gradient(net, gradient, tmp_path):
    after = {name: value.detach() - 0.01 * gradient[name] for name, value in net.named_parameters()}
    path = tmp_path / "update.safetensors"
    save_file(after, path)
    with pytest.raises(WrongInput, match="looks like weights"):
        read_update(path, net, False)
    assert isinstance(read_update(path, net, True), Weights)
    save_file(after, path, {"kind": "gradient"})
    assert isinstance(read_update(path, net, False), Gradient)


def test_what_does_not_fit_is_one_sentence(net, gradient, tmp_path):
    path = tmp_path / "update.safetensors"
    first = "0.weight"
    for values, metadata, sentence in (
        ({first: gradient[first]}, None, "does not fit the model; missing: 0.bias"),
        (gradient | {"more": torch.ones(1)}, None, "unexpected: more"),
        (gradient | {first: torch.ones(2, 2)}, None, r"of another shape: 0.weight \(2, 2\)"),
        (gradient | {first: gradient[first] / 0}, None, "holds NaN or infinity in 0.weight"),
        ({name: value * 0 for name, value in gradient.items()}, None, "is zero everywhere"),
        (gradient, {"kind": "delta"}, "says that its kind is 'delta'; allowed: gradient, weights"),
    ):
        save_file(values, path, metadata)
        with pytest.raises(WrongInput, match=f"update: .*{sentence}"):
            read_update(path, net, False)
    save_file(gradient, path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no such file, but text"):
        path.write_bytes(content)
        with pytest.raises(WrongInput, match=r"cannot be read as a \.safetensors file"):
            read_update(path, net, False)
    with pytest.raises(WrongInput, match="cannot be read"):
        read_update(tmp_path / "nowhere", net, False)
