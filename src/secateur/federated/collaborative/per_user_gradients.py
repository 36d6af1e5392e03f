"""Layers on the batches of many users at once that give each user a gradient of its own.

Batches are (users * B, ...), one user after the other. The gradients of the parameters are written where they belong,
(users, ...), and autograd is told of none.

BatchNorm, the sum of a skip and ReLU as one step of a network: each waits for memory, and so they wait once.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function

from secateur.gpu.batchnorm import Moments, normalised, returned
from secateur.gpu.graphs import Aside
from secateur.gpu.jacobian.convolutions import Geometry, transposed

SUMS = (operator.add, operator.iadd, torch.add)
RELUS = (F.relu, torch.relu)


class Layer(NamedTuple):
    """Where a layer's gradients belong; None: nobody asks."""

    users: int
    aside: Aside
    weight: Tensor | None  # (users, ...)
    bias: Tensor | None

    def rows(self, x: Tensor) -> Tensor:
        """(users, places, C), for channels in the second axis; of channels_last pictures it is a view."""
        return x.movedim(1, -1).reshape(self.users, -1, x.shape[1]).contiguous()


class Conv2d(Function):
    """F.conv2d; the users' gradients of the filters are taken beside the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, layer: Layer) -> Tensor:
        """The output."""
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.layer = geometry, layer
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """With respect to x."""
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        geometry = Geometry(x.shape[2:], weight.shape[2:], *ctx.geometry)
        # as x lies: a user's part of it is then whole, and no call copies it
        g = g.contiguous(memory_format=torch.channels_last if _channels_last(x) else torch.contiguous_format)
        if layer.weight is not None:
            parts = zip(layer.weight, g.chunk(layer.users), x.chunk(layer.users), strict=True)
            layer.aside([partial(_by_filters, *part, weight, geometry) for part in parts], g, x)
        if layer.bias is not None:
            layer.aside([lambda: layer.bias.copy_(layer.rows(g).sum(1))], g)
        return transposed(g, weight, geometry) if ctx.needs_input_grad[0] else None, None, None, None, None


class Linear(Function):
    """F.linear; the users' gradients of the weights are one product of many matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        """The output."""
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """With respect to x."""
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        own, inputs = (each.reshape(layer.users, -1, each.shape[-1]) for each in (g, x))
        if layer.weight is not None:
            layer.aside([lambda: layer.weight.copy_(own.mT @ inputs)], own, inputs)
        if layer.bias is not None:
            layer.aside([lambda: layer.bias.copy_(own.sum(1))], own)
        return g @ weight if ctx.needs_input_grad[0] else None, None, None, None


class BatchNorm(Function):
    """F.batch_norm in training, of a user's rows each, and what `norm_relu` adds to it; also mean and variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None, relu: bool, eps: float, layer: Layer
    ) -> tuple[Tensor, ...]:
        """The output, and the users' mean and biased variance."""
        rows = layer.rows(x)
        out, moments = normalised(rows, weight, bias, eps, None if skip is None else layer.rows(skip), relu)
        out = _like(out, x).data  # not a view: the network may change it in place
        ctx.by = relu, skip is not None
        ctx.save_for_backward(out if all(ctx.by) else bias, rows, *moments)
        ctx.layer = layer
        ctx.mark_non_differentiable(moments.mean, moments.var)
        return out, moments.mean, moments.var

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> Any:
        """With respect to x and the skip."""
        (out, rows, *moments), (relu, skips), layer = ctx.saved_tensors, ctx.by, ctx.layer
        if relu and skips:  # the skip needs it in memory
            g = torch.ops.aten.threshold_backward(g, out, 0)
        inputs, weight, bias = returned(layer.rows(g), rows, Moments(*moments), out if relu and not skips else None)
        pairs = [(to, value) for to, value in ((layer.weight, weight), (layer.bias, bias)) if to is not None]
        layer.aside([partial(to.copy_, value) for to, value in pairs], weight, bias)
        return _like(inputs, g), None, None, g if skips else None, None, None, None


def _by_filters(into: Tensor, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> None:
    """One user's gradient: cuDNN gives the sum over a batch, so every user is a call."""
    _, _, stride, padding, dilation, groups = geometry
    others = None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
    into.copy_(torch.ops.aten.convolution_backward(g, x, weight, *others)[1])


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """`Layer.rows` of an x, in its shape."""
    return rows.view(len(x), *x.shape[2:], -1).movedim(-1, 1)


def _channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def norm_relu(x: Tensor, skip: Tensor | None, *norm: Any) -> Tensor:
    """ReLU of what F.batch_norm makes of x and the arguments after it, plus the skip; a mode may do it in one pass."""
    if has_torch_function((x,)):
        found: Tensor = handle_torch_function(norm_relu, (x,), x, skip, *norm)
        return found
    out = F.batch_norm(x, *norm)
    return F.relu(out if skip is None else out + skip)


def fused(net: nn.Module) -> nn.Module:
    """A copy that calls `norm_relu` where it can, by the same names; the network itself where it cannot be traced."""
    copied = copy.deepcopy(net)
    try:
        graph = fx.Tracer().trace(copied)
    except Exception:  # whatever a forward of the user's does that is not for a trace
        return net
    modules = dict(copied.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in list(graph.nodes):
        norm = modules.get(node.target) if node.op == "call_module" else None
        if isinstance(norm, _BatchNorm) and calls[node.target] == 1 and _plain(norm) and len(node.args) == 1:
            _fuse(graph, node, norm, modules)
    made = fx.GraphModule(copied, graph)
    return made if {*_names(made)} == {*_names(net)} else net  # a part that is never called would be left out


def _names(net: nn.Module) -> list[str]:
    return [name for name, _ in [*net.named_parameters(), *net.named_buffers()]]


def _fuse(graph: fx.Graph, node: fx.Node, norm: _BatchNorm, modules: dict[str, nn.Module]) -> None:
    after, skip = _only_user(node), None
    sum_ = after
    if after is not None and (skip := _skip(after, node)) is not None:
        after = _only_user(after)
    if after is None or not _is_relu(after, modules):
        return
    with graph.inserting_before(after):
        after.replace_all_uses_with(graph.call_module(str(node.target), (node.args[0], skip)))
    for each in (after, sum_, node) if skip is not None else (after, node):
        assert each is not None
        graph.erase_node(each)
    norm.forward = partial(_forward, norm)  # type: ignore[method-assign]


def _forward(norm: _BatchNorm, x: Tensor, skip: Tensor | None) -> Tensor:
    running = norm.running_mean, norm.running_var
    return norm_relu(x, skip, *running, norm.weight, norm.bias, True, norm.momentum, norm.eps)


def _plain(norm: _BatchNorm) -> bool:
    """Whether its forward is F.batch_norm in training and nothing else."""
    counts = norm.num_batches_tracked is not None
    return norm.training and not counts and norm.momentum is not None and not hooked(norm)


def hooked(module: nn.Module) -> bool:
    """Whether somebody looks at what it is given or gives."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _skip(node: fx.Node, norm: fx.Node) -> fx.Node | None:
    """What is added to the norm's output, where that is all the node does; in place it must be to that output."""
    if node.op != "call_function" or node.target not in SUMS or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    other = second if first is norm else first if node.target is not operator.iadd else None
    return other if isinstance(other, fx.Node) and other is not norm else None


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        module = modules[str(node.target)]
        return type(module) is nn.ReLU and not hooked(module)
    return node.op == "call_function" and node.target in RELUS
