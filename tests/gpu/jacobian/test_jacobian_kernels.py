"""The kernels of a Flow against operations of torch: by Triton's interpreter, or on a GPU where there is one."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="left out: Triton is not installed")

from secateur.gpu.jacobian import kernels
from secateur.gpu.jacobian.flows import Flow, Thin, laid_out

pytestmark = pytest.mark.system  # interpreted, they take minutes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pictures(count, shape, rng):
    return laid_out(torch.randn(count, *shape, generator=rng)).to(DEVICE)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("features", "batch", "shape"), [(11, 3, (70, 5, 4)), (3, 2, (12, 20, 17)), (8, 4, (64, 4, 4)), (1, 2, (3, 2, 2))]
)
def test_a_pass_over_the_memory_equals_operations_of_torch(features, batch, shape, parts, rng):
    given = tuple(pictures(features * batch, shape, rng) for _ in range(parts))
    normal, mask = pictures(batch, shape, rng), (pictures(batch, shape, rng) > 0).float()
    factor = torch.rand(1, shape[0], 1, 1, generator=rng).to(DEVICE)
    for slope in (mask, factor, None):
        exact = Flow(tuple(part.double() for part in given), None if slope is None else slope.double())
        (alone, none), (centred, kept) = (kernels.centred(given, slope, normal, keep) for keep in (False, True))
        assert none is None
        pairs = [
            (alone, exact.centred(normal.double())),
            (centred, exact.centred(normal.double())),
            (kept, exact.whole()),
        ]
        if slope is not None:
            pairs.append((kernels.summed(given, slope), exact.whole()))
        for found, expected in pairs:
            assert found.is_contiguous(memory_format=torch.channels_last) and found.dtype == torch.float32
            assert float((found - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize(("size", "steps"), [((5, 4), (2, 2)), ((7, 6), (3, 1)), ((4, 8), (1, 4))])
def test_a_part_with_values_at_some_places(size, steps, rng):
    thin = Thin(
        pictures(22, (70, *(-(-side // step) for side, step in zip(size, steps, strict=True))), rng), size, steps
    )
    dense, normal, mask = (pictures(count, (70, *size), rng) for count in (22, 2, 2))
    exact = Flow((dense.double(), thin._replace(values=thin.values.double())), mask.double())
    for found, expected in [
        (kernels.summed((dense, thin), mask), exact.whole()),
        (kernels.centred((dense, thin), mask, normal)[0], exact.centred(normal.double())),
    ]:
        assert float((found - expected).norm() / expected.norm()) < 1e-6
