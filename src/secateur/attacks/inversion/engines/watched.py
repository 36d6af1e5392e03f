"""A copy of a network whose layers note what they are given; and why some networks cannot be had that way."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from secateur.attacks.inversion.engines.layers import ConvLayer, Layer, LinearLayer, Tape
from secateur.attacks.inversion.engines.norms import NormLayer, batchnorm_layer
from secateur.attacks.inversion.problem import Problem

LAYERS: dict[type[nn.Module], Callable[[Any, Tape], Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv2d: ConvLayer,
    nn.BatchNorm1d: batchnorm_layer,
    nn.BatchNorm2d: batchnorm_layer,
    nn.GroupNorm: NormLayer,
    nn.LayerNorm: NormLayer,
}
UNTRACED = "its forward cannot be traced"


def supported(problem: Problem) -> str | None:
    """Why the layer-wise engine cannot take a problem; None where it can."""
    if problem.own_weights:
        return "every trial has weights of its own"
    if problem.steps > 1:
        return "local steps are unrolled"
    if problem.compression is not None:
        return "the trial's gradient is compressed"
    return _of_parameters(problem.net) or _of_calls(problem.net)


def _of_parameters(net: nn.Module) -> str | None:
    """Every parameter must lie in a known layer, and in one only."""
    seen: dict[int, str] = {}
    for name, value in net.named_parameters(remove_duplicate=False):
        owner = net.get_submodule(name.rpartition(".")[0])
        if type(owner) not in LAYERS:
            return f"the parameter {name} is in {type(owner).__name__}"
        if id(value) in seen:
            return f"the parameter {name} is also {seen[id(value)]}"
        seen[id(value)] = name
    for name, module in net.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"the module {name or 'itself'} has hooks"
    return None


def _of_calls(net: nn.Module) -> str | None:
    """Every layer must be called once, and no parameter be used around its layer; seen in a trace of the network."""
    whole = nn.Sequential(net)
    try:
        nodes = fx.Tracer().trace(whole).nodes
    except Exception as error:
        return f"{UNTRACED} ({type(error).__name__})"
    calls = Counter(str(node.target) for node in nodes if node.op == "call_module")
    names = dict(whole.named_parameters())
    for node in nodes:
        if node.op == "get_attr" and node.target in names:
            return f"the parameter {str(node.target)[2:]} is used outside of its layer"
        if node.op == "call_function" and node.target is F.batch_norm:
            return "its forward calls batch_norm, which would mix the trials"
    for name, module in whole.named_modules():
        if type(module) in LAYERS and calls[name] != 1:
            return f"the layer {name[2:] or 'itself'} is called {calls[name]} times"
    return None


def watched(problem: Problem, tape: Tape) -> tuple[nn.Module, dict[str, Layer]]:
    """A copy with the sent tensors, frozen and channels_last, and its layers by name; the given one is not touched."""
    net = copy.deepcopy(problem.net)
    layers = {}
    for name, module in net.named_modules():
        prefix = f"{name}." if name else ""
        for key in module._parameters:
            if prefix + key in problem.sent:
                value = problem.sent[prefix + key].detach()
                module._parameters[key] = nn.Parameter(value.contiguous(memory_format=layout(value)), False)
        for key in module._buffers:
            if prefix + key in problem.sent:
                module._buffers[key] = problem.sent[prefix + key].detach()
        if type(module) in LAYERS:
            layers[name] = LAYERS[type(module)](module, tape)
            module.forward = layers[name].forward
    return net, layers


def layout(x: Tensor) -> torch.memory_format:
    """How a tensor of this shape is laid out."""
    return torch.channels_last if x.ndim == 4 else torch.contiguous_format
