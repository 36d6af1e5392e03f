"""Soteria: pruning of one fully connected layer's gradient at the features that reveal the input."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.functional import one_hot

from secateur.catalogue import method
from secateur.defenses.selection import counts, mask_largest
from secateur.errors import WrongInput, check_number, unknown
from secateur.functional import make_static
from secateur.gpu.graphs import fast
from secateur.gpu.memory import halve_on_shortage, ran_out
from secateur.gpu.precision import tf32
from secateur.interfaces import Params, Upload, UploadContext

AT_ONCE = {"cpu": 64, "cuda": 4096}  # inputs times features whose gradients are held at a time
LEAST = 1e-10  # added to |r|
Back = Callable[[Tensor], Tensor]  # gradients by the features (K, B, F) -> by the inputs (K, B, ...)


@method(
    "defense",
    "soteria",
    "dgp",
    acts_on="upload",
    adaptive=("layer",),
    strongest="adaptive=layer, which leaves the defended layer out; rob never reads that layer",
)
@dataclass(frozen=True)
class Soteria(Upload):
    """Zeroes the columns of a fully connected layer's gradient whose features depend least on the input (Sun 2021).

    Acts on: the upload. A feature r_f, an input of the defended layer, has the score ||d r_f / d X|| / (|r_f| + 1e-10),
    summed over the batch. The columns of the `rate` lowest scores become zero, exactly int(rate F) of F. Gradients of
    many features are computed at once; the authors' code runs one backward pass per feature. On a GPU the gradients
    of a float32 network are computed in TF32, with each layer accurate to 2^-9. Columns whose scores are that close may
    change places.

    Equation: `score_f = |dr_f / dX| / (|r_f| + 1e-10); dL/dW[:, f] = 0 for the int(rate F) lowest`.
    """

    rate: float = 0.8
    layer: str | None = None  # name in the model; None: the last fully connected layer

    def __post_init__(self) -> None:
        check_number("rate", self.rate, "[0, 1)")

    def __call__(self, grads: Params, state: Params, context: UploadContext) -> tuple[Params, Params]:
        """Return the gradient with the lowest-scored columns zeroed."""
        layer = find_layer(context.net, self.layer)
        name = f"{layer}.weight" if layer else "weight"
        if name not in grads:
            raise WrongInput("layer", f"{name} is frozen, so nothing of it is sent; use the name of a trained layer")
        column_scores = scores(context, layer)
        _, kept = counts(column_scores.numel(), 0, self.rate)
        return grads | {name: torch.where(mask_largest(column_scores, kept), grads[name], 0)}, state


def find_layer(net: nn.Module, asked: str | None) -> str:
    """Return the name of the requested fully connected layer, or of the last one."""
    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not names:
        raise WrongInput("model", "has no fully connected layer, which soteria needs")
    if asked is not None and asked not in names:
        raise unknown("layer", asked, names)
    return names[-1] if asked is None else asked


def scores(context: UploadContext, layer: str) -> Tensor:
    """Return (F,) sums over the batch of ||d r_f / d X|| / (|r_f| + 1e-10).

    Many features share a backward pass under vmap. If vmap does not support the network, each has a pass of its own.
    """
    call, inputs = partial(features, context, layer), context.batch.inputs.detach()
    with fast():
        try:
            return sum_scores(by_vmap, call, inputs, layer)
        except RuntimeError as error:
            if ran_out(error):
                raise
        return sum_scores(one_by_one, call, inputs, layer)


def features(context: UploadContext, layer: str, inputs: Tensor) -> Tensor:
    """Return the inputs of a layer in the network that the client runs: its structure with the received tensors.

    A missing tensor is the structure's own. The network is a copy that draws nothing and updates no statistics.
    """
    seen: list[Tensor] = []
    shared = {id(tensor): tensor for tensor in chain(context.net.parameters(), context.net.buffers())}
    net = make_static(copy.deepcopy(context.net, dict(shared)), context.batchnorm)  # the copy shares the tensors
    net.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    named = chain(net.named_parameters(), net.named_buffers())
    tensors = {name: context.sent.get(name, tensor).detach() for name, tensor in named}
    functional_call(net, tensors, (inputs.clone(),))  # copies, because a forward may change its tensors in place
    return seen[-1]


def by_vmap(call: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Tensor, Back]:
    """Return the features, and their backward for many gradients at once."""
    values, pull = vjp(call, inputs)  # type: ignore[misc]
    return values, lambda gradients: vmap(pull)(gradients)[0]


def one_by_one(call: Callable[[Tensor], Tensor], inputs: Tensor) -> tuple[Tensor, Back]:
    """Return the features, and their backward by one pass per gradient."""
    with torch.enable_grad():
        leaf = inputs.clone().requires_grad_()
        values = call(leaf)
    grad = partial(torch.autograd.grad, values, leaf, retain_graph=True)
    return values.detach(), lambda gradients: torch.stack([grad(gradient)[0] for gradient in gradients])


def sum_scores(
    differentiate: Callable[..., tuple[Tensor, Back]], call: Callable[[Tensor], Tensor], inputs: Tensor, layer: str
) -> Tensor:
    """Return the scores (F,), with the features and their gradients by one of the two functions above."""
    with tf32(False):  # cheap, and TF32 would change an r_f near 0
        values, back = differentiate(call, inputs)  # (B, F)
    if values.ndim != 2:
        shape = tuple(values.shape)
        raise WrongInput("layer", f"{layer} has inputs of the shape {shape}; soteria needs (batch, features)")

    def norms(chosen: Tensor) -> Tensor:
        """Return the (K, B) norms of the features `chosen` (K,)."""
        ones = one_hot(chosen, values.shape[1]).to(values.dtype)
        slopes = back(ones[:, None].expand(-1, *values.shape))  # (K, B, ...)
        size: Tensor = torch.linalg.vector_norm(slopes, dim=tuple(range(2, slopes.ndim)))
        return size

    indices = torch.arange(values.shape[1], device=values.device)
    chunk = max(1, AT_ONCE[inputs.device.type] // inputs.shape[0])
    sizes = torch.cat(
        [part for chosen in torch.split(indices, chunk) for part in halve_on_shortage(norms, chosen)]
    )  # (F, B)
    total: Tensor = (sizes.T / (values.abs() + LEAST)).sum(0)
    return total.detach()
