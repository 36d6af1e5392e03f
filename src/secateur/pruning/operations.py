"""What the channel analysis knows of layers and functions: how each treats a channel that is zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp, TensorMetadata

from secateur.errors import WrongInput

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

# Each channel stays by itself, and zero stays zero.
PASS_LAYERS = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Hardswish),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
PASS_FUNCTIONS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone"),
    *("relu", "relu_", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "tanh", "hardswish"),
    *(f"{pool}_pool{n}d" for pool in ("max", "avg", "adaptive_max", "adaptive_avg") for n in (1, 2, 3)),
}
SCALE_FUNCTIONS = {"mul", "truediv", "div"}  # by a number; by a tensor they are unknown
# Each channel stays by itself, but zero becomes something else.
SHIFT_LAYERS = (nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Softplus)
SHIFT_FUNCTIONS = {"sigmoid", "logsigmoid", "hardsigmoid", "softplus"}

RESHAPE_FUNCTIONS = {"flatten", "view", "reshape", "squeeze"}
REDUCE_FUNCTIONS = {"mean", "sum"}
SUM_FUNCTIONS = {"add", "add_", "iadd"}
CAT_FUNCTIONS = {"cat", "concat", "concatenate"}


class Tracer(fx.Tracer):
    """Keeps the layers that the analysis knows whole, the user's subclasses of them included."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether to record a call of this module as one step."""
        known = (*CONVS, *NORMS, nn.Linear)
        return isinstance(m, known) or super().is_leaf_module(m, module_qualified_name)


def trace(net: nn.Module, input_shape: tuple[int, ...]) -> fx.GraphModule:
    """The graph of a module's forward with the shape of every value, or a clear error where it cannot be had."""
    first = next(net.parameters())
    rows = torch.zeros(2, *input_shape, dtype=first.dtype, device=first.device)  # two: squeeze() keeps the batch
    try:
        graph = fx.GraphModule(net, Tracer().trace(net))
        with torch.no_grad():
            ShapeProp(graph).propagate(rows)
    except Exception as error:  # a user's forward can raise anything when it meets a proxy
        message = f"its forward cannot be traced, which whole channels need ({type(error).__name__}: {error})"
        raise WrongInput("model", message) from error
    return graph


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a value that has a batch and a channel dimension."""
    meta = node.meta["tensor_meta"]
    if not isinstance(meta, TensorMetadata) or len(meta.shape) < 2:
        raise unknown_operation(name_of(node))
    return tuple(meta.shape)


def adds_tensors(node: fx.Node) -> bool:
    """Whether both sides of an addition are values with the same dimensions, and none is a number."""
    sides = (argument(node, 0, "input"), argument(node, 1, "other"))
    if not all(isinstance(side, fx.Node) and "tensor_meta" in side.meta for side in sides):
        return False
    return len({len(shape_of(side)) for side in sides}) == 1


def is_spatial(node: fx.Node) -> bool:
    """Whether a reduction leaves the batch and the channels alone."""
    dims = argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    rank = len(shape_of(node.all_input_nodes[0]))
    return bool(dims) and all(dim % rank >= 2 for dim in dims)


def function_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def name_of(node: fx.Node) -> str:
    """What an error calls an operation: a layer by its name, a function by the nearest layer before it."""
    if node.op == "call_module":
        return _layer_name(node)
    if node.op not in ("call_function", "call_method"):
        return function_of(node)
    before = list(node.all_input_nodes)
    for each in before:  # grows meanwhile, so that the nearest come first
        if each.op == "call_module":
            return f"{function_of(node)} after {_layer_name(each)}"
        before += [one for one in each.all_input_nodes if one not in before]
    return f"{function_of(node)} before any layer"


def _layer_name(node: fx.Node) -> str:
    graph = node.graph.owning_module
    assert graph is not None
    return f"{type(graph.get_submodule(str(node.target))).__name__} ({node.target})"


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, however it was given."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def unknown_operation(name: str, why: str = "is not known to the channel analysis") -> WrongInput:
    """The error for what the analysis cannot follow."""
    return WrongInput("model", f"{name} {why}; prune with l1-unstructured or with mask conv-only instead")
