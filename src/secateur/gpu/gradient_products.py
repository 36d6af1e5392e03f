"""Products of a trial's gradient with the observed gradient; on a GPU one pass forward and one pass backward.

Operations of torch store every product before the sum, and every summand of the slope. They read and write the gradient
of a large layer ten times.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function

from secateur.gpu.client_ops import to_lanes
from secateur.gpu.triton_loader import load_kernels


def products(value: Tensor, aim: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scalars <value, aim>, |value|^2 and |aim|^2 of one trial; the mask selects entries of the value."""
    if _kernels_for(value, aim) is not None:
        scalars: Tensor = _Products.apply(value, aim, mask)  # type: ignore[no-untyped-call]
        return scalars[0], scalars[1], scalars[2]
    return _compute_plainly(value, aim, mask)


def _compute_plainly(value: Tensor, aim: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    value = value if mask is None else value * mask
    return (value * aim).sum(), value.square().sum(), aim.square().sum()


class _Products(Function):
    """Autograd function of the three products of a trial, (3,); the aim is a constant."""

    @staticmethod
    def forward(value: Tensor, aim: Tensor, mask: Tensor | None) -> Tensor:
        return torch.stack(_compute_plainly(value, aim, mask))

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
            result: Tensor = kernels.sum_products(*lanes)
            return result, 0
        return torch.vmap(lambda *trial: torch.stack(_compute_plainly(*trial)), _dims(lanes))(*lanes), 0


class _Pulled(Function):
    """Autograd function of the slope by the value for slopes (3,) of the products; linear in value and slopes."""

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
            result: Tensor = kernels.pull_back(*lanes)
            return result, 0
        return torch.vmap(_slope, _dims(lanes))(*lanes), 0


def _slope(value: Tensor, aim: Tensor, mask: Tensor | None, slopes: Tensor) -> Tensor:
    slope = slopes[0] * aim + 2 * slopes[1] * value
    return slope if mask is None else slope * mask


def _lanes(count: int, dims: Any, *values: Tensor | None) -> list[Any]:
    return [None if v is None else to_lanes(v, dim, count) for v, dim in zip(values, dims, strict=True)]


def _dims(lanes: list[Any]) -> tuple[int | None, ...]:
    return tuple(None if lane is None else 0 for lane in lanes)


def _kernels_of_many(lanes: list[Any]) -> ModuleType | None:
    """Return the kernels, or None inside an outer vmap or grad.

    Tensors of an outer transform have no plain memory; torch's operations unwrap them level by level.
    """
    wrapped = any(lane is not None and is_functorch_wrapped_tensor(lane) for lane in lanes)
    return None if wrapped else _kernels_for(*lanes[:2])


def _kernels_for(*tensors: Tensor) -> ModuleType | None:
    if not tensors[0].numel() or not all(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors):
        return None
    return load_kernels("secateur.gpu.gradient_products_kernels", _probe, "gradient matching")


def _probe(kernels: ModuleType) -> None:
    zeros = torch.zeros(1, 4, device="cuda")
    kernels.pull_back(zeros, zeros, None, kernels.sum_products(zeros, zeros, None))
