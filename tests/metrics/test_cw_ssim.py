import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.metrics import pictures as module
from secateur.metrics.pictures import bands, cw_ssim

SIZES = [(32, 32, 5), (28, 28, 5), (64, 64, 5), (17, 40, 5), (16, 16, 4), (8, 8, 3), (8, 32, 3), (2, 2, 1), (1, 1, 1)]


def smooth(rng, *shape):
    rough = torch.rand(shape, generator=rng, dtype=torch.float64)
    return torch.nn.functional.avg_pool2d(rough, 5, 1, 2)


def test_the_first_filters_are_biorthogonal_in_integers():
    low = [round(tap * 5120) for tap in module._FIRST_LOW]
    high = [round(tap * 1146880) for tap in module._FIRST_HIGH]
    low, high = low + low[-2::-1], high + high[-2::-1]
    assert (sum(low), sum(high)) == (5120, 0)
    product = np.convolve(low, [-((-1) ** i) * tap for i, tap in enumerate(high)])
    middle = len(product) // 2
    assert product[middle] == 5120 * 1146880 // 2
    assert not product[middle + 2 :: 2].any()  # half-band: every second tap from the middle is zero
    assert np.array_equal(product, product[::-1])


def test_the_later_filter_is_orthonormal():
    taps = np.array(module._QUARTER_SHIFT)
    shifted = [float(taps[2 * k :] @ taps[: len(taps) - 2 * k]) for k in range(7)]
    assert shifted == pytest.approx([1, 0, 0, 0, 0, 0, 0], abs=1e-14)
    assert taps.sum() == pytest.approx(math.sqrt(2))
    centre = float((np.arange(14) * taps**2).sum())
    assert centre == pytest.approx(6.5 - 0.25, abs=0.03)  # a quarter sample off the middle


def test_each_orientation_is_one_sided():
    # A complex wavelet that answers to one direction: its response to a plane wave and to the mirrored one differ.
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    for scale, frequency in ((1, 0.7), (2, 0.35), (3, 0.18)):
        waves = torch.stack([torch.cos(frequency * (x + y)), torch.cos(frequency * (x - y))])[:, None].double()
        inner = bands(waves, 4)[scale][:, 0, 4:6]  # the two diagonals
        inner = inner[..., 2:-2, 2:-2] if inner.shape[-1] > 4 else inner[..., 1:-1, 1:-1]
        energy = inner.abs().square().mean((2, 3))
        assert energy.max(1).values.min() > 40 * energy.min(1).values.max()
        assert energy.argmax(1).tolist() in ([0, 1], [1, 0])


def test_magnitudes_hardly_move_with_a_shift():
    x = torch.arange(64.0, dtype=torch.float64)
    edges = torch.stack([(x > 30 + shift).double().expand(64, 64) for shift in range(4)])[:, None]
    for coefficients in bands(edges, 4)[1:]:
        energy = coefficients.abs().square().sum((1, 2, 3, 4))
        assert float(energy.std() / energy.mean()) < 0.03


def test_transform_keeps_the_mirror_symmetry(rng):
    # reversing a picture conjugates and exchanges opposite orientations, and moves nothing else
    picture = smooth(rng, 1, 1, 32, 32)
    for plain, turned in zip(bands(picture, 5), bands(picture.flip(-1), 5), strict=True):
        assert torch.allclose(plain.abs().square().sum(2), turned.flip(-1).abs().square().sum(2))


@pytest.mark.parametrize("height, width, scales", SIZES)
def test_equal_pictures_at_every_size(rng, height, width, scales):
    picture = smooth(rng, 3, 3, height, width)
    found = cw_ssim(picture, picture)
    assert found.scales == scales
    assert found.values.tolist() == pytest.approx([1.0] * 3)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), gain=st.floats(0.1, 1.0), offset=st.floats(-0.5, 0.5))
def test_symmetric_and_bounded_and_brightness_is_free(seed, gain, offset):
    rng = torch.Generator().manual_seed(seed)
    x, y = smooth(rng, 2, 1, 16, 16), torch.rand(2, 1, 16, 16, generator=rng, dtype=torch.float64)
    found = cw_ssim(x, y).values
    assert torch.allclose(found, cw_ssim(y, x).values)
    assert bool(((found >= 0) & (found <= 1)).all())
    assert torch.allclose(cw_ssim(x, y + offset).values, found, atol=1e-4)
    # a gain g alone gives 2 g / (1 + g^2), Sampat et al.'s formula at y = g x
    assert cw_ssim(x, gain * x).values.tolist() == pytest.approx([2 * gain / (1 + gain**2)] * 2, abs=5e-3)


def test_by_hand_at_one_coefficient():
    # 2x2 pixels: every tap beyond the border meets the mirror image, so a linear filter of four numbers is left
    a, b, c, d = 0.1, 0.4, 0.8, 0.2
    low = [tap / 5120 for tap in (-9, 0, 114, -240, -247, 1520, 2844, 1520, -247, -240, 114, 0, -9)]
    high = module._FIRST_HIGH + module._FIRST_HIGH[-2::-1]

    def along(taps, pair):
        reach = len(taps) // 2
        mirrored = [pair[(k % 4) if (k % 4) < 2 else 3 - (k % 4)] for k in range(-reach, 2 + reach)]
        return [sum(tap * mirrored[i + j] for j, tap in enumerate(taps)) for i in range(2)]

    def band(rows, columns):
        first = [along(columns, row) for row in ((a, b), (c, d))]
        return np.array([along(rows, column) for column in zip(*first, strict=True)]).T

    expected = []
    for rows, columns in ((low, high), (high, low), (high, high)):
        (p, q), (r, s) = band(rows, columns)
        expected += [complex(p - s, q + r) / math.sqrt(2), complex(p + s, q - r) / math.sqrt(2)]
    picture = torch.tensor([[a, b], [c, d]], dtype=torch.float64).view(1, 1, 2, 2)
    assert bands(picture, 1)[0].flatten().tolist() == pytest.approx(expected)
    other = picture.flip(-1)
    x, y = bands(picture, 1)[0].flatten(), bands(other, 1)[0].flatten()
    by_hand = (2 * abs(complex((x * y.conj()).sum())) + 1e-6) / (float((abs(x) ** 2 + abs(y) ** 2).sum()) + 1e-6)
    assert cw_ssim(picture, other).values.item() == pytest.approx(by_hand)


def test_a_shift_costs_less_than_noise(rng):
    picture = smooth(rng, 8, 3, 64, 64)
    shifted = picture.roll(1, -1)
    noisy = picture + 0.2 * torch.randn(picture.shape, generator=rng)
    assert float(cw_ssim(picture, shifted).values.min()) > 0.7
    assert float(cw_ssim(picture, noisy).values.max()) < 0.6


def test_constant_pictures_are_alike():
    grey = torch.full((1, 1, 32, 32), 0.5)
    assert cw_ssim(grey, grey + 0.2).values.item() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.data
def test_noise_on_real_pictures_scores_as_the_papers_floor(photographs, rng):
    for noise in (torch.rand(photographs.shape, generator=rng), torch.randn(photographs.shape, generator=rng)):
        floor = cw_ssim(photographs, noise.clamp(0, 1)).values
        assert 0.2 < float(floor.mean()) < 0.25  # DGP's Table 1 has 0.25 where nothing is recovered
        assert float(floor.quantile(0.05)) > 0.15 and float(floor.quantile(0.95)) < 0.29


@pytest.mark.data
def test_small_changes_of_real_pictures(photographs):
    blurred = torch.nn.functional.avg_pool2d(photographs, 3, 1, 1, count_include_pad=False)
    assert float(cw_ssim(photographs, photographs.roll(1, -1)).values.mean()) > 0.8
    assert float(cw_ssim(photographs, blurred).values.mean()) > 0.8
    assert float(cw_ssim(photographs, photographs + 0.2).values.min()) > 0.999
