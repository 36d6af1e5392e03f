"""Named tensors of many users as rows (U, N): one operation acts on every tensor of every user.

Otherwise a CUDA graph of a step would hold a node for each of 62 tensors of each of ten users. Every sum, comparison
and copy would add as many. A GPU takes longer to begin a node than to process a small tensor.

`Flat` is the layout of a row. `Statistics` holds the buffers of the shared model in such rows: BatchNorm's running
statistics, and all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.interfaces import Params

ALIGNED = 64  # entries: libraries read aligned memory in larger pieces, and some accept no other
AVERAGED, COUNTED, TAKEN = "averaged", "counted", "taken"  # rules of buffers


class Flat:
    """The layout of named tensors in a row: filters come first, and zeros fill the gaps."""

    def __init__(self, like: Params) -> None:
        first = next(iter(like.values()))
        self.zeros = first.new_zeros(ALIGNED)
        self.shapes = {name: value.shape for name, value in like.items()}
        self.filters = [name for name, shape in self.shapes.items() if len(shape) == 4]
        self.starts: dict[str, int] = {}
        self.size = self.tail = 0  # the end of all tensors, and of the filters
        for name in sorted(like, key=lambda name: name not in self.filters):
            self.starts[name] = self.size
            self.size += -(-like[name].numel() // ALIGNED) * ALIGNED
            self.tail = self.size if name in self.filters else self.tail
        self.sizes = tuple(like[name].numel() for name in self.starts)  # in the order of the row

    def allocate(self, users: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return (users, N) zeros."""
        return self.zeros.new_zeros((users, self.size), dtype=dtype)

    def views(self, rows: Tensor) -> Params:
        """Return each tensor in (N,) or (users, N) as a view of its shape behind the leading axis."""
        lead = rows.shape[:-1]
        return {
            name: rows[..., self.starts[name] : self.starts[name] + shape.numel()].view([*lead, *shape])
            for name, shape in self.shapes.items()
        }

    def channels_last_views(self, rows: Tensor) -> Params:
        """Return the same as `views` for rows with filters in channels_last, as a backward leaves them."""
        views = self.views(rows)
        for name in self.filters:
            out, into, *size = self.shapes[name]
            lead = rows.shape[:-1]
            views[name] = views[name].reshape(*lead, out, *size, into).movedim(-1, len(lead) + 1)
        return views

    def pairs(self, plain: Tensor, turned: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return views of equal entries in plain and turned rows: each filter, and the rest, which lies alike."""
        to, of = self.views(plain), self.channels_last_views(turned)
        rest = plain[..., self.tail :], turned[..., self.tail :]
        return [*((to[name], of[name]) for name in self.filters), rest]

    def split_rows(self, rows: Tensor) -> list[Tensor]:
        """Return every tensor of every row, row by row."""
        named = self.views(rows).values()
        return [value[user] for user in range(len(rows)) for value in named]

    def join(self, tensors: Params, out: Tensor | None = None) -> Tensor:
        """Return the row (N,) of tensors of these shapes, or rows (users, N) of tensors with a leading axis."""
        parts: list[Tensor] = []
        for name in self.starts:
            shape, value = self.shapes[name], tensors[name]
            lead = value.shape[: value.ndim - len(shape)]
            parts.append(value.reshape(*lead, -1))
            gap = -shape.numel() % ALIGNED
            parts += [self.zeros[:gap].expand(*lead, gap).contiguous()] if gap else []
        return torch.cat(parts, -1, out=out)

    def join_turned(self, tensors: Params, out: Tensor) -> None:
        """Write the row of tensors with filters in channels_last; filters that lie so already are copied once."""
        turned = {name: value.movedim(1, -1) if name in self.filters else value for name, value in tensors.items()}
        self.join(turned, out)


class Statistics:
    """The server's buffers, and their update by the users' backwards.

    BatchNorm's running statistics become the users' average. Its count of batches goes up by one, here and not in every
    user's forward. Any other buffer is taken from the first user.
    """

    def __init__(self, structure: nn.Module, buffers: Params, users: int) -> None:
        self.groups = group_tensors(buffers, _rules(structure, buffers))
        named = [flat.views(row[0]) for _, flat, row in self.groups]
        self.buffers: Params = {name: next(group[name] for group in named if name in group) for name in buffers}
        self.users = users

    def copies(self) -> list[Tensor]:
        """Return copies of the buffers for all users, (users, N) a group: a forward changes them."""
        return [row.repeat(self.users, 1) for _, _, row in self.groups]

    def buffers_of(self, user: int, copies: list[Tensor]) -> Params:
        """Return one user's buffers by name, without the counts of batches."""
        views: Params = {}
        for (rule, flat, _), rows in zip(self.groups, copies, strict=True):
            views |= flat.views(rows[user]) if rule != COUNTED else {}
        return views

    @torch.no_grad()
    def take(self, copies: list[Tensor]) -> None:
        """Update the server's buffers after a step of all users."""
        for (rule, _, row), rows in zip(self.groups, copies, strict=True):
            row.copy_(row[0] + 1 if rule == COUNTED else rows.mean(0) if rule == AVERAGED else rows[0])


def group_tensors(tensors: Params, rules: dict[str, str]) -> list[tuple[str, Flat, Tensor]]:
    """Group tensors of one rule and one dtype: the rule, the layout, and (1, N) copies."""
    keys: Sequence[tuple[str, torch.dtype]] = [(rules[name], value.dtype) for name, value in tensors.items()]
    groups = []
    for key in dict.fromkeys(keys):
        members = {name: value for (name, value), other in zip(tensors.items(), keys, strict=True) if other == key}
        flat = Flat(members)
        groups.append((key[0], flat, flat.join(members)[None]))
    return groups


def _rules(structure: nn.Module, buffers: Params) -> dict[str, str]:
    """Return the rule of each buffer; BatchNorm modules whose batches are counted here stop counting."""
    rules = dict.fromkeys(buffers, TAKEN)
    for name, module in structure.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        names = {kind: f"{name}.{kind}".lstrip(".") for kind in ("running_mean", "running_var", "num_batches_tracked")}
        rules |= {names[kind]: AVERAGED for kind in ("running_mean", "running_var") if names[kind] in rules}
        # without a momentum the average itself depends on the count
        if module.training and module.momentum is not None and names["num_batches_tracked"] in rules:
            rules[names["num_batches_tracked"]] = COUNTED
            module.num_batches_tracked = None
    return rules
