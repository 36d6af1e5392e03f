"""Soteria: the gradient of one fully connected layer is pruned where its features give the input away."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.catalogue import method
from secateur.defenses.selection import counts, largest
from secateur.errors import WrongInput, unknown
from secateur.gpu.graphs import fast
from secateur.gpu.jacobian.network import Network, features
from secateur.gpu.memory import halving
from secateur.gpu.precision import tf32
from secateur.interfaces import Params, Turning

AT_ONCE = {"cpu": 32, "cuda": 4096}  # inputs times features whose gradients are held at a time
LEAST = 1e-10  # what is added to |r|


@method("defense", "soteria", "dgp", acts_on="upload", adaptive=("layer",))
@dataclass(frozen=True)
class Soteria:
    """Zeroes the columns of a fully connected layer's gradient whose features depend least on the input (Sun 2021).

    Acts on: the upload. A feature r_f, an input of the defended layer, has the score ||d r_f / d X|| / (|r_f| + 1e-10),
    added up over the batch; the columns of the `rate` lowest scores become zero, exactly int(rate F) of F. The
    Jacobian is taken for many features at once, where the authors' code goes backward once for each. On a GPU the
    gradients of a float32 network go back in TF32, each layer on their way right to 2^-9, and columns whose scores are
    as near as that may change places.
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
    inputs = turning.batch.inputs
    with fast():
        with tf32(False):  # it is cheap, and an r_f near 0 would be another
            found, back = features(network(turning), layer, inputs)  # (B, F)
        if found.ndim != 2:
            shape = tuple(found.shape)
            raise WrongInput("layer", f"{layer} has inputs of the shape {shape}; soteria needs (batch, features)")
        every = torch.arange(found.shape[1], device=found.device)

        def norms(some: Tensor) -> Tensor:
            """(K, B) of some features (K,)."""
            slopes = back(some)  # (K, B, ...)
            size: Tensor = torch.linalg.vector_norm(slopes, dim=tuple(range(2, slopes.ndim)))
            return size

        chunk = max(1, AT_ONCE[inputs.device.type] // inputs.shape[0])
        sizes = torch.cat([part for some in torch.split(every, chunk) for part in halving(norms, some)])  # (F, B)
    total: Tensor = (sizes.T / (found.abs() + LEAST)).sum(0)
    return total.detach()


def network(turning: Turning) -> Network:
    """The network that the client runs: its structure with what it was sent."""
    return Network(turning.net, turning.sent, turning.batchnorm)
