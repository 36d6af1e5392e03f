"""The kernels of BatchNorm against operations of torch: by Triton's interpreter, or on a GPU where there is one."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="left out: Triton is not installed")

from secateur.gpu import batchnorm, batchnorm_kernels

pytestmark = pytest.mark.system  # interpreted, they take minutes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(3, 70, 70), (1, 33, 3), (2, 2, 64), (4, 300, 130), (5, 1, 1)])
@pytest.mark.parametrize("programs", [1, 40, 1024])
@pytest.mark.parametrize(("skips", "relu"), [(False, False), (False, True), (True, True), (True, False)])
@pytest.mark.parametrize("own", [False, True])  # whether each user has a weight and a bias of its own
def test_two_passes_over_the_memory_equal_operations_of_torch(shape, programs, skips, relu, own, rng, monkeypatch):
    monkeypatch.setattr(batchnorm_kernels, "PROGRAMS", programs)
    x, g, skip = (torch.randn(shape, generator=rng).to(DEVICE) for _ in range(3))
    x = x * 3 + 50  # far from 0: a sum of squares would lose the variance
    weight, bias = (torch.randn(shape[::2] if own else shape[2:], generator=rng).to(DEVICE) for _ in range(2))
    exact, moments = batchnorm.normalised(
        x.double(), weight.double(), bias.double(), 0.5, skip.double() if skips else None, relu
    )
    out, found = batchnorm_kernels.normalised(x, weight, bias, 0.5, skip if skips else None, relu)
    mean, _, inverse, scale = found
    by = bias if relu else None
    back = batchnorm_kernels.returned(g, x, mean, inverse, scale, by)
    expected = batchnorm.returned(g.double(), x.double(), moments, None if by is None else by.double())
    pairs = [(out, exact), *zip(found, moments, strict=True), *zip(back, expected, strict=True)]
    assert out.dtype == torch.float32 and out.is_contiguous()
    for one, other in pairs:
        # The gradient of x is what of g * scale is left without its mean: of one place exactly nothing, and as far from
        # it as float32 is from what was summed.
        summed = g * scale[:, None] if other is expected[0] else other
        assert float((one - other).norm()) <= 2e-6 * float(summed.norm()) + 1e-12


def test_what_is_not_a_number_stays_so_that_a_training_can_tell(rng):
    x, skip = (torch.randn(2, 40, 3, generator=rng).to(DEVICE) for _ in range(2))
    ones = torch.ones(3, device=DEVICE)
    x[1, 5, 1] = skip[0, 3, 0] = torch.nan
    out, (mean, var, *_) = batchnorm_kernels.normalised(x, ones, ones, 1e-5, skip, True)
    assert out.isnan().sum(1).tolist() == [[1, 0, 0], [0, 40, 0]]
    assert mean.isnan().tolist() == var.isnan().tolist() == [[False] * 3, [False, True, False]]
