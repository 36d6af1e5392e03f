"""Crops and flips."""

import pytest
import torch

from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.federated.augment import CropAndFlip, crop_and_flip


def test_every_picture_is_a_shifted_or_mirrored_window_of_its_own(rng):
    inputs = torch.randn(40, 3, 5, 4, generator=rng)
    made = CropAndFlip(2, (9.0, 8.0, 7.0))(inputs, rng)
    black = torch.tensor([9.0, 8.0, 7.0]).view(1, 3, 1, 1)
    padded = black.expand(40, 3, 9, 8).clone()
    padded[:, :, 2:7, 2:6] = inputs
    found = set()
    for before, after in zip(padded, made, strict=True):
        windows = {
            (y, x, flip): before[:, y : y + 5, x : x + 4].flip(-1) if flip else before[:, y : y + 5, x : x + 4]
            for y in range(5)
            for x in range(5)
            for flip in (False, True)
        }
        (place,) = [place for place, window in windows.items() if torch.equal(window, after)]
        found.add(place)
    assert made.shape == inputs.shape
    assert len(found) > 25 and {flip for *_, flip in found} == {False, True}


def test_without_padding_pictures_are_only_mirrored(rng):
    inputs = torch.randn(64, 1, 3, 3, generator=rng)
    made = CropAndFlip(0)(inputs, rng)
    same = (made == inputs).flatten(1).all(1)
    assert 10 < int(same.sum()) < 54
    assert torch.equal(made[~same], inputs[~same].flip(-1))


def test_draws_come_from_the_generator_alone_and_the_given_stays():
    inputs = torch.arange(32.0).view(2, 1, 4, 4)
    before = inputs.clone()
    first, second, other = (CropAndFlip(1)(inputs, torch.Generator().manual_seed(seed)) for seed in (1, 1, 3))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(inputs, before)


def test_black_is_a_pixel_of_zero_in_the_models_units():
    digits = load("digits")
    made = crop_and_flip(digits)
    assert made.padding == 4
    assert made.black == (tuple(-m / s for m, s in zip(digits.mean, digits.std, strict=True)) or (0.0,))


def test_refusals():
    with pytest.raises(WrongInput, match="no pictures"):
        crop_and_flip(load("breast_cancer"))
    with pytest.raises(WrongInput, match="padding"):
        CropAndFlip(-1)
