"""The ways to every user's gradient of a convolution's filters, against autograd for each."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_collaborative import needs_cuda
from torch.nn import functional as F

from secateur.federated import filter_gradients
from secateur.federated.filter_gradients import Asked, as_groups, by_columns, by_user, fastest, ways
from secateur.jacobian.convolutions import Geometry

USERS = 3


def pair(least, most):
    return st.tuples(st.integers(least, most), st.integers(least, most))


def example(geometry, channels=(2, 3), turned=True, dtype=torch.float64, device="cpu", batch=2):
    """What is asked, and each user's gradient as autograd has it; `turned` as rows of all parameters hold them."""
    rng, groups = torch.Generator().manual_seed(0), geometry.groups

    def random(*shape):
        value = torch.randn(shape, generator=rng, dtype=dtype).to(device)
        return torch.empty_like(value, memory_format=torch.channels_last).copy_(value)

    x = random(USERS * batch, channels[0] * groups, *geometry.size)
    weight = random(channels[1] * groups, channels[0], *geometry.window).requires_grad_()
    parts = [F.conv2d(part, weight, None, *geometry[2:]) for part in x.chunk(USERS)]
    gradients = [random(*part.shape) for part in parts]
    truth = torch.stack([torch.autograd.grad(*each, grad_outputs=g)[0] for *each, g in _with(parts, weight, gradients)])
    out, into, *window = weight.shape
    rows = torch.full((USERS, weight.numel() + 7), torch.nan, dtype=dtype, device=device)[:, : weight.numel()]
    room = rows.unflatten(1, (out, *window, into)).movedim(-1, 2) if turned else torch.full_like(truth, torch.nan)
    return Asked(torch.cat(gradients), x, weight.detach(), geometry, room), truth


def _with(parts, weight, gradients):
    return [(part, weight, gradient) for part, gradient in zip(parts, gradients, strict=True)]


@settings(max_examples=150, deadline=None)
@given(
    pair(1, 7), pair(1, 3), pair(1, 3), pair(0, 2), pair(1, 2), st.integers(1, 2), pair(1, 4), st.booleans(),
    st.sampled_from([torch.float64, torch.float32]),
)  # fmt: skip
def test_every_way_is_right(size, window, stride, padding, dilation, groups, channels, turned, dtype):
    geometry = Geometry(size, window, stride, padding, dilation, groups)
    sides = zip(size, window, padding, dilation, strict=True)
    assume(all(side + 2 * pad > by * (wide - 1) for side, wide, pad, by in sides))
    asked, truth = example(geometry, channels, turned, dtype)
    found = list(ways(asked))
    assert set(found) == {by_user, as_groups, *([by_columns] if groups == 1 else [])}
    within = 1e-10 if dtype == torch.float64 else 1e-4
    for way in found:
        asked.into.fill_(torch.nan)
        for job in way(asked):
            job()
        assert torch.allclose(asked.into, truth, rtol=within, atol=within), way


def test_a_product_is_written_where_it_belongs(monkeypatch):
    asked, truth = example(Geometry((4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("a copy"))
    for job in by_columns(asked):
        job()
    assert torch.allclose(asked.into, truth)


def test_columns_that_would_fill_the_memory_are_no_way(monkeypatch):
    asked, _ = example(Geometry((4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    monkeypatch.setattr(filter_gradients, "MOST", 6 * 16 * 2 * 9 - 1)
    assert set(ways(asked)) == {by_user, as_groups}
    monkeypatch.setattr(filter_gradients, "MOST", 6 * 16 * 2 * 9)
    assert by_columns in ways(asked)


def test_the_fastest_is_timed_once_a_shape_and_never_in_a_capture(monkeypatch):
    asked, _ = example(Geometry((4, 4), (3, 3), (1, 1), (1, 1), (1, 1), 1))
    timed = []
    monkeypatch.setattr(filter_gradients, "known", {})
    monkeypatch.setattr(filter_gradients, "_milliseconds", lambda way, *_: timed.append(way) or -len(timed))
    assert fastest(asked, 0) is by_user and not timed  # a CPU
    monkeypatch.setattr(filter_gradients, "capturing", lambda: True)
    assert fastest(asked, 5) is by_user and not timed
    monkeypatch.setattr(filter_gradients, "capturing", lambda: False)
    assert fastest(asked, 5) is by_columns and timed == [by_user, as_groups, by_columns]
    monkeypatch.setattr(filter_gradients, "capturing", lambda: True)
    assert fastest(asked, 5) is by_columns and len(timed) == 3
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not torch.backends.cudnn.allow_tf32)
    assert fastest(asked, 5) is by_user  # other products have other times


@needs_cuda
@pytest.mark.parametrize(("window", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_a_gpu_times_them(window, stride, monkeypatch):
    geometry = Geometry((8, 8), (window,) * 2, (stride,) * 2, (window // 2,) * 2, (1, 1), 1)
    asked, truth = example(geometry, (16, 32), dtype=torch.float32, device="cuda", batch=8)
    monkeypatch.setattr(filter_gradients, "known", {})
    assert fastest(asked, 2) in ways(asked)
    (times,) = filter_gradients.known.values()
    assert set(times) == set(ways(asked)) and min(times.values()) > 0
    for way in times:
        asked.into.fill_(torch.nan)
        for job in way(asked):
            job()
        assert float((asked.into - truth).norm() / truth.norm()) < 2e-3
