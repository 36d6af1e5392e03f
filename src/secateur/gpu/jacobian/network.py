"""Features of a network, the inputs of one of its layers, and their gradients for many features at a time.

The forward is traced once for each network. The network's own tensors and settings are never changed.
"""

from __future__ import annotations

import copy
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from secateur.functional import evaluated
from secateur.gpu.jacobian.flows import Flow, Lone, laid_out, parted
from secateur.gpu.jacobian.layers import RULES, Back, Rule, added, by_vjp, flatten, identity, plain_copy
from secateur.interfaces import Params

ADDITIONS = (operator.add, operator.iadd, torch.add)
CHANGING = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
Pull = Callable[[Tensor], Tensor]  # features (K,) -> their gradients by the inputs (K, B, ...)
Modules = tuple[tuple[str, int, type[nn.Module]], ...]
_seen: WeakKeyDictionary[nn.Module, dict[tuple[str, str], tuple[Modules, Traced | None]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Network:
    """Structure of a network, the tensors that were sent for it, and the statistics that its BatchNorms use."""

    net: nn.Module
    sent: Params  # a missing tensor is the structure's own
    batchnorm: Literal["eval", "batch"]

    def tensor(self, own: Tensor | None) -> Tensor | None:
        """Return the tensor that replaces one of the structure; None for statistics that are not used."""
        return self._instead.get(id(own), own)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by name."""
        return dict(self.net.named_modules())

    @cached_property
    def _instead(self) -> dict[int, Tensor | None]:
        """The replacements by the identity of the tensors: a tied tensor has two modules and one name."""
        instead: dict[int, Tensor | None] = {}
        for path, module in self.modules.items():
            unused = self.batchnorm == "batch" and isinstance(module, _BatchNorm)
            for name, own in chain(module._parameters.items(), module._buffers.items()):
                if own is not None and id(own) not in instead:  # a tied tensor is sent under its first name
                    now = self.sent.get(f"{path}.{name}" if path else name, own)
                    instead[id(own)] = None if unused and name in module._buffers else now.detach()
        return instead

    def copied(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module that draws nothing and keeps no statistics; its tensors are shared."""
        shared = {id(own): own for own in chain(module.parameters(), module.buffers())}
        return evaluated(copy.deepcopy(module, dict(shared)), self.batchnorm)

    def call(self, module: nn.Module) -> Callable[..., Any]:
        """Return a module as a function with the sent tensors; `module` may be a copy."""
        named = chain(module.named_parameters(), module.named_buffers())
        tensors = {name: value for name, own in named if (value := self.tensor(own)) is not None}
        return lambda *args, **kwargs: functional_call(module, tensors, args, kwargs)

    def given(self, layer: str, inputs: Tensor) -> Tensor:
        """Return the inputs of a layer, by the network's own forward."""
        seen: list[Tensor] = []
        copied = self.copied(self.net)
        copied.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        self.call(copied)(inputs)
        return seen[-1]


class Untraceable(Exception):
    """Error: the network's forward is not a list of steps with one tensor each."""


class Traced(NamedTuple):
    """Steps of a traced forward, which name modules and tensors and hold none."""

    nodes: list[fx.Node]  # from the inputs up to, not including, the layer's last call
    end: fx.Node  # its value is the layer's inputs


class Step(NamedTuple):
    """One step of the forward and its backward."""

    output: fx.Node
    inputs: list[fx.Node]
    back: Back


def features(network: Network, layer: str, inputs: Tensor) -> tuple[Tensor, Pull]:
    """Return the inputs of a layer (B, F), and the function that gives their gradients.

    The gradients are computed step by step, or by torch.func if the network cannot be traced.
    """
    inputs = laid_out(inputs.detach())
    try:
        walk = Walk(network, traced(network, layer))
        return walk.forward(inputs), walk.back
    except Untraceable:
        values, back = by_vjp(partial(network.given, layer), [inputs])
        return values, lambda rows: parted(back(setting_out(rows, values))[0].whole(), len(inputs))


def setting_out(rows: Tensor, found: Tensor) -> Flow:
    """Return the gradients of some features (K,) by all features, `found` (B, F): where the backward starts."""
    return Flow((Lone(found.new_ones(len(rows) * len(found), 1), rows, found.shape[1]),))


class Walk:
    """Traced forward that records its backward."""

    def __init__(self, network: Network, trace: Traced) -> None:
        self.network, self.trace = network, trace
        self.steps: list[Step] = []
        self.values: dict[fx.Node, Any] = {}

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs of the layer."""
        self.start, self.batch = self.trace.nodes[0], len(inputs)
        self.values, moved = {self.start: inputs}, {self.start}
        for node in self.trace.nodes[1:]:
            sources = [source for source in node.all_input_nodes if source in moved]
            if sources:
                self._check_in_place(node)
            value = self.values[node] = self._step(node, sources) if sources else self._value(node)
            if sources and isinstance(value, Tensor) and value.is_floating_point():
                moved.add(node)
        end = self.values[self.trace.end]
        if not isinstance(end, Tensor):
            raise Untraceable
        self.values, self.end = {}, end
        return end

    @torch.no_grad()
    def back(self, rows: Tensor) -> Tensor:
        """Return the gradients (K, B, ...) of some features (K,) by the inputs."""
        flows = {self.trace.end: setting_out(rows, self.end)}
        for output, inputs, back in reversed(self.steps):
            if (flow := flows.pop(output, None)) is not None:
                for node, part in zip(inputs, back(flow), strict=True):
                    flows[node] = flows[node].joined(part) if node in flows else part
        return parted(flows[self.start].whole(), self.batch)

    def _step(self, node: fx.Node, sources: list[fx.Node]) -> Any:
        """Return the value of a node that depends on the inputs, and record its backward."""
        ruled = self._ruled(node)
        if ruled is not None:
            sources = [source for source in node.args if isinstance(source, fx.Node)]
        else:
            once = self._value(node, {source: plain_copy(self.values[source]) for source in sources})
            if not isinstance(once, Tensor) or once.ndim == 0:
                if any(isinstance(leaf, Tensor) for leaf in tree_leaves(once)):
                    raise Untraceable
                return once  # such as a size
            if not once.is_floating_point():
                return once
            tensors = [self.values[source] for source in sources]
            ruled = by_vjp(lambda *some: self._value(node, dict(zip(sources, some, strict=True))), tensors)
        self.steps.append(Step(node, sources, ruled[1]))
        return ruled[0]

    def _ruled(self, node: fx.Node) -> tuple[Tensor, Back] | None:
        """Return a node's value and its backward by a layer's rule; None if there is no rule."""
        if node.kwargs or not all(isinstance(argument, fx.Node) for argument in node.args):
            return None
        values = [self.values[source] for source in node.all_input_nodes]
        if node.op == "call_function" and node.target in ADDITIONS and len(values) == 2:
            return added(*values) if _alike(*values) else None
        rule = self._rule(node)
        return rule(self._module(node), values[0], self.network.tensor) if rule and len(values) == 1 else None

    def _value(self, node: fx.Node, instead: Mapping[fx.Node, Tensor] | None = None) -> Any:
        """Return the value of a node, with other values in place of some inputs."""
        values = ChainMap(dict(instead or {}), self.values)
        if node.op == "placeholder":
            return node.args[0] if node.args else None  # a further argument's default
        if node.op == "get_attr":
            return self.network.tensor(attrgetter(str(node.target))(self.network.net))
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        module = self._module(node)
        call: Any = node.target if module is None else self.network.call(self.network.copied(module))
        return call(*args, **kwargs)

    def _module(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls."""
        return self.network.modules[str(node.target)] if node.op == "call_module" else None

    def _check_in_place(self, node: fx.Node) -> None:
        """Refuse a node that changes a value in place if another node may read that value."""
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        if "out" in node.kwargs or name.endswith("_"):
            raise Untraceable
        inplace = getattr(self._module(node), "inplace", False) or node.kwargs.get("inplace", False)
        if not inplace and node.target not in CHANGING:
            return
        changed = node.args[0] if node.args else None
        if not isinstance(changed, fx.Node) or len(changed.users) > 1 or not self._is_new(changed):
            raise Untraceable

    def _is_new(self, node: fx.Node) -> bool:
        """Return True if the node's value lies in new memory; a view's does not."""
        return node.target in ADDITIONS or self._rule(node) not in (None, identity, flatten)

    def _rule(self, node: fx.Node) -> Rule | None:
        """Return the rule of a node's module; None for a module with hooks or of an unknown type."""
        module = self._module(node)
        hooked = module is None or module._forward_hooks or module._forward_pre_hooks
        return None if module is None or hooked else RULES.get(type(module))


def _alike(first: Any, second: Any) -> bool:
    """Return True if both are tensors of one shape and dtype, so that adding them broadcasts neither."""
    tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    return tensors and first.shape == second.shape and first.dtype == second.dtype


def traced(network: Network, layer: str) -> Traced:
    """Return the steps of the forward, cached while the network lives and has the same modules under the same names.

    The forward of the same modules must take the same steps. If it branches by an attribute, such as
    `if self.depth > 3`, a later change of the attribute is not seen. Settings of layers are not part of the steps.
    """
    modules = tuple((name, id(module), type(module)) for name, module in network.modules.items())
    cached, key = _seen.setdefault(network.net, {}), (layer, network.batchnorm)
    if key not in cached or cached[key][0] != modules:
        cached[key] = modules, _trace(network, layer)
    if (steps := cached[key][1]) is None:
        raise Untraceable
    return steps


def _trace(network: Network, layer: str) -> Traced | None:
    """Return the steps of the forward up to a layer; None if it cannot be traced."""
    copied = network.copied(network.net)
    before = set(vars(copied))
    try:
        with torch.enable_grad():
            nodes = list(_Tracer().trace(copied).nodes)
    except Exception:  # a user's forward may raise anything on proxies
        return None
    calls = [node for node in nodes if node.op == "call_module" and node.target == layer]
    if not calls or not calls[-1].args or not isinstance(calls[-1].args[0], fx.Node):
        return None
    if set(vars(copied)) != before:  # the forward stored a tensor, which may differ the next time
        return None
    return Traced(nodes[: nodes.index(calls[-1])], calls[-1].args[0])


class _Tracer(fx.Tracer):
    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuse a step that the forward takes without gradients, which a trace does not show."""
        if not torch.is_grad_enabled():
            raise Untraceable
        return super().create_node(*args, **kwargs)
