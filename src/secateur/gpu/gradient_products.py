"""How a trial's gradient lies to the observed one: the products of both, which on a GPU are one pass each way.

Operations of torch write down every product before it is summed, and every summand of the slope: a large layer's
gradient is read and written ten times over.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function

from secateur.gpu.client_ops import in_lanes
from secateur.gpu.triton_loader import loaded


def products(value: Tensor, aim: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """() <value, aim>, |value|^2 and |aim|^2, the value where the mask says that it is compared; of one trial."""
    if _kernels_for(value, aim) is not None:
        found: Tensor = _Products.apply(value, aim, mask)  # type: ignore[no-untyped-call]
        return found[0], found[1], found[2]
    return _plainly(value, aim, mask)


def _plainly(value: Tensor, aim: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    value = value if mask is None else value * mask
    return (value * aim).sum(), value.square().sum(), aim.square().sum()


class _Products(Function):
    """(3,) of a trial; the aim is a constant."""

    @staticmethod
    def forward(value: Tensor, aim: Tensor, mask: Tensor | None) -> Tensor:
        return torch.stack(_plainly(value, aim, mask))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> Any:
        return _Pulled.apply(*ctx.saved_tensors, slopes), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, dims: Any, value: Tensor, aim: Tensor, mask: Tensor | None) -> tuple[Tensor, int]:
        lanes = _lanes(info.batch_size, dims, value, aim, mask)
        if kernels := _kernels_of_many(lanes):
            found: Tensor = kernels.summed(*lanes)
            return found, 0
        return torch.vmap(lambda *one: torch.stack(_plainly(*one)), _dims(lanes))(*lanes), 0


class _Pulled(Function):
    """The slope by the value, of slopes (3,) of its products: linear in the value and in these."""

    @staticmethod
    def forward(value: Tensor, aim: Tensor, mask: Tensor | None, slopes: Tensor) -> Tensor:
        return _slope(value, aim, mask, slopes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        value, aim, mask, slopes = ctx.saved_tensors
        g = g if mask is None else g * mask
        by_slopes = torch.stack([(g * aim).sum(), 2 * (g * value).sum(), g.new_zeros(())])
        return 2 * slopes[1] * g, None, None, by_slopes

    @staticmethod
    def vmap(
        info: Any, dims: Any, value: Tensor, aim: Tensor, mask: Tensor | None, slopes: Tensor
    ) -> tuple[Tensor, int]:
        lanes = _lanes(info.batch_size, dims, value, aim, mask, slopes)
        if kernels := _kernels_of_many(lanes):
            found: Tensor = kernels.pulled(*lanes)
            return found, 0
        return torch.vmap(_slope, _dims(lanes))(*lanes), 0


def _slope(value: Tensor, aim: Tensor, mask: Tensor | None, slopes: Tensor) -> Tensor:
    found = slopes[0] * aim + 2 * slopes[1] * value
    return found if mask is None else found * mask


def _lanes(count: int, dims: Any, *values: Tensor | None) -> list[Any]:
    return [None if v is None else in_lanes(v, dim, count) for v, dim in zip(values, dims, strict=True)]


def _dims(lanes: list[Any]) -> tuple[int | None, ...]:
    return tuple(None if each is None else 0 for each in lanes)


def _kernels_of_many(lanes: list[Any]) -> ModuleType | None:
    """Of an outer vmap or grad tensors have no memory of their own: torch's operations then go level by level."""
    wrapped = any(each is not None and is_functorch_wrapped_tensor(each) for each in lanes)
    return None if wrapped else _kernels_for(*lanes[:2])


def _kernels_for(*tensors: Tensor) -> ModuleType | None:
    fits = all(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors)
    return _kernels() if fits and tensors[0].numel() else None


@cache
def _kernels() -> ModuleType | None:
    def probe(kernels: ModuleType) -> None:
        with _DisableFuncTorch():
            some = torch.zeros(1, 4, device="cuda")
            kernels.pulled(some, some, None, kernels.summed(some, some, None))

    return loaded("secateur.gpu.gradient_products_kernels", probe, "gradient matching")
