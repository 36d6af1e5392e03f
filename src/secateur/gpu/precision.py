"""Full float32 precision on a GPU: without tensor cores, or with three TF32 products per product.

TF32 keeps ten bits of a factor. Its error in the sensitivity at eps = 1e-3 is 9 %. float32 without TF32 is 11 times
slower. A float32 is the sum of two TF32 numbers up to its last bits, so three TF32 products give one float32 product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LOST_BITS = 13  # mantissa bits of a float32's 23 that TF32 drops


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 products inside the context, and restore the setting afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = allowed
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def full_precision(device: torch.device | str = "cpu") -> Iterator[None]:
    """Compute in full float32 inside the context; on a GPU each layer of a network uses three TF32 products."""
    with tf32(False), ThreeProducts() if torch.device(device).type == "cuda" else nullcontext():
        yield


class ThreeProducts(TorchFunctionMode):
    """Torch function mode that computes convolutions and linear layers of float32 as x_h w_h + x_h w_l + x_l w_h.

    The relative error is about 2^-21.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        grouped = args[6:] not in ((), (1,))  # then the two outputs below could not be separated
        if func not in (F.conv2d, F.linear) or kwargs or grouped or args[0].dtype != torch.float32:
            return func(*args, **kwargs)
        with tf32(True):
            return _three_products(func, *args)


def _three_products(func: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *others: Any) -> Tensor:
    high, low = halves(inputs)
    of_weight = halves(weight)
    main, rest = func(high, torch.cat(of_weight), None, *others).chunk(2, -3 if func is F.conv2d else -1)
    total: Tensor = main + (rest + func(low, of_weight[0], bias, *others))
    return total


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split x exactly into the nearest TF32 number and the remainder (Veltkamp's splitting; Dekker 1971).

    The split uses arithmetic, because vmap has no rule for reading a float's bits. It holds for |x| up to 1e34.
    """
    scaled = x * float((1 << LOST_BITS) + 1)
    high = scaled - (scaled - x)
    return high, x - high
