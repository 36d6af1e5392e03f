"""Local differential privacy of a client that trains by itself: PriPrune with dp, which the paper leaves to later work.

PriPrune looks at a client's examples twice in a turn of one step: at the gradient of the weights, and at that of what
would be sent, by which its mask learns. Both are answered by clipped and noised gradients and by nothing else, so the
weights, alpha, which weights are withheld and what stays at home are all made of these: the epsilon of two looks a turn
covers the choice of the mask as well as the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.defenses.dp import DifferentialPrivacy, gradients
from secateur.interfaces import Batch, LossOf, Mask, OwnTurn, Params, Sent

LOOKS = 2  # at the examples, in a turn of one local step
LOOK = "look/"  # of a noise's names, and of no parameter's


@dataclass(frozen=True)
class PrivateTurn:
    """A turn of its own that sees its client's examples through `private` alone."""

    inner: OwnTurn
    private: DifferentialPrivacy

    def init(self, params: Params) -> Params:
        """A client's state before its first round."""
        return self.inner.init(params)

    def caution(self, weights: int) -> str | None:
        """What is to be known of the turn."""
        return self.inner.caution(weights)

    def noise(self, params: Params, steps: int, rng: Generator) -> Params:
        """The turn's own chance, and standard normal draws for every look."""
        drawn = self.inner.noise(params, steps, rng)
        for look in range(LOOKS):
            drawn |= {f"{LOOK}{look}.{name}": value for name, value in self.private.noise(params, rng).items()}
        return drawn

    def turn(
        self,
        loss: LossOf,
        received: Params,
        mask: Mask,
        state: Params,
        batches: Batch,
        noise: Params,
        learning_rate: float,
    ) -> Sent:
        """The turn, with a loss whose gradient is private; a third look has no noise left and fails."""
        looks = [{name: noise[f"{LOOK}{look}.{name}"] for name in received} for look in range(LOOKS)]

        def private(params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
            """0, with the noisy gradient at `params`: the value of the loss would be one more look."""
            here = {name: value.detach() for name, value in params.items()}
            slopes = self.private.noisy(gradients(loss, here, Batch(inputs, labels)), looks.pop(0), len(labels))
            return torch.stack([((value - here[name]) * slopes[name]).sum() for name, value in params.items()]).sum()

        own = {name: value for name, value in noise.items() if not name.startswith(LOOK)}
        return self.inner.turn(private, received, mask, state, batches, own, learning_rate)
