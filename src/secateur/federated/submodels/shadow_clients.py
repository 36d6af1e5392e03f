"""The attacker's own clients, for LiRA and RMIA.

The attacker is the server: it knows the sub-model that it sent a client in the last round. Shadow clients of the same
width start from that very model and train as the client does, for one turn, each on half of the examples asked about.
So every example has models that trained on it and models that did not. What these differ by is what that turn alone
gave away; what earlier rounds left is in the model that was sent, and so in all of them. A client with more examples
than are asked about takes more steps in its turn than its shadows do.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Params, Transform
from secateur.recipe import Recipe, Task
from secateur.training import fit_many


def shadow_clients(
    net: nn.Module,
    received: Params,
    pool: Batch,
    models: int,
    turn: Recipe,
    rng: Generator,
    augment: Transform | None = None,  # of every step's inputs, as the client does
) -> tuple[list[Params], Tensor]:
    """What the shadow clients would send, and (models, pool) which rows each trained on."""
    design = halves(pool.size, models, rng)
    device, nobody = pool.inputs.device, pool.take(torch.arange(0))
    start = tree.to(received, device)
    seeds = torch.randint(2**62, (models,), generator=rng).tolist()
    tasks = [
        Task(start, pool.take(rows.to(device)), nobody, torch.Generator().manual_seed(seed))
        for rows, seed in zip(design, seeds, strict=True)
    ]
    way = "stacked" if device.type == "cuda" else "auto"  # narrow, equal and brief: timing the ways takes longer
    with torch.enable_grad():  # a server that looks at updates takes no gradients
        fitted = dict(fit_many(net, tasks, turn, transform=augment, way=way))
    return [fitted[number].state for number in range(models)], design


def halves(rows: int, models: int, rng: Generator) -> Tensor:
    """(models, rows) bool: pairs of models share the rows out evenly, so that every row is in exactly half of them."""
    if models < 2 or models % 2:
        raise WrongInput("shadows", f"{models} is not allowed; give an even number: each row is in half of them")
    first = torch.stack([torch.randperm(rows, generator=rng) < rows // 2 for _ in range(models // 2)])
    return torch.stack([first, ~first], 1).flatten(0, 1)
