"""Selection by rank: exactly so many, ties by position, the same on every path."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from secateur.defenses import selection
from secateur.defenses.selection import counts, end_to_end, keep_between, mask_between, mask_largest, slices
from secateur.errors import WrongInput
from secateur.gpu.triton_loader import load_kernels


@pytest.mark.parametrize(
    ("size", "top", "bottom", "expected"),
    [
        (1000, 0.05, 0.75, (50, 200)),
        (20, 0.05, 0.75, (1, 4)),  # .05 * 20 is exactly 1, whatever binary makes of it
        (21, 0.05, 0.75, (2, 4)),  # 1.05 rounds up, 15.75 down
        (10, 0.05, 0.75, (1, 2)),  # a bias of ten classes loses its largest
        (1, 0.05, 0.75, (1, 0)),
        (10, 0, 0.8, (0, 2)),
        (10, 0, 0, (0, 10)),
        (0, 0.05, 0.75, (0, 0)),
    ],
)
def test_how_many_are_dropped_and_kept(size, top, bottom, expected):
    assert counts(size, top, bottom) == expected


@pytest.mark.parametrize(
    ("top", "bottom"), [(-0.1, 0.5), (0.1, -0.5), (0.5, 0.5), (0.9, 0.2), (math.nan, 0), (0, math.nan)]
)
def test_shares_that_leave_nothing_are_refused(top, bottom):
    with pytest.raises(WrongInput, match="a sum below 1"):
        counts(10, top, bottom)


def ranked_between(magnitudes, first, kept):
    return slices((len(magnitudes),), magnitudes, ((first, first + kept),))[1]


def by_sorting(values, first, kept):
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))  # of equal ones the earlier is larger
    chosen = set(order[first : first + kept])
    return [i in chosen for i in range(len(values))]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_it_is_a_slice_of_the_sorted_entries_and_equal_when_nothing_may_be_asked(data):
    values = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=30))
    first = data.draw(st.integers(0, len(values)))
    kept = data.draw(st.integers(0, len(values) - first))
    magnitudes = torch.tensor(values, dtype=torch.float32)
    expected = by_sorting(values, first, kept)
    assert ranked_between(magnitudes, first, kept).tolist() == expected
    stacked = vmap(lambda one: ranked_between(one, first, kept))(magnitudes.expand(3, -1))
    assert stacked.tolist() == [expected] * 3
    assert mask_largest(magnitudes, kept).tolist() == by_sorting(values, 0, kept)


def test_between_keeps_the_shape_and_looks_at_magnitudes():
    values = torch.tensor([[-9.0, 1.0, -2.0], [3.0, 0.0, -4.0]], requires_grad=True)
    mask = mask_between(values, 1 / 6, 0.5)  # drops -9 and the three smallest
    assert mask.tolist() == [[False, False, False], [True, False, True]]


def test_many_zeros_do_not_change_the_number():
    values = torch.zeros(1000)
    values[::10] = torch.arange(1.0, 101.0)
    assert int(mask_between(values, 0.05, 0.75).sum()) == 200  # 50 of the top go, 50 values and 150 of the zeros stay
    assert mask_between(values, 0.05, 0.75)[1:10].all()  # the earliest of them


@pytest.mark.parametrize("kind", ["smooth", "filters", "tied", "constant", "tails"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_sample_of_many_entries_finds_the_same_ones(kind, dtype):
    rng = torch.Generator().manual_seed(3)
    values = torch.randn(120_000, generator=rng).abs()
    values = {
        "smooth": values,
        "filters": values * (torch.arange(120_000) % 9 + 1),  # an entry's size follows its place in the filter
        "tied": (values * 4).round(),
        "constant": torch.ones_like(values),
        "tails": values.pow(8),
    }[kind].to(dtype)
    listed = values.tolist()
    order = sorted(range(len(listed)), key=lambda i: (-listed[i], i))
    for first, kept in ((0, 24_000), (6_000, 24_000), (1, 1), (119_000, 900)):
        expected = torch.zeros(len(values), dtype=torch.bool)
        expected[order[first : first + kept]] = True
        assert torch.equal(ranked_between(values, first, kept), expected)


@pytest.mark.parametrize("size", [7, 120_000])
def test_nan_counts_as_infinite_on_every_path(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(1)).abs()
    values[[1, 4]] = math.nan
    values[[0, 5]] = math.inf
    for number in (1, 2, 3, 4, 5, size):
        expected = torch.zeros(size, dtype=torch.bool)
        expected[values.nan_to_num(math.inf, math.inf).sort(descending=True, stable=True).indices[:number]] = True
        assert torch.equal(mask_largest(values, number), expected)
        assert torch.equal(mask_largest(values, torch.tensor(number)), expected)
        assert torch.equal(vmap(lambda one, n=number: mask_largest(one, n))(values[None])[0], expected)


def test_tensors_are_ranked_each_by_itself(rng):
    grads = {"a": torch.randn(3, 5, generator=rng), "b": torch.randn(40, generator=rng)}
    sent = keep_between(grads, 0.05, 0.75)
    for name, value in grads.items():
        assert torch.equal(sent[name], torch.where(mask_between(value, 0.05, 0.75), value, 0))
    flat = torch.cat([value.flatten().abs() for value in grads.values()])
    together = slices((15, 40), flat, ((1, 4), (2, 10)))
    for alone, part in zip(slices((15,), flat[:15], ((1, 4),)), together, strict=True):
        assert torch.equal(alone, part[:15])
    for alone, part in zip(slices((40,), flat[15:], ((2, 10),)), together, strict=True):
        assert torch.equal(alone, part[15:])


def test_a_rule_of_several_trees_is_given_the_same_tensor_of_each():
    left, right = (
        {"a": torch.ones(2, 3), "b": torch.ones(4)},
        {"b": torch.full((4,), 3.0), "a": torch.full((2, 3), 2.0)},
    )
    added, size = end_to_end(lambda sizes, x, y: (x + y, x * sizes[0]), left, right)
    assert added["a"].tolist() == [[3.0] * 3] * 2 and added["b"].tolist() == [4.0] * 4
    assert size["a"].shape == (2, 3) and size["b"].tolist() == [4.0] * 4


@pytest.mark.parametrize(
    ("raised", "told"), [(ImportError("triton"), []), (RuntimeError("no C compiler\nat all"), [True])]
)
def test_a_gpu_without_a_compiler_goes_on_without_the_kernel(raised, told, monkeypatch, caplog):
    def bands(*_):
        raise raised

    monkeypatch.setitem(sys.modules, "secateur.gpu.select", SimpleNamespace(bands=bands))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    assert load_kernels.__wrapped__("secateur.gpu.select", selection._probe, "selection") is None
    assert [record.getMessage().endswith("(no C compiler)") for record in caplog.records] == told
