"""Layers of many networks at once, each network with its own weights: by kernels on a GPU, or by torch's operations.

`conv2d`, `linear`, `norm_relu` and `norm_relu_pool` take batches (lanes * B, ...), one lane after the other, and
weights with a first axis of lanes. vmap turns such a convolution into one with groups, which is slow for narrow groups.
On a GPU kernels read channels_last images in place.

`convolution` is the same for use inside vmap: its rule for vmap turns the many into lanes. `Products` replaces the
layers of any network under vmap by products. The gradient of a stacked linear layer comes transposed, so that every
step reads it with bad strides. A stacked convolution of images with one channel runs in kernels for depthwise
convolutions, which are slow. As products, both are one batched product with the memory layout of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, vmap
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight
from torch.overrides import TorchFunctionMode

from secateur.gpu.client_ops import to_lanes
from secateur.gpu.triton_loader import load_kernels

CONVOLUTION, BATCHNORM = "secateur.gpu.stacked_layers_kernels", "secateur.gpu.batchnorm_kernels"
DEVICE = "cuda"  # where the kernels are probed
CHANNELS = 3  # at most, of an image that becomes patches: with more, patches cost more than they save
MOST = 1 << 22  # entries at most of the patches of one network's batch


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, back: bool = False) -> Tensor:
    """Return a convolution of stride 1 and "same" zero padding, for weight (lanes, F, C, h, w) and bias (lanes, F).

    h and w are odd. `back` goes from F channels to C, with the filters turned, and bias (lanes, C).
    """
    if kernels := _convolution_kernels(x, weight):
        out: Tensor = _Conv2d.apply(x, weight, bias, back, kernels)  # type: ignore[no-untyped-call]
        return out
    weight = transpose_filters(weight) if back else weight
    one = partial(F.conv2d, padding=_padding(weight.shape[3:]))
    return vmap(one, (0, 0, None if bias is None else 0))(_split_lanes(x, len(weight)), weight, bias).flatten(0, 1)


class _Conv2d(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, back: bool, kernels: ModuleType) -> Tensor:
        rows = _rows(x, len(weight))
        ctx.save_for_backward(rows, weight)
        ctx.kernels, ctx.size, ctx.back = kernels, x.shape[2:], back
        filters = kernels.transpose_filters(weight) if back else kernels.by_tap(weight)
        bias = None if bias is None else bias.contiguous()
        out = kernels.convolve(rows, filters, bias, ctx.size, weight.shape[3:])
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
            filters = kernels.by_tap(weight) if ctx.back else kernels.transpose_filters(weight)
            by_x = _pictures(kernels.convolve(of, filters, None, size, taps), (len(g), *size))
        return by_x, by_weight, by_bias, None, None


def by_filters(g: Tensor, x: Tensor, lanes: int, taps: Sequence[int]) -> Tensor:
    """Return the gradient of the filters, (lanes, F, C, h, w), for g, the gradient of the output of `conv2d` of x."""
    recorded = torch.is_grad_enabled() and (g.requires_grad or x.requires_grad)  # kernels record no graph
    if not recorded and (kernels := _convolution_kernels(x, g)):
        gradient: Tensor = kernels.by_filters(_rows(g, lanes), _rows(x, lanes), x.shape[2:], taps)
        return gradient
    shape = g.shape[1], x.shape[1], *taps

    def one(x: Tensor, g: Tensor) -> Tensor:
        return conv2d_weight(x, shape, g, padding=_padding(taps))  # type: ignore[no-any-return, no-untyped-call]

    return vmap(one)(_split_lanes(x, lanes), _split_lanes(g, lanes))


def transpose_filters(weight: Tensor) -> Tensor:
    """Return the filters of the transposed convolution, from the outputs back to the inputs."""
    return weight.flip(-2, -1).transpose(-4, -3)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a linear layer of every lane, for weight (lanes, F, C) and bias (lanes, F)."""
    return torch.baddbmm(bias[:, None], _split_lanes(x, len(weight)), weight.mT).flatten(0, 1)


def norm_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the ReLU of BatchNorm by each lane's batch, for weight and bias (lanes, C)."""
    out: Tensor = _NormRelu.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return out


class _NormRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows = _rows(x, len(weight))
        out, moments = normalise(rows, weight, bias, eps)
        ctx.save_for_backward(rows, *moments, bias)
        return _pictures(out, (len(x), *x.shape[2:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        bias = ctx.saved_tensors[-1]
        by_x, *others = normalise_back(_rows(g, len(bias)), *ctx.saved_tensors)
        return _pictures(by_x, (len(g), *g.shape[2:])), *others, None


def normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the ReLU of (x - mean) / sqrt(var + eps) * weight + bias for x (lanes, positions, C).

    The second result is mean, 1 / sqrt(var + eps) and that times weight, (lanes, C) each.
    """
    if kernels := kernels_for(x, BATCHNORM):
        result: tuple[Tensor, Sequence[Tensor]] = kernels.normalise(x, weight, bias, eps)
        return result
    var, mean = torch.var_mean(x, 1, correction=0)
    inverse = (var + eps).rsqrt()
    scale = inverse * weight
    return torch.addcmul(bias[:, None], x - mean[:, None], scale[:, None]).relu_(), (mean, inverse, scale)


def normalise_back(
    g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `normalise` by x, and by weight and bias of each lane, (lanes, C).

    `g` is the gradient by the output, h that before the ReLU. The gradient by x is
    scale * (h - mean(h) - z mean(h z)) for the normalised z.
    """
    if kernels := kernels_for(x, BATCHNORM):
        gradients: tuple[Tensor, Tensor, Tensor] = kernels.normalise_back(g, x, mean, inverse, scale, bias)
        return gradients
    z = x - mean[:, None]
    h = g * (torch.addcmul(bias[:, None], z, scale[:, None]) > 0)
    z.mul_(inverse[:, None])
    total, along = h.sum(1), (h * z).sum(1)
    by_x = (h - total[:, None] / x.shape[1] - z * along[:, None] / x.shape[1]) * scale[:, None]
    return by_x, along, total


def norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the 2x2 max-pooling of `norm_relu`; the last line or column of an odd size is left out."""
    kernels = kernels_for(x, BATCHNORM)
    if kernels is not None and x.shape[2] % 2 == x.shape[3] % 2 == 0:
        out: Tensor = _NormReluPool.apply(x, weight, bias, eps, kernels)  # type: ignore[no-untyped-call]
        return out
    return F.max_pool2d(norm_relu(x, weight, bias, eps), 2)


class _NormReluPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: ModuleType) -> Tensor:
        rows, size = _rows(x, len(weight)), x.shape[2:]
        out, moments = kernels.normalise(rows, weight, bias, eps, size[1])
        ctx.save_for_backward(rows, *moments, bias)
        ctx.kernels, ctx.size = kernels, size
        return _pictures(out, (len(x), *(length // 2 for length in size)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        bias = ctx.saved_tensors[-1]
        by_x, *others = ctx.kernels.normalise_back(_rows(g, len(bias)), *ctx.saved_tensors, ctx.size[1])
        return _pictures(by_x, (len(g), *ctx.size)), *others, None, None


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, back: bool = False) -> Tensor:
    """Return `Convolution` of one network; inside vmap of many, as lanes."""
    out: Tensor = Convolution.apply(x, weight, bias, back)  # type: ignore[no-untyped-call]
    return out


class Convolution(Function):
    """F.conv2d with stride 1 and "same" zero padding, for odd filters; `back` with the filters turned."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, back: bool) -> Tensor:
        """Return the convolution of one network."""
        return F.conv2d(x, transpose_filters(weight) if back else weight, bias, padding=_padding(weight.shape[2:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs for the backward pass."""
        ctx.save_for_backward(*inputs[:2])
        ctx.back = inputs[3]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Return the gradients; that by x is the convolution of g in the other direction."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        by_x = convolution(g, weight, back=not ctx.back) if of_x else None
        sides = (x, g) if ctx.back else (g, x)
        by_weight = _ByFilters.apply(*sides, weight.shape[2:]) if of_weight else None  # type: ignore[no-untyped-call]
        return by_x, by_weight, g.sum((0, 2, 3)) if of_bias else None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, back: bool) -> tuple[Tensor, int]:
        """Return the convolutions of many networks, as lanes."""
        lanes = info.batch_size
        biases = None if bias is None else to_lanes(bias, dims[2], lanes)
        out = conv2d(to_lanes(x, dims[0], lanes).flatten(0, 1), to_lanes(weight, dims[1], lanes), biases, back)
        return _split_lanes(out, lanes), 0


class _ByFilters(Function):
    """Gradient of the filters from g, that of the output; linear in x and g, so its own gradients are convolutions."""

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
        g, x = (to_lanes(value, dim, lanes).flatten(0, 1) for value, dim in ((g, dims[0]), (x, dims[1])))
        return by_filters(g, x, lanes, taps), 0


class Products(TorchFunctionMode):
    """Mode that replaces linear layers and plain convolutions of images by products, for all calls inside."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and args[1].ndim == 2:
            return product_linear(*args)
        if func is F.conv2d and not kwargs and takes(*args):
            return convolution(*args[:3])
        if func is F.conv2d and not kwargs and _is_plain(*args):
            return product_convolution(*args[:5])
        if func is F.batch_norm:  # cuDNN's asks for the memory of its input, which a lane of a vmap does not have
            with torch.backends.cudnn.flags(enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def takes(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Return True if `convolution` can replace a call of F.conv2d, and there are kernels for it."""
    same = tuple(size // 2 for size in weight.shape[2:])
    plain = (stride, padding, dilation, groups) == ((1, 1), same, (1, 1), 1)
    return plain and x.ndim == 4 and all(size % 2 for size in weight.shape[2:]) and bool(kernels_for(x, CONVOLUTION))


def _is_plain(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> bool:
    """Return True if `product_convolution` can replace a call of F.conv2d, and its patches are not too many."""
    pairs = all(isinstance(setting, tuple) for setting in (stride, padding, dilation))
    if not pairs or x.ndim != 4 or weight.shape[1] > CHANNELS or dilation != (1, 1) or groups != 1:
        return False
    places = x.shape[2] * x.shape[3] // (stride[0] * stride[1])
    return bool(x.shape[0] * places * weight[0].numel() <= MOST)


def product_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the linear layer of inputs (..., in) and weight (out, in), as W x^T."""
    out = weight @ inputs.reshape(-1, inputs.shape[-1]).mT  # (out, rows)
    out = out if bias is None else out + bias[:, None]
    return out.mT.reshape(*inputs.shape[:-1], len(weight))


def product_convolution(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
) -> Tensor:
    """Return the convolution of inputs (B, in, H, W) and weight (out, in, h, w): the filters times all patches."""
    (high, wide), (above, beside) = stride, padding
    padded = F.pad(inputs, (beside, beside, above, above)) if above or beside else inputs
    patches = padded.unfold(2, weight.shape[2], high).unfold(3, weight.shape[3], wide)  # (B, in, H', W', h, w)
    size, _, rows, columns = patches.shape[:4]
    out = weight.flatten(1) @ patches.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)
    out = out if bias is None else out + bias[:, None]
    return out.view(len(weight), size, rows, columns).transpose(0, 1)


def _split_lanes(x: Tensor, lanes: int) -> Tensor:
    """Return a batch with a first axis of lanes."""
    return x.view(lanes, -1, *x.shape[1:])


def _rows(x: Tensor, lanes: int) -> Tensor:
    """Return images as (lanes, places, C); a view if they are channels_last."""
    return x.movedim(1, -1).reshape(lanes, -1, x.shape[1]).contiguous()


def _pictures(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return rows (lanes, places, C) as images; `shape` is their number, height and width."""
    return rows.view(*shape, -1).movedim(-1, 1)


def _padding(taps: Sequence[int]) -> list[int]:
    """Return the padding that keeps the size, for filters of odd sizes."""
    return [size // 2 for size in taps]


def _convolution_kernels(*tensors: Tensor) -> ModuleType | None:
    """Return the convolution kernels if they take the tensors.

    Tensors of an outer vmap or grad have no memory of their own: torch's operations then go level by level.
    """
    return None if any(map(is_functorch_wrapped_tensor, tensors)) else kernels_for(tensors[0], CONVOLUTION)


def kernels_for(x: Tensor, name: str) -> ModuleType | None:
    """Return the kernels of a module if they are available and take x."""
    probe = _probe_convolution if name == CONVOLUTION else _probe_batchnorm
    return load_kernels(name, probe, "stacked networks") if x.is_cuda and x.dtype == torch.float32 else None


def _probe_convolution(kernels: ModuleType) -> None:
    x = torch.zeros(1, 16, 3, device=DEVICE)
    weight = kernels.by_filters(x.new_zeros(1, 16, 8), x, (4, 4), (3, 3))
    out = kernels.convolve(x, kernels.by_tap(weight), x.new_zeros(1, 8), (4, 4), (3, 3))
    kernels.convolve(out, kernels.transpose_filters(weight), None, (4, 4), (3, 3))


def _probe_batchnorm(kernels: ModuleType) -> None:
    x = torch.zeros(1, 16, 3, device=DEVICE)
    out, moments = kernels.normalise(x, x[:, 0], x[:, 0], 1.0, 4)
    kernels.normalise_back(out, x, *moments, x[:, 0], 4)
