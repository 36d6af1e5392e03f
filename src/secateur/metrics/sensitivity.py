"""Prediction sensitivity: how much a model's answer moves when its input moves a little."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from secateur.interfaces import BlackBox
from secateur.precision import full_precision
from secateur.queries import probabilities

ROWS = 4096  # asked at once: the moved copies of a CIFAR would not fit beside it


@torch.no_grad()
def sensitivity(
    box: BlackBox,
    inputs: Tensor,
    rng: Generator,
    directions: int = 10,
    epsilon: float = 1e-3,
    shared: bool = False,
    answers: Tensor | None = None,
) -> Tensor:
    """(N, K) mean over n Gaussian directions d of |f(x + eps d) - f(x)| / eps (samia_ppb, Eq. 2).

    Every example has directions of its own, whose chance averages out over a set. `shared` asks all examples in the
    same directions, so that an example's answer does not depend on which others are asked, nor on their order.
    The directions are the same numbers in float32 and in float64. `answers` are f(x), where they are known already.
    """
    device = inputs.device
    noise = Generator(device).manual_seed(int(torch.randint(2**62, (), generator=rng)))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, device=device).to(inputs.dtype)

    common = draw(directions, *inputs.shape[1:]) if shared else None
    with full_precision(), torch.autocast(device.type, enabled=False):
        answers = probabilities(box, inputs) if answers is None else answers
        moved = torch.zeros_like(answers)
        for part, answer, total in zip(*(torch.split(x, ROWS) for x in (inputs, answers, moved)), strict=True):
            for i in range(directions):
                step = draw(*part.shape) if common is None else common[i]
                total += (probabilities(box, part + epsilon * step) - answer).abs()
    return moved / (directions * epsilon)
