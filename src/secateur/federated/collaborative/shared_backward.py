"""The gradients of all users at one shared model, by one forward and one backward over all of their batches.

The users share every weight, so a layer of ten batches is one product that fills a GPU, and so is the gradient with
respect to its inputs. Only what a user has of its own is taken by user: the gradients of the weights, which nothing
waits for and which therefore run beside the backward, and BatchNorm's statistics.

The layers of such a forward are those of per_user_gradients.py.
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

BRANCHES = 5  # beside the backward
TOLERANCE = 1e-3  # relative; two orders of the same float32 sums are apart by 1e-5
LOOSE, ROUNDING = 0.2, 1e-5  # of a tensor's gradient: ReLUs near 0 that fall to the other side are .01; and of all


class Layers(TorchFunctionMode):
    """Answers the layers of a forward that it knows; `names` are of the parameters that it has not met yet.

    A parameter counts as known once. Where it is used again, or by a function that is not known here, autograd finds a
    gradient of it, which is that of all users together.
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
        found = self.known[func](*args, **kwargs) if func in self.known else None
        return func(*args, **kwargs) if found is None else found

    def _layer(self, weight: Tensor | None, bias: Tensor | None) -> Layer | None:
        """None where a parameter is not one of the network's own, or was met before."""
        given = [value for value in (weight, bias) if value is not None and value.requires_grad]
        if any(id(value) not in self.names for value in given):
            return None
        names = {id(value): self.names.pop(id(value)) for value in given}
        to = [self.into[names[id(value)]] if id(value) in names else None for value in (weight, bias)]
        return Layer(self.users, self.aside, *to)

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
        layer = None if isinstance(padding, str) or input.ndim != 4 else self._layer(weight, bias)
        if layer is None:
            return None
        geometry = [(each,) * 2 if isinstance(each, int) else tuple(each) for each in (stride, padding, dilation)]
        return _called(Conv2d, input, weight, bias, (*geometry, groups), layer)[0]

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        layer = self._layer(weight, bias)
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
        layer = self._layer(weight, bias) if training and len(running) == len(held) else None
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


@torch.no_grad()
def _track(running: Sequence[Tensor], mean: Tensor, var: Tensor, places: int, momentum: float) -> None:
    unbiased = var * (places / (places - 1))
    for old, new in zip(running, (mean, unbiased), strict=True):
        old.lerp_(new, momentum)


def _called(function: type[Function], *given: Any) -> tuple[Tensor, ...]:
    found = function.apply(*given)  # type: ignore[no-untyped-call]
    return found if isinstance(found, tuple) else (found,)


class OneBatch:
    """One forward and one backward for all users, for the networks that it is right for.

    Not right is a network that uses a parameter other than once in a layer that is known here, that mixes examples
    other than by nn.BatchNorm, that has them in another axis than the first, or whose trace leaves out what it does,
    such as torch.no_grad. The first step shows it.
    """

    def __init__(self, learner: Functional, loss: Loss, users: int, device: torch.device) -> None:
        self.learner, self.loss, self.users = learner, loss, users
        self.together = copy.copy(learner)
        self.together.structure = fused(learner.structure)
        self.aside = Aside(min(BRANCHES, users), device)
        self.fits: bool | None = None  # not known before the first step

    def takes(self, leaves: Params, statistics: Statistics, given: list[Given], by_user: Callable[[], Found]) -> bool:
        """Whether it is right for these batches, which must be of one size; the first ones are compared."""
        if len({user.batch.size for user in given}) > 1:
            return False
        if self.fits is None:
            self.fits = self._agrees(leaves, statistics, given, by_user)
        return self.fits

    def __call__(self, leaves: Params, running: Params, given: list[Given], into: Params) -> Tensor | None:
        """(users,) losses, with the gradients in `into` and `running` as BatchNorm leaves it, both (users, ...).

        None where it is not right after all.
        """
        with self.aside:
            outputs, unused = self._outputs(leaves, running, given, into)
            losses = self._losses(outputs, torch.cat([user.batch.labels for user in given]))
            around = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
        for name in unused:
            into[name].zero_()
        if any(value is not None for value in around):
            self.fits = False
            return None
        return losses.detach()

    def _outputs(self, leaves: Params, running: Params, given: list[Given], into: Params) -> tuple[Tensor, list[str]]:
        """The outputs for all batches, and the parameters without a known layer."""
        tensors = leaves | {name: value[0] for name, value in running.items()}
        layers = Layers(self.users, self.aside, leaves, into, {id(tensors[n]): value for n, value in running.items()})
        dropout = [torch.cat(values) for values in zip(*(user.dropout for user in given), strict=True)]
        with layers:
            outputs = self.together(tensors, torch.cat([user.batch.inputs for user in given]), dropout)
        return outputs, list(layers.names.values())

    def _losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if self.loss is F.cross_entropy:
            return F.cross_entropy(outputs, labels, reduction="none").view(self.users, -1).mean(1)
        parts = zip(outputs.chunk(self.users), labels.chunk(self.users), strict=True)
        return torch.stack([self.loss(*each) for each in parts])

    def _agrees(self, leaves: Params, statistics: Statistics, given: list[Given], by_user: Callable[[], Found]) -> bool:
        """Whether a user's loss, gradient and buffers are what they are without the others."""
        buffers = statistics.copies()
        room = {name: value.new_zeros(self.users, *value.shape) for name, value in leaves.items()}
        with tf32(False), cudnn_chooses(by_timing=False):
            own = by_user()
            try:
                losses = self(leaves, statistics.views(buffers), given, room)
            except Exception:  # such as of a network that takes batches of one size only
                return False
        if losses is None:
            return False
        expected = [torch.stack(own.losses), *statistics.taken(own.buffers)]
        grads = [{name: value[user] for name, value in room.items()} for user in range(self.users)]
        return all(map(_close, [losses, *statistics.taken(buffers)], expected)) and all(map(_alike, grads, own.grads))


def _close(one: Tensor, other: Tensor) -> bool:
    one, other = one.double(), other.double()
    return one.shape == other.shape and bool((one - other).norm() <= TOLERANCE * other.norm())


def _alike(one: Params, other: Params) -> bool:
    """Gradients, tensor by tensor: of a bias before BatchNorm nothing but rounding is left."""
    apart = torch.stack([(one[name] - value).norm() for name, value in other.items()])
    sizes = torch.stack([value.norm() for value in other.values()])
    return bool((apart <= LOOSE * sizes + ROUNDING * sizes.norm()).all())
