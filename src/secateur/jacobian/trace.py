"""The steps of a network's forward up to one of its layers, found once for each network."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from secateur.jacobian.network import Network


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
