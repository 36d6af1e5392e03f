"""Local differential privacy of a client that trains by itself: PriPrune with dp, future work in the paper.

In a turn of one step PriPrune reads a client's examples twice. One read gives the gradient of the weights, the other
the gradient of the values to be sent, by which the mask learns. Both reads return clipped and noised gradients only.
The weights, alpha, the withheld mask and the values that stay on the client depend on nothing else. So the epsilon of
two reads per turn covers the choice of the mask as well as the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.defenses.dp import DifferentialPrivacy, gradients
from secateur.interfaces import Batch, ClientResult, CustomTurn, LossOf, Mask, Params

LOOKS = 2  # reads of the examples in a turn of one local step
LOOK = "look/"  # prefix of the noise's names; no parameter has it


@dataclass(frozen=True)
class PrivateTurn:
    """A client's own turn that reads the examples through `private` alone."""

    inner: CustomTurn
    private: DifferentialPrivacy

    def init(self, params: Params) -> Params:
        """Return a client's state before its first round."""
        return self.inner.init(params)

    def caution(self, weights: int) -> str | None:
        """Return the inner turn's warning, or None."""
        return self.inner.caution(weights)

    def noise(self, params: Params, steps: int, rng: Generator) -> Params:
        """Return the inner turn's draws, and standard normal draws for every read."""
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
    ) -> ClientResult:
        """Run the turn with a loss whose gradient is private; a third read has no noise left and fails."""
        looks = [{name: noise[f"{LOOK}{look}.{name}"] for name in received} for look in range(LOOKS)]

        def private(params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
            """Return 0 with the noisy gradient at `params`: the value of the loss would be one more read."""
            here = {name: value.detach() for name, value in params.items()}
            slopes = self.private.noisy(gradients(loss, here, Batch(inputs, labels)), looks.pop(0), len(labels))
            return torch.stack([((value - here[name]) * slopes[name]).sum() for name, value in params.items()]).sum()

        inner_noise = {name: value for name, value in noise.items() if not name.startswith(LOOK)}
        return self.inner.turn(private, received, mask, state, batches, inner_noise, learning_rate)
