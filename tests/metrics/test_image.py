import doctest
import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.metrics import mean_squared_error, peak_signal_noise_ratio, structural_similarity

from secateur.errors import WrongInput
from secateur.metrics.image import denoise, mse, picture_scores, psnr, ssim, summary
from secateur.metrics.pictures import match


def pictures(rng, *shape):
    """Smooth shapes with some noise, so that windows have structure."""
    rough = torch.rand(shape, generator=rng, dtype=torch.float64)
    return 0.7 * torch.nn.functional.avg_pool2d(rough, 3, 1, 1) + 0.3 * rough


@pytest.mark.parametrize("module", ["image", "lpips", "pictures"])
def test_the_examples_run(module):
    found = doctest.testmod(importlib.import_module(f"secateur.metrics.{module}"))
    assert found.attempted and not found.failed


@pytest.mark.parametrize("shape", [(5, 1, 28, 28), (5, 3, 32, 32), (2, 3, 11, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_scikit_image(rng, shape, dtype):
    x = pictures(rng, *shape).to(dtype)
    y = (0.8 * x + 0.2 * torch.rand(shape, generator=rng)).clamp(0, 1).to(dtype)
    as_numpy = zip(x.permute(0, 2, 3, 1).double().numpy(), y.permute(0, 2, 3, 1).double().numpy(), strict=True)
    expected = [
        (
            mean_squared_error(a, b),
            peak_signal_noise_ratio(a, b, data_range=1),
            structural_similarity(
                a, b, gaussian_weights=True, use_sample_covariance=False, data_range=1, channel_axis=-1
            ),
        )
        for a, b in as_numpy
    ]
    found = torch.stack([mse(x, y), psnr(x, y), ssim(x, y)], 1)
    assert found.numpy() == pytest.approx(np.array(expected), rel=1e-9)


def test_equal_pictures(rng):
    x = pictures(rng, 3, 3, 16, 16)
    assert mse(x, x).tolist() == [0.0] * 3
    assert psnr(x, x).tolist() == [math.inf] * 3
    assert ssim(x, x).tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("measure", [mse, psnr, ssim])
def test_wrong_pictures_are_refused_in_one_sentence(measure):
    x = torch.zeros(2, 3, 16, 16)
    for a, b in (
        (x, x[:1]),
        (x[0], x[0]),
        (x[:, :2], x[:, :2]),
        (x[:0], x[:0]),
        (x.byte(), x.byte()),
        (x, x[..., :12]),
    ):
        with pytest.raises(WrongInput, match="pictures: "):
            measure(a, b)


def test_ssim_needs_its_window(rng):
    with pytest.raises(WrongInput, match="ssim: 16x8 pixels are too few; use at least 11 a side"):
        ssim(torch.zeros(1, 1, 16, 8), torch.zeros(1, 1, 16, 8))


@settings(max_examples=25, deadline=None)
@given(number=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_matching_undoes_any_order(number, seed):
    rng = torch.Generator().manual_seed(seed)
    truth = torch.rand(number, 1, 4, 4, generator=rng)
    order = torch.randperm(number, generator=rng)
    guess = (truth + 0.01 * torch.randn(truth.shape, generator=rng))[order]
    assert torch.equal(order[match(truth, guess)], torch.arange(number))


def test_matching_minimises_the_total_not_each():
    # guess 0 equals truth 0, but 0.4^2 + 0.4^2 < 0^2 + 0.8^2
    truth, guess = (torch.tensor(values).view(2, 1, 1, 1) for values in ([0.4, 0.8], [0.4, 0.0]))
    assert match(truth, guess).tolist() == [1, 0]


def test_of_more_guesses_than_truths_the_best_are_taken():
    truth, guess = (torch.tensor(values).view(-1, 1, 1, 1) for values in ([0.1, 0.9], [0.5, 1.0, 0.0]))
    assert match(truth, guess).tolist() == [2, 1]
    with pytest.raises(WrongInput, match="pictures: "):
        match(guess, truth)


def test_what_diverged_is_not_matched_nor_scored():
    broken = torch.full((1, 1, 4, 4), math.nan)
    for function in (lambda: match(broken, broken), lambda: picture_scores(broken, broken, None)):
        with pytest.raises(WrongInput, match="NaN"):
            function()


def test_all_scores(rng):
    truth = pictures(rng, 4, 3, 32, 32).float()
    guess = truth + 0.5 * torch.randn(truth.shape, generator=rng)  # leaves [0, 1]
    scores = picture_scores(truth, guess, weights=None)
    assert {"mse", "psnr", "ssim", "cw_ssim", "nmi_256", "nmi_256_chance", "ami_256", "nmi_100"} <= set(scores.values)
    assert all(value.shape == (4,) for value in scores.values.values())
    assert torch.equal(scores.values["mse"], mse(truth, guess.clamp(0, 1)))
    assert "lpips" not in scores.values and scores.notes["lpips"].startswith("absent")
    with pytest.raises(WrongInput, match="undo their normalisation"):
        picture_scores(truth * 2 - 1, guess, None)


def test_small_pictures_say_what_is_absent(rng):
    truth = torch.rand(2, 1, 8, 8, generator=rng)
    scores = picture_scores(truth, truth, weights=None)
    assert "ssim" not in scores.values and scores.notes["ssim"].startswith("absent")
    assert scores.notes["cw_ssim"] == "3 scales"


def test_summary(rng):
    values = torch.randn(400, generator=rng) + 5
    found = summary({"psnr": values, "half": values / 2}, rng)
    psnr_found, half = found["psnr"], found["half"]
    assert psnr_found.mean.value == pytest.approx(float(values.mean()), abs=1e-5)
    assert psnr_found.median.value == pytest.approx(float(np.median(values)), abs=1e-5)
    assert (psnr_found.minimum, psnr_found.maximum) == (float(values.min()), float(values.max()))
    # the standard error of a mean of 400 is 1/20, of a median 1.25/20
    assert psnr_found.mean.high - psnr_found.mean.low == pytest.approx(2 * 1.96 / 20, rel=0.2)
    assert psnr_found.median.high - psnr_found.median.low == pytest.approx(2 * 1.96 * 1.25 / 20, rel=0.4)
    assert half.mean.low == pytest.approx(psnr_found.mean.low / 2)  # the same draws
    assert psnr_found.targets == 400 and psnr_found.mean.note is None


def test_summary_of_infinite_and_single_values(rng):
    found = summary({"psnr": torch.tensor([math.inf, 20.0, 30.0])}, rng)["psnr"]
    assert found.mean.value == math.inf and found.median.value == 30.0
    assert found.median.low == 20.0 and found.median.high == math.inf
    one = summary({"psnr": torch.tensor([20.0])}, rng)["psnr"]
    assert one.mean[:3] == (20.0, 20.0, 20.0) and one.mean.note == "one target: no interval"


def test_summary_draws_a_target_with_all_its_values(rng):
    """Targets of two values and of one: resampled medians are those of whole targets."""
    values = torch.tensor([0.0, 1.0, 6.0])
    found = summary({"own": values}, rng, sizes=[2, 1])["own"]
    assert (found.median.value, found.median.low, found.median.high) == (1.0, 0.5, 6.0)
    assert found.median.note.startswith("2 targets are too few for 95 %")
    # sums 1 and 6 are 11/3 off their shares of 7/3 a value: sqrt(2 * 2 * (11/3)^2) / 3 = 22/9, and t(1) = 12.7062
    assert found.mean.value == pytest.approx(7 / 3)
    assert found.mean.high - found.mean.value == pytest.approx(12.7062 * 22 / 9, rel=1e-5)
    assert found.mean.value - found.mean.low == pytest.approx(12.7062 * 22 / 9, rel=1e-5)
    assert found.targets == 2 and "over the 2 targets" in found.mean.note
    many = summary({"psnr": values.repeat(5)}, rng, sizes=[2, 1] * 5)["psnr"]
    assert 0.5 <= many.mean.low < 7 / 3 < many.mean.high <= 6.0 and many.median.note == many.mean.note


@pytest.mark.parametrize("targets", [2, 3, 5, 9, 20])
def test_an_interval_of_few_targets_covers_as_often_as_it_says(targets, rng):
    """Two targets resampled lie on both sides of their mean half of the time, and that is no 95 %."""
    draws = torch.randn(600, targets, generator=rng)
    found = [summary({"x": draw}, rng, resamples=200)["x"].mean for draw in draws]
    covered = sum(each.low <= 0 <= each.high for each in found) / len(found)
    assert covered > 0.9


def test_the_denoiser_is_that_of_scikit_image(rng):
    from skimage.restoration import denoise_tv_chambolle

    pictures = torch.rand(2, 3, 9, 13, generator=rng, dtype=torch.float64)
    for weight, iterations in ((0.1, 20), (0.3, 7)):
        for picture, smooth in zip(pictures, denoise(pictures, weight, iterations), strict=True):
            # the last of its iterations only measures the change
            settings = {"weight": weight, "eps": 0, "max_num_iter": iterations + 1, "channel_axis": 0}
            expected = torch.from_numpy(denoise_tv_chambolle(picture.numpy(), **settings))
            torch.testing.assert_close(smooth, expected, atol=1e-12, rtol=0)


def test_intervals_stay_in_the_range_of_their_measure(rng):
    """Finding 4: SSIM [-1.408, 1.763] at two targets."""
    values = {"ssim": torch.tensor([0.05, 0.3]), "mse": torch.tensor([0.01, 0.3]), "psnr": torch.tensor([1.0, 30.0])}
    wide = summary(values, rng)
    assert (wide["ssim"].mean.low, wide["ssim"].mean.high) == (-1, 1)
    assert (wide["mse"].mean.low, wide["mse"].mean.high) == (0, 1)
    assert wide["psnr"].mean.low == 0 and wide["psnr"].mean.high > 100
