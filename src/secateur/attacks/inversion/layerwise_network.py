"""Networks that `layerwise` can invert: convolutions with ReLU and max-pooling, then a tail from the first Linear on.

The network is traced symbolically, so ReLU and flattening may be functions. Every step takes the output of the step
before it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.nn.functional import conv2d, relu, unfold

from secateur.attacks.inversion.problem import structure
from secateur.errors import WrongInput
from secateur.interfaces import Knowledge, Params

LARGEST = 4096  # inputs of one convolution: its solver holds matrices of this size squared
POSITIONS = 1 << 26  # largest product of inputs and outputs of one convolution: the matrix takes 512 MiB
FLATTENS = {"flatten", "view", "reshape"}
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.GELU)
PASSES = (nn.Identity, nn.Dropout, nn.Dropout2d)  # of a network without chance
ALLOWED = "Conv2d with ReLU, each with or without MaxPool2d; then Flatten and Linear with activations"
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PooledLayer:
    """Convolution, ReLU and max-pooling over cells that do not overlap; a layer without pooling has cells of one."""

    name: str
    weight: Tensor  # (O, C, h, w)
    bias: Tensor  # (O,)
    shape: tuple[int, int, int]  # (C, H, W) of the input
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    pool: tuple[int, int] = (1, 1)  # height and width of a cell
    rectified: bool = False  # True if ReLU follows

    @property
    def size(self) -> int:
        """Number of inputs, n."""
        return math.prod(self.shape)

    @property
    def cells(self) -> Tensor:
        """Positions of each cell within a channel of the convolution's output, (L, k)."""
        _, _, height, width = self.convolve(torch.zeros(1, *self.shape, dtype=self.weight.dtype)).shape
        numbers = torch.arange(height * width, dtype=torch.float64).view(1, 1, height, width)
        return unfold(numbers, self.pool, stride=self.pool)[0].T.long()

    @property
    def patches(self) -> Tensor:
        """Input pixel within a channel of each entry of each patch, (h w, P); H W where it is padding."""
        _, height, width = self.shape
        numbers = torch.arange(1, height * width + 1, dtype=torch.float64).view(1, 1, height, width)
        pixels = unfold(numbers, self.weight.shape[2:], self.dilation, self.padding, self.stride)[0].long()
        return torch.where(pixels == 0, height * width, pixels - 1)

    def convolve(self, inputs: Tensor) -> Tensor:
        """Return the convolution of inputs (N, C, H, W) without the bias, (N, O, H', W')."""
        return conv2d(inputs, self.weight, None, self.stride, self.padding, self.dilation)

    def in_cells(self, inputs: Tensor) -> Tensor:
        """Return the convolution of inputs (N, n) with the bias, by cell: (N, O L, k)."""
        outputs = self.convolve(inputs.view(-1, *self.shape)).flatten(2) + self.bias[:, None]
        return outputs[:, :, self.cells].flatten(1, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs (N, O L) of inputs (N, n): the largest of each cell, or 0."""
        return self.in_cells(inputs).amax(2).relu()


class Network(NamedTuple):
    """The convolutions from first to last, and the rest of the network from its first Linear on."""

    layers: list[PooledLayer]
    first: str  # name of the first Linear
    weight: Tensor  # (D, F) of the first Linear
    bias: Tensor  # (D,)
    rest: list[Step]  # after the first Linear


@dataclass
class _Reading:
    """State of the reading of a network's steps."""

    values: Params
    shape: tuple[int, ...]
    layers: list[PooledLayer] = field(default_factory=list)
    first: tuple[str, Tensor, Tensor] | None = None
    rest: list[Step] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


def read_network(knowledge: Knowledge, sent: Params) -> Network:
    """Return the network in float64 on the CPU; refuse one that is no such chain."""
    values = {name: value.detach().cpu().double() for name, value in sent.items()}
    net = structure(knowledge.net, knowledge.batchnorm).cpu()
    try:
        graph = fx.symbolic_trace(net).graph
    except Exception as error:  # a network is any code
        raise refusal(f"its forward pass cannot be traced ({type(error).__name__})") from error
    modules, reading = dict(net.named_modules()), _Reading(values, knowledge.input_shape)
    before: fx.Node | None = None
    for node in graph.nodes:
        if _is_shape(node):
            continue
        if before is not None and (not node.args or node.args[0] not in (before, (before,))):
            raise refusal(f"{node.name} does not take the output of the step before it")
        if node.op not in ("placeholder", "output"):
            _read_step(node, modules, reading)
        before = node
    if reading.first is None or not reading.layers:
        raise refusal("it needs a convolution and, after the convolutions, a Linear")
    if bare := [layer.name for layer in reading.layers if not layer.rectified]:
        raise refusal(f"{bare[0]} is not followed by ReLU")
    return Network(reading.layers, *reading.first, reading.rest)


def refusal(reason: str) -> WrongInput:
    """Return the error of a network that cannot be attacked."""
    return WrongInput("attack layerwise", f"cannot invert this network: {reason}; allowed: {ALLOWED}")


def _is_shape(node: fx.Node) -> bool:
    """Return True if a step only reads the size of a batch, for a later `view`."""
    return (node.op == "call_method" and node.target == "size") or node.target in (getattr, operator.getitem)


def _read_step(node: fx.Node, modules: Mapping[str, nn.Module], reading: _Reading) -> None:
    """Add a step of the graph to the reading, or refuse it."""
    module: nn.Module | None = None
    if node.op == "call_module":
        module = modules[str(node.target)]
    elif (node.op == "call_function" and node.target in (relu, torch.relu)) or (
        node.op == "call_method" and node.target in ("relu", "relu_")
    ):
        module = nn.ReLU()
    elif node.op == "call_function" and node.target is nn.functional.max_pool2d:
        module = _read_pool(node)
    elif (node.op == "call_function" and node.target is torch.flatten) or (
        node.op == "call_method" and node.target in FLATTENS
    ):
        module = nn.Flatten()
    if module is None:
        raise refusal(f"{node.name} is no layer that is known here")
    if isinstance(module, (nn.Flatten, *PASSES)):
        return
    if isinstance(module, nn.Conv2d | nn.Linear):
        if str(node.target) in reading.names:
            raise refusal(f"{node.target} is used more than once")
        reading.names.add(str(node.target))
    if reading.first is None:
        _read_layer(str(node.target), module, reading)
    else:
        _read_tail(str(node.target), module, reading)


def _read_pool(node: fx.Node) -> nn.Module:
    """Return the pooling of a call of max_pool2d."""
    arguments: dict[str, Any] = dict(zip(("kernel_size", "stride", "padding"), node.args[1:], strict=False))
    return nn.MaxPool2d(**(arguments | node.kwargs))


def _read_layer(name: str, module: nn.Module, reading: _Reading) -> None:
    """Add a step before the first Linear."""
    if isinstance(module, nn.Linear):
        if module.in_features != math.prod(reading.shape):
            raise refusal(f"{name} does not take all {math.prod(reading.shape)} outputs of the step before it")
        reading.first = (name, *_read_affine(name, module.out_features, reading))
    elif isinstance(module, nn.Conv2d):
        reading.layers.append(_read_convolution(name, module, reading))
        reading.shape = _measure(reading.layers[-1])
    elif not reading.layers:
        raise refusal(f"{name} comes before the first convolution")
    elif isinstance(module, nn.ReLU) and not reading.layers[-1].rectified:
        reading.layers[-1] = replace(reading.layers[-1], rectified=True)
    elif isinstance(module, nn.MaxPool2d) and reading.layers[-1].pool == (1, 1):
        reading.layers[-1] = replace(reading.layers[-1], pool=_read_cell(name, module))
        reading.shape = _measure(reading.layers[-1])
    else:
        raise refusal(f"{name} ({type(module).__name__}) is not allowed there")


def _read_tail(name: str, module: nn.Module, reading: _Reading) -> None:
    """Add a step after the first Linear; it is only computed forwards."""
    if not isinstance(module, (nn.Linear, *ACTIVATIONS)):
        raise refusal(f"{name} ({type(module).__name__}) is not allowed after the first Linear")
    params = {key: reading.values[f"{name}.{key}"] for key, _ in module.named_parameters()}
    reading.rest.append(lambda inputs: functional_call(module, params, (inputs.clone(),)))


def _read_affine(name: str, outputs: int, reading: _Reading) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a layer; zeros for no bias."""
    weight = reading.values[f"{name}.weight"]
    return weight, reading.values.get(f"{name}.bias", weight.new_zeros(outputs))


def _read_convolution(name: str, module: nn.Conv2d, reading: _Reading) -> PooledLayer:
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        raise refusal(f"{name} must have one group and a padding of zeros, written as numbers")
    weight, bias = _read_affine(name, module.out_channels, reading)
    channels, height, width = reading.shape
    geometry = (module.stride, module.padding, module.dilation)
    layer = PooledLayer(name, weight, bias, (channels, height, width), *geometry)  # type: ignore[arg-type]
    outputs = layer.convolve(torch.zeros(1, *layer.shape, dtype=weight.dtype)).numel()
    if layer.size > LARGEST or layer.size * outputs > POSITIONS:
        most = f"at most {LARGEST}, and {POSITIONS} pairs of them with outputs, can be solved"
        raise refusal(f"{name} has {layer.size} inputs and {outputs} outputs; {most}")
    return layer


def _read_cell(name: str, module: nn.MaxPool2d) -> tuple[int, int]:
    """Return height and width of the cells of a pooling."""

    def pair(value: Any) -> tuple[int, int]:
        return (value, value) if isinstance(value, int) else tuple(value)

    size, stride = pair(module.kernel_size), pair(module.stride)
    if stride != size or pair(module.padding) != (0, 0) or pair(module.dilation) != (1, 1) or module.ceil_mode:
        raise refusal(f"{name} must pool cells that do not overlap, without padding")
    return size


def _measure(layer: PooledLayer) -> tuple[int, ...]:
    """Return the shape of a layer's output."""
    _, channels, height, width = layer.convolve(torch.zeros(1, *layer.shape, dtype=layer.weight.dtype)).shape
    return channels, height // layer.pool[0], width // layer.pool[1]
