"""The buffers of a shared model over a step of many users: BatchNorm's running statistics, and all others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.federated.flat import grouped
from secateur.interfaces import Params

AVERAGED, COUNTED, TAKEN = "averaged", "counted", "taken"


class Statistics:
    """The server's buffers, and what the users' backwards make of them.

    BatchNorm's running statistics become the users' average. Its count of batches goes up by one, here and not in every
    user's forward. Of any other buffer the first user's is taken.
    """

    def __init__(self, structure: nn.Module, buffers: Params, users: int) -> None:
        self.groups = grouped(buffers, _rules(structure, buffers))
        named = [flat.views(row[0]) for _, flat, row in self.groups]
        self.buffers: Params = {name: next(own[name] for own in named if name in own) for name in buffers}
        self.users = users

    def copies(self) -> list[Tensor]:
        """All users' buffers, (users, N) a group: a forward changes them."""
        return [row.repeat(self.users, 1) for _, _, row in self.groups]

    def views(self, copies: list[Tensor]) -> Params:
        """Them by name, (users, ...), without those that are only counted."""
        found: Params = {}
        for (rule, flat, _), rows in zip(self.groups, copies, strict=True):
            found |= flat.views(rows) if rule != COUNTED else {}
        return found

    def of(self, user: int, copies: list[Tensor]) -> Params:
        """One user's."""
        return {name: value[user] for name, value in self.views(copies).items()}

    @torch.no_grad()
    def take(self, copies: list[Tensor]) -> None:
        """One more step of everybody."""
        for (_, _, row), value in zip(self.groups, self.taken(copies), strict=True):
            row.copy_(value)

    def taken(self, copies: list[Tensor]) -> list[Tensor]:
        """What a step makes of each group."""
        found = []
        for (rule, _, row), rows in zip(self.groups, copies, strict=True):
            found.append(row[0] + 1 if rule == COUNTED else rows.mean(0) if rule == AVERAGED else rows[0])
        return found


def _rules(structure: nn.Module, buffers: Params) -> dict[str, str]:
    """What becomes of each buffer; BatchNorm modules of the structure whose batches are counted here stop counting."""
    rules = dict.fromkeys(buffers, TAKEN)
    for name, module in structure.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        names = {each: f"{name}.{each}".lstrip(".") for each in ("running_mean", "running_var", "num_batches_tracked")}
        rules |= {names[each]: AVERAGED for each in ("running_mean", "running_var") if names[each] in rules}
        # without a momentum the average itself depends on the count
        if module.training and module.momentum is not None and names["num_batches_tracked"] in rules:
            rules[names["num_batches_tracked"]] = COUNTED
            module.num_batches_tracked = None
    return rules
