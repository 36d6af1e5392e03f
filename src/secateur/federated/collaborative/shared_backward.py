"""The gradients of all users at one shared model, by one forward and one backward over all of their batches.

The users share every weight. So a layer of ten batches is one product that fills a GPU, and so is the gradient with
respect to its inputs. Two parts are computed by user: BatchNorm's statistics, and the gradients of the weights. The
latter run beside the backward, as no other operation waits for them.

`OneBatch` runs the backward, and compares its first result with one backward for each user. `Layers` replaces the
layers of the forward by those of per_user_gradients.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from secateur.federated.collaborative.flat_tensors import Statistics
from secateur.federated.collaborative.per_user_gradients import BatchNorm, Conv2d, Layer, Linear, fused, norm_relu
from secateur.federated.collaborative.plan import Found, Given
from secateur.functional import Functional
from secateur.gpu.graphs import Aside, cudnn_chooses
from secateur.gpu.precision import tf32
from secateur.interfaces import Loss, Params

BRANCHES = 5  # streams beside the backward
TOLERANCE = 1e-3  # relative; two orders of the same float32 sums differ by 1e-5
# shares of a tensor's gradient (ReLUs that change sign near 0 are .01), and of the gradient of all tensors
LOOSE, ROUNDING = 0.2, 1e-5


class OneBatch:
    """One forward and one backward for all users, for the networks that allow it.

    The first step compares the result with one backward for each user. The comparison refuses a network that

    - uses a parameter other than once in a known layer,
    - mixes examples other than by nn.BatchNorm, or has them in another axis than the first,
    - is traced without parts of its forward, such as torch.no_grad.
    """

    def __init__(self, learner: Functional, loss: Loss, users: int, device: torch.device) -> None:
        self.learner, self.loss, self.users = learner, loss, users
        self.together = copy.copy(learner)
        self.together.structure = fused(learner.structure)
        self.aside = Aside(min(BRANCHES, users), device)
        self.fits: bool | None = None  # not known before the first step

    def takes(self, leaves: Params, statistics: Statistics, given: list[Given], by_user: Callable[[], Found]) -> bool:
        """Return True if this is right for these batches, which must be of one size; the first ones are compared."""
        if len({user.batch.size for user in given}) > 1:
            return False
        if self.fits is None:
            self.fits = self._agrees(leaves, statistics, given, by_user)
        return self.fits

    def __call__(self, leaves: Params, running: Params, given: list[Given], into: Params) -> Tensor | None:
        """Return the (users,) losses; write the gradients into `into` and BatchNorm's update into `running`.

        Both have shapes (users, ...). Return None if autograd finds a gradient outside of the known layers.
        """
        with self.aside:
            outputs, unused = self._outputs(leaves, running, given, into)
            losses = self._losses(outputs, torch.cat([user.batch.labels for user in given]))
            missed = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        for name in unused:
            into[name].zero_()
        if any(value is not None for value in missed):
            self.fits = False
            return None
        return losses.detach()

    def _outputs(self, leaves: Params, running: Params, given: list[Given], into: Params) -> tuple[Tensor, list[str]]:
        """Return the outputs for all batches, and the names of parameters without a known layer."""
        tensors = leaves | {name: value[0] for name, value in running.items()}
        layers = Layers(self.users, self.aside, leaves, into, {id(tensors[n]): value for n, value in running.items()})
        dropout = [torch.cat(values) for values in zip(*(user.dropout for user in given), strict=True)]
        with layers:
            outputs = self.together(tensors, torch.cat([user.batch.inputs for user in given]), dropout)
        return outputs, list(layers.names.values())

    def _losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the (users,) losses."""
        if self.loss is F.cross_entropy:
            return F.cross_entropy(outputs, labels, reduction="none").view(self.users, -1).mean(1)
        parts = zip(outputs.chunk(self.users), labels.chunk(self.users), strict=True)
        return torch.stack([self.loss(*part) for part in parts])

    def _agrees(self, leaves: Params, statistics: Statistics, given: list[Given], by_user: Callable[[], Found]) -> bool:
        """Return True if each user's loss, gradient and buffers are the same without the other users."""
        buffers = statistics.copies()
        room = {name: value.new_zeros(self.users, *value.shape) for name, value in leaves.items()}
        with tf32(False), cudnn_chooses(by_timing=False):
            alone = by_user()
            try:
                losses = self(leaves, statistics.views(buffers), given, room)
            except Exception:  # such as a network that takes batches of one size only
                return False
        if losses is None:
            return False
        expected = [torch.stack(alone.losses), *statistics.taken(alone.buffers)]
        grads = [{name: value[user] for name, value in room.items()} for user in range(self.users)]
        return all(map(_close, [losses, *statistics.taken(buffers)], expected)) and all(map(_alike, grads, alone.grads))


class Layers(TorchFunctionMode):
    """A torch function mode that replaces the known layers of a forward by those with a gradient for each user.

    `names` holds the parameters that no known layer has used yet. A parameter counts as known once. If it is used
    again, or by an unknown function, autograd finds its gradient over all users together.
    """

    def __init__(self, users: int, aside: Aside, leaves: Params, into: Params, running: dict[int, Tensor]) -> None:
        super().__init__()
        self.users, self.aside, self.into = users, aside, into
        self.running = running  # (users, C) by the id of the tensor that the network holds
        self.names = {id(value): name for name, value in leaves.items()}
        self.known: dict[Any, Callable[..., Tensor | None]] = {
            F.conv2d: self._conv2d,
            F.linear: self._linear,
            F.batch_norm: self._batch_norm,
            norm_relu: self._norm_relu,
        }

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = self.known[func](*args, **kwargs) if func in self.known else None
        return func(*args, **kwargs) if output is None else output

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        layer = None if isinstance(padding, str) or input.ndim != 4 else self._layer_of(weight, bias)
        if layer is None:
            return None
        geometry = [(size,) * 2 if isinstance(size, int) else tuple(size) for size in (stride, padding, dilation)]
        return _called(Conv2d, input, weight, bias, (*geometry, groups), layer)[0]

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        layer = self._layer_of(weight, bias)
        return None if layer is None else _called(Linear, input, weight, bias, layer)[0]

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *,
        skip: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor | None:
        held = [value for value in (running_mean, running_var) if value is not None]
        running = [self.running[id(value)] for value in held if id(value) in self.running]
        layer = self._layer_of(weight, bias) if training and len(running) == len(held) else None
        if layer is None:
            return None
        weight = input.new_ones(input.shape[1]) if weight is None else weight
        bias = input.new_zeros(input.shape[1]) if bias is None else bias
        out, mean, var = _called(BatchNorm, input, weight, bias, skip, relu, eps, layer)
        if running:
            places = input.numel() // mean.numel()
            self.aside([partial(_track, running, mean, var, places, momentum)], mean, var)
        return out

    def _norm_relu(self, x: Tensor, skip: Tensor | None, *norm: Any) -> Tensor | None:
        if skip is None or skip.shape == x.shape:
            return self._batch_norm(x, *norm, skip=skip, relu=True)
        out = self._batch_norm(x, *norm)
        return None if out is None else F.relu(out + skip)

    def _layer_of(self, weight: Tensor | None, bias: Tensor | None) -> Layer | None:
        """Return where a layer's gradients go; None if a parameter is not the network's, or was used before."""
        learnt = [value for value in (weight, bias) if value is not None and value.requires_grad]
        if any(id(value) not in self.names for value in learnt):
            return None
        names = {id(value): self.names.pop(id(value)) for value in learnt}
        to = [self.into[names[id(value)]] if id(value) in names else None for value in (weight, bias)]
        return Layer(self.users, self.aside, *to)


def _called(function: type[Function], *args: Any) -> tuple[Tensor, ...]:
    """Apply an autograd function, and return its outputs as a tuple."""
    outputs = function.apply(*args)  # type: ignore[no-untyped-call]
    return outputs if isinstance(outputs, tuple) else (outputs,)


@torch.no_grad()
def _track(running: Sequence[Tensor], mean: Tensor, var: Tensor, places: int, momentum: float) -> None:
    """Update running mean and variance in place."""
    unbiased = var * (places / (places - 1))
    for old, new in zip(running, (mean, unbiased), strict=True):
        old.lerp_(new, momentum)


def _close(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal up to TOLERANCE."""
    one, other = one.double(), other.double()
    return one.shape == other.shape and bool((one - other).norm() <= TOLERANCE * other.norm())


def _alike(one: Params, other: Params) -> bool:
    """Return True if gradients agree, tensor by tensor; of a bias before BatchNorm only rounding is left."""
    distances = torch.stack([(one[name] - value).norm() for name, value in other.items()])
    sizes = torch.stack([value.norm() for value in other.values()])
    return bool((distances <= LOOSE * sizes + ROUNDING * sizes.norm()).all())
