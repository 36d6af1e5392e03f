"""BatchNorm under differential privacy, which must not mix examples: frozen, or replaced by GroupNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from secateur.errors import WrongInput


def frozen(net: nn.Module) -> nn.Module:
    """Return a copy whose layers with running statistics are fixed affine maps, with the same names, not trained."""
    for module in net.modules():
        if isinstance(module, _BatchNorm) and not module.track_running_stats:
            raise WrongInput("model", "has BatchNorm without running statistics, which cannot be frozen")
    return _swapped(net, lambda m: _Fixed(m) if isinstance(m, _NormBase) and m.track_running_stats else None)


def grouped(net: nn.Module) -> nn.Module:
    """Return a copy with GroupNorm instead of BatchNorm: at most 32 groups (Wu and He 2018) of at least 4 channels.

    A group of one value would always be normalised to 0.
    """

    def group_norm(module: nn.Module) -> nn.Module | None:
        if not isinstance(module, _BatchNorm):
            return None
        channels = module.num_features
        most = max(1, min(32, channels // 4))
        groups = max(number for number in range(1, most + 1) if channels % number == 0)
        return nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)

    like = next((value for value in net.parameters() if value.is_floating_point()), None)
    replaced = _swapped(net, group_norm)
    return replaced if like is None else replaced.to(like)


class _Fixed(nn.Module):
    """Layer that computes a norm's eval-mode output by plain arithmetic.

    Under vmap torch's own layer is slower, and on a GPU it may fail.
    """

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, norm: _NormBase) -> None:
        super().__init__()
        self.eps = norm.eps
        for name, value in norm._parameters.items():  # None where the norm has no weight
            self.register_parameter(name, None if value is None else nn.Parameter(value, requires_grad=False))
        for name, tensor in norm.named_buffers():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:  # (N, C, ...)
        def of_channel(values: Tensor) -> Tensor:
            return values.reshape(-1, *(1 for _ in x.shape[2:]))

        y = (x - of_channel(self.running_mean)) * of_channel((self.running_var + self.eps).rsqrt())
        y = y if self.weight is None else y * of_channel(self.weight)
        return y if self.bias is None else y + of_channel(self.bias)


def _swapped(net: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """Return a copy in which the layers that `make` returns replace the originals; None keeps a layer.

    A layer with two names stays one layer.
    """
    net = copy.deepcopy(net)
    new: dict[nn.Module, nn.Module | None] = {}
    for name, module in list(net.named_modules(remove_duplicate=False)):
        if module not in new:
            new[module] = make(module)
        swap = new[module]
        if swap is not None:
            net.set_submodule(name, swap.train(module.training))
    return net
