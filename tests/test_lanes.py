"""Passes over many clients' tensors: by hand, and the kernels against operations of torch, interpreted or on a GPU."""

import importlib.util
import os

import pytest
import torch
from torch import vmap
from torch._C._functorch import is_functorch_wrapped_tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from secateur import lanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(3, 7), (5, 4, 16), (2, 9000), (4,), (1, 1), (3, 0)]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="left out: Triton is not installed, which torch for CUDA brings"
)


@pytest.fixture
def kernels():
    from secateur import lanes_kernels

    return lanes_kernels


@pytest.fixture
def interpreted(kernels, monkeypatch):
    """Tensors of a CPU go to the kernels too, which the interpreter runs."""
    if DEVICE == "cpu":
        monkeypatch.setattr(
            lanes, "_kernels_for", lambda *given: None if any(map(is_functorch_wrapped_tensor, given)) else kernels
        )


def drawn(rng, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=rng).to(DEVICE, dtype)


def flags(rng, *shape):
    return (torch.rand(shape, generator=rng) < 0.3).to(DEVICE)


def test_who_weighs_nothing_adds_nothing_whatever_it_is():
    total, values = torch.ones(2), torch.tensor([[1.0, 2.0], [torch.nan, torch.inf], [3.0, 4.0]])
    lanes.add_weighted(total, values, torch.tensor([1.0, 0.0, 2.0]))
    assert total.tolist() == [8.0, 11.0]
    lanes.add_weighted(total, values, torch.tensor([1.0, 0.0, 2.0]), squared=True)
    assert total.tolist() == [27.0, 47.0]


def test_by_hand():
    where, values = torch.tensor([[True, False], [False, False]]), torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    assert lanes.mixed(where, values, torch.tensor([8.0, 9.0])).tolist() == [[1, 9], [8, 9]]
    inside, outside = lanes.parted(where, values, True)
    assert inside.tolist() == [[1, 0], [0, 0]] and outside.tolist() == [[0, -2], [3, 4]]
    assert lanes.magnitudes([values, values[0]], []).tolist() == [1, 2, 3, 4, 1, 2]
    assert lanes.magnitudes([values, values[0]], [where, where[0]]).tolist() == [1, -1, -1, -1, 1, -1]
    assert lanes.copies(values, 2).tolist() == [values.tolist()] * 2


def looks(look, device):
    """Everything is seen: numbers that are not finite, or have no finite square, and zeros."""
    values = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 0.0], [1e30, 1e-30, 0.0]], device=device)
    whole, none = torch.tensor([3, 0, 7], device=device), torch.empty(3, 0, device=device)
    wrong = torch.tensor([[1.0, torch.nan], [1.0, 1.0], [torch.inf, -torch.inf]], device=device)
    found = look([(values, False), (whole, False), (none, False)])
    assert [each.tolist() for each in found] == [[True, True, True], [2 * 4 + 8, 0, 2 * 4 + 8]]
    assert [each.tolist() for each in look([(values, True)])] == [[True, True, False], [8, 0, 4]]
    assert [each.tolist() for each in look([(wrong.double(), False), (values, False)])] == [
        [False, True, False],
        [16 + 8, 16, 16 + 8],
    ]


def test_a_look():
    looks(lanes.looked, "cpu")


@needs_triton
def test_a_look_by_the_kernel(kernels):
    looks(kernels.looked, DEVICE)


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int64])
def test_rows_by_place(shape, dtype, rng, kernels):
    held = drawn(rng, 6, *shape[1:], dtype=torch.float32).mul(3).to(dtype)
    places = torch.tensor([[4, 9], [0, 9], [5, 9]], device=DEVICE)[:, 0]  # as a column of what a round is told
    rows = kernels.rows_at(held, places)
    assert torch.equal(rows, held[places]) and rows.dtype == dtype
    found, expected = held.clone(), held.clone()
    other = drawn(rng, 3, *shape[1:]).mul(3).to(dtype)
    kernels.put_rows(found, places, other)
    expected[places] = other
    assert torch.equal(found, expected)
    wide = torch.stack([other, other], 1)[:, 0]  # rows that lie apart
    kernels.put_rows(found, places.flip(0), wide)
    expected[places.flip(0)] = other
    assert torch.equal(found, expected)
    assert torch.equal(kernels.copies(held[0], 4), held[0].expand(4, *held.shape[1:]))


def alike(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_and_parts(shape, dtype, rng, kernels):
    values, weights = drawn(rng, *shape, dtype=dtype), torch.arange(shape[0], device=DEVICE, dtype=dtype)
    values[0] = torch.nan  # it weighs nothing
    where, others = flags(rng, *shape), drawn(rng, *shape[1:], dtype=dtype)
    for each, squared in ((values, False), (values, True), (where, False)):
        found, expected = others.clone(), others.clone()
        kernels.add_weighted(found, each, weights, squared)
        for lane in range(1, shape[0]):
            expected += weights[lane] * (each[lane].square() if squared else each[lane])
        alike(found, expected)
    parts = [(values, False), (others.expand(shape), True)]
    for one, other in zip(kernels.looked(parts), lanes.looked([(v.cpu(), s) for v, s in parts]), strict=True):
        assert torch.equal(one.cpu(), other)
    alike(kernels.mixed(where, values, others), torch.where(where, values, others))
    for hidden in (where, where[0]):  # of each lane, and of all
        found = values.clone()
        kernels.erase(hidden, found)
        alike(found, values.masked_fill(hidden, 0))
    row = flags(rng, shape[0], 2, *shape[1:])
    for hidden in (where, row[:, 1]):  # of which the second is not end to end
        for both in (True, False):
            inside, outside = kernels.parted(hidden, values, both)
            alike(outside, torch.where(hidden, 0, values))
            alike(inside, torch.where(hidden, values, 0) if both else outside)


@needs_triton
@pytest.mark.parametrize("kept", ["all", "shared", "own"])
def test_magnitudes_of_one_and_of_many(kept, rng, interpreted):
    shapes = [(3, 5), (40,), (2, 3, 4)]
    values = [drawn(rng, 4, *shape) for shape in shapes]
    keeps = [] if kept == "all" else [flags(rng, *([4] if kept == "own" else []), *shape) for shape in shapes]
    given = [keep if kept == "own" else keep.expand(4, *keep.shape) for keep in keeps]
    whole = given or [torch.ones_like(value, dtype=torch.bool) for value in values]
    expected = [torch.where(keep, value.abs(), -1).flatten(1) for keep, value in zip(whole, values, strict=True)]
    many = vmap(lambda v, k: torch.ops.secateur.magnitudes(v, k), (0, 0 if kept == "own" else None))(values, keeps)
    assert torch.equal(many, torch.cat(expected, 1))
    for lane in range(4):
        one = torch.ops.secateur.magnitudes([v[lane] for v in values], [keep[lane] for keep in given])
        assert torch.equal(one, many[lane])
