"""Soteria: pruning of one fully connected layer's gradient at the features that reveal the input."""

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
LEAST = 1e-10  # added to |r|


@method("defense", "soteria", "dgp", acts_on="upload", adaptive=("layer",))
@dataclass(frozen=True)
class Soteria:
    """Zeroes the columns of a fully connected layer's gradient whose features depend least on the input (Sun 2021).

    Acts on: the upload. A feature r_f, an input of the defended layer, has the score ||d r_f / d X|| / (|r_f| + 1e-10),
    summed over the batch. The columns of the `rate` lowest scores become zero, exactly int(rate F) of F. The Jacobian
    is computed for many features at once; the authors' code runs one backward pass per feature. On a GPU the gradients
    of a float32 network are computed in TF32, with each layer accurate to 2^-9. Columns whose scores are that close may
    change places.
    """

    rate: float = 0.8
    layer: str | None = None  # name in the model; None: the last fully connected layer

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise WrongInput("rate", f"{self.rate} is not allowed; give a share from 0 up to, not including, 1")

    def init(self, params: Params) -> Params:
        """Return an empty state."""
        return {}

    def __call__(self, grads: Params, state: Params, turning: Turning) -> tuple[Params, Params]:
        """Return the gradient with the lowest-scored columns zeroed."""
        layer = defended_layer(turning.net, self.layer)
        name = f"{layer}.weight" if layer else "weight"
        if name not in grads:
            raise WrongInput("layer", f"{name} is frozen, so nothing of it is sent; name one that is trained: layer")
        column_scores = scores(turning, layer)
        _, kept = counts(column_scores.numel(), 0, self.rate)
        return grads | {name: torch.where(largest(column_scores, kept), grads[name], 0)}, state


def defended_layer(net: nn.Module, asked: str | None) -> str:
    """Return the name of the requested fully connected layer, or of the last one."""
    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise WrongInput("model", "has no fully connected layer, which soteria needs")
    if asked is not None and asked not in names:
        raise unknown("layer", asked, names)
    return names[-1] if asked is None else asked


def scores(turning: Turning, layer: str) -> Tensor:
    """Return (F,) sums over the batch of ||d r_f / d X|| / (|r_f| + 1e-10)."""
    inputs = turning.batch.inputs
    with fast():
        with tf32(False):  # cheap, and TF32 would change an r_f near 0
            values, back = features(network(turning), layer, inputs)  # (B, F)
        if values.ndim != 2:
            shape = tuple(values.shape)
            raise WrongInput("layer", f"{layer} has inputs of the shape {shape}; soteria needs (batch, features)")
        indices = torch.arange(values.shape[1], device=values.device)

        def norms(chosen: Tensor) -> Tensor:
            """Return the (K, B) norms of the features `chosen` (K,)."""
            slopes = back(chosen)  # (K, B, ...)
            size: Tensor = torch.linalg.vector_norm(slopes, dim=tuple(range(2, slopes.ndim)))
            return size

        chunk = max(1, AT_ONCE[inputs.device.type] // inputs.shape[0])
        sizes = torch.cat([part for chosen in torch.split(indices, chunk) for part in halving(norms, chosen)])  # (F, B)
    total: Tensor = (sizes.T / (values.abs() + LEAST)).sum(0)
    return total.detach()


def network(turning: Turning) -> Network:
    """Return the network that the client runs: its structure with the received tensors."""
    return Network(turning.net, turning.sent, turning.batchnorm)
