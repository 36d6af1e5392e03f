"""Cost of a model (parameters, FLOPs, bytes on disk, latency) and of an update (bytes on the wire).

No function changes the model or the update.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secateur.interfaces import Mask, Params
from secateur.models.create import example_rows
from secateur.tree import count, mask_tree
from secateur.wire import encode, encode_mask

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Cost:
    """Cost of one model for one example."""

    parameters: int
    flops: int
    bytes: int  # on disk, as safetensors
    seconds: float  # median latency of one example


def cost(net: nn.Module, input_shape: tuple[int, ...], repeats: int = 30) -> Cost:
    """Return all four costs of a model."""
    return Cost(parameters(net), flops(net, input_shape), bytes_on_disk(net), latency(net, input_shape, repeats))


def parameters(net: nn.Module) -> int:
    """Return the number of parameters, zeros included.

    Example:
        >>> parameters(nn.Linear(3, 2))
        8
    """
    return sum(value.numel() for value in net.parameters())


def flops(net: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Return two FLOPs for each multiply-accumulate of Conv, Linear and BatchNorm layers on one example, in eval mode.

    A Conv or Linear has fan-in multiply-accumulates an output (the sum starts with the bias), a BatchNorm has one. All
    other operations are not counted, as in the papers.

    Example:
        >>> flops(nn.Linear(3, 2), (3,))
        12
    """
    total = 0

    def count(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal total
        fan_in = 1 if isinstance(layer, NORMS) else layer.weight[0].numel()  # type: ignore[index]
        total += 2 * fan_in * output.numel()

    twin = copy.deepcopy(net).eval()
    example = _example(twin, input_shape)  # before the hooks: it tries the model
    for module in twin.modules():
        if isinstance(module, (*CONVS, *NORMS, nn.Linear)):
            module.register_forward_hook(count)
    with torch.no_grad():
        twin(example)
    return total


def bytes_on_disk(net: nn.Module) -> int:
    """Return the size of the parameters and buffers as a safetensors file, header included."""
    from safetensors.torch import save

    tensors = {part: value for name, whole in net.state_dict().items() for part, value in _plain(name, whole)}
    return len(save({name: value.detach().clone().contiguous() for name, value in tensors.items()}))


def _plain(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Return the plain tensors of a tensor by name: a quantised one has integers and scales."""
    if not hasattr(value, "__tensor_flatten__"):
        return [(name, value)]
    parts, _ = value.__tensor_flatten__()
    return [(f"{name}.{part}", tensor) for part in parts if (tensor := getattr(value, part)) is not None]


def latency(net: nn.Module, input_shape: tuple[int, ...], repeats: int = 30) -> float:
    """Return the median seconds of a forward pass of one example on the model's device, after a warm-up.

    A CPU uses one thread.
    """
    twin = copy.deepcopy(net).eval()
    example = _example(twin, input_shape)
    seconds = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for _ in range(max(3, repeats // 10) + repeats):
                start = time.perf_counter()
                twin(example)
                if example.is_cuda:
                    torch.cuda.synchronize(example.device)
                seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds[-repeats:])


@dataclass(frozen=True)
class Communication:
    """Traffic of one user in one round, in bytes."""

    up: int
    down: int
    broadcast: int  # positions that users share (adgp): one user sends a copy, every other user receives one
    entries: int  # number of entries of the gradient
    dense: int  # one upload and one download without any compression

    @property
    def bytes(self) -> int:
        """Total traffic: upload, download and broadcast."""
        return self.up + self.down + self.broadcast

    @property
    def bits(self) -> float:
        """Bits per gradient entry of all traffic."""
        return 8 * self.bytes / self.entries

    @property
    def ratio(self) -> float:
        """Traffic relative to an uncompressed upload and download."""
        return self.bytes / self.dense


def communication(sent: Params, inside: Mask | None = None, received: Params | None = None) -> Communication:
    """Return the bytes of one upload and one download, as encoded on the wire.

    Args:
        sent: The upload.
        inside: The shared mask of adgp. Positions are relative to it, it is broadcast, and only its entries return.
        received: The download; None: a number for every entry, or for every entry inside.
    """
    if received is None:
        ones = {name: torch.ones_like(value) for name, value in sent.items()}
        received = ones if inside is None else mask_tree(ones, inside)
    return Communication(
        up=len(encode(sent, inside=inside)),
        down=len(encode(received, inside=inside)),
        broadcast=0 if inside is None else len(encode_mask(inside)),
        entries=count(sent),
        dense=_dense_bits(sent),
    )


def count_as_paper(sent: Params, inside: Mask | None = None) -> Communication:
    """Return the traffic as counted in dgp's Table 3: the bits of a kept value, and one bit for a zero.

    No decoder could locate the zeros from these bits. DGP at 20 %: 6.4 + .8 bits up and 32 down of 64, 0.6125. ADGP:
    6.4 + .2 up, 1 for the positions, 12.8 down, 0.31875.

    Example:
        >>> count_as_paper({"w": (torch.arange(100) % 5 == 0).float()}).ratio
        0.6125
    """
    up = down = broadcast = 0
    for name, value in sent.items():
        width, kept, size = 8 * value.element_size(), int(value.count_nonzero()), value.numel()
        if inside is not None:
            broadcast += size
            size = int(inside[name].sum()) if name in inside else size
        up += width * kept + size - kept
        down += width * size
    up, down, broadcast = (math.ceil(bits / 8) for bits in (up, down, broadcast))
    return Communication(up, down, broadcast, count(sent), _dense_bits(sent))


def _dense_bits(sent: Params) -> int:
    return sum(2 * value.element_size() * value.numel() for value in sent.values())


def _example(net: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    return torch.zeros_like(example_rows(net, input_shape)[:1])
