"""Soteria: the gradient of one fully connected layer is pruned where its features give the input away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from secateur.attacks.inversion.problem import structure
from secateur.catalogue import method
from secateur.defenses.selection import counts, largest
from secateur.errors import WrongInput, unknown
from secateur.interfaces import Params, Turning

AT_ONCE = {"cpu": 64, "cuda": 4096}  # inputs times features whose gradients are held at a time
LEAST = 1e-10  # what is added to |r|


@method("defense", "soteria", "dgp", acts_on="upload", adaptive=("layer",))
@dataclass(frozen=True)
class Soteria:
    """Zeroes the columns of a fully connected layer's gradient whose features depend least on the input (Sun 2021).

    Acts on: the upload. A feature r_f, an input of the defended layer, has the score ||d r_f / d X|| / (|r_f| + 1e-10),
    added up over the batch; the columns of the `rate` lowest scores become zero, exactly int(rate F) of F. The
    Jacobian is taken for many features at once, where the authors' code goes backward once for each.
    """

    rate: float = 0.8
    layer: str | None = None  # its name in the model; None: the last fully connected one

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise WrongInput("rate", f"{self.rate} is not allowed; give a share from 0 up to, not including, 1")

    def init(self, params: Params) -> Params:
        """Nothing is kept."""
        return {}

    def __call__(self, grads: Params, state: Params, turning: Turning) -> tuple[Params, Params]:
        """The gradient with those columns at zero."""
        layer = defended_layer(turning.net, self.layer)
        name = f"{layer}.weight" if layer else "weight"
        if name not in grads:
            raise WrongInput("layer", f"{name} is frozen, so nothing of it is sent; name one that is trained: layer")
        found = scores(turning, layer)
        _, kept = counts(found.numel(), 0, self.rate)
        return grads | {name: torch.where(largest(found, kept), grads[name], 0)}, state


def defended_layer(net: nn.Module, asked: str | None) -> str:
    """The name of the fully connected layer that is asked for, or of the last one."""
    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise WrongInput("model", "has no fully connected layer, which soteria needs")
    if asked is not None and asked not in names:
        raise unknown("layer", asked, names)
    return names[-1] if asked is None else asked


def scores(turning: Turning, layer: str) -> Tensor:
    """(F,) the sum over the batch of ||d r_f / d X|| / (|r_f| + 1e-10)."""
    features_of, inputs = features(turning, layer), turning.batch.inputs
    found, back = vjp(features_of, inputs)  # type: ignore[misc]  # (B, F)
    if found.ndim != 2:
        raise WrongInput(
            "layer", f"{layer} has inputs of the shape {tuple(found.shape)}; soteria needs (batch, features)"
        )

    def norms(feature: Tensor) -> Tensor:
        """(B,) of one feature of every example, (F,) one-hot."""
        size: Tensor = torch.linalg.vector_norm(back(feature.expand_as(found))[0].flatten(1), dim=1)
        return size

    count = found.shape[1]
    every = torch.eye(count, dtype=found.dtype, device=found.device)
    chunk = max(1, AT_ONCE[inputs.device.type] // inputs.shape[0])
    sizes = torch.cat([vmap(norms)(some) for some in torch.split(every, chunk)])  # (F, B)
    total: Tensor = (sizes.T / (found.abs() + LEAST)).sum(0)
    return total.detach()


def features(turning: Turning, layer: str) -> Callable[[Tensor], Tensor]:
    """The inputs of a layer as a function of the network's."""
    net = structure(turning.net, turning.batchnorm)
    own = {name for name, _ in [*net.named_parameters(), *net.named_buffers()]}
    sent = {name: value.detach() for name, value in turning.sent.items() if name in own}

    def features_of(inputs: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = net.get_submodule(layer).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            functional_call(net, sent, (inputs,))
        finally:
            hook.remove()
        return seen[-1]

    return features_of
