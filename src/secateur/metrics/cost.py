"""What a model costs: parameters, FLOPs, bytes on disk and seconds; and what an update costs: bytes on the wire.

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
from secateur.tree import count, masked
from secateur.wire import encode, encode_mask

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Cost:
    """What one model costs for one example."""

    parameters: int
    flops: int
    bytes: int  # on disk, as safetensors
    seconds: float  # median latency of one example


def cost(net: nn.Module, input_shape: tuple[int, ...], repeats: int = 30) -> Cost:
    """All four at once."""
    return Cost(parameters(net), flops(net, input_shape), bytes_on_disk(net), latency(net, input_shape, repeats))


def parameters(net: nn.Module) -> int:
    """How many parameters it has, zeros included.

    Example:
        >>> parameters(nn.Linear(3, 2))
        8
    """
    return sum(value.numel() for value in net.parameters())


def flops(net: nn.Module, input_shape: tuple[int, ...]) -> int:
    """Two for each multiply-accumulate of the Conv, Linear and BatchNorm layers on one example, in eval mode.

    A Conv or Linear has fan-in multiply-accumulates an output (its bias starts the sum), a BatchNorm one. All other
    operations are left out, as the papers do.

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
    for module in twin.modules():
        if isinstance(module, (*CONVS, *NORMS, nn.Linear)):
            module.register_forward_hook(count)
    with torch.no_grad():
        twin(_example(twin, input_shape))
    return total


def bytes_on_disk(net: nn.Module) -> int:
    """The size of its parameters and buffers as a safetensors file, header included."""
    from safetensors.torch import save

    return len(save({name: value.detach().clone().contiguous() for name, value in net.state_dict().items()}))


def latency(net: nn.Module, input_shape: tuple[int, ...], repeats: int = 30) -> float:
    """The median seconds of one example's forward on the model's device, after a warm-up; on a CPU with one thread."""
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
    """What one user sends and receives in one round, in bytes."""

    up: int
    down: int
    broadcast: int  # positions that users share (adgp): the one that broadcasts sends a copy, each other receives one
    entries: int  # of the gradient
    dense: int  # one upload and one download without any compression

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.up + self.down + self.broadcast

    @property
    def bits(self) -> float:
        """Bits an entry, of an upload and a download together."""
        return 8 * self.bytes / self.entries

    @property
    def ratio(self) -> float:
        """The share of dense."""
        return self.bytes / self.dense


def communication(sent: Params, inside: Mask | None = None, received: Params | None = None) -> Communication:
    """The bytes of one upload and one download, as really encoded.

    With `inside` (adgp) positions are relative to it, it travels too, and only its entries come back. `received` is
    what the server returns; None: a number for every entry, or for every one inside.
    """
    if received is None:
        ones = {name: torch.ones_like(value) for name, value in sent.items()}
        received = ones if inside is None else masked(ones, inside)
    return Communication(
        up=len(encode(sent, inside=inside)),
        down=len(encode(received, inside=inside)),
        broadcast=0 if inside is None else len(encode_mask(inside)),
        entries=count(sent),
        dense=_dense(sent),
    )


def paper_accounting(sent: Params, inside: Mask | None = None) -> Communication:
    """The same as dgp's Table 3 counts: a kept value's bits, and one bit for a zero, which no decoder could place.

    DGP at 20 %: 6.4 + .8 bits up and 32 down of 64, 0.6125; ADGP: 6.4 + .2 up, 1 for the positions, 12.8 down, 0.31875.

    Example:
        >>> paper_accounting({"w": (torch.arange(100) % 5 == 0).float()}).ratio
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
    return Communication(up, down, broadcast, count(sent), _dense(sent))


def _dense(sent: Params) -> int:
    return sum(2 * value.element_size() * value.numel() for value in sent.values())


def _example(net: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    first = next(net.parameters())
    return torch.zeros(1, *input_shape, dtype=first.dtype, device=first.device)
