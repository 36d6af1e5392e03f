"""A client's turn: what it is given, what it comes to, and Adam over a model's flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn, vmap
from torch.nn.functional import cross_entropy

from secateur.data.dataset import fingerprint
from secateur.federated.augment import CropAndFlip
from secateur.federated.submodels.chain import Chain, fits
from secateur.federated.submodels.cutting import params_of
from secateur.federated.submodels.terms import Adam
from secateur.functional import Ask, Functional


class Narrow:
    """The model of one width, as a function of its flat vector."""

    def __init__(self, net: nn.Module, rate: float, scaler: bool, device: torch.device) -> None:
        self.net, self.rate = net, rate
        self.key = f"{rate}, {scaler}, {fingerprint(*net.buffers())}: {net}"  # equal for equal functions
        self.shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
        self.others = {name: value.to(device) for name, value in net.named_buffers()}
        self.function = Functional(net, training=True, device=device)
        self.chain = Chain(net) if fits(net) else None
        self._asks: dict[int, list[Ask]] = {}
        self._quiet = False  # whether it is known to draw nothing

    def loss(self, flat: Tensor, inputs: Tensor, labels: Tensor, owned: Tensor | None, *noise: Tensor) -> Tensor:
        """Cross-entropy; the logits of labels that a client does not own count as 0 (HeteroFL)."""
        logits = self.function(params_of(flat, self.shapes) | self.others, inputs, noise)
        return cross_entropy(logits if owned is None else logits * owned, labels)

    def losses(
        self, flat: Tensor, inputs: Tensor, labels: Tensor, owned: Tensor | None, noise: tuple[Tensor, ...]
    ) -> Tensor:
        """Of many clients at once, (lanes,): all that is given has a first axis of them."""
        if self.chain is None:
            inputs = inputs.contiguous()  # one lane would stay channels_last, which vmap cannot tell BatchNorm of
            lanes = (0, 0, 0, None if owned is None else 0, *(0 for _ in noise))
            return vmap(self.loss, in_dims=lanes)(flat, inputs, labels, owned, *noise)
        logits = self.chain(flat, inputs)
        logits = logits if owned is None else logits * owned[:, None]
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)

    def noise(self, flat: Tensor, data: Tensor, size: int, rng: Generator) -> tuple[Tensor, ...]:
        """What the network draws for a batch of so many of the data's rows."""
        if self._quiet:
            return ()
        if size not in self._asks:
            asks = self.function.asks(params_of(flat, self.shapes) | self.others, data[[0] * size])
            self._asks[size], self._quiet = asks, not asks
        return tuple(ask.draw(rng) for ask in self._asks[size])


class Moments(NamedTuple):
    """Adam's memory of a client that goes on."""

    first: Tensor
    second: Tensor
    steps: int


class Job(NamedTuple):
    """One client's turn."""

    key: str  # of its Narrow
    start: Tensor  # (P_c,)
    epochs: Sequence[Tensor]  # its rows in the order of each, as `picked` gives them
    rng: Generator  # of the network's noise, on the device
    owned: Tensor | None = None  # (K,) 1 for the labels that it owns, else 0
    moments: Moments | None = None  # None: new


class Made(NamedTuple):
    """What a turn comes to."""

    flat: Tensor
    moments: Moments


def picked(epochs: Sequence[Tensor], augment: CropAndFlip | None, rng: Generator) -> Sequence[Tensor]:
    """Every epoch's rows (n,); where pictures are augmented each with its own moves beside it, (n, 4).

    So all chance of a turn is drawn before it, whichever way and device it is trained on.
    """
    if augment is None:
        return epochs
    return [torch.cat([rows[:, None], augment.draw(len(rows), rng)], 1) for rows in epochs]


def batches(rows: Tensor, size: int) -> list[Tensor]:
    """Full batches, then what is left; a single row joins the batch before, as BatchNorm cannot normalise it.

    Example:
        >>> [len(batch) for batch in batches(torch.arange(7), 3)]
        [3, 4]
    """
    parts = list(torch.split(rows, size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def scales(local: Adam, number: int) -> tuple[float, float]:
    """Adam's step size and what the root of its second moment is multiplied by, in step `number` from 1."""
    one, two = local.betas
    return float(local.learning_rate / (1 - one**number)), float((1 - two**number) ** -0.5)


@torch.no_grad()
def adam_(
    flat: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor | float,
    root: Tensor | float,
    local: Adam,
) -> None:
    """One step of torch.optim.Adam, in place; `step` and `root` are of each lane where there are many."""
    one, two = local.betas
    first.lerp_(grad, 1 - one)
    second.mul_(two).addcmul_(grad, grad, value=1 - two)
    flat.sub_(first / second.sqrt().mul_(root).add_(local.eps) * step)
