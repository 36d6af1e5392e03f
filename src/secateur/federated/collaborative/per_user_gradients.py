"""Layers on the batches of many users at once, with a separate parameter gradient for each user.

Batches are (users * B, ...), one user after the other. A backward writes the parameters' gradients, (users, ...), into
the tensors of `Layer` and returns none to autograd.

`fused` rewrites a network so that BatchNorm, the sum of a skip and ReLU are one call of `norm_relu`. Each of the three
is bound by memory, so one pass saves two.
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
    """The destination of a layer's gradients; None: the gradient is not needed."""

    users: int
    aside: Aside
    weight: Tensor | None  # (users, ...)
    bias: Tensor | None

    def rows(self, x: Tensor) -> Tensor:
        """Return (users, places, C) of an x with channels in the second axis; a view if x is channels_last."""
        return x.movedim(1, -1).reshape(self.users, -1, x.shape[1]).contiguous()


class Conv2d(Function):
    """F.conv2d; the users' gradients of the filters run beside the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, layer: Layer) -> Tensor:
        """Return the output."""
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.layer = geometry, layer
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Return the gradient with respect to x."""
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        geometry = Geometry(x.shape[2:], weight.shape[2:], *ctx.geometry)
        # in the memory format of x: each user's part is then contiguous, and no call copies it
        channels_last = x.is_contiguous(memory_format=torch.channels_last)
        g = g.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        if layer.weight is not None:
            parts = zip(layer.weight, g.chunk(layer.users), x.chunk(layer.users), strict=True)
            layer.aside([partial(_by_filters, *part, weight, geometry) for part in parts], g, x)
        if layer.bias is not None:
            layer.aside([lambda: layer.bias.copy_(layer.rows(g).sum(1))], g)
        return transposed(g, weight, geometry) if ctx.needs_input_grad[0] else None, None, None, None, None


class Linear(Function):
    """F.linear; the users' gradients of the weights are one batched matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        """Return the output."""
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Return the gradient with respect to x."""
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        grads, inputs = (value.reshape(layer.users, -1, value.shape[-1]) for value in (g, x))
        if layer.weight is not None:
            layer.aside([lambda: layer.weight.copy_(grads.mT @ inputs)], grads, inputs)
        if layer.bias is not None:
            layer.aside([lambda: layer.bias.copy_(grads.sum(1))], grads)
        return g @ weight if ctx.needs_input_grad[0] else None, None, None, None


class BatchNorm(Function):
    """F.batch_norm in training over each user's rows, with the optional skip and ReLU of `norm_relu`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None, relu: bool, eps: float, layer: Layer
    ) -> tuple[Tensor, ...]:
        """Return the output, and the users' mean and biased variance."""
        rows = layer.rows(x)
        out, moments = normalised(rows, weight, bias, eps, None if skip is None else layer.rows(skip), relu)
        out = _like(out, x).data  # not a view: the network may change the output in place
        ctx.by = relu, skip is not None
        ctx.save_for_backward(out if all(ctx.by) else bias, rows, *moments)
        ctx.layer = layer
        ctx.mark_non_differentiable(moments.mean, moments.var)
        return out, moments.mean, moments.var

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> Any:
        """Return the gradients with respect to x and the skip."""
        (out, rows, *moments), (relu, skips), layer = ctx.saved_tensors, ctx.by, ctx.layer
        if relu and skips:  # the skip needs this gradient in memory
            g = torch.ops.aten.threshold_backward(g, out, 0)
        inputs, weight, bias = returned(layer.rows(g), rows, Moments(*moments), out if relu and not skips else None)
        pairs = [(to, value) for to, value in ((layer.weight, weight), (layer.bias, bias)) if to is not None]
        layer.aside([partial(to.copy_, value) for to, value in pairs], weight, bias)
        return _like(inputs, g), None, None, g if skips else None, None, None, None


def _by_filters(into: Tensor, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> None:
    """Write one user's gradient of the filters: cuDNN sums over a batch, so every user is a call."""
    _, _, stride, padding, dilation, groups = geometry
    others = None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
    into.copy_(torch.ops.aten.convolution_backward(g, x, weight, *others)[1])


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """Return the result of `Layer.rows` in the shape of x."""
    return rows.view(len(x), *x.shape[2:], -1).movedim(-1, 1)


def norm_relu(x: Tensor, skip: Tensor | None, *norm: Any) -> Tensor:
    """Return ReLU(F.batch_norm(x, *norm) + skip); a torch function mode may compute it in one pass."""
    if has_torch_function((x,)):
        output: Tensor = handle_torch_function(norm_relu, (x,), x, skip, *norm)
        return output
    out = F.batch_norm(x, *norm)
    return F.relu(out if skip is None else out + skip)


def fused(net: nn.Module) -> nn.Module:
    """Return a copy of the network that calls `norm_relu` where possible, with the same names.

    Return the network itself if it cannot be traced.
    """
    copied = copy.deepcopy(net)
    try:
        graph = fx.Tracer().trace(copied)
    except Exception:  # a user's forward may do anything that a trace refuses
        return net
    modules = dict(copied.named_modules())
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in list(graph.nodes):
        norm = modules.get(node.target) if node.op == "call_module" else None
        if isinstance(norm, _BatchNorm) and calls[node.target] == 1 and _plain(norm) and len(node.args) == 1:
            _fuse(graph, node, norm, modules)
    rewritten = fx.GraphModule(copied, graph)
    same = {*_names(rewritten)} == {*_names(net)}  # a module that is never called would be left out
    return rewritten if same else net


def _plain(norm: _BatchNorm) -> bool:
    """Return True if the norm's forward is F.batch_norm in training and nothing else."""
    counts = norm.num_batches_tracked is not None
    return norm.training and not counts and norm.momentum is not None and not hooked(norm)


def _fuse(graph: fx.Graph, node: fx.Node, norm: _BatchNorm, modules: dict[str, nn.Module]) -> None:
    """Replace one norm, the sum after it if there is one, and the ReLU by one call; do nothing without a ReLU."""
    after, skip = _only_user(node), None
    sum_ = after
    if after is not None and (skip := _skip(after, node)) is not None:
        after = _only_user(after)
    if after is None or not _is_relu(after, modules):
        return
    with graph.inserting_before(after):
        after.replace_all_uses_with(graph.call_module(str(node.target), (node.args[0], skip)))
    for replaced in (after, sum_, node) if skip is not None else (after, node):
        assert replaced is not None
        graph.erase_node(replaced)
    norm.forward = partial(_forward, norm)  # type: ignore[method-assign]


def _only_user(node: fx.Node) -> fx.Node | None:
    """Return the only node that uses this node's output; None: there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _skip(node: fx.Node, norm: fx.Node) -> fx.Node | None:
    """Return the other term of a sum with the norm's output; None if there is none, or the sum overwrites that term."""
    if node.op != "call_function" or node.target not in SUMS or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    other = second if first is norm else first if node.target is not operator.iadd else None
    return other if isinstance(other, fx.Node) and other is not norm else None


def _is_relu(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return True if a node is a plain ReLU."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return type(module) is nn.ReLU and not hooked(module)
    return node.op == "call_function" and node.target in RELUS


def _forward(norm: _BatchNorm, x: Tensor, skip: Tensor | None) -> Tensor:
    """Run `norm_relu` with a norm's tensors."""
    running = norm.running_mean, norm.running_var
    return norm_relu(x, skip, *running, norm.weight, norm.bias, True, norm.momentum, norm.eps)


def hooked(module: nn.Module) -> bool:
    """Return True if a module has hooks on its inputs or outputs."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _names(net: nn.Module) -> list[str]:
    """Return the names of all parameters and buffers."""
    return [name for name, _ in [*net.named_parameters(), *net.named_buffers()]]
