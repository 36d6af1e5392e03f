"""BatchNorm of many users by operations of torch, against torch's own for each user."""

import pytest
import torch
from torch.nn import functional as F

from secateur.gpu.batchnorm import normalised, returned


@pytest.mark.parametrize("relu", [False, True])
def test_batchnorm_of_many_users_is_torchs_own_of_each(relu, rng):
    x, g = (torch.randn(3, 10, 4, dtype=torch.float64, generator=rng) for _ in range(2))
    weight, bias = (torch.randn(4, dtype=torch.float64, generator=rng) for _ in range(2))
    out, moments = normalised(x, weight, bias, 0.1, relu=relu)
    found = returned(g, x, moments, bias if relu else None)
    for user in range(3):
        given = [value.clone().requires_grad_() for value in (x[user], weight, bias)]
        own = F.batch_norm(given[0], None, None, *given[1:], training=True, eps=0.1)
        own = own.relu() if relu else own
        assert torch.allclose(own, out[user], rtol=1e-12)
        for one, other in zip(torch.autograd.grad(own, given, g[user]), found, strict=True):
            assert torch.allclose(one, other[user], rtol=1e-12)
