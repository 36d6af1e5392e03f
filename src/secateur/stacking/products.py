"""The layers of many stacked networks as batched matrix products.

The gradient of a stacked linear layer comes transposed, so that every step reads it against its grain, and a stacked
convolution of pictures of one channel is run by kernels for depthwise ones, which are slow. Written out as below both
are one product for all networks, of tensors that lie as the weights do. On a GPU kernels take the convolutions that
lane_convolution.py knows; all others become ones with groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from secateur.stacking import lane_convolution

CHANNELS = 3  # of a picture; of more, patches cost more than they bring
MOST = 1 << 22  # entries of the patches of one network's batch


class Products(TorchFunctionMode):
    """Takes linear layers and plain convolutions of pictures so, for all that is called inside."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and args[1].ndim == 2:
            return linear(*args)
        if func is F.conv2d and not kwargs and lane_convolution.takes(*args):
            return lane_convolution.convolution(*args[:3])
        if func is F.conv2d and not kwargs and _plain(*args):
            return convolution(*args[:5])
        return func(*args, **kwargs)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., in) by (out, in), as W x^T."""
    found = weight @ inputs.reshape(-1, inputs.shape[-1]).mT  # (out, rows)
    found = found if bias is None else found + bias[:, None]
    return found.mT.reshape(*inputs.shape[:-1], len(weight))


def convolution(
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
