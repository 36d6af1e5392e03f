"""Layers of many networks at once, each with weights of its own: by kernels on a GPU, and by torch's operations.

Batches are (lanes * B, ...), one lane after the other; weights have a first axis of lanes. vmap makes one convolution
in groups of such a layer, which is slow where groups are as narrow as here. On a GPU kernels read channels_last
pictures as they lie, and a sub-model's layer is three of them each way.

`Convolution` has a rule for vmap that makes lanes of the many. `Products` takes what is called inside as batched matrix
products: the gradient of a stacked linear layer comes transposed, so that every step reads it against its grain, and a
stacked convolution of pictures of one channel is run by kernels for depthwise ones, which are slow. Written out as
below both are one product for all networks, of tensors that lie as the weights do. On a GPU kernels take the
convolutions that `takes` knows; all others become ones with groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, vmap
from torch._C import _DisableFuncTorch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight
from torch.overrides import TorchFunctionMode

from secateur.gpu.batchnorm import Moments, normalised, returned
from secateur.gpu.client_ops import in_lanes
from secateur.gpu.triton_loader import loaded

CONVOLUTION, POOLING = "secateur.gpu.stacked_layers_kernels", "secateur.gpu.batchnorm_kernels"
DEVICE = "cuda"  # where kernels are tried

CHANNELS = 3  # of a picture; of more, patches cost more than they bring
MOST = 1 << 22  # entries of the patches of one network's batch


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, back: bool = False) -> Tensor:
    """Stride 1, with zeros around that keep the size: weight (lanes, F, C, h, w) of odd h and w, bias (lanes, F).

    Back is from F channels to C, with the filters turned, and bias (lanes, C).
    """
    if kernels := _convolving(x, weight):
        found: Tensor = _Conv2d.apply(x, weight, bias, back, kernels)  # type: ignore[no-untyped-call]
        return found
    weight = turned(weight) if back else weight
    one = partial(F.conv2d, padding=_padding(weight.shape[3:]))
    return vmap(one, (0, 0, None if bias is None else 0))(_apart(x, len(weight)), weight, bias).flatten(0, 1)


def by_filters(g: Tensor, x: Tensor, lanes: int, taps: Sequence[int]) -> Tensor:
    """(lanes, F, C, h, w) the gradient of the filters by g, that of what `conv2d` made of x."""
    recorded = torch.is_grad_enabled() and (g.requires_grad or x.requires_grad)  # kernels would leave it out
    if not recorded and (kernels := _convolving(x, g)):
        found: Tensor = kernels.by_filters(_rows(g, lanes), _rows(x, lanes), x.shape[2:], taps)
        return found
    shape = g.shape[1], x.shape[1], *taps

    def one(x: Tensor, g: Tensor) -> Tensor:
        return conv2d_weight(x, shape, g, padding=_padding(taps))  # type: ignore[no-any-return, no-untyped-call]

    return vmap(one)(_apart(x, lanes), _apart(g, lanes))


def turned(weight: Tensor) -> Tensor:
    """The filters that lead back from the outputs to the inputs."""
    return weight.flip(-2, -1).transpose(-4, -3)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Weight (lanes, F, C), bias (lanes, F)."""
    return torch.baddbmm(bias[:, None], _apart(x, len(weight)), weight.mT).flatten(0, 1)


def norm_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """ReLU of BatchNorm by a lane's own batch; weight and bias (lanes, C)."""
    found: Tensor = _NormRelu.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return found


def norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Of that the largest of every two by two; what an odd size leaves at the end is left out."""
    kernels = kernels_for(x, POOLING)
    if kernels is not None and x.shape[2] % 2 == x.shape[3] % 2 == 0:
        found: Tensor = _NormReluPool.apply(x, weight, bias, eps, kernels)  # type: ignore[no-untyped-call]
        return found
    return F.max_pool2d(norm_relu(x, weight, bias, eps), 2)


class _Conv2d(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, back: bool, kernels: ModuleType) -> Tensor:
        rows = _rows(x, len(weight))
        ctx.save_for_backward(rows, weight)
        ctx.kernels, ctx.size, ctx.back = kernels, x.shape[2:], back
        filters = kernels.turned(weight) if back else kernels.by_tap(weight)
        bias = None if bias is None else bias.contiguous()
        out = kernels.convolved(rows, filters, bias, ctx.size, weight.shape[3:])
        return _pictures(out, (len(x), *ctx.size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (rows, weight), kernels, size = ctx.saved_tensors, ctx.kernels, ctx.size
        taps, of = weight.shape[3:], _rows(g, len(weight))
        by_weight = kernels.by_filters(*((rows, of) if ctx.back else (of, rows)), size, taps)
        by_bias = of.sum(1) if ctx.needs_input_grad[2] else None
        by_x = None
        if ctx.needs_input_grad[0]:  # the same convolution, of g with turned filters
            filters = kernels.by_tap(weight) if ctx.back else kernels.turned(weight)
            by_x = _pictures(kernels.convolved(of, filters, None, size, taps), (len(g), *size))
        return by_x, by_weight, by_bias, None, None


class _NormRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows = _rows(x, len(weight))
        out, moments = normalised(rows, weight, bias, eps, relu=True)
        ctx.save_for_backward(rows, bias, *moments)
        return _pictures(out, (len(x), *x.shape[2:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, bias, *moments = ctx.saved_tensors
        by_x, by_weight, by_bias = returned(_rows(g, len(bias)), rows, Moments(*moments), bias)
        return _pictures(by_x, (len(g), *g.shape[2:])), by_weight, by_bias, None


class _NormReluPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: ModuleType) -> Tensor:
        rows, size = _rows(x, len(weight)), x.shape[2:]
        out, (mean, _, inverse, scale) = kernels.pooled(rows, weight, bias, eps, size[1])
        ctx.save_for_backward(rows, mean, inverse, scale, bias)
        ctx.kernels, ctx.size = kernels, size
        return _pictures(out, (len(x), *(each // 2 for each in size)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        bias = ctx.saved_tensors[-1]
        by_x, *others = ctx.kernels.spread(_rows(g, len(bias)), *ctx.saved_tensors, ctx.size[1])
        return _pictures(by_x, (len(g), *ctx.size)), *others, None, None


def _apart(x: Tensor, lanes: int) -> Tensor:
    return x.view(lanes, -1, *x.shape[1:])


def _rows(x: Tensor, lanes: int) -> Tensor:
    """(lanes, places, C); of channels_last pictures a view."""
    return x.movedim(1, -1).reshape(lanes, -1, x.shape[1]).contiguous()


def _pictures(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """What `_rows` makes of pictures, as pictures: how many, and their size."""
    return rows.view(*shape, -1).movedim(-1, 1)


def _padding(taps: Sequence[int]) -> list[int]:
    return [size // 2 for size in taps]


def _convolving(*given: Tensor) -> ModuleType | None:
    """Of an outer vmap or grad tensors have no memory of their own: torch's operations then go level by level."""
    return None if any(map(is_functorch_wrapped_tensor, given)) else kernels_for(given[0], CONVOLUTION)


def kernels_for(x: Tensor, name: str) -> ModuleType | None:
    """Kernels that take such an x."""
    return _kernels(name) if x.is_cuda and x.dtype == torch.float32 else None


@cache
def _kernels(name: str) -> ModuleType | None:
    def probe(kernels: ModuleType) -> None:
        with _DisableFuncTorch():  # inside of vmap and grad new tensors would have no memory of their own
            x = torch.zeros(1, 16, 3, device=DEVICE)
            if name == CONVOLUTION:
                weight = kernels.by_filters(x.new_zeros(1, 16, 8), x, (4, 4), (3, 3))
                out = kernels.convolved(x, kernels.by_tap(weight), x.new_zeros(1, 8), (4, 4), (3, 3))
                kernels.convolved(out, kernels.turned(weight), None, (4, 4), (3, 3))
            else:
                out, (mean, *_) = kernels.pooled(x, x[:, 0], x[:, 0], 1.0, 4)
                kernels.spread(out, x, mean, mean, mean, mean, 4)

    return loaded(name, probe, "stacked networks")


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


class Products(TorchFunctionMode):
    """Takes linear layers and plain convolutions of pictures so, for all that is called inside."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and args[1].ndim == 2:
            return product_linear(*args)
        if func is F.conv2d and not kwargs and takes(*args):
            return convolution(*args[:3])
        if func is F.conv2d and not kwargs and _plain(*args):
            return product_convolution(*args[:5])
        return func(*args, **kwargs)


def product_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., in) by (out, in), as W x^T."""
    found = weight @ inputs.reshape(-1, inputs.shape[-1]).mT  # (out, rows)
    found = found if bias is None else found + bias[:, None]
    return found.mT.reshape(*inputs.shape[:-1], len(weight))


def product_convolution(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
) -> Tensor:
    """(B, in, H, W) by (out, in, h, w): the filters times all patches."""
    (high, wide), (above, beside) = stride, padding
    padded = F.pad(inputs, (beside, beside, above, above)) if above or beside else inputs
    patches = padded.unfold(2, weight.shape[2], high).unfold(3, weight.shape[3], wide)  # (B, in, H', W', h, w)
    size, _, rows, columns = patches.shape[:4]
    found = weight.flatten(1) @ patches.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)
    found = found if bias is None else found + bias[:, None]
    return found.view(len(weight), size, rows, columns).transpose(0, 1)


def _plain(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
) -> bool:
    """Whether it is one of a batch of pictures that `convolution` knows, and its patches are not too many."""
    pairs = all(isinstance(each, tuple) for each in (stride, padding, dilation))
    if not pairs or inputs.ndim != 4 or weight.shape[1] > CHANNELS or dilation != (1, 1) or groups != 1:
        return False
    places = inputs.shape[2] * inputs.shape[3] // (stride[0] * stride[1])
    return bool(inputs.shape[0] * places * weight[0].numel() <= MOST)
