"""Registration: shifted and turned copies of a picture come to lie on it, and noise stays where it is."""

import math

import pytest
import torch

from secateur.attacks.inversion.problem import consensus
from secateur.attacks.inversion.registration import compose, find_shift, register, solve, standardise, warp


def scene(height=24, width=28, channels=3):
    """Smooth blobs away from the edges."""
    y, x = torch.meshgrid(torch.arange(height).float(), torch.arange(width).float(), indexing="ij")
    blobs = [(8, 9, 3.0, 1.0), (14, 17, 2.0, -0.8), (11, 20, 2.5, 0.6), (16, 10, 2.0, 0.7)]
    picture = sum(a * torch.exp(-((y - r) ** 2 + (x - c) ** 2) / (2 * s * s)) for r, c, s, a in blobs)
    return torch.stack([picture * (k + 1) / channels for k in range(channels)])[None]


def inside(pictures):
    return pictures[..., 6:-6, 6:-6]


def test_shifted_copies_register_to_the_same_picture():
    truth = scene()
    shifts = [(0, 0), (2, -3), (-4, 1), (3, 4)]
    copies = torch.cat([truth.roll(shift, (2, 3)) for shift in shifts])
    aligned = register(copies, truth.expand_as(copies))
    assert float((inside(aligned) - inside(truth)).abs().max()) < 1e-3
    assert torch.equal(aligned[0], copies[0])  # what lies there already is not sampled again
    maps = find_shift(standardise(copies), standardise(truth.expand_as(copies)))
    assert (maps[:, :, 2] * torch.tensor([14, 12])).round().tolist() == [[0, 0], [-3, 2], [1, -4], [4, 3]]


def test_a_turned_and_scaled_copy_registers_too():
    truth, angle = scene(), math.radians(9)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.11], [math.sin(angle), math.cos(angle), -0.07]])
    copy = warp(truth, turn[None] * torch.tensor([1.05, 1.05, 1.0]))
    before, after = ((inside(x) - inside(truth)).square().mean() for x in (copy, register(copy, truth)))
    assert float(after) < 0.02 * float(before)


def test_noise_and_flat_pictures_stay_where_they_are():
    rng = torch.Generator().manual_seed(0)
    flat = torch.full((1, 3, 24, 28), 0.5)
    assert torch.equal(register(flat, scene()), flat) and torch.equal(register(scene(), flat), scene())
    noise = torch.randn(2, 3, 24, 28, generator=rng)
    assert register(noise, scene().expand_as(noise)).isfinite().all()


def test_the_consensus_of_shifted_candidates_is_the_picture_and_not_their_blur():
    truth = scene()
    candidates = torch.stack([truth.roll(shift, (2, 3)) for shift in ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))])
    blurred, registered = (consensus(candidates, 5, registers)[0] for registers in (False, True))
    errors = [float((inside(one) - inside(truth)).square().mean()) for one in (blurred, registered)]
    assert errors[1] < 0.1 * errors[0]
    broken = candidates.clone()
    broken[3] = torch.nan  # a diverged restart has no say
    assert consensus(broken, 5, True).isfinite().all()


def test_elimination_and_composition_by_hand():
    rng = torch.Generator().manual_seed(0)
    half = torch.randn(3, 6, 6, generator=rng, dtype=torch.float64)
    square, right = half @ half.mT + torch.eye(6), torch.randn(3, 6, generator=rng, dtype=torch.float64)
    assert torch.allclose(solve(square, right), torch.linalg.solve(square, right))
    twice = compose(torch.tensor([[[1.0, 0, 0.5], [0, 1, 0]]]), torch.tensor([[[1.0, 0, 0.25], [0, 0, 0]]]))
    assert twice[0, 0].tolist() == [2.0, 0.0, 0.75]  # x -> 2 x + .25, then + .5


@pytest.mark.parametrize("restarts", [1, 2])
def test_without_registration_it_is_the_mean(restarts):
    inputs = torch.arange(16.0).view(2, 2, 1, 2, 2)
    assert torch.equal(consensus(inputs, restarts), inputs if restarts == 1 else inputs.mean(0, True).expand_as(inputs))
