"""A network up to what one of its layers is given, and the way back from there for many features at a time.

The steps of its forward are found once for each network, whose own tensors and settings are never touched.
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


@dataclass(frozen=True)
class Network:
    """The structure, the tensors that were sent for it, and by which statistics its BatchNorms normalise."""

    net: nn.Module
    sent: Params  # what is missing is the structure's own
    batchnorm: Literal["eval", "batch"]

    def tensor(self, own: Tensor | None) -> Tensor | None:
        """What counts in place of a tensor of the structure: None for statistics that are not used."""
        return self._instead.get(id(own), own)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """By name."""
        return dict(self.net.named_modules())

    @cached_property
    def _instead(self) -> dict[int, Tensor | None]:
        """By the identity of the structure's tensors, as a tensor may be tied to two places under one name."""
        instead: dict[int, Tensor | None] = {}
        for place, module in self.modules.items():
            unused = self.batchnorm == "batch" and isinstance(module, _BatchNorm)
            for name, own in chain(module._parameters.items(), module._buffers.items()):
                if own is not None and id(own) not in instead:  # a tied one is sent under its first name
                    now = self.sent.get(f"{place}.{name}" if place else name, own)
                    instead[id(own)] = None if unused and name in module._buffers else now.detach()
        return instead

    def copied(self, module: nn.Module) -> nn.Module:
        """One of its modules, or all of it, that draws nothing and keeps no statistics; its tensors are not copied."""
        shared = {id(own): own for own in chain(module.parameters(), module.buffers())}
        return evaluated(copy.deepcopy(module, dict(shared)), self.batchnorm)

    def call(self, module: nn.Module) -> Callable[..., Any]:
        """One of its modules as a function, with what was sent; `module` may be a copy."""
        named = chain(module.named_parameters(), module.named_buffers())
        tensors = {name: value for name, own in named if (value := self.tensor(own)) is not None}
        return lambda *args, **kwargs: functional_call(module, tensors, args, kwargs)

    def given(self, layer: str, inputs: Tensor) -> Tensor:
        """What a layer is given, by the network's own forward."""
        seen: list[Tensor] = []
        copied = self.copied(self.net)
        copied.get_submodule(layer).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        self.call(copied)(inputs)
        return seen[-1]


class Untraceable(Exception):
    """The network's forward is no list of steps that give one tensor each."""


class Traced(NamedTuple):
    """Steps, which name modules and tensors and hold none."""

    nodes: list[fx.Node]  # from the inputs up to, not including, the layer's last call
    end: fx.Node  # gives what the layer is given


Modules = tuple[tuple[str, int, type[nn.Module]], ...]
_seen: WeakKeyDictionary[nn.Module, dict[tuple[str, str], tuple[Modules, Traced | None]]] = WeakKeyDictionary()


def traced(network: Network, layer: str) -> Traced:
    """The steps, which are kept while the network lives and has the same modules under the same names.

    Assumed is that its forward then takes the same steps: where it branches by a number of its own, such as
    `if self.depth > 3`, a number that is changed later is not seen. Settings of the layers are no part of the steps.
    """
    modules = tuple((name, id(module), type(module)) for name, module in network.modules.items())
    kept, key = _seen.setdefault(network.net, {}), (layer, network.batchnorm)
    if key not in kept or kept[key][0] != modules:
        kept[key] = modules, _trace(network, layer)
    if (found := kept[key][1]) is None:
        raise Untraceable
    return found


class _Tracer(fx.Tracer):
    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuse what a forward does without gradients, as a trace would not show that."""
        if not torch.is_grad_enabled():
            raise Untraceable
        return super().create_node(*args, **kwargs)


def _trace(network: Network, layer: str) -> Traced | None:
    copied = network.copied(network.net)
    before = set(vars(copied))
    try:
        with torch.enable_grad():
            nodes = list(_Tracer().trace(copied).nodes)
    except Exception:  # whatever the user's own forward raises on proxies
        return None
    calls = [node for node in nodes if node.op == "call_module" and node.target == layer]
    if not calls or not calls[-1].args or not isinstance(calls[-1].args[0], fx.Node):
        return None
    if set(vars(copied)) != before:  # a tensor that the forward made, which may be another the next time
        return None
    return Traced(nodes[: nodes.index(calls[-1])], calls[-1].args[0])


class Step(NamedTuple):
    """One step of the forward and the way back through it."""

    output: fx.Node
    inputs: list[fx.Node]
    back: Back


def features(network: Network, layer: str, inputs: Tensor) -> tuple[Tensor, Pull]:
    """What a layer is given (B, F), and the way back: step by step, or by torch.func where the net cannot be traced."""
    inputs = laid_out(inputs.detach())
    try:
        walk = Walk(network, traced(network, layer))
        return walk.forward(inputs), walk.back
    except Untraceable:
        found, back = by_vjp(partial(network.given, layer), [inputs])
        return found, lambda rows: parted(back(setting_out(rows, found))[0].whole(), len(inputs))


def setting_out(rows: Tensor, found: Tensor) -> Flow:
    """The gradients of some features by all of them, found (B, F)."""
    return Flow((Lone(found.new_ones(len(rows) * len(found), 1), rows, found.shape[1]),))


class Walk:
    """The traced forward, which notes the way back as it goes."""

    def __init__(self, network: Network, trace: Traced) -> None:
        self.network, self.trace = network, trace
        self.steps: list[Step] = []
        self.values: dict[fx.Node, Any] = {}

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """What the layer is given."""
        self.start, self.batch = self.trace.nodes[0], len(inputs)
        self.values, moved = {self.start: inputs}, {self.start}
        for node in self.trace.nodes[1:]:
            places = [each for each in node.all_input_nodes if each in moved]
            if places:
                self._check_in_place(node)
            value = self.values[node] = self._step(node, places) if places else self._value(node)
            if places and isinstance(value, Tensor) and value.is_floating_point():
                moved.add(node)
        found = self.values[self.trace.end]
        if not isinstance(found, Tensor):
            raise Untraceable
        self.values, self.found = {}, found
        return found

    @torch.no_grad()
    def back(self, rows: Tensor) -> Tensor:
        """(K, B, ...) the gradients of some features (K,) by the inputs."""
        flows = {self.trace.end: setting_out(rows, self.found)}
        for output, inputs, back in reversed(self.steps):
            if (flow := flows.pop(output, None)) is not None:
                for node, part in zip(inputs, back(flow), strict=True):
                    flows[node] = flows[node].joined(part) if node in flows else part
        return parted(flows[self.start].whole(), self.batch)

    def _step(self, node: fx.Node, places: list[fx.Node]) -> Any:
        """The value of a node that the inputs move; the way back is noted."""
        ruled = self._ruled(node)
        if ruled is not None:
            places = [each for each in node.args if isinstance(each, fx.Node)]
        else:
            once = self._value(node, {each: plain_copy(self.values[each]) for each in places})
            if not isinstance(once, Tensor) or once.ndim == 0:
                if any(isinstance(leaf, Tensor) for leaf in tree_leaves(once)):
                    raise Untraceable
                return once  # such as a size
            if not once.is_floating_point():
                return once
            tensors = [self.values[each] for each in places]
            ruled = by_vjp(lambda *some: self._value(node, dict(zip(places, some, strict=True))), tensors)
        self.steps.append(Step(node, places, ruled[1]))
        return ruled[0]

    def _ruled(self, node: fx.Node) -> tuple[Tensor, Back] | None:
        """By a rule, where there is one for it."""
        if node.kwargs or not all(isinstance(each, fx.Node) for each in node.args):
            return None
        values = [self.values[each] for each in node.all_input_nodes]
        if node.op == "call_function" and node.target in ADDITIONS and len(values) == 2:
            return added(*values) if _alike(*values) else None
        rule = self._rule(node)
        return rule(self._module(node), values[0], self.network.tensor) if rule and len(values) == 1 else None

    def _value(self, node: fx.Node, instead: Mapping[fx.Node, Tensor] | None = None) -> Any:
        """What a node gives, with other values in place of some."""
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
        return self.network.modules[str(node.target)] if node.op == "call_module" else None

    def _check_in_place(self, node: fx.Node) -> None:
        """Refuse what changes a value that something else may look at."""
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
        """Whether its value lies in memory of its own; a view's does not."""
        return node.target in ADDITIONS or self._rule(node) not in (None, identity, flatten)

    def _rule(self, node: fx.Node) -> Rule | None:
        """Of a module that does what its type says."""
        module = self._module(node)
        hooked = module is None or module._forward_hooks or module._forward_pre_hooks
        return None if module is None or hooked else RULES.get(type(module))


def _alike(first: Any, second: Any) -> bool:
    """Whether both are tensors of one shape and type, so that adding them spreads neither."""
    tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    return tensors and first.shape == second.shape and first.dtype == second.dtype
