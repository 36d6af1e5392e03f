"""What a model costs: parameters, FLOPs, bytes on disk and seconds. No function changes the model."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


def _example(net: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    first = next(net.parameters())
    return torch.zeros(1, *input_shape, dtype=first.dtype, device=first.device)
