"""One layer's share of a comparison of gradients, and how a direction of its parameters is carried back."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.attacks.inversion.engines.layers import Algebra


class Aim(NamedTuple):
    """What was observed for one parameter, as its layer stores it, and which entries of it are compared."""

    value: Tensor  # (N, ...)
    mask: Tensor | None

    def take(self, rows: slice) -> Aim:
        """Some of the trials."""
        return Aim(self.value[rows], None if self.mask is None else self.mask[rows])


class Part(NamedTuple):
    """One parameter's share, (N,) each, and how v = p g* + q g is carried back to its layer's inputs and outputs."""

    dot: Tensor
    trial: Tensor
    gap: Tensor | None
    pull: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor]]  # p, q -> by a, and by d as rows


def weight_part(algebra: Algebra, aim: Aim, needs_gap: bool) -> Part:
    """By inner products of rows where they suffice and are cheaper, by the gradient itself elsewhere."""
    if algebra.rows is not None and aim.mask is None and not needs_gap:
        a, d, unrows = algebra.rows
        inputs, outputs = a.shape[2], d.shape[2]
        if 2 * a.shape[1] * (inputs + outputs) < inputs * outputs:  # the rest of the work is the same
            return _of_products(a, d, unrows, aim.value)
    return _of_gradient(algebra.gradient(), aim, needs_gap, lambda v: (algebra.back(v), algebra.along(v)))


def bias_part(rows: Tensor, aim: Aim, needs_gap: bool) -> Part:
    """For the sum of d over the places (`rows`)."""
    return _of_gradient(rows.sum(1), aim, needs_gap, lambda v: (None, v[:, None].expand_as(rows)))


def _of_gradient(
    gradient: Tensor, aim: Aim, needs_gap: bool, carry: Callable[[Tensor], tuple[Tensor | None, Tensor]]
) -> Part:
    value, mask = aim
    g = gradient if mask is None else gradient * mask

    def pull(p: Tensor, q: Tensor) -> tuple[Tensor | None, Tensor]:
        v = torch.addcmul(_wide(p, g) * value, _wide(q, g), g)
        return carry(v if mask is None else v * mask)

    return Part(_sum(g * value), _sum(g.square()), _sum((g - value).square()) if needs_gap else None, pull)


def _of_products(a: Tensor, d: Tensor, unrows: Callable[[Tensor], Tensor], aim: Tensor) -> Part:
    """<d^T a, g*> = <d, a g*^T> and |d^T a|^2 = <a a^T, d d^T>."""
    along = torch.bmm(a, aim.mT)
    of_a, of_d = torch.bmm(a, a.mT), torch.bmm(d, d.mT)

    def pull(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        p, q = _wide(p, a), _wide(q, a)
        by_a = torch.baddbmm(torch.bmm(p * d, aim), q * of_d, a)
        return unrows(by_a), torch.baddbmm(p * along, q * of_a, d)

    return Part(_sum(along * d), _sum(of_a * of_d), None, pull)


def _sum(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)


def _wide(x: Tensor, like: Tensor) -> Tensor:
    return x.view(-1, *[1] * (like.ndim - 1))
