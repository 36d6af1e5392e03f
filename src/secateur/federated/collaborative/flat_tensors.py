"""Tensors by name as one row, a user a row: what is done to every tensor of every user is one operation on (U, N).

A graph of a step would otherwise hold a node for each of 62 tensors of each of ten users, and as often again for every
sum, comparison and copy; a GPU takes longer to begin a node than to work through a small tensor.

The buffers of a shared model over a step of many users: BatchNorm's running statistics, and all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.interfaces import Params

ALIGNED = 64  # entries: libraries read aligned memory in larger pieces, and some read no other

AVERAGED, COUNTED, TAKEN = "averaged", "counted", "taken"


class Flat:
    """Where every tensor lies in a row: filters come first, and zeros fill the gaps."""

    def __init__(self, like: Params) -> None:
        first = next(iter(like.values()))
        self.zeros = first.new_zeros(ALIGNED)
        self.shapes = {name: value.shape for name, value in like.items()}
        self.filters = [name for name, shape in self.shapes.items() if len(shape) == 4]
        self.starts: dict[str, int] = {}
        self.size = self.tail = 0  # the end of all, and of the filters
        for name in sorted(like, key=lambda name: name not in self.filters):
            self.starts[name] = self.size
            self.size += -(-like[name].numel() // ALIGNED) * ALIGNED
            self.tail = self.size if name in self.filters else self.tail
        self.sizes = tuple(like[name].numel() for name in self.starts)  # as they lie

    def new(self, users: int, dtype: torch.dtype | None = None) -> Tensor:
        """(users, N) zeros."""
        return self.zeros.new_zeros((users, self.size), dtype=dtype)

    def views(self, rows: Tensor) -> Params:
        """Each tensor in (N,) or (users, N), as a view of its own shape behind the leading axis."""
        lead = rows.shape[:-1]
        return {
            name: rows[..., self.starts[name] : self.starts[name] + shape.numel()].view([*lead, *shape])
            for name, shape in self.shapes.items()
        }

    def turned(self, rows: Tensor) -> Params:
        """The same of rows whose filters lie channels last, as a backward leaves them."""
        found = self.views(rows)
        for name in self.filters:
            out, into, *size = self.shapes[name]
            lead = rows.shape[:-1]
            found[name] = found[name].reshape(*lead, out, *size, into).movedim(-1, len(lead) + 1)
        return found

    def pairs(self, plain: Tensor, turned: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same entries of rows of either kind: filter by filter, and the rest, which lies alike."""
        to, of = self.views(plain), self.turned(turned)
        rest = plain[..., self.tail :], turned[..., self.tail :]
        return [*((to[name], of[name]) for name in self.filters), rest]

    def each(self, rows: Tensor) -> list[Tensor]:
        """Every tensor of every row by itself, row by row."""
        named = self.views(rows).values()
        return [value[user] for user in range(len(rows)) for value in named]

    def join(self, tensors: Params, out: Tensor | None = None) -> Tensor:
        """(N,) of tensors of these shapes, (users, N) of such behind a leading axis."""
        parts: list[Tensor] = []
        for name in self.starts:
            shape, value = self.shapes[name], tensors[name]
            lead = value.shape[: value.ndim - len(shape)]
            parts.append(value.reshape(*lead, -1))
            gap = -shape.numel() % ALIGNED
            parts += [self.zeros[:gap].expand(*lead, gap).contiguous()] if gap else []
        return torch.cat(parts, -1, out=out)

    def join_turned(self, tensors: Params, out: Tensor) -> None:
        """The same with the filters channels last: of those that lie so already nothing is copied twice."""
        turned = {name: value.movedim(1, -1) if name in self.filters else value for name, value in tensors.items()}
        self.join(turned, out)


def grouped(tensors: Params, rules: dict[str, str]) -> list[tuple[str, Flat, Tensor]]:
    """Tensors of one rule and one dtype side by side: the rule, where each lies, and (1, N) copies of them."""
    keys: Sequence[tuple[str, torch.dtype]] = [(rules[name], value.dtype) for name, value in tensors.items()]
    groups = []
    for key in dict.fromkeys(keys):
        own = {name: value for (name, value), each in zip(tensors.items(), keys, strict=True) if each == key}
        flat = Flat(own)
        groups.append((key[0], flat, flat.join(own)[None]))
    return groups


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
