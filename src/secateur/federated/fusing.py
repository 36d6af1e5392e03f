"""BatchNorm, the sum of a skip and ReLU as one step of a network: each waits for memory, and so they wait once."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import handle_torch_function, has_torch_function

SUMS = (operator.add, operator.iadd, torch.add)
RELUS = (F.relu, torch.relu)


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
