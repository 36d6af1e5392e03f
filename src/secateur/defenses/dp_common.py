"""Parts that all defenses with differential privacy share: settings, accounting by Opacus, and BatchNorm.

BatchNorm must not mix examples, so it is frozen, or replaced by GroupNorm.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from secateur.errors import WrongInput, check_number, require, unknown
from secateur.training.recipe import Recipe

OPACUS = ("opacus", "dp")  # the package, and the extra that brings it
AT_ONCE = {"cpu": 2**24, "cuda": 2**30}  # entries of per-example gradients in memory at a time: CPU caches are small
ACCOUNTANTS = ("rdp", "prv")  # Opacus' third, GDP, can report less than was spent
LARGE_ORDERS = tuple(2**k for k in range(6, 13))  # beyond Opacus' own orders: best for much noise


@dataclass(frozen=True)
class PrivacySettings:
    """Settings of the Gaussian mechanism on clipped gradients, and of its accounting."""

    noise_multiplier: float = 1.0  # sigma, in units of max_grad_norm; samia_ppb tries .01, .1, 1, 10, 100
    max_grad_norm: float = 1.0  # C
    delta: float | None = None  # None: 1 / the number of training examples
    accountant: str = "rdp"  # or prv, tighter but only for epsilon up to 100

    def __post_init__(self) -> None:
        check_number("noise_multiplier", self.noise_multiplier, "[0, inf)")
        check_number("max_grad_norm", self.max_grad_norm, "(0, inf)")
        if self.delta is not None:
            check_number("delta", self.delta, "(0, 1)")
        if self.accountant not in ACCOUNTANTS:
            raise unknown("accountant", self.accountant, ACCOUNTANTS)


class Phase(NamedTuple):
    """Steps of DP-SGD with one sampling rate."""

    sample_rate: float  # q
    steps: int


class Guarantee(NamedTuple):
    """(epsilon, delta)-differential privacy, when one example is added or removed."""

    epsilon: float
    delta: float
    accountant: str
    covers: str
    whole: bool = False  # True if it covers every use of the examples, so that an attack on the model can refute it

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:.4g} at delta {self.delta:.3g} ({self.accountant}) for {self.covers}"


def count_steps(size: int, recipe: Recipe) -> Phase:
    """Return the sampling rate of DP-SGD and its steps by a recipe: one step per batch of every epoch.

    Example:
        >>> count_steps(1000, Recipe(epochs=2, batch_size=128))
        Phase(sample_rate=0.128, steps=16)
    """
    batch = min(recipe.batch_size, size)
    return Phase(batch / size, math.ceil(size / batch) * recipe.epochs)


@contextmanager
def root_logger_restored() -> Iterator[None]:
    """Restore the handlers and the level of the root logger, which importing Opacus changes."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def epsilon(noise_multiplier: float, phases: Iterable[Phase], delta: float, accountant: str = "rdp") -> float:
    """Return the composed epsilon of the phases, an upper bound; infinite without noise."""
    if accountant not in ACCOUNTANTS:
        raise unknown("accountant", accountant, ACCOUNTANTS)
    require("opacus", "dp")
    with root_logger_restored():
        from opacus.accountants import PRVAccountant, RDPAccountant

    if noise_multiplier == 0:
        return math.inf
    rdp, prv = RDPAccountant(), PRVAccountant()
    rdp.history = prv.history = [(noise_multiplier, *phase) for phase in phases]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that other orders could be tighter; the bound still holds
        bound = float(rdp.get_epsilon(delta, alphas=[*RDPAccountant.DEFAULT_ALPHAS, *LARGE_ORDERS]))
        if accountant == "rdp":
            return bound
        if bound > 100:  # the grid of privacy losses grows with epsilon: minutes, then out of memory
            message = f"prv is not allowed where epsilon is above 100, and here it is about {bound:.3g}; use rdp"
            raise WrongInput("accountant", message)
        return float(prv.get_epsilon(delta))


def freeze_norms(net: nn.Module) -> nn.Module:
    """Return a copy whose layers with running statistics are fixed affine maps, with the same names, not trained."""
    for module in net.modules():
        if isinstance(module, _BatchNorm) and not module.track_running_stats:
            raise WrongInput("model", "has BatchNorm without running statistics, which cannot be frozen")
    return _swap_layers(net, lambda m: _Fixed(m) if isinstance(m, _NormBase) and m.track_running_stats else None)


def replace_batchnorm(net: nn.Module) -> nn.Module:
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
    replaced = _swap_layers(net, group_norm)
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


def _swap_layers(net: nn.Module, make: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
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
