"""Passes over many clients' tensors: by hand, and the kernels against operations of torch, interpreted or on a GPU."""

import importlib
import importlib.util
import os

import pytest
import torch
from torch import vmap
from torch._C._functorch import is_functorch_wrapped_tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from secateur.gpu import client_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETER = "triton._C.libtriton.interpreter"
SHAPES = [(3, 7), (5, 4, 16), (2, 9000), (4,), (1, 1), (3, 0)]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="left out: Triton is not installed, which torch for CUDA brings"
)


@pytest.fixture
def kernels():
    from secateur.gpu import client_ops_kernels

    return client_ops_kernels


@pytest.fixture
def interpreted(kernels, monkeypatch):
    """Tensors of a CPU go to the kernels too, which the interpreter runs."""
    if DEVICE == "cpu":
        monkeypatch.setattr(
            client_ops, "_kernels_for", lambda *given: None if any(map(is_functorch_wrapped_tensor, given)) else kernels
        )


def drawn(rng, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=rng).to(DEVICE, dtype)


def flags(rng, *shape):
    return (torch.rand(shape, generator=rng) < 0.3).to(DEVICE)


def test_who_weighs_nothing_adds_nothing_whatever_it_is():
    total, values = torch.ones(2), torch.tensor([[1.0, 2.0], [torch.nan, torch.inf], [3.0, 4.0]])
    client_ops.add_weighted(total, values, torch.tensor([1.0, 0.0, 2.0]))
    assert total.tolist() == [8.0, 11.0]
    client_ops.add_weighted(total, values, torch.tensor([1.0, 0.0, 2.0]), squared=True)
    assert total.tolist() == [27.0, 47.0]


def test_by_hand():
    where, values = torch.tensor([[True, False], [False, False]]), torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    assert client_ops.mix(where, values, torch.tensor([8.0, 9.0])).tolist() == [[1, 9], [8, 9]]
    inside, outside = client_ops.split_where(where, values, True)
    assert inside.tolist() == [[1, 0], [0, 0]] and outside.tolist() == [[0, -2], [3, 4]]
    assert client_ops.magnitudes([values, values[0]], []).tolist() == [1, 2, 3, 4, 1, 2]
    assert client_ops.magnitudes([values, values[0]], [where, where[0]]).tolist() == [1, -1, -1, -1, 1, -1]
    assert client_ops.copies(values, 2).tolist() == [values.tolist()] * 2
    assert client_ops.copies(values, 2, where).tolist() == [[[1, 0], [0, 0]]] * 2
    keep = torch.tensor([True, False])
    assert client_ops.mix(where, values, torch.tensor([8.0, 9.0]), keep).tolist() == [[1, 0], [8, 0]]
    assert (
        client_ops.intersect(where[0], keep).tolist() == [True, False]
        and not client_ops.intersect(where[1], keep).any()
    )
    assert client_ops.intersect(where[1], keep, inverted=True).tolist() == [True, False]
    assert not client_ops.intersect(where[0], keep, inverted=True).any()
    client_ops.descend([values, whole := torch.ones(2)], [torch.ones(2, 2), whole * 4], 0.5, [~keep, None])
    assert values.tolist() == [[0.5, 0], [2.5, 0]] and whole.tolist() == [-1, -1]


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
    looks(client_ops.check_finite, "cpu")


@needs_triton
def test_a_look_by_the_kernel(kernels):
    looks(kernels.check_finite, DEVICE)


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


def same(one, other):
    """Bit for bit, and NaN where it is."""
    return torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0)) and one.dtype == other.dtype


def apart(value):
    """The same, with other numbers between its rows."""
    return torch.stack([value, value], 1)[:, 0]


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
    for one, other in zip(
        kernels.check_finite(parts), client_ops.check_finite([(v.cpu(), s) for v, s in parts]), strict=True
    ):
        assert torch.equal(one.cpu(), other)
    either, keep = torch.where(where, values, others), flags(rng, *shape[1:])
    assert same(kernels.mix(where, values, others, None), either)
    assert same(kernels.mix(where, values, others, keep), torch.where(keep, either, 0))
    for hidden in (where, where[0]):  # of each lane, and of all
        found = values.clone()
        kernels.erase(hidden, found)
        alike(found, values.masked_fill(hidden, 0))
    row = flags(rng, shape[0], 2, *shape[1:])
    for hidden in (where, row[:, 1]):  # of which the second is not end to end
        for both in (True, False):
            inside, outside = kernels.split_where(hidden, values, both)
            alike(outside, torch.where(hidden, 0, values))
            alike(inside, torch.where(hidden, values, 0) if both else outside)


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.25, 0.1])
def test_a_step_is_torchs_bit_for_bit(shape, dtype, rate, rng, interpreted):
    if DEVICE == "cpu" and rate == 0.1 and not hasattr(importlib.import_module(INTERPRETER), "fma_fp64"):
        pytest.skip("left out: the interpreter of this Triton rounds an fma twice; .25 needs no rounding")
    slopes, dropped, whole = drawn(rng, *shape, dtype=dtype), flags(rng, *shape), drawn(rng, *shape, dtype=dtype)
    whole[0] = torch.nan
    drops = [dropped, dropped[0], apart(dropped), None, dropped]
    given = [slopes, apart(slopes), slopes[:1].expand_as(slopes), slopes, slopes]
    found = [whole.clone() for _ in drops]
    found[-1] = whole.unsqueeze(-1).expand(*shape, 2).clone()[..., 0]  # its entries lie apart, as no kernel has them
    expected = [whole.clone() for _ in drops]
    client_ops.descend(found, given, rate, drops)
    torch._foreach_add_(expected, given, alpha=-rate)
    for one, other, drop in zip(found, expected, drops, strict=True):
        assert same(one, other if drop is None else other.masked_fill(drop, 0))


@needs_triton
def test_a_step_of_rows_that_lie_apart(rng, kernels):
    held, slopes, dropped = drawn(rng, 3, 2, 7), drawn(rng, 3, 7), flags(rng, 7)
    values, other = held[:, 0], held[:, 1].clone()
    expected = values.sub(slopes, alpha=0.25).masked_fill(dropped, 0)
    kernels.descend(values, slopes, 0.25, dropped)
    assert torch.equal(values, expected) and torch.equal(held[:, 1], other)


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("inverted", [True, False])
def test_both_of_one_and_of_many(shape, inverted, rng, interpreted):
    where, keep = flags(rng, *shape), flags(rng, *shape)
    both = torch.ops.secateur.both
    for said, kept in [(where, keep), (apart(where), keep), (where, apart(keep)), (where, keep[0]), (where[0], keep)]:
        dims = tuple(0 if each.ndim == len(shape) else None for each in (said, kept))
        many = vmap(lambda one, other: both(one, other, inverted), dims)(said, kept)
        expected = (~said if inverted else said) & kept
        assert torch.equal(many, expected)
        one = [each[0] if dim == 0 else each for each, dim in zip((said, kept), dims, strict=True)]
        assert torch.equal(both(*one, inverted), expected[0])
    last = vmap(lambda one: both(one, keep[0], inverted), -1, -1)(where.movedim(0, -1))  # lanes behind
    assert torch.equal(last.movedim(-1, 0), (~where if inverted else where) & keep[0])


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
