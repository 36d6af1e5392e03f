"""The gradients of all users at one shared model, by one forward and one backward over all of their batches.

The users share every weight, so a layer of ten batches is one product that fills a GPU, and so is the gradient with
respect to its inputs. Only what a user has of its own is taken by user: the gradients of the weights, which nothing
waits for and which therefore run beside the backward, and BatchNorm's statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from secateur.federated.fusing import fused
from secateur.federated.graphs import Aside
from secateur.federated.shared_layers import Layers
from secateur.federated.statistics import Statistics
from secateur.federated.steps import Found, Given
from secateur.functional import Functional
from secateur.interfaces import Loss, Params
from secateur.precision import tf32
from secateur.timing import cudnn_chooses

BRANCHES = 5  # beside the backward
TOLERANCE = 1e-3  # relative; two orders of the same float32 sums are apart by 1e-5
LOOSE, ROUNDING = 0.2, 1e-5  # of a tensor's gradient: ReLUs near 0 that fall to the other side are .01; and of all


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
