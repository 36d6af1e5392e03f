"""A network as a client runs it, whose own tensors and settings are never touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.attacks.inversion.problem import evaluated
from secateur.interfaces import Params


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
