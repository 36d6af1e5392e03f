"""Every user's own gradient of a convolution's filters and bias, against autograd for each."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from secateur.federated.collaborative.per_user_gradients import Conv2d, Layer
from secateur.gpu.graphs import Aside

USERS, BATCH = 3, 2


def pair(least, most):
    return st.tuples(st.integers(least, most), st.integers(least, most))


def room(weight, turned):
    """For a gradient of each user; `turned` as rows of all parameters hold those of filters that lie channels last."""
    rows = torch.full((USERS, weight.numel() + 7), torch.nan, dtype=weight.dtype)[:, : weight.numel()]
    if turned:
        return rows.unflatten(1, weight.movedim(1, -1).shape).movedim(-1, 2)
    return rows.unflatten(1, weight.shape)


@settings(max_examples=150, deadline=None)
@given(
    pair(1, 7), pair(1, 3), pair(1, 3), pair(0, 2), pair(1, 2), st.integers(1, 2), pair(1, 4), st.booleans(),
    st.sampled_from([torch.channels_last, torch.contiguous_format]), st.sampled_from([torch.float64, torch.float32]),
)  # fmt: skip
def test_each_gets_what_its_own_backward_gives(
    size, window, stride, padding, dilation, groups, channels, turned, layout, dtype
):
    sides = zip(size, window, padding, dilation, strict=True)
    assume(all(side + 2 * pad > by * (wide - 1) for side, wide, pad, by in sides))
    # A window of one cannot be dilated; asked to, torch 2.13 on a CPU ends the process (float32, channels_last).
    assume(all(wide > 1 or by == 1 for wide, by in zip(window, dilation, strict=True)))
    rng, geometry, (inputs, outputs) = torch.Generator().manual_seed(0), (stride, padding, dilation, groups), channels

    def random(*shape):
        return torch.randn(shape, generator=rng, dtype=dtype)

    x = random(USERS * BATCH, inputs * groups, *size).contiguous(memory_format=layout).requires_grad_()
    weight = random(outputs * groups, inputs, *window).contiguous(memory_format=layout).requires_grad_()
    bias = random(outputs * groups).requires_grad_()
    layer = Layer(USERS, Aside(USERS, x.device), room(weight, turned), room(bias, False))
    found = Conv2d.apply(x, weight, bias, geometry, layer)
    g = random(*found.shape)
    by_x, *around = torch.autograd.grad(found, (x, weight, bias), g, allow_unused=True)
    assert around == [None, None]  # nobody's but a user's own
    for user, (part, own) in enumerate(zip(x.detach().chunk(USERS), g.chunk(USERS), strict=True)):
        part.requires_grad_()
        truth = torch.autograd.grad(F.conv2d(part, weight, bias, *geometry), (part, weight, bias), own)
        within = 1e-10 if dtype == torch.float64 else 1e-4
        for one, other in zip((by_x.chunk(USERS)[user], layer.weight[user], layer.bias[user]), truth, strict=True):
            assert torch.allclose(one, other, rtol=within, atol=within)
