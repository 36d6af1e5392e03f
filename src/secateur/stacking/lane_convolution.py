"""A convolution whose rule for vmap makes lanes of the many: by lane_layers.py, where vmap itself would make groups."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from secateur.lanes import in_lanes
from secateur.stacking.lane_layers import CONVOLUTION, by_filters, conv2d, kernels_for, turned


class Convolution(Function):
    """F.conv2d with stride 1 and zeros around that keep the size, of odd filters; back, with the filters turned."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, back: bool) -> Tensor:
        """Of one network."""
        padding = [size // 2 for size in weight.shape[2:]]
        return F.conv2d(x, turned(weight) if back else weight, bias, padding=padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """What the way back needs."""
        ctx.save_for_backward(*inputs[:2])
        ctx.back = inputs[3]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """By x the same convolution, of g the other way; on the way back x and g change their sides."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        by_x = convolution(g, weight, back=not ctx.back) if of_x else None
        sides = (x, g) if ctx.back else (g, x)
        by_weight = _ByFilters.apply(*sides, weight.shape[2:]) if of_weight else None  # type: ignore[no-untyped-call]
        return by_x, by_weight, g.sum((0, 2, 3)) if of_bias else None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, back: bool) -> tuple[Tensor, int]:
        """Of many networks."""
        lanes = info.batch_size
        of_all = None if bias is None else in_lanes(bias, dims[2], lanes)
        found = conv2d(in_lanes(x, dims[0], lanes).flatten(0, 1), in_lanes(weight, dims[1], lanes), of_all, back)
        return found.view(lanes, -1, *found.shape[1:]), 0


class _ByFilters(Function):
    """The gradient of the filters by g, that of the output: linear in x and in g, so its own are convolutions again."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, taps: tuple[int, ...]) -> Tensor:
        return by_filters(g, x, 1, taps)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, of_filters: Tensor) -> Any:
        g, x = ctx.saved_tensors
        of_g, of_x, _ = ctx.needs_input_grad
        by_g = convolution(x, of_filters) if of_g else None
        return by_g, convolution(g, of_filters, back=True) if of_x else None, None

    @staticmethod
    def vmap(info: Any, dims: Any, g: Tensor, x: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, int]:
        lanes = info.batch_size
        g, x = (in_lanes(value, dim, lanes).flatten(0, 1) for value, dim in ((g, dims[0]), (x, dims[1])))
        return by_filters(g, x, lanes, taps), 0


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, back: bool = False) -> Tensor:
    """What `Convolution` is, as a function."""
    found: Tensor = Convolution.apply(x, weight, bias, back)  # type: ignore[no-untyped-call]
    return found


def takes(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> bool:
    """Whether a call of F.conv2d is one of these, and there are kernels for it."""
    same = tuple(size // 2 for size in weight.shape[2:])
    plain = (stride, padding, dilation, groups) == ((1, 1), same, (1, 1), 1)
    return plain and x.ndim == 4 and all(size % 2 for size in weight.shape[2:]) and bool(kernels_for(x, CONVOLUTION))
