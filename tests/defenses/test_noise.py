"""Gaussian noise without clipping."""

import pytest
import torch

from secateur.defenses.noise import GaussianNoise, draw_normal, move_generator
from secateur.errors import WrongInput
from secateur.interfaces import UploadContext


def turning(seed):
    return UploadContext(None, {}, None, 0, torch.Generator().manual_seed(seed))


def test_it_adds_sigma_times_what_was_drawn():
    grads = {"w": torch.tensor([1.0, 2.0])}
    sent, state = GaussianNoise(0.5)(grads, {}, None, noise={"w": torch.tensor([2.0, -4.0])})
    assert sent["w"].tolist() == [2, 0] and state == {}


def test_the_noise_has_the_papers_deviation_and_comes_from_the_given_generator():
    grads = {"w": torch.zeros(200, 200, dtype=torch.float64), "b": torch.zeros(7)}
    first, again, other = (GaussianNoise()(grads, {}, turning(seed))[0] for seed in (0, 0, 1))
    assert float(first["w"].std()) == pytest.approx(1e-2, rel=0.01) and abs(float(first["w"].mean())) < 2e-4
    assert torch.equal(first["w"], again["w"]) and not torch.equal(first["b"], other["b"])
    assert first["w"].dtype == torch.float64 and first["b"].dtype == torch.float32


def test_noise_that_is_drawn_before_is_the_noise_that_would_be_drawn():
    grads, upload = {"w": torch.ones(3)}, GaussianNoise()
    drawn = upload.noise(grads, turning(3).rng)
    assert torch.equal(upload(grads, {}, None, noise=drawn)[0]["w"], upload(grads, {}, turning(3))[0]["w"])


def test_on_a_cpu_the_generator_itself_draws():
    rng = torch.Generator().manual_seed(0)
    assert move_generator(torch.device("cpu"), rng) is rng
    before = rng.get_state()
    draw_normal({"w": torch.ones(3)}, rng)
    assert not torch.equal(before, rng.get_state())


@pytest.mark.parametrize("sigma", [-1, float("nan"), float("inf")])
def test_wrong_sigma_is_refused(sigma):
    with pytest.raises(WrongInput, match=r"sigma: .* must be at least 0"):
        GaussianNoise(sigma)
